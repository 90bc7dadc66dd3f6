//! `waljet docs`: pages of `docs/` that are made from the program, so that they cannot differ from it.

use clap::{Arg, ArgAction, CommandFactory, Subcommand};

use waljet_pipeline::Code;

use super::{Cli, EXIT_CODES};
use crate::render::{Exit, Failure, data};

/// Print pages of the documentation.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print docs/cli.md
    Cli,
    /// Print docs/errors.md
    Errors,
}

/// Does what was typed.
pub(crate) fn run(command: &Command) -> Result<Exit, Failure> {
    match command {
        Command::Cli => data(&cli_page())?,
        Command::Errors => data(&errors_page())?,
    }
    Ok(Exit::Done)
}

/// Writes all codes as Markdown, each with a section of its own.
fn errors_page() -> String {
    let mut text =
        "# Errors\n\nThis page is made by `waljet docs errors`. Every fault carries one of these codes.\n".to_owned();
    for (title, codes) in codes() {
        text.push_str(&format!("\n## {title}\n"));
        let mut codes = codes.to_vec();
        codes.sort_unstable();
        for (code, meaning) in codes {
            text.push_str(&format!("\n### {code}\n\n{meaning}\n"));
        }
    }
    text
}

/// Returns the codes of all crates.
fn codes() -> [(&'static str, &'static [(Code, &'static str)]); 4] {
    [
        ("Configuration and commands", crate::error::CODES),
        ("PostgreSQL", waljet_postgres::CODES),
        ("NATS", waljet_jetstream::CODES),
        ("Delivery", waljet_pipeline::error::CODES),
    ]
}

/// Writes all commands as Markdown.
fn cli_page() -> String {
    let mut root = Cli::command();
    root.build();
    let mut text = format!(
        "# Command line\n\nThis page is made by `waljet docs cli`.\n\n{}\n\n{EXIT_CODES}\n\n\
         Data goes to standard output, all else to standard error. Errors print `error:` with a stable code that has\n\
         a section in `docs/errors.md`, then `cause:` and `hint:`. Colour is used only on a terminal and where\n\
         `NO_COLOR` is not set.\n\n## Every command\n\n",
        about(&root)
    );
    text.push_str(&arguments(root.get_arguments().filter(|arg| arg.is_global_set())));
    for command in root.get_subcommands().filter(|command| !command.is_hide_set()) {
        section(&mut text, command, "waljet", 2);
    }
    text
}

/// Adds a command and the commands below it.
fn section(text: &mut String, command: &clap::Command, parent: &str, level: usize) {
    let name = format!("{parent} {}", command.get_name());
    text.push_str(&format!("\n{} `{name}`\n\n{}\n", "#".repeat(level), about(command)));
    let usage = command.clone().render_usage().to_string();
    if !command.has_subcommands() {
        text.push_str(&format!("\n```text\n{}\n```\n", usage.trim_start_matches("Usage: ")));
    }
    let own = arguments(command.get_arguments().filter(|arg| !arg.is_global_set() && arg.get_id() != "help"));
    if !own.is_empty() {
        text.push_str(&format!("\n{own}"));
    }
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        section(text, command, &name, level + 1);
    }
}

/// Returns what a command says about itself, the long form where there is one, ending in a full stop.
fn about(command: &clap::Command) -> String {
    let text = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string).unwrap_or_default();
    sentence(&text)
}

/// Writes arguments as a table; nothing where there are none.
fn arguments<'a>(arguments: impl Iterator<Item = &'a Arg>) -> String {
    let rows: Vec<String> = arguments.filter(|arg| !arg.is_hide_set()).map(row).collect();
    if rows.is_empty() { String::new() } else { format!("| argument | |\n| --- | --- |\n{}", rows.concat()) }
}

/// Writes one argument.
fn row(arg: &Arg) -> String {
    let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let name = match (arg.get_long(), value.filter(|_| takes_value)) {
        (Some(long), Some(value)) => format!("--{long} {value}"),
        (Some(long), None) => format!("--{long}"),
        (None, value) => value.unwrap_or_else(|| arg.get_id().to_string()),
    };
    let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let words: Vec<String> = match arg.get_possible_values() {
        words if takes_value => words.iter().map(|word| format!("`{}`", word.get_name())).collect(),
        _ => Vec::new(),
    };
    let words = if words.is_empty() { String::new() } else { format!(" One of {}.", words.join(", ")) };
    format!("| `{name}` | {}{words} |\n", sentence(&help).replace('|', "\\|").replace('\n', " "))
}

/// Ends a text with a full stop.
fn sentence(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() || text.ends_with('.') { text.to_owned() } else { format!("{text}.") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_docs_is_what_the_command_prints() {
        let page = include_str!("../../../../docs/cli.md");
        assert!(page == cli_page(), "run `waljet docs cli > docs/cli.md`");
    }

    #[test]
    fn the_page_of_errors_in_docs_is_what_the_command_prints() {
        let page = include_str!("../../../../docs/errors.md");
        assert!(page == errors_page(), "run `waljet docs errors > docs/errors.md`");
    }

    #[test]
    fn every_code_is_in_one_list_only() {
        let mut all: Vec<Code> = codes().iter().flat_map(|(_, codes)| codes.iter().map(|(code, _)| *code)).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn every_command_and_argument_says_what_it_does() {
        fn look(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {}", command.get_name(), arg.get_id());
            }
            command.get_subcommands().for_each(look);
        }
        look(&Cli::command());
    }
}
