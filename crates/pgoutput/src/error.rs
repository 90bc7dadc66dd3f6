//! What is wrong with bytes that cannot be decoded, or with a message that cannot be encoded.
//!
//! Both can be logged: apart from a byte that should have chosen between forms, they hold none of the
//! bytes of the message, only lengths and places.

/// The bytes are not the message that they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} message: {field} at byte {offset}: {fault}")]
pub struct DecodeError {
    /// What was read: the manual's name of the message.
    pub message: &'static str,
    /// Which part of it.
    pub field: &'static str,
    /// Where the part starts, from 0 at the message's first byte.
    pub offset: usize,
    /// What was expected there and what was found.
    pub fault: DecodeFault,
}

/// What was expected and what was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeFault {
    /// The message ends before the field does.
    #[error("expected {expected} bytes, found {found}")]
    TooShort {
        /// How long the field is, or the least that its items need.
        expected: usize,
        /// How much is left.
        found: usize,
    },
    /// A string lacks the zero byte that ends it.
    #[error("expected a string with a zero byte at its end, found no zero byte in {found} bytes")]
    Unterminated {
        /// How much is left.
        found: usize,
    },
    /// A byte that chooses between forms has none of the known values.
    #[error("expected {expected}, found byte {found:#04x}")]
    Unknown {
        /// The known values.
        expected: &'static str,
        /// The byte.
        found: u8,
    },
    /// A length or a count is negative.
    #[error("expected a number from 0 up, found {found}")]
    Negative {
        /// The number.
        found: i32,
    },
    /// The message goes on after its last field.
    #[error("expected the end of the message, found {found} more bytes")]
    Trailing {
        /// How much is left.
        found: usize,
    },
    /// The message may not come here.
    #[error("expected {expected}, found this message")]
    OutOfPlace {
        /// What may come.
        expected: &'static str,
    },
}

/// The message has no wire form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} message: {field}: {fault}")]
pub struct EncodeError {
    /// The manual's name of the message.
    pub message: &'static str,
    /// Which part of it.
    pub field: &'static str,
    /// What was expected there and what was found.
    pub fault: EncodeFault,
}

/// What was expected and what was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeFault {
    /// A zero byte ends a string on the wire, so that none can be inside.
    #[error("expected a string without zero bytes, found one at byte {found}")]
    ZeroByte {
        /// Where it is.
        found: usize,
    },
    /// A length or a count does not fit its field.
    #[error("expected at most {limit}, found {found}")]
    TooMany {
        /// The most that fits.
        limit: usize,
        /// The length or count.
        found: usize,
    },
}
