//! What a person or a script sees: data on standard output, everything else on standard error.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::process::ExitCode;

use waljet_pipeline::{Action, Fault};

use crate::error::{OUTPUT, halt};

/// How the process ends. The numbers are a contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done = 0,
    /// Failed.
    Failed = 1,
    /// The command line or the configuration is at fault.
    Usage = 2,
    /// A check found a fault.
    CheckFault = 3,
    /// Events may be missing; going on needs the operator's word.
    Gap = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command did not do what it was told.
#[derive(Debug)]
pub(crate) struct Failure {
    /// How the process ends.
    pub(crate) exit: Exit,
    /// What is said about it; empty where nobody is left to listen.
    pub(crate) faults: Vec<Fault>,
}

impl Failure {
    /// The configuration or the command line is at fault.
    pub(crate) fn usage(faults: impl Into<Vec<Fault>>) -> Self {
        Self { exit: Exit::Usage, faults: faults.into() }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        let exit = if fault.action == Action::Gap { Exit::Gap } else { Exit::Failed };
        Self { exit, faults: vec![fault] }
    }
}

/// Writes data to standard output. A reader that has gone away has all that it wanted.
pub(crate) fn data(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(Failure { exit: Exit::Done, faults: Vec::new() })
        }
        Err(error) => Err(halt(OUTPUT, "write the result to standard output").cause(error).into()),
    }
}

/// Writes a remark for a person to standard error.
pub(crate) fn note(text: &str) {
    // Where standard error is gone there is nobody to tell.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints the outcome of a command and returns how the process ends.
pub(crate) fn outcome(result: Result<Exit, Failure>) -> ExitCode {
    let failure = match result {
        Ok(exit) => return exit.into(),
        Err(failure) => failure,
    };
    let style = Style::of(&io::stderr());
    let texts: Vec<String> = failure.faults.iter().map(|fault| fault_text(fault, style)).collect();
    if !texts.is_empty() {
        note(texts.join("\n").trim_end());
    }
    failure.exit.into()
}

/// Writes a fault as `error:`, `cause:` and `hint:` lines.
pub(crate) fn fault_text(fault: &Fault, style: Style) -> String {
    let mut text = format!("{} {} [{}]\n", style.red("error:"), fault.message, fault.code);
    let mut cause = fault.source();
    while let Some(error) = cause {
        let _ = writeln!(text, "{} {error}", style.bold("cause:"));
        cause = error.source();
    }
    if let Some(hint) = &fault.hint {
        let _ = writeln!(text, "{} {hint}", style.green("hint:"));
    }
    text
}

/// Whether what is printed carries colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// No escape codes.
    Plain,
    /// Escape codes of a terminal.
    Colour,
}

impl Style {
    /// Colour only for a terminal, and only where `NO_COLOR` is not set (no-color.org).
    pub(crate) fn of(stream: &impl IsTerminal) -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if stream.is_terminal() && !refused { Self::Colour } else { Self::Plain }
    }

    /// Paints what is wrong.
    pub(crate) fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Paints what may surprise.
    pub(crate) fn yellow(self, text: &str) -> String {
        self.paint("1;33", text)
    }

    /// Paints what is good or helps.
    pub(crate) fn green(self, text: &str) -> String {
        self.paint("1;32", text)
    }

    /// Makes text stand out.
    pub(crate) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Colour => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
        }
    }
}

/// Aligns rows of cells into columns with two spaces between them.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use waljet_pipeline::Code;

    use super::*;

    fn fault() -> Fault {
        Fault::new(Code("slot-active"), Action::Halt, "slot \"waljet\" is in use by PID 12")
            .cause(io::Error::other("ERROR 55006"))
            .hint("stop the other relay")
    }

    #[test]
    fn a_fault_prints_error_cause_and_hint() {
        let text = "error: slot \"waljet\" is in use by PID 12 [slot-active]\ncause: ERROR 55006\nhint: stop the other relay\n";
        assert_eq!(fault_text(&fault(), Style::Plain), text);
        assert!(fault_text(&fault(), Style::Colour).starts_with("\u{1b}[1;31merror:\u{1b}[0m slot"));
    }

    #[test]
    fn the_action_of_a_fault_decides_how_the_process_ends() {
        assert_eq!(Failure::from(fault()).exit, Exit::Failed);
        assert_eq!(Failure::from(Fault::new(Code("x"), Action::Gap, "x")).exit, Exit::Gap);
    }

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_blanks() {
        let rows = [
            vec!["a".to_owned(), "bb".to_owned(), String::new()],
            vec!["äaa".to_owned(), "b".to_owned(), "c".to_owned()],
        ];
        assert_eq!(table(&rows), "a    bb\näaa  b   c\n");
        assert_eq!(table(&[]), "");
    }
}
