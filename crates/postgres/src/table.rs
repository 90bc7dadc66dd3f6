//! The outbox table as a source: the rows that no slot sends any more, up to where a new slot begins.
//!
//! ```text
//!  CREATE_REPLICATION_SLOT … (SNAPSHOT 'export')     all that is committed before the slot's first transaction
//!       └─► SET TRANSACTION SNAPSHOT ─► SELECT … ORDER BY sequence ─► one transaction just before the slot's position
//! ```
//!
//! The rows come as one transaction, in the order of their sequence: the order in which they were committed is not known any more,
//! and for one ordering key the sequence is that order where its transactions wait for each other. See `docs/decisions/0009`.

use std::pin::Pin;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::watch;
use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow, SimpleQueryStream};
use waljet_pgoutput::{
    Begin, Column, Commit, Insert, Lsn, Message, Oid, Relation, ReplicaIdentity, Timestamp, Tuple, Value, Xid,
};
use waljet_pipeline::{Action, Confirmed, Fault, Frame, Identity, Resume, Source, Visible};

use crate::connect::ConnectOptions;
use crate::control::{Control, optional, text};
use crate::dial::{HANDSHAKE_TIMEOUT, Stream, dial};
use crate::error::{self, CATCH_UP, PRIVILEGE, SLOT_BLOCKED, TABLE_MISSING};
use crate::publication::TableName;
use crate::replication;
use crate::slot::{self, Failover};
use crate::sql::{quote_ident, quote_literal};
use crate::wire::Wire;

/// What to read, and what to leave out.
#[derive(Clone, Debug)]
pub struct TableOptions {
    /// The database.
    pub connect: ConnectOptions,
    /// The slot to create.
    pub slot: String,
    /// Whether standbys copy it.
    pub failover: Failover,
    /// The outbox table.
    pub table: TableName,
    /// The column that grows with each insert.
    pub sequence: String,
    /// The column with the transaction, and what is stored; without it, all rows come.
    pub stored: Option<(String, Visible)>,
    /// How long older transactions are waited for.
    pub wait: Duration,
}

/// What a catch-up is about.
#[derive(Clone, Debug)]
pub struct CatchUp {
    /// Where the slot begins: everything before it comes from the table.
    pub at: Confirmed,
    /// What the table was read with.
    pub visible: Visible,
    /// How many rows are to be looked at.
    pub rows: u64,
}

/// A [`Source`] of the rows of a table.
pub struct TableSource {
    slot: String,
    identity: Identity,
    at: Lsn,
    /// Holds the snapshot until it is taken, and the transaction while it is read.
    _session: (Wire<Stream>, Control),
    relation: Option<Relation>,
    oid: Oid,
    columns: Vec<String>,
    rows: Pin<Box<SimpleQueryStream>>,
    state: State,
    done: watch::Sender<bool>,
}

impl std::fmt::Debug for TableSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TableSource").field("slot", &self.slot).field("at", &self.at).finish_non_exhaustive()
    }
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unconnected,
    Relation,
    Begin,
    Rows,
    Ended,
}

impl TableSource {
    /// Creates the slot, takes its snapshot and begins to read the table with it.
    ///
    /// # Errors
    ///
    /// The slot exists, a column is missing, the role may not read the table, or an older transaction did not end in time.
    pub async fn create(options: TableOptions) -> Result<(Self, CatchUp), Fault> {
        slot::validate_name(&options.slot)?;
        let control = Control::connect(&options.connect).await?;
        let table = Table::look(&control, &options).await?;
        let stream = dial(&options.connect, &control.endpoint).await?;
        let end_point = stream.server_end_point();
        let mut wire = Wire::start(stream, &options.connect, end_point, HANDSHAKE_TIMEOUT).await?;
        let system = replication::identify_system(&mut wire).await?;
        let switch_points = replication::switch_points(&mut wire, system.history.timeline).await?;
        let (at, snapshot) = create_slot(&mut wire, &control, &options).await?;
        let from = options.stored.as_ref().map_or(Lsn::ZERO, |(_, visible)| visible.after);
        let identity = Identity {
            history: system.history,
            wal_end: at,
            switch_points,
            slot_confirmed: from.min(at),
            handed_over: false,
        };
        let begun = begin_reading(&control, &options, &table, &snapshot).await;
        let (visible, rows, reading) = match begun {
            Ok(begun) => begun,
            Err(fault) => {
                // A slot that nobody reads would keep WAL for ever.
                drop(wire);
                slot::drop(&options.connect, &options.slot).await.ok();
                return Err(fault);
            }
        };
        let about = CatchUp {
            at: Confirmed { history: system.history, lsn: at },
            visible: Visible { snapshot: visible, after: at },
            rows,
        };
        let source = Self {
            slot: options.slot,
            identity,
            at,
            _session: (wire, control),
            oid: table.relation.oid,
            columns: table.names(),
            relation: Some(table.relation),
            rows: Box::pin(reading),
            state: State::Unconnected,
            done: watch::Sender::new(false),
        };
        Ok((source, about))
    }

    /// Turns true once everything is stored.
    #[must_use]
    pub fn done(&self) -> watch::Receiver<bool> {
        self.done.subscribe()
    }

    /// The LSN that the rows' transaction has: just before the slot's position, where no commit record can be.
    fn commit_lsn(&self) -> Lsn {
        Lsn(self.at.0 - 1)
    }

    fn frame(&self, message: &Message) -> Result<Frame, Fault> {
        let data = message.to_bytes().map_err(|cause| self.broken("a row cannot be passed on").cause(cause))?;
        Ok(Frame::Change { wal_end: self.at, data })
    }

    fn broken(&self, what: &str) -> Fault {
        Fault::new(CATCH_UP, Action::Gap, format!("the catch-up of slot {:?} broke off: {what}", self.slot))
            .hint("waljet run --catch-up begins it anew; what is stored by then is not sent again")
    }

    async fn row(&mut self) -> Result<Option<SimpleQueryRow>, Fault> {
        loop {
            match self.rows.next().await {
                None => return Ok(None),
                Some(Ok(SimpleQueryMessage::Row(row))) => return Ok(Some(row)),
                Some(Ok(_)) => {}
                Some(Err(cause)) => {
                    let fault = error::from_client("read the table", cause);
                    return Err(self.broken("the table could not be read on").cause(fault));
                }
            }
        }
    }
}

impl Source for TableSource {
    async fn connect(&mut self, _: Option<Resume>) -> Result<Identity, Fault> {
        if self.state != State::Unconnected {
            return Err(self.broken("its connection was lost"));
        }
        self.state = State::Relation;
        Ok(self.identity.clone())
    }

    async fn next(&mut self) -> Result<Frame, Fault> {
        let commit_lsn = self.commit_lsn();
        match self.state {
            State::Relation => {
                self.state = State::Begin;
                match self.relation.take() {
                    Some(relation) => self.frame(&Message::Relation(relation)),
                    None => Err(self.broken("it was begun twice")),
                }
            }
            State::Begin => {
                self.state = State::Rows;
                let commit_time = now();
                self.frame(&Message::Begin(Begin { final_lsn: commit_lsn, commit_time, xid: Xid(0) }))
            }
            State::Rows => match self.row().await? {
                Some(row) => {
                    let value = |column: &String| match row.try_get(column.as_str()).ok().flatten() {
                        Some(text) => Value::Text(Bytes::copy_from_slice(text.as_bytes())),
                        None => Value::Null,
                    };
                    let new = Tuple(self.columns.iter().map(value).collect());
                    self.frame(&Message::Insert(Insert { xid: None, relation: self.oid, new }))
                }
                None => {
                    self.state = State::Ended;
                    let commit = Commit { flags: 0, commit_lsn, end_lsn: self.at, commit_time: now() };
                    self.frame(&Message::Commit(commit))
                }
            },
            State::Unconnected => Err(self.broken("it is not connected")),
            State::Ended => std::future::pending().await,
        }
    }

    fn report(&mut self, flushed: Lsn) {
        if flushed >= self.at {
            self.done.send_replace(true);
        }
    }

    async fn close(&mut self, _: Option<Confirmed>) -> Result<(), Fault> {
        Ok(())
    }
}

/// The table as the catalogue has it.
struct Table {
    relation: Relation,
}

impl Table {
    async fn look(control: &Control, options: &TableOptions) -> Result<Self, Fault> {
        let name = quote_literal(&options.table.quoted());
        let sql = format!(
            "SELECT a.attrelid, a.attname, a.atttypid, a.atttypmod FROM pg_attribute a WHERE a.attrelid = to_regclass({name}) \
             AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum"
        );
        let rows = control.rows("read the table's columns", &sql).await?;
        let Some(first) = rows.first() else {
            return Err(Fault::new(TABLE_MISSING, Action::Halt, format!("there is no table {}", options.table)));
        };
        let columns: Vec<Column> = rows
            .iter()
            .map(|row| Column {
                key: false,
                name: Bytes::copy_from_slice(text(row, "attname").as_bytes()),
                type_oid: Oid(text(row, "atttypid").parse().unwrap_or(0)),
                type_modifier: text(row, "atttypmod").parse().unwrap_or(-1),
            })
            .collect();
        let needed = options.stored.iter().map(|(xid, _)| xid).chain([&options.sequence]);
        for column in needed {
            if !columns.iter().any(|found| found.name == column.as_bytes()) {
                let what = format!("table {} has no column {column:?}, which a catch-up reads", options.table);
                return Err(Fault::new(error::COLUMN_MISSING, Action::Halt, what).hint(
                    "set outbox.columns.sequence to a column that grows with each insert, and outbox.columns.xid to one of \
                     type xid8 with the transaction, or to \"\" where there is none",
                ));
            }
        }
        let relation = Relation {
            xid: None,
            oid: Oid(text(first, "attrelid").parse().unwrap_or(0)),
            schema: Bytes::copy_from_slice(options.table.schema.as_bytes()),
            name: Bytes::copy_from_slice(options.table.name.as_bytes()),
            replica_identity: ReplicaIdentity::Default,
            columns,
        };
        Ok(Self { relation })
    }

    fn names(&self) -> Vec<String> {
        let name = |column: &Column| String::from_utf8_lossy(&column.name).into_owned();
        self.relation.columns.iter().map(name).collect()
    }
}

/// Creates the slot and returns where it begins, and the name of its snapshot.
async fn create_slot(
    wire: &mut Wire<Stream>,
    control: &Control,
    options: &TableOptions,
) -> Result<(Lsn, String), Fault> {
    let context = format!("create slot {:?}", options.slot);
    let limit = options.wait.as_millis().max(1);
    // Older transactions are waited for like locks.
    wire.query(&context, &format!("SET lock_timeout = {limit}")).await?;
    let sql = slot::export_command(&options.slot, options.failover, control.version);
    let rows = wire.query_within(&context, &sql, options.wait + Duration::from_secs(5)).await.map_err(|fault| {
        let blocked = fault.summary().contains("55P03");
        if !blocked {
            return fault;
        }
        let what = format!("could not {context} within {limit} ms: an older transaction is open");
        Fault::new(SLOT_BLOCKED, Action::Retry, what).cause(fault).hint(
            "SELECT pid, xact_start, query FROM pg_stat_activity WHERE xact_start IS NOT NULL ORDER BY xact_start;",
        )
    })?;
    let parse = || {
        let row = rows.first()?;
        Some((row.get(1)?.as_deref()?.parse().ok()?, row.get(2)?.as_deref()?.to_owned()))
    };
    parse().ok_or_else(|| error::protocol("its answer to CREATE_REPLICATION_SLOT cannot be read"))
}

/// Takes the snapshot and begins to read. Returns the snapshot's text and the number of rows, too.
async fn begin_reading(
    control: &Control,
    options: &TableOptions,
    table: &Table,
    snapshot: &str,
) -> Result<(String, u64, SimpleQueryStream), Fault> {
    let denied = |fault: Fault| {
        if fault.code != PRIVILEGE {
            return fault;
        }
        let role = quote_ident(options.connect.config().get_user().unwrap_or("the_role"));
        fault.hint(format!("GRANT SELECT ON {} TO {role};", options.table.quoted()))
    };
    control.rows("read for as long as it takes", "SET statement_timeout = 0").await?;
    let begin = format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {}",
        quote_literal(snapshot)
    );
    control.rows("take the slot's snapshot", &begin).await?;
    let row = control.row("read the snapshot", "SELECT pg_current_snapshot() AS snapshot").await?;
    let visible = optional(&row, "snapshot").unwrap_or_default();
    let only = options.stored.as_ref().map_or_else(String::new, |(xid, stored)| {
        let snapshot = quote_literal(&stored.snapshot);
        format!(" WHERE NOT pg_visible_in_snapshot({}, {snapshot}::pg_snapshot)", quote_ident(xid))
    });
    let from = format!("FROM {}{only}", options.table.quoted());
    // Counted first, so that progress means something; the limit is the time that reading it all may take.
    let count = format!("SELECT count(*) AS rows {from}");
    let row = control.rows_within("count the rows", &count, COUNT_TIMEOUT).await.map_err(denied)?;
    let rows = row.first().and_then(|row| text(row, "rows").parse().ok()).unwrap_or(0);
    let columns: Vec<String> = table.names().iter().map(|name| quote_ident(name)).collect();
    let sql = format!("SELECT {} {from} ORDER BY {}", columns.join(", "), quote_ident(&options.sequence));
    Ok((visible, rows, control.stream("read the table", &sql).await.map_err(denied)?))
}

/// How long counting may take.
const COUNT_TIMEOUT: Duration = Duration::from_secs(3600);

/// When the rows' transaction says that it was committed: the time of each is not known.
fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_micros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}
