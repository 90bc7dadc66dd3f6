//! The configuration files that we write into a cluster.

use super::{Auth, Durability, PostgresOptions};

/// The name of our file, which `postgresql.conf` includes last.
pub(super) const FILE: &str = "testbed.conf";

/// What every server runs with: small, on loopback, ready for logical replication.
const BASE: &[(&str, &str)] = &[
    ("listen_addresses", "127.0.0.1"),
    // None: the path of a socket may hold 107 bytes, and temporary folders can be deep.
    ("unix_socket_directories", ""),
    ("wal_level", "logical"),
    ("max_connections", "50"),
    ("max_wal_senders", "20"),
    ("max_replication_slots", "20"),
    ("wal_sender_timeout", "10s"),
    ("shared_buffers", "32MB"),
    // In the data folder, so that nothing stays in /dev/shm after a kill -9.
    ("dynamic_shared_memory_type", "mmap"),
    // We read the log: on standard error, in English.
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
    ("lc_messages", "C"),
    ("log_line_prefix", "%m [%p] "),
];

/// What makes a cluster faster and a crash of the machine fatal.
///
/// Not `synchronous_commit` and not `full_page_writes`: these would lose commits, or tear pages,
/// when no more than the server is killed.
const VOLATILE: &[(&str, &str)] = &[("fsync", "off")];

/// Writes our configuration file; of two equal names, PostgreSQL takes the later one.
pub(super) fn conf(options: &PostgresOptions, port: u16, changed: &[(String, String)]) -> String {
    let port = ("port".to_owned(), port.to_string());
    let volatile = match options.durability {
        Durability::Durable => &[],
        Durability::Volatile => VOLATILE,
    };
    let fixed = BASE.iter().chain(volatile).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let settings = fixed.chain([port]).chain(options.settings.iter().cloned()).chain(changed.iter().cloned());
    settings.map(|(name, value)| format!("{name} = '{}'\n", value.replace('\'', "''"))).collect()
}

/// Writes `pg_hba.conf`: the lines of the caller first, then everybody from this machine.
pub(super) fn hba(auth: &Auth, lines: &[String]) -> String {
    let method = match auth {
        Auth::Trust => "trust",
        Auth::Scram(_) => "scram-sha-256",
    };
    let mut text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    for database in ["all", "replication"] {
        text.push_str(&format!("host {database} all 127.0.0.1/32 {method}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Pair;

    #[test]
    fn later_settings_win_and_values_are_quoted() {
        let pair = Pair { postgres: Path::new("/x").into(), nats: Path::new("/y").into() };
        let mut options = PostgresOptions::new(&pair);
        options.settings.push(("wal_level".into(), "replica".into()));
        let conf = conf(&options, 21000, &[("search_path".into(), "it's".into())]);
        assert!(conf.ends_with("port = '21000'\nwal_level = 'replica'\nsearch_path = 'it''s'\n"), "{conf}");
        assert!(conf.contains("fsync = 'off'"));
    }
}
