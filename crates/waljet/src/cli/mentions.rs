//! What the program tells people to type or to set has to exist.

use std::path::{Path, PathBuf};

use clap::CommandFactory;

use super::Cli;
use crate::config::keys::{KEYS, LATER};

/// Words that follow the program's name in sentences. Whatever else follows it is taken for a command.
const SENTENCES: [&str; 23] = [
    "and", "answers", "called", "cannot", "connects", "does", "goes", "has", "is", "itself", "keeps", "knows",
    "program", "reads", "refuses", "relays", "sends", "slows", "stands", "to", "tries", "waits", "would",
];

/// Sections whose keys are looked at; the others are also words of subjects and of code.
const SECTIONS: [&str; 9] =
    ["postgres", "route", "nats", "publisher", "window", "retry", "admin", "shutdown", "dead_letter"];

#[test]
fn every_command_that_a_message_a_hint_or_a_page_names_exists() {
    let mut wrong = Vec::new();
    for (place, text) in texts() {
        wrong.extend(unknown_commands(&text).into_iter().map(|what| format!("{place}: {what}")));
    }
    assert!(wrong.is_empty(), "not commands of this version:\n{}", wrong.join("\n"));
}

#[test]
fn every_key_that_a_message_a_hint_or_a_page_names_exists() {
    let mut wrong = Vec::new();
    for (place, text) in texts() {
        wrong.extend(unknown_keys(&text).into_iter().map(|what| format!("{place}: {what}")));
    }
    assert!(wrong.is_empty(), "not keys of this version:\n{}", wrong.join("\n"));
}

#[test]
fn what_does_not_exist_is_found() {
    let commands =
        ["then waljet dead-letters retry", "`waljet slot eat`", "waljet run --fast", "see waljet slot advance --top X"];
    for text in commands {
        assert_eq!(unknown_commands(text).len(), 1, "{text}");
    }
    for text in ["waljet goes on", "waljet slot create, and waljet run --accept-gap", "waljet slot advance --to LSN"] {
        assert_eq!(unknown_commands(text), [""; 0], "{text}");
    }
    assert_eq!(unknown_keys("set nats.tls.ca_file, or nats.tls.ca and nats.password_file"), ["nats.tls.ca_file"]);
    let code = "f(\"a \\\"b\\\" c\", 'x', '\"', r#\"raw \"x\"\"#) // \"comment\"\n\"two \\\n    lines\"";
    assert_eq!(literals(code), ["a \"b\" c", "raw \"x\"", "two lines"]);
}

/// Returns all literals of the sources before their tests, and all pages, each with where it is from.
fn texts() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    for part in ["pipeline", "postgres", "jetstream", "waljet"] {
        collect(&root.join("crates").join(part).join("src"), "rs", &mut files);
    }
    let mut texts = Vec::new();
    for file in files.iter().filter(|file| !file.ends_with("cli/mentions.rs")) {
        let source = read(file);
        let (source, _) = source.split_once("#[cfg(test)]").unwrap_or((&source, ""));
        texts.extend(literals(source).into_iter().map(|text| (file.display().to_string(), text)));
    }
    let mut pages = Vec::new();
    collect(&root.join("docs"), "md", &mut pages);
    pages.extend(Some(root.join("README.md")).filter(|page| page.exists()));
    for page in pages {
        texts.extend(code(&read(&page)).into_iter().map(|text| (page.display().to_string(), text)));
    }
    texts.push(("docker-compose.yml".to_owned(), read(&root.join("docker-compose.yml"))));
    assert!(texts.len() > 500, "only {} texts were found", texts.len());
    texts
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

fn collect(folder: &Path, extension: &str, files: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("read {}: {error}", folder.display()));
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.is_dir() {
            collect(&path, extension, files);
        } else if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
}

/// Returns the blocks and spans of code of a page.
fn code(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, part) in page.split("```").enumerate() {
        if at % 2 == 1 {
            found.push(part.to_owned());
        } else {
            found.extend(part.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    found
}

/// Returns what follows the program's name and is neither a sentence nor a command with its flags.
fn unknown_commands(text: &str) -> Vec<String> {
    let root = Cli::command();
    let mut wrong = Vec::new();
    for (at, name) in text.match_indices("waljet ") {
        if text[..at].chars().next_back().is_some_and(|before| before.is_alphanumeric() || "-_/.".contains(before)) {
            continue;
        }
        let line = text[at + name.len()..].lines().next().unwrap_or_default();
        // A span of code ends at its back quote.
        let line = line.split('`').next().unwrap_or_default();
        let words = line.split_whitespace().map(|word| word.trim_matches(|c: char| ",;:.()'\"".contains(c)));
        let mut command = &root;
        let mut flags = false;
        for word in words.skip_while(|word| *word == "--") {
            if let Some(found) = command.find_subcommand(word) {
                command = found;
            } else if let Some(flag) = word.strip_prefix("--") {
                flags = true;
                let flag = flag.split('=').next().unwrap_or_default();
                let known = |command: &clap::Command| command.get_arguments().any(|arg| arg.get_long() == Some(flag));
                if !known(command) && !known(&root) && flag != "help" && flag != "version" {
                    wrong.push(format!("waljet {} --{flag}", command.get_name()));
                }
            } else if !flags && command.has_subcommands() && is_word(word) {
                if command.get_name() != "waljet" || !SENTENCES.contains(&word) {
                    wrong.push(format!("{} {word}", command.get_name()));
                }
                break;
            } else if !flags {
                break;
            }
        }
    }
    wrong
}

fn is_word(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '-')
}

/// Returns what looks like a key of one of the sections and is none.
fn unknown_keys(text: &str) -> Vec<String> {
    let inside = |c: char| c.is_ascii_alphanumeric() || "._".contains(c);
    let words = text.split(|c: char| !inside(c)).map(|word| word.trim_end_matches('.'));
    let of_section = |word: &&str| {
        let section = word.split_once('.').map(|(section, _)| section);
        section.is_some_and(|section| SECTIONS.contains(&section))
    };
    // Names that end like this are hosts.
    let hosts = |word: &&str| !word.ends_with(".example");
    words.filter(of_section).filter(hosts).filter(|word| !is_key(word)).map(str::to_owned).collect()
}

/// Returns whether a path is a key, the file of a secret, a section of keys, or named as one of a later version.
fn is_key(path: &str) -> bool {
    let secret = path.strip_suffix("_file").unwrap_or(path);
    KEYS.iter().any(|key| key.path == path || (key.path == secret && key.has_file_twin()) || within(key.path, path))
        || LATER.iter().any(|(later, _)| *later == path)
}

fn within(key: &str, section: &str) -> bool {
    key.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'))
}

/// Returns the string literals of a source.
fn literals(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = rest.split_once('\n').map_or("", |(_, after)| after);
        } else if let Some(after) = rest.strip_prefix("r#\"") {
            let (text, after) = after.split_once("\"#").unwrap_or((after, ""));
            found.push(text.to_owned());
            rest = after;
        } else if let Some(after) = rest.strip_prefix('"') {
            let (text, after) = literal(after);
            found.push(text);
            rest = after;
        } else if rest.starts_with("'\"'") {
            rest = &rest[3..];
        } else {
            rest = &rest[first.len_utf8()..];
        }
    }
    found
}

/// Returns a literal without its escapes, and what follows its closing quote.
fn literal(source: &str) -> (String, &str) {
    let mut text = String::new();
    let mut rest = source;
    loop {
        let mut chars = rest.chars();
        match (chars.next(), chars.clone().next()) {
            (None, _) => return (text, rest),
            (Some('"'), _) => return (text, chars.as_str()),
            (Some('\\'), Some('\n')) => rest = chars.as_str().trim_start(),
            (Some('\\'), Some(escaped)) => {
                text.push(if escaped == 'n' { '\n' } else { escaped });
                rest = &chars.as_str()[escaped.len_utf8()..];
            }
            (Some(c), _) => {
                text.push(c);
                rest = chars.as_str();
            }
        }
    }
}
