//! What was done in a run, counted.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

/// What was done, and what the relay made of it.
#[derive(Debug, Default)]
pub(super) struct Tally {
    run: String,
    faults: BTreeMap<&'static str, u32>,
    /// Events that were skipped because the stream held them, over all relays that could still be asked.
    skipped: u64,
    /// From `/status`, over the same; none where it does not tell.
    told: Option<u64>,
}

impl Tally {
    pub(super) fn new(run: &str) -> Self {
        Self { run: run.to_owned(), ..Self::default() }
    }

    /// Counts one fault.
    pub(super) fn count(&mut self, what: &'static str) {
        *self.faults.entry(what).or_default() += 1;
    }

    /// How many faults there were.
    pub(super) fn faults(&self) -> u32 {
        self.faults.values().sum()
    }

    /// Takes in the status of a relay that is about to be killed, or at the end.
    pub(super) fn take(&mut self, status: &Value) {
        self.skipped += status["events"]["skipped"].as_u64().unwrap_or(0);
        if let Some(told) = status["sink"]["read_backs"]["count"].as_u64() {
            *self.told.get_or_insert(0) += told;
        }
    }

    /// Puts it into words, with what the logs say of the stream being read back.
    pub(super) fn report(&self, log: &str, books: &dyn fmt::Display) -> String {
        let faults: Vec<String> = self.faults.iter().map(|(what, count)| format!("{what} {count}")).collect();
        let (times, events) = read_backs(log);
        let told = self.told.map_or_else(String::new, |told| format!(" ({told} by the last status of each relay)"));
        format!(
            "{run}: {faults}\n{run}: read-backs {times}{told} that found {events} \
             events, skipped {skipped}\n{run}: {books}",
            run = self.run,
            faults = faults.join(", "),
            skipped = self.skipped,
        )
    }
}

/// How often the log says that the stream was read back, and how many events that found.
pub(super) fn read_backs(log: &str) -> (usize, u64) {
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("stream read back")).collect();
    let found = |line: &&str| {
        let text: String = line.split_once("found=").or_else(|| line.split_once("\"found\":"))?.1.to_owned();
        text.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok()
    };
    (lines.len(), lines.iter().filter_map(found).sum())
}

#[test]
fn what_was_read_back_is_counted_from_the_log() {
    let log = "INFO stream read back; the events found are stored already messages=40 found=12 seconds=0.1\nINFO ready\n\
               {\"message\":\"stream read back; the events found are stored already\",\"messages\":31,\"found\":30}\n";
    assert_eq!(read_backs(log), (2, 42));
}
