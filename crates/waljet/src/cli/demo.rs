//! `waljet demo`: the main job on throw-away servers, with everything killed once on the way.

use std::time::Duration;

use clap::Args;
use waljet_pipeline::{Action, Fault};

use super::runtime;
use crate::demo::{self, DemoOptions};
use crate::error::DEMO;
use crate::render::{Exit, Failure};

/// Show the main job on throw-away servers.
#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Print one JSON object with the numbers instead of a table
    #[arg(long)]
    json: bool,
    /// Leave everything running afterwards, with the commands to look around, until Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Let events flow for one second between two faults instead of four
    #[arg(long)]
    short: bool,
    /// Rows of the large transaction
    #[arg(long, value_name = "ROWS", default_value_t = 50_000, value_parser = clap::value_parser!(u32).range(1..))]
    large: u32,
}

/// Does what was typed.
pub(crate) fn run(args: &Demo) -> Result<Exit, Failure> {
    let phase = Duration::from_secs(if args.short { 1 } else { 4 });
    let options = DemoOptions { phase, large: args.large, keep: args.keep, json: args.json };
    let report = runtime()?.block_on(Box::pin(demo::run(options))).map_err(|error| {
        let mut causes = error.chain().skip(1).map(ToString::to_string).collect::<Vec<_>>().join(": ");
        if causes.is_empty() {
            causes = "no further cause".to_owned();
        }
        Fault::new(DEMO, Action::Halt, error.to_string())
            .cause(causes)
            .hint("servers are found or fetched by ./tools.sh; ./demo calls it")
    })?;
    Ok(if report.books.balanced() { Exit::Done } else { Exit::Failed })
}
