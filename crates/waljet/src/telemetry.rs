//! The log: lines for a person or for a machine, on standard error.

use std::io::{self, IsTerminal};
use std::panic::PanicHookInfo;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use waljet_pipeline::Fault;

use crate::config::Log;
use crate::error::{CONFIG_VALUE, START, halt};
use crate::render::{Exit, Style};

/// Starts the log and lets a panic end the process.
///
/// # Errors
///
/// `RUST_LOG` is not a filter, or a log has been started already.
pub(crate) fn start(log: &Log) -> Result<(), Fault> {
    let filter = filter(log, std::env::var("RUST_LOG").ok())?;
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_timer(Utc);
    let started = if is_json(&log.format, io::stderr().is_terminal()) {
        registry.with(layer.json().flatten_event(true).with_span_list(false)).try_init()
    } else {
        registry.with(layer.with_target(false).with_ansi(Style::of(&io::stderr()) == Style::Colour)).try_init()
    };
    started.map_err(|error| halt(START, "start the log").cause(error))?;
    std::panic::set_hook(Box::new(end_on_panic));
    Ok(())
}

/// Returns whether lines are written as JSON: always, never, or wherever no person watches.
fn is_json(format: &str, terminal: bool) -> bool {
    match format {
        "json" => true,
        "text" => false,
        _ => !terminal,
    }
}

/// Added where only a level is given: the client tells each connection at length and calls it an error when it gives one up, which the relay does for it, and so do the crates here.
const QUIETER: &str = "async_nats=warn,async_nats::connector=off";

/// Reads the filter; the variable goes before the setting, as with all programs that know it.
fn filter(log: &Log, variable: Option<String>) -> Result<EnvFilter, Fault> {
    let variable = variable.filter(|text| !text.trim().is_empty());
    let (name, text) = variable.as_ref().map_or(("log.level", &log.level), |text| ("RUST_LOG", text));
    let chatty = matches!(text.parse(), Ok(LevelFilter::INFO | LevelFilter::DEBUG | LevelFilter::TRACE));
    let full = if chatty { format!("{text},{QUIETER}") } else { text.clone() };
    EnvFilter::try_new(full).map_err(|error| {
        halt(CONFIG_VALUE, format!("{name}: expected a level or a filter, found {text:?}"))
            .cause(error)
            .hint("write a level such as info, or a filter such as info,waljet_postgres=debug")
    })
}

#[expect(clippy::disallowed_methods, reason = "a panic may be on any thread; main cannot be told")]
/// Logs where the panic was and ends the process: a task that is gone would leave a relay that looks alive.
fn end_on_panic(info: &PanicHookInfo<'_>) {
    let location = info.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current().name().unwrap_or("unnamed").to_owned();
    tracing::error!(location, thread, reason = panic_reason(info), "panicked, which is a bug in waljet");
    std::process::exit(Exit::Failed as i32);
}

/// Returns the panic's message where it is a literal. A formatted one may quote the data of a row and is
/// shown only to who asks for backtraces.
fn panic_reason<'a>(info: &'a PanicHookInfo<'_>) -> &'a str {
    let payload = info.payload();
    let formatted = || payload.downcast_ref::<String>().filter(|_| std::env::var_os("RUST_BACKTRACE").is_some());
    let literal = payload.downcast_ref::<&'static str>().copied();
    literal
        .or_else(|| formatted().map(String::as_str))
        .unwrap_or("withheld, since it may quote data; set RUST_BACKTRACE to see it")
}

/// Milliseconds in UTC: as readable as needed, and comparable between machines.
struct Utc;

impl FormatTime for Utc {
    fn format_time(&self, w: &mut Writer<'_>) -> std::fmt::Result {
        write!(w, "{:.3}", jiff::Timestamp::now())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use super::*;

    fn log(level: &str) -> Log {
        Log { format: "auto".into(), level: level.into() }
    }

    #[test]
    fn json_is_for_whoever_is_no_terminal_unless_the_setting_says_otherwise() {
        assert_eq!([is_json("auto", true), is_json("auto", false)], [false, true]);
        assert_eq!([is_json("json", true), is_json("text", false)], [true, false]);
    }

    #[test]
    fn rust_log_goes_before_the_setting() {
        let read =
            |level: &str, variable: Option<&str>| filter(&log(level), variable.map(Into::into)).unwrap().to_string();
        assert_eq!(read("warn", None), "warn");
        assert_eq!(read("warn", Some("error")), "error");
        assert_eq!(read("warn", Some(" ")), "warn");
        assert!(filter(&log("info"), Some("a=b=c".into())).unwrap_err().message.starts_with("RUST_LOG: "));
    }

    #[test]
    fn a_level_alone_leaves_the_clients_chatter_out() {
        let read = |level: &str| filter(&log(level), None).unwrap().to_string();
        assert_eq!(read("info"), "async_nats::connector=off,async_nats=warn,info");
        assert_eq!(read("info,async_nats=info"), "async_nats=info,info");
    }

    #[test]
    fn times_are_utc_with_milliseconds() {
        let mut text = String::new();
        Utc.format_time(&mut Writer::new(&mut text)).unwrap();
        assert_eq!(text.len(), "2026-11-30T12:00:00.000Z".len(), "{text}");
        assert!(text.ends_with('Z'));
    }
}
