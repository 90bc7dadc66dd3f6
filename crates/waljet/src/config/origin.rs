//! Where a value comes from, and the layers in which values are given.

use std::fmt;

use super::value::Raw;

/// Where a value comes from; a later variant goes before an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// The default of the key.
    Default,
    /// The preset of column names.
    Preset(String),
    /// The configuration file.
    File {
        /// Its path.
        path: String,
        /// The line, from 1.
        line: usize,
    },
    /// An environment variable.
    Environment(String),
    /// A flag of the command line.
    Flag(&'static str),
}

impl Origin {
    /// Returns whether both are in one layer, so that neither goes before the other.
    pub(crate) fn same_layer(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Preset(name) => write!(f, "preset {name}"),
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Environment(variable) => write!(f, "environment {variable}"),
            Self::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// One value as it was given, before it is known whether the key exists.
#[derive(Clone)]
pub(crate) struct Given {
    /// The dotted path.
    pub(crate) path: String,
    /// The value.
    pub(crate) raw: Raw,
    /// Where it was given.
    pub(crate) origin: Origin,
}
