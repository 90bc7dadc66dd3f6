//! The source of waljet: a PostgreSQL replication slot, its publication and its outbox table.
//!
//! This crate must not see the broker. The modules, in the order in which a change passes them:
//!
//! 1. [`connect`], `dial`, `tls`, `channel_binding`: from a URL to a verified session, for both connections.
//! 2. `wire`, `replication`: start-up, authentication and the commands of the replication connection.
//! 3. `reader`, `batch`: the task that owns the stream's socket and speaks to the server in time.
//! 4. [`source`]: [`ReplicationSource`], which gives the frames out and takes positions.
//!
//! Beside the stream, over SQL (`control`, [`sql`]): [`checkpoint`] stores how far everything is confirmed, [`watch`] proves how far keepalives may be trusted,
//! [`mod@check`] finds what would go wrong before it does, [`provision`] creates what is missing, and [`slot`]
//! and [`publication`] hold what is known of those two. [`error`] lists every fault.

mod batch;
mod channel_binding;
pub mod check;
pub mod checkpoint;
pub mod connect;
mod control;
mod dial;
pub mod error;
pub mod provision;
pub mod publication;
mod reader;
mod replication;
pub mod slot;
pub mod source;
pub mod sql;
pub mod table;
mod tls;
pub mod turn;
pub mod watch;
mod wire;

pub use check::check;
pub use checkpoint::{CHECKPOINT_TABLE, CheckpointTable};
pub use connect::{ConnectOptions, SslMode};
pub use control::SharedControl;
pub use error::{CODES, ServerError};
pub use provision::{Done, Outcome, ProvisionOptions, Statement, init, plan};
pub use publication::TableName;
pub use slot::{Advanced, Failover, SlotState};
pub use source::{Messages, ReplicationSource, SourceOptions, identify};
pub use table::{CatchUp, TableOptions, TableSource};
pub use turn::Turn;
pub use watch::{PublicationWatch, SourceWatch};
