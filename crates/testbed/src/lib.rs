//! Private, throw-away PostgreSQL and NATS servers and a faulty proxy, for the demo and the tests.
//!
//! The testbed must not see the product: it starts the servers that the product talks to, breaks
//! them, and meets the relay between them as a program, by what users see of it.
//!
//! Every server is a child process with its own folder, its own leased port and its own log. It
//! dies with the process that started it, however that process ends, and takes its folder along.
//! As root, the servers run as `postgres` or `nobody`, because PostgreSQL refuses root.
//!
//! The modules in the order in which a test meets them:
//!
//! - [`Pair`]: which server binaries to use, from the environment or from what is installed.
//! - [`Postgres`]: a cluster, copied from a cached `initdb` template, that can be stopped, killed,
//!   frozen and started again on the same port.
//! - [`Nats`] and [`NatsCluster`]: the same for nats-server with JetStream, alone or as three.
//! - [`Proxy`]: a TCP proxy that delays, stalls, cuts, resets or refuses.
//! - [`Program`]: any other program, such as the relay.
//! - [`Workload`], [`Books`] and [`Rig`]: a service that writes an outbox, what it committed against what is stored,
//!   and all of that put together.
//! - [`wait_for`]: polls until something holds, and fails with its name when it does not.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use waljet_testbed::{Nats, NatsOptions, Pair, Postgres, PostgresOptions};
//!
//! let pair = Pair::newest()?;
//! let postgres = Postgres::start(PostgresOptions::new(&pair)).await?;
//! let nats = Nats::start(NatsOptions::new(&pair)).await?;
//! postgres.kill().await?; // as a power cut would
//! postgres.start_again().await?; // on the same port, with the same data
//! # Ok(())
//! # }
//! ```

mod binaries;
mod books;
mod folder;
mod http;
mod nats;
mod port;
mod postgres;
mod process;
mod program;
mod proxy;
mod rig;
mod spawn;
mod wait;
mod workload;

pub use binaries::Pair;
pub use books::Books;
pub use http::{HttpResponse, http_get};
pub use nats::{JetStream, Nats, NatsCluster, NatsOptions, addresses};
pub use port::PortLease;
pub use postgres::{Auth, Durability, Postgres, PostgresOptions};
pub use program::{Program, ProgramOptions};
pub use proxy::{Direction, Mode, Proxy};
pub use rig::{Rig, RigOptions, SLOT, STREAM, stored};
pub use wait::{Answer, wait_for};
pub use workload::{Counters, Workload, WorkloadOptions, connect, large_transaction};
