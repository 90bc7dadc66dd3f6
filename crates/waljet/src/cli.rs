//! The command line: what can be typed, and which function each command is.

mod check;
mod config;
mod demo;
mod docs;
mod init;
#[cfg(test)]
#[allow(clippy::panic, reason = "a test may fail by panicking")]
mod mentions;
mod run;
mod slot;
mod status;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tokio::runtime::Runtime;
use waljet_pipeline::Fault;

use crate::config::{Config, Inputs, load};
use crate::error::{START, halt};
use crate::render::{Exit, Failure, data};
use crate::telemetry;

/// Relays events of a transactional outbox from the PostgreSQL WAL to NATS JetStream.
///
/// An event that was committed is stored in the stream once and in order, whatever crashes; the database
/// is told so only after the broker has acknowledged it.
#[derive(Debug, Parser)]
#[command(name = "waljet", bin_name = "waljet", version, propagate_version = false, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// What every command takes.
    #[command(flatten)]
    pub(crate) global: Global,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The log of commands that end by themselves, whose faults are printed.
const QUIET: &str = "error";

/// The pipeline is one task; the others are those of the two clients and the admin endpoint.
const WORKERS: usize = 2;

/// Shown after the help of the program.
const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 a check found a fault, \
4 data gap that needs the operator's word.";

/// What every command takes.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// The configuration file; `waljet.toml` where none is named, which may be missing
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Lines for a person or for a machine [default: log.format]
    #[arg(long, global = true, value_name = "FORMAT")]
    pub(crate) log_format: Option<LogFormat>,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Text on a terminal, JSON elsewhere
    Auto,
    /// One line of text an event
    Text,
    /// One JSON object a line
    Json,
}

impl LogFormat {
    /// Returns the word of `log.format`.
    fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

impl Global {
    /// Returns what the flags say about the configuration.
    pub(crate) fn inputs(&self) -> Inputs {
        let format = self.log_format.map(|format| ("log.format", "--log-format", format.word().to_owned()));
        Inputs { file: self.config.clone(), flags: format.into_iter().collect() }
    }

    /// Reads the configuration, whole.
    fn load(&self) -> Result<Config, Failure> {
        load(&self.inputs()).map_err(Failure::usage)
    }

    /// Reads the configuration for a command that ends by itself: its log only has what may surprise.
    fn load_quietly(&self) -> Result<Config, Failure> {
        let mut config = self.load()?;
        QUIET.clone_into(&mut config.log.level);
        telemetry::start(&config.log).map_err(|fault| Failure::usage([fault]))?;
        Ok(config)
    }
}

/// What waljet can do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Relay events until SIGTERM or SIGINT: the first drains and confirms, the second aborts
    Run(run::Run),
    /// Create what is missing: schema and table, publication, slot, stream
    Init(init::Init),
    /// Check both ends, one line a check, with the remedy; exit code 3 on a fault
    Check(check::Check),
    /// Show positions, lag, what is in flight, slot and stream
    Status(status::Status),
    /// Show, create, drop or advance the replication slot
    #[command(subcommand)]
    Slot(slot::Command),
    /// Show, check or explain the configuration
    #[command(subcommand)]
    Config(config::Command),
    /// Show the main job on throw-away servers: everything is killed once, and the books must balance
    Demo(demo::Demo),
    /// Print the version
    Version,
    /// Print pages of the documentation that are made from the program
    #[command(subcommand, hide = true)]
    Docs(docs::Command),
}

/// Does what was typed.
pub(crate) fn dispatch(cli: &Cli) -> Result<Exit, Failure> {
    match &cli.command {
        Command::Run(args) => run::run(&cli.global, args),
        Command::Init(args) => init::run(&cli.global, args),
        Command::Check(args) => check::run(&cli.global, args),
        Command::Status(args) => status::run(&cli.global, args),
        Command::Slot(command) => slot::run(&cli.global, command),
        Command::Config(command) => config::run(&cli.global, command),
        Command::Demo(args) => demo::run(args),
        Command::Version => data(concat!("waljet ", env!("CARGO_PKG_VERSION"), "\n")).map(|()| Exit::Done),
        Command::Docs(command) => docs::run(command),
    }
}

/// Starts the threads that everything asynchronous runs on.
fn runtime() -> Result<Runtime, Fault> {
    let built = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build();
    built.map_err(|error| halt(START, "start the runtime").cause(error))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_stand_before_or_after_the_command() {
        for line in
            ["waljet --config a.toml --log-format json version", "waljet version --config a.toml --log-format json"]
        {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            let inputs = cli.global.inputs();
            assert_eq!(inputs.file, Some(PathBuf::from("a.toml")));
            assert_eq!(inputs.flags, [("log.format", "--log-format", "json".to_owned())]);
        }
    }
}
