//! The result of a preflight: one line a check, with the remedy.

use crate::Fault;

/// One check of one end.
#[derive(Debug)]
pub struct Check {
    /// What was looked at, in a few words: `wal_level`, `publication "waljet"`.
    pub name: String,
    /// What was found.
    pub finding: Finding,
}

/// What a check found.
#[derive(Debug)]
pub enum Finding {
    /// As it should be; the text says what it is.
    Good(String),
    /// It works, but it may surprise: what, and what mends it.
    Warning {
        /// What was found.
        message: String,
        /// What mends it.
        hint: String,
    },
    /// It cannot work like this.
    Fault(Fault),
}

impl Check {
    /// A check that found what it should.
    #[must_use]
    pub fn good(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self { name: name.into(), finding: Finding::Good(found.into()) }
    }

    /// A check that found something that works but may surprise.
    #[must_use]
    pub fn warning(name: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name: name.into(), finding: Finding::Warning { message: message.into(), hint: hint.into() } }
    }

    /// A check that found a fault.
    #[must_use]
    pub fn fault(name: impl Into<String>, fault: Fault) -> Self {
        Self { name: name.into(), finding: Finding::Fault(fault) }
    }
}
