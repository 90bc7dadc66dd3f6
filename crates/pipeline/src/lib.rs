//! The delivery rules of waljet: from a replication message to a confirmed position, without servers.
//!
//! This crate must not see a network client, a file or the environment, so that every fault can be
//! simulated.

pub mod check;
pub mod fault;
pub mod message;
pub mod position;
pub mod sink;
pub mod source;

pub use check::{Check, Finding};
pub use fault::{Action, Code, Fault};
pub use message::{InvalidSubject, OutboundMessage, Subject};
pub use position::{History, ParsePositionError, Position};
pub use sink::{Ack, Opened, PublisherMode, Rejection, Sink};
pub use source::{Frame, Identity, Source};
