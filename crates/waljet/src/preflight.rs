//! The checks of both ends: made by `check`, and by `run` before it starts.

use serde_json::{Value, json};
use waljet_pipeline::{Action, Check, Fault, Finding};
use waljet_postgres::SharedControl;

use crate::checkpoint::Store;
use crate::config::{CheckpointStore, Config};
use crate::gap;
use crate::render::{Style, table};

/// What the checks of both ends found.
#[derive(Debug)]
pub(crate) struct Preflight {
    /// The end towards the database.
    pub(crate) postgres: Vec<Check>,
    /// The end towards the broker.
    pub(crate) nats: Vec<Check>,
}

impl Preflight {
    /// Makes the checks of both ends at the same time.
    pub(crate) async fn make(config: &Config) -> Self {
        let postgres = waljet_postgres::check(&config.source);
        let nats = waljet_jetstream::check(&config.nats, &config.stream);
        let store = Store::new(config, SharedControl::default());
        let (mut postgres, mut nats, checkpoint) = tokio::join!(postgres, nats, Box::pin(store.check()));
        // An end that does not answer has said so already.
        let reached = |checks: &[Check]| checks.len() > 1;
        match config.checkpoint.store {
            CheckpointStore::Nats if reached(&nats) => nats.push(checkpoint),
            CheckpointStore::Postgres | CheckpointStore::None if reached(&postgres) => postgres.push(checkpoint),
            _ => {}
        }
        gap::look(config, &mut postgres).await;
        Self { postgres, nats }
    }

    /// Compares the slot with the stored checkpoint, for a look from outside; a relay that starts does so by itself.
    pub(crate) async fn compare_checkpoint(&mut self, config: &Config) {
        if let Some(fault) = gap::moved(config).await {
            self.postgres.push(Check::fault("gap", fault));
        }
    }

    /// Returns all checks, each with the end that it is of.
    pub(crate) fn checks(&self) -> impl Iterator<Item = (&'static str, &Check)> {
        let postgres = self.postgres.iter().map(|check| ("postgres", check));
        postgres.chain(self.nats.iter().map(|check| ("nats", check)))
    }

    /// Returns whether any check found a fault.
    pub(crate) fn has_fault(&self) -> bool {
        self.checks().any(|(_, check)| matches!(check.finding, Finding::Fault(_)))
    }

    /// Takes out the faults: first those that end a start, then those that may heal while it waits.
    pub(crate) fn into_faults(self) -> (Vec<Fault>, Vec<Fault>) {
        let faults = self.postgres.into_iter().chain(self.nats).filter_map(|check| match check.finding {
            Finding::Fault(fault) => Some(fault),
            Finding::Good(_) | Finding::Warning { .. } => None,
        });
        faults.partition(|fault| fault.action != Action::Retry)
    }

    /// Writes one line a check, with the remedy below where there is one.
    pub(crate) fn text(&self, style: Style) -> String {
        let rows: Vec<Vec<String>> = self.checks().map(|(end, check)| row(end, check)).collect();
        let mut text = String::new();
        for ((_, check), line) in self.checks().zip(table(&rows).lines()) {
            text.push_str(&paint(style, &check.finding, line));
            text.push('\n');
            for (label, remark) in remarks(&check.finding) {
                text.push_str(&format!("       {} {remark}\n", style.bold(label)));
            }
        }
        text
    }

    /// Returns the checks as JSON: an array of objects.
    pub(crate) fn to_json(&self) -> Value {
        self.checks().map(|(end, check)| as_json(end, check)).collect()
    }
}

/// Returns the cells of one check.
fn row(end: &str, check: &Check) -> Vec<String> {
    let message = match &check.finding {
        Finding::Good(found) => found.clone(),
        Finding::Warning { message, .. } => message.clone(),
        Finding::Fault(fault) => format!("{} [{}]", fault.message, fault.code),
    };
    vec![word(&check.finding).to_owned(), end.to_owned(), check.name.clone(), message]
}

/// Returns the first word of a line.
fn word(finding: &Finding) -> &'static str {
    match finding {
        Finding::Good(_) => "ok",
        Finding::Warning { .. } => "warn",
        Finding::Fault(_) => "FAULT",
    }
}

/// Paints the first word of a line.
fn paint(style: Style, finding: &Finding, line: &str) -> String {
    let (word, rest) = line.split_at(word(finding).len());
    let word = match finding {
        Finding::Good(_) => style.green(word),
        Finding::Warning { .. } => style.yellow(word),
        Finding::Fault(_) => style.red(word),
    };
    format!("{word}{rest}")
}

/// Returns what is said below a line: causes and the remedy.
fn remarks(finding: &Finding) -> Vec<(&'static str, String)> {
    match finding {
        Finding::Good(_) => Vec::new(),
        Finding::Warning { hint, .. } => vec![("hint:", hint.clone())],
        Finding::Fault(fault) => {
            let causes = causes(fault).into_iter().map(|cause| ("cause:", cause));
            causes.chain(fault.hint.clone().map(|hint| ("hint:", hint))).collect()
        }
    }
}

/// Returns what led to a fault, nearest first.
fn causes(fault: &Fault) -> Vec<String> {
    let first = std::error::Error::source(fault);
    std::iter::successors(first, |error| error.source()).map(ToString::to_string).collect()
}

/// Returns one check as an object; the keys are a contract.
fn as_json(end: &str, check: &Check) -> Value {
    let mut object = json!({ "end": end, "check": check.name });
    match &check.finding {
        Finding::Good(found) => {
            object["result"] = json!("ok");
            object["message"] = json!(found);
        }
        Finding::Warning { message, hint } => {
            object["result"] = json!("warning");
            object["message"] = json!(message);
            object["hint"] = json!(hint);
        }
        Finding::Fault(fault) => {
            object["result"] = json!("fault");
            object["message"] = json!(fault.message);
            object["code"] = json!(fault.code);
            object["action"] = json!(fault.action);
            object["causes"] = json!(causes(fault));
            object["hint"] = json!(fault.hint);
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use waljet_pipeline::Code;

    use super::*;

    fn preflight() -> Preflight {
        let fault = |code, action, message: &str| Fault::new(Code(code), action, message).hint("mend it");
        Preflight {
            postgres: vec![
                Check::good("wal_level", "logical"),
                Check::warning("slot limit", "max_slot_wal_keep_size is not set", "ALTER SYSTEM ..."),
                Check::fault("slot", fault("slot-active", Action::Retry, "slot \"w\" is in use").cause("PID 12")),
            ],
            nats: vec![Check::fault("stream", fault("stream-sealed", Action::Halt, "stream \"O\" is sealed"))],
        }
    }

    #[test]
    fn each_check_is_a_line_with_its_remedy_below() {
        let text = "\
ok     postgres  wal_level   logical
warn   postgres  slot limit  max_slot_wal_keep_size is not set
       hint: ALTER SYSTEM ...
FAULT  postgres  slot        slot \"w\" is in use [slot-active]
       cause: PID 12
       hint: mend it
FAULT  nats      stream      stream \"O\" is sealed [stream-sealed]
       hint: mend it
";
        assert_eq!(preflight().text(Style::Plain), text);
        assert!(preflight().text(Style::Colour).starts_with("\u{1b}[1;32mok\u{1b}[0m     postgres"));
    }

    #[test]
    fn faults_that_may_heal_are_told_from_those_that_end_a_start() {
        assert!(preflight().has_fault());
        let (ends, heals) = preflight().into_faults();
        let codes = |faults: Vec<Fault>| faults.into_iter().map(|fault| fault.code.0).collect::<Vec<_>>();
        assert_eq!((codes(ends), codes(heals)), (vec!["stream-sealed"], vec!["slot-active"]));
    }

    #[test]
    fn json_names_result_code_and_remedy() {
        let json = preflight().to_json();
        assert_eq!(json[0], json!({ "end": "postgres", "check": "wal_level", "result": "ok", "message": "logical" }));
        assert_eq!(
            json[2],
            json!({
                "end": "postgres", "check": "slot", "result": "fault", "message": "slot \"w\" is in use",
                "code": "slot-active", "action": "retry", "causes": ["PID 12"], "hint": "mend it",
            })
        );
    }
}
