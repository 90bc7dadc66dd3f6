//! The sink of waljet: one lane to one NATS JetStream stream, written so that nothing can overtake.
//!
//! This crate must not see PostgreSQL. An event passes it like this: [`JetStreamSink`] opens a generation, for which it
//! connects ([`connect`](connect())), reads the stream's tail ([`Tail`]) and reads back by id what is stored already; the
//! message gets its headers and is held against the limits; it goes out with a reply subject of its generation, in fast
//! mode as part of a batch, and the answer that comes in there is an acknowledgement or ends the generation. What an
//! answer obliges is one table in [`error`].

mod ack;
mod api;
mod atomic;
mod base64;
pub mod check;
pub mod checkpoint;
mod connect;
mod encode;
mod ending;
pub mod error;
mod explain;
mod fast;
mod generation;
mod limits;
mod mode;
mod open;
pub mod options;
pub mod provision;
mod readback;
mod removed;
mod scan;
pub mod sink;
pub mod snapshot;
mod subject;
pub mod tail;
mod writing;

pub use async_nats::Client;
pub use check::check;
pub use checkpoint::{CHECKPOINT_BUCKET, CheckpointBucket};
pub use connect::connect;
pub use error::CODES;
pub use options::{Auth, LaneOptions, Matching, ModeChoice, NatsOptions, Secret, StreamOptions, TlsOptions};
pub use provision::{Done, Outcome, StreamSettings, init, plan};
pub use sink::JetStreamSink;
pub use snapshot::SinkWatch;
pub use tail::{Tail, is_whole, read_tail};
