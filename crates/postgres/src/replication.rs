//! The commands of a replication session (PostgreSQL manual, section 55.4).

use tokio::io::{AsyncRead, AsyncWrite};
use waljet_pgoutput::Lsn;
use waljet_pipeline::{Fault, History};

use crate::error;
use crate::sql::{quote_ident, quote_literal};
use crate::wire::Wire;

/// What `IDENTIFY_SYSTEM` said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct System {
    /// The cluster and its timeline.
    pub(crate) history: History,
    /// Up to where WAL is flushed.
    pub(crate) wal_end: Lsn,
}

/// Asks who the server is.
pub(crate) async fn identify_system<S: AsyncRead + AsyncWrite + Unpin>(wire: &mut Wire<S>) -> Result<System, Fault> {
    let rows = wire.query("identify the system", "IDENTIFY_SYSTEM").await?;
    let parse = || {
        let mut values = rows.first()?.iter();
        let mut text = || values.next()?.as_deref();
        let history = History { system_id: text()?.parse().ok()?, timeline: text()?.parse().ok()? };
        Some(System { history, wal_end: text()?.parse().ok()? })
    };
    parse().ok_or_else(|| error::protocol("its answer to IDENTIFY_SYSTEM cannot be read"))
}

/// Asks where earlier timelines ended.
pub(crate) async fn switch_points<S: AsyncRead + AsyncWrite + Unpin>(
    wire: &mut Wire<S>,
    timeline: u32,
) -> Result<Vec<(u32, Lsn)>, Fault> {
    // The first timeline has no history file.
    if timeline <= 1 {
        return Ok(Vec::new());
    }
    let rows = wire.query("read the timeline's history", &format!("TIMELINE_HISTORY {timeline}")).await?;
    let content = rows.first().and_then(|row| row.get(1)).and_then(Option::as_deref).unwrap_or_default();
    Ok(parse_history(content))
}

/// Reads a history file: lines of timeline, switch point and reason; `#` starts a comment.
fn parse_history(content: &str) -> Vec<(u32, Lsn)> {
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    content.lines().filter(|line| !line.trim_start().starts_with('#')).filter_map(parse).collect()
}

/// Starts the stream at `from`; the server raises it to the slot's own position.
pub(crate) async fn start<S: AsyncRead + AsyncWrite + Unpin>(
    wire: &mut Wire<S>,
    slot: &str,
    publication: &str,
    messages: bool,
    from: Lsn,
) -> Result<(), Fault> {
    let context = format!("start replication from slot {slot:?}");
    wire.copy_both(&context, &start_command(slot, publication, messages, from)).await
}

fn start_command(slot: &str, publication: &str, messages: bool, from: Lsn) -> String {
    // The list of names is parsed like identifiers, so the name is quoted once for that and once as a literal.
    let names = quote_literal(&quote_ident(publication));
    let mut sql = format!(
        "START_REPLICATION SLOT {} LOGICAL {from} (proto_version '1', publication_names {names}",
        quote_ident(slot)
    );
    if messages {
        sql.push_str(", messages 'true'");
    }
    sql.push(')');
    sql
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_twice_where_they_are_parsed_twice() {
        assert_eq!(
            start_command("w", "My \"Pub\",it's", false, Lsn(0x1_0000_0002)),
            "START_REPLICATION SLOT \"w\" LOGICAL 1/2 (proto_version '1', publication_names '\"My \"\"Pub\"\",it''s\"')"
        );
        assert!(start_command("w", "p", true, Lsn::ZERO).ends_with(", messages 'true')"));
    }

    #[test]
    fn a_history_file_gives_where_each_timeline_ended() {
        let content = "1\t0/3000098\tno recovery target specified\n\n# a comment\n2\t0/5000000\tbefore 2026\n";
        assert_eq!(parse_history(content), [(1, Lsn(0x300_0098)), (2, Lsn(0x500_0000))]);
        assert_eq!(parse_history(""), []);
    }
}
