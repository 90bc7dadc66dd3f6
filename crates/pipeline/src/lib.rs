//! The delivery rules of waljet: from a replication message to a confirmed position, without servers.
//!
//! This crate must not see a network client, a file, the environment or the wall clock, so that every fault
//! can be simulated. The way of one event through its modules:
//!
//! 1. [`source`]: a [`Source`] gives out [`Frame`]s: changes in commit order, and keepalives.
//! 2. [`transaction`]: a change becomes a [`Step`]; each row gets its [`Position`].
//! 3. [`outbox`]: a row becomes an [`OutboxEvent`], or the reason why it cannot.
//! 4. [`route`] and [`headers`]: the event becomes an [`OutboundMessage`].
//! 5. `intake` waits for room in the `window` and puts the message in, in commit order.
//! 6. `lane` sends the window into a [`Sink`], which cannot be overtaken, and takes acknowledgements.
//! 7. When all events before the end of a commit are acknowledged, `keeper` stores that position as the
//!    [`checkpoint`]; then it is confirmed: the source reports it to the server.
//!
//! What holds throughout:
//!
//! - A position is confirmed only when everything committed before it is stored in the stream.
//! - A failure ends the generation of the sink; the next begins with the first event that is not known to be
//!   stored, and the stream is read back first. Nothing is sent around a failed event.
//! - What can heal is tried for ever. What cannot ends [`Pipeline::run`] with a [`Fault`].
//! - Memory is bounded by the window, whatever the size of a transaction or the length of an outage.

#![forbid(unsafe_code)]

pub mod check;
pub mod checkpoint;
pub mod error;
pub mod fault;
mod grouping;
pub mod headers;
mod hold;
mod intake;
mod keeper;
mod keys;
mod lane;
pub mod message;
pub mod metrics;
pub mod options;
pub mod outbox;
pub mod position;
mod queue;
pub mod read_back;
pub mod retry;
pub mod route;
mod run;
pub mod sink;
pub mod source;
pub mod status;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transaction;
mod window;

pub use check::{Check, Finding};
pub use checkpoint::{Checkpoint, Checkpoints, NoCheckpoints, Replace, StreamMark};
pub use fault::{Action, Code, Fault};
pub use hold::ReplayWindow;
pub use keeper::{date, pending_gap};
pub use message::{InvalidSubject, OrderingKey, OutboundMessage, Subject};
pub use metrics::Metrics;
pub use options::{
    Columns, DEFAULT_CHECKPOINT_INTERVAL, DEFAULT_DRAIN_TIMEOUT, DEFAULT_MAX_BYTES, DEFAULT_MAX_EVENTS,
    DEFAULT_RETRY_MAX, DEFAULT_RETRY_MIN, HeaderOptions, OutboxOptions, PipelineOptions, RetryOptions, WindowOptions,
};
pub use outbox::{EventError, OutboxEvent};
pub use position::{History, ParsePositionError, Position};
pub use read_back::{Missing, ReadBack, ReadBacks};
pub use route::{InvalidTemplate, Route, RouteError, UnsafeToken};
pub use run::{Pipeline, Stopped};
pub use sink::{Ack, IdDigest, Opened, Placement, PublisherMode, Rejection, Sink, Stored};
pub use source::{Confirmed, Frame, Horizon, Identity, Resume, Source, Visible};
pub use status::{EndState, Monitor, Status};
pub use transaction::{Operation, RefusedEvent, Step};
