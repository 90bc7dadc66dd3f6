//! What went wrong, as an operator reads it and as the pipeline acts on it.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// A stable code for a kind of fault; each has a section in `docs/errors.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Code(pub &'static str);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// What a fault obliges the pipeline to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// It may heal: try again for ever, with backoff. Nothing is confirmed meanwhile.
    Retry,
    /// This event can never be stored; it says nothing about any other event.
    Refuse,
    /// Going on needs a change by a person: stop. Exit code 1, or 3 where a check before the start found it.
    Halt,
    /// Events may be missing between what is stored and what the source can send: stop. Exit code 4.
    Gap,
}

/// A fault: what was being done to which object, what was expected and found, and what mends it.
#[derive(Debug)]
pub struct Fault {
    /// The kind.
    pub code: Code,
    /// What to do about it.
    pub action: Action,
    /// Lowercase, without a full stop; never holds a payload, a header value or a row value.
    pub message: String,
    /// What mends it: a command, a statement or a setting.
    pub hint: Option<String>,
    /// Why it happened.
    pub cause: Option<Box<dyn Error + Send + Sync>>,
    /// The longest pause before the next attempt, where waiting as long as usual would cost time: a standby
    /// takes over soon after the slot is free.
    pub retry_within: Option<Duration>,
}

impl Fault {
    /// Makes a fault without hint and cause.
    #[must_use]
    pub fn new(code: Code, action: Action, message: impl Into<String>) -> Self {
        Self { code, action, message: message.into(), hint: None, cause: None, retry_within: None }
    }

    /// Adds what mends it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds why it happened.
    #[must_use]
    pub fn cause(mut self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// Sets the longest pause before the next attempt.
    #[must_use]
    pub fn retry_within(mut self, pause: Duration) -> Self {
        self.retry_within = Some(pause);
        self
    }

    /// Returns the message with the causes behind it, on one line.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut text = self.message.clone();
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Fault {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as &(dyn Error + 'static))
    }
}
