//! `waljet check`: looks at both ends and says what to mend.

use std::io;

use clap::Args;

use super::{Global, runtime};
use crate::preflight::Preflight;
use crate::render::{Exit, Failure, Style, data};

/// Check both ends.
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// Print JSON: an array with an object for each check
    #[arg(long)]
    json: bool,
}

/// Does what was typed.
pub(crate) fn run(global: &Global, args: &Check) -> Result<Exit, Failure> {
    let config = global.load_quietly()?;
    let preflight = runtime()?.block_on(async {
        let mut preflight = Preflight::make(&config).await;
        preflight.compare_checkpoint(&config).await;
        preflight
    });
    let text =
        if args.json { format!("{:#}\n", preflight.to_json()) } else { preflight.text(Style::of(&io::stdout())) };
    data(&text)?;
    Ok(if preflight.has_fault() { Exit::CheckFault } else { Exit::Done })
}
