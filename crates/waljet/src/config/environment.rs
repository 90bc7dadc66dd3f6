//! The layer of the environment: `WALJET_SECTION__KEY`.

use std::ffi::OsString;

use waljet_pipeline::Fault;

use super::origin::{Given, Origin};
use super::value::Raw;
use crate::error::{CONFIG_VALUE, halt};

/// What all variables of waljet start with.
const PREFIX: &str = "WALJET_";

/// Variables that tell the demo and the tests where the servers are, and are no configuration.
const NOT_CONFIGURATION: [&str; 6] = [
    "WALJET_PG_BIN",
    "WALJET_OLD_PG_BIN",
    "WALJET_NATS_SERVER",
    "WALJET_OLD_NATS_SERVER",
    "WALJET_TOOLS",
    "WALJET_KEEP",
];

/// Takes the variables that are meant for waljet. A name that has no section is given as it is, so that it
/// is refused as an unknown key.
pub(crate) fn read(variables: &[(OsString, OsString)]) -> (Vec<Given>, Vec<Fault>) {
    let (mut given, mut faults) = (Vec::new(), Vec::new());
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| is_ours(name)) else { continue };
        match value.to_str() {
            Some(value) => given.push(Given {
                path: path(name),
                raw: Raw::Untyped(value.to_owned()),
                origin: Origin::Environment(name.to_owned()),
            }),
            None => faults.push(halt(CONFIG_VALUE, format!("environment variable {name}: expected UTF-8"))),
        }
    }
    given.sort_by(|a, b| a.path.cmp(&b.path));
    (given, faults)
}

/// Returns whether a variable is meant for waljet.
fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX) && !NOT_CONFIGURATION.contains(&name) && !is_service_link(name)
}

/// Returns whether Kubernetes made the variable for a service whose name starts with `waljet`: it adds
/// such variables to every container of the namespace (manual, "Accessing the Service").
fn is_service_link(name: &str) -> bool {
    let port = |tail: &str| {
        let mut parts = tail.split('_');
        let number = parts.next().is_some_and(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
        number && parts.next().is_some_and(|part| matches!(part, "TCP" | "UDP" | "SCTP"))
    };
    !name.contains("__")
        && (name.ends_with("_SERVICE_HOST")
            || name.contains("_SERVICE_PORT")
            || name.ends_with("_PORT")
            || name.split_once("_PORT_").is_some_and(|(_, tail)| port(tail)))
}

/// Returns the dotted path that a variable stands for.
fn path(name: &str) -> String {
    name.strip_prefix(PREFIX).unwrap_or(name).replace("__", ".").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<String> {
        let variables: Vec<_> = names.iter().map(|name| (OsString::from(name), OsString::from("x"))).collect();
        read(&variables).0.into_iter().map(|given| given.path).collect()
    }

    #[test]
    fn variables_become_paths() {
        assert_eq!(
            paths(&["WALJET_POSTGRES__SLOT", "HOME", "WALJET_OUTBOX__COLUMNS__AGGREGATE_ID", "WALJET_SLOT"]),
            ["outbox.columns.aggregate_id", "postgres.slot", "slot"]
        );
    }

    #[test]
    fn what_kubernetes_adds_for_a_service_is_passed_over() {
        let links = [
            "WALJET_SERVICE_HOST",
            "WALJET_SERVICE_PORT",
            "WALJET_SERVICE_PORT_METRICS",
            "WALJET_PORT",
            "WALJET_PORT_9464_TCP",
            "WALJET_PORT_9464_TCP_ADDR",
            "WALJET_METRICS_SERVICE_HOST",
        ];
        assert_eq!(paths(&links), Vec::<String>::new());
        assert_eq!(paths(&["WALJET_POSTGRES__PORT"]), ["postgres.port"]);
    }
}
