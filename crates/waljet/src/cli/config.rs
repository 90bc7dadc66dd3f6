//! `waljet config`: what is in force, whether it is right, what there is.

use clap::Subcommand;

use super::Global;
use crate::config::{read, reference, show, show_json};
use crate::render::{Exit, Failure, data, note};

/// Show, check or explain the configuration.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the value of every key and where it comes from, without secrets
    Show {
        /// Print JSON: an object of path to value and origin
        #[arg(long)]
        json: bool,
    },
    /// Check the configuration and report all faults; connects to nothing
    Validate,
    /// Print all keys as Markdown
    Reference,
}

/// Does what was typed.
pub(crate) fn run(global: &Global, command: &Command) -> Result<Exit, Failure> {
    match command {
        Command::Show { json } => {
            let (effective, _) = read(&global.inputs());
            data(&if *json { show_json(&effective) } else { show(&effective) })?;
            // What is faulty is shown as if it were not there, so it has to be said.
            global.load()?;
        }
        Command::Validate => {
            global.load()?;
            note("the configuration is valid");
        }
        Command::Reference => data(&reference())?,
    }
    Ok(Exit::Done)
}
