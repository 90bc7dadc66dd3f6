//! The codes of the faults that the binary itself finds.

use waljet_pipeline::{Action, Code, Fault};

/// A configuration file that is not there or cannot be read.
pub(crate) const CONFIG_FILE: Code = Code("config-file");
/// A configuration file that is not TOML.
pub(crate) const CONFIG_SYNTAX: Code = Code("config-syntax");
/// A key that does not exist.
pub(crate) const CONFIG_UNKNOWN_KEY: Code = Code("config-unknown-key");
/// A value that the key does not allow.
pub(crate) const CONFIG_VALUE: Code = Code("config-value");
/// A key without which nothing can start.
pub(crate) const CONFIG_MISSING: Code = Code("config-missing");
/// Two keys that exclude each other.
pub(crate) const CONFIG_CONFLICT: Code = Code("config-conflict");
/// A key or value that this version does not have.
pub(crate) const CONFIG_NOT_IN_THIS_VERSION: Code = Code("config-not-in-this-version");
/// The file that a secret is read from.
pub(crate) const SECRET_FILE: Code = Code("secret-file");
/// The admin endpoint's address is taken or not ours.
pub(crate) const ADMIN_LISTEN: Code = Code("admin-listen");
/// The process could not set itself up.
pub(crate) const START: Code = Code("start");
/// Writing the result failed.
pub(crate) const OUTPUT: Code = Code("output");
/// A command that loses data was not told to go on.
pub(crate) const CONFIRMATION: Code = Code("confirmation-missing");
/// A second signal ended the relay.
pub(crate) const ABORTED: Code = Code("aborted");

/// A catch-up cannot tell which events are stored.
pub(crate) const CATCH_UP_BLIND: Code = Code("catch-up-blind");

/// The demo did not come to its end.
pub(crate) const DEMO: Code = Code("demo-failed");

/// All codes of this crate, with what they mean and what to do.
pub(crate) const CODES: &[(Code, &str)] = &[
    (
        DEMO,
        "The demo could not start its servers, or something did not happen in time. The cause says what; the servers' logs are kept where `WALJET_KEEP=1` is set.",
    ),
    (
        CONFIG_FILE,
        "The configuration file is missing or cannot be read. Name one with `--config`, or set everything by environment variables and leave the file away.",
    ),
    (
        CONFIG_SYNTAX,
        "The configuration file is not TOML. The message names line and column; often a quote or a bracket is missing.",
    ),
    (
        CONFIG_UNKNOWN_KEY,
        "A key in the file, or an environment variable that starts with `WALJET_`, is not one of waljet's. It is refused because a misspelt key would silently leave the default in force. `waljet config reference` lists all keys.",
    ),
    (
        CONFIG_VALUE,
        "A value does not fit its key. The message says what the key takes, what was found and where it came from.",
    ),
    (
        CONFIG_MISSING,
        "A key that has no default is not set. Set it in the file or by the environment variable that the hint names.",
    ),
    (
        CONFIG_CONFLICT,
        "Two keys are set that exclude or need each other. Remove or add the one that the message names.",
    ),
    (
        CONFIG_NOT_IN_THIS_VERSION,
        "The key or the value belongs to a feature that this version of waljet does not have. It is refused so that nothing is believed to be in force that is not.",
    ),
    (
        SECRET_FILE,
        "A file that holds a secret is missing, cannot be read, is empty or is not text. Check the path and that the user of the process may read it.",
    ),
    (
        ADMIN_LISTEN,
        "The admin endpoint could not be bound. Another process has the port, or the address is not one of this machine: change `admin.listen`, or set it to \"off\".",
    ),
    (
        START,
        "The process could not set up its runtime, its signal handlers or its log. The cause says which call failed; usually a limit of the operating system was reached.",
    ),
    (OUTPUT, "The result could not be written to standard output. The cause says why; a full disk is the usual one."),
    (
        CONFIRMATION,
        "The command would lose data and only showed what: read the range of positions and the bytes that it printed, and add `--yes` to do it.",
    ),
    (
        CATCH_UP_BLIND,
        "A catch-up or a backfill compares the rows of the table with the messages of the stream by their ids. The stream no longer \
         holds all messages that it was given (they aged out, were consumed, purged or deleted), and the checkpoint holds no \
         snapshot by which the rows could be told apart: the events of those messages would be published again. Nothing was done. \
         Compare the table with what consumers have, publish what is missing by hand, then go on with `waljet run --accept-gap`.",
    ),
    (
        ABORTED,
        "A second signal ended the relay before all events that it had received were acknowledged. Nothing is lost: what was not confirmed is looked up in the stream at the next start.",
    ),
];

/// A fault that needs a change by a person before the process can start.
pub(crate) fn halt(code: Code, message: impl Into<String>) -> Fault {
    Fault::new(code, Action::Halt, message)
}
