//! From `pgoutput` messages to steps: what is to be published, and what may be confirmed once it is.

use std::collections::HashMap;

use bytes::Bytes;
use waljet_pgoutput::{
    Commit, DecodeError, Decoder, Insert, Lsn, Message, Oid, ProtocolVersion, Relation, Streaming, Timestamp, Tuple,
};

use crate::error;
use crate::outbox::Mapping;
use crate::{
    Action, EventError, Fault, HeaderOptions, History, OrderingKey, OutboundMessage, OutboxEvent, OutboxOptions,
    Position, Route, headers,
};

/// What one message of the source comes to.
#[derive(Debug)]
pub enum Step {
    /// Nothing to do.
    Nothing,
    /// A change that is not an event: an update, delete or truncate of the outbox table.
    Ignored(Operation),
    /// An event that an earlier connection has given out already.
    Seen,
    /// An event to publish.
    Event(Box<OutboundMessage>),
    /// An event that cannot be published.
    Refused(RefusedEvent),
    /// A transaction is complete: once all before it is stored, this position may be confirmed.
    Commit(Lsn),
}

/// An event that can never be published as it is.
#[derive(Debug)]
pub struct RefusedEvent {
    /// Where it stands.
    pub position: Position,
    /// Why.
    pub fault: Fault,
}

/// A change of the outbox table that is not an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A row was changed.
    Update,
    /// A row was removed.
    Delete,
    /// The table was emptied.
    Truncate,
}

impl Operation {
    /// The value of the metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Update => "update",
            Self::Delete => "delete",
            Self::Truncate => "truncate",
        }
    }
}

/// Follows the transactions of one connection after the other.
///
/// Nothing is buffered for a transaction: what comes is committed (`streaming` off), and the `Begin` tells
/// the commit LSN.
#[derive(Debug)]
pub struct Assembler {
    outbox: OutboxOptions,
    route: Route,
    headers: HeaderOptions,
    history: History,
    decoder: Decoder,
    relations: HashMap<Oid, Option<Result<Mapping, EventError>>>,
    /// The outbox table, once a row of it came.
    outbox_oid: Option<Oid>,
    open: Option<Transaction>,
    /// The last change that was given out, over all connections: what comes again at or before it is skipped.
    given_out: Option<(Lsn, u64)>,
    /// The commit LSN of the connection's last transaction.
    last_commit_lsn: Lsn,
}

#[derive(Debug)]
struct Transaction {
    commit_lsn: Lsn,
    commit_time: Timestamp,
    ordinal: u64,
}

impl Assembler {
    /// Starts without a connection.
    #[must_use]
    pub fn new(outbox: OutboxOptions, route: Route, headers: HeaderOptions) -> Self {
        Self {
            outbox,
            route,
            headers,
            history: History { system_id: 0, timeline: 0 },
            decoder: Decoder::new(ProtocolVersion::V1, Streaming::Off),
            relations: HashMap::new(),
            outbox_oid: None,
            open: None,
            given_out: None,
            last_commit_lsn: Lsn::ZERO,
        }
    }

    /// Forgets what belonged to the connection before: relations and a transaction that broke off.
    pub fn connected(&mut self, history: History) {
        self.history = history;
        self.decoder = Decoder::new(ProtocolVersion::V1, Streaming::Off);
        self.relations.clear();
        self.open = None;
        self.last_commit_lsn = Lsn::ZERO;
    }

    /// Forgets what was given out: another reader had the slot, and what it left comes as to a new process.
    pub fn forget(&mut self) {
        self.given_out = None;
    }

    /// Returns whether a transaction has begun and not ended: then no keepalive position may be confirmed.
    #[must_use]
    pub fn in_transaction(&self) -> bool {
        self.open.is_some()
    }

    /// Takes one message.
    ///
    /// # Errors
    ///
    /// The message cannot be decoded or breaks the protocol; nothing after it may be confirmed.
    pub fn step(&mut self, data: Bytes) -> Result<Step, Fault> {
        let frame = data.len();
        let message = self.decoder.decode(data).map_err(undecodable)?;
        match message {
            Message::Insert(insert) => self.insert(&insert, frame),
            Message::Begin(begin) => self.begin(begin.final_lsn, begin.commit_time),
            Message::Commit(commit) => self.commit(&commit),
            Message::Relation(relation) => self.relation(&relation),
            Message::Update(update) => self.ignore(&[update.relation], Operation::Update),
            Message::Delete(delete) => self.ignore(&[delete.relation], Operation::Delete),
            Message::Truncate(truncate) => self.ignore(&truncate.relations, Operation::Truncate),
            // A transactional message is a change like any other and counts; one outside belongs to no
            // transaction.
            Message::Message(message) if message.transactional => {
                self.next_ordinal("a transactional message")?;
                Ok(Step::Nothing)
            }
            Message::Message(_) | Message::Origin(_) | Message::Type(_) => Ok(Step::Nothing),
            Message::StreamStart(_)
            | Message::StreamStop
            | Message::StreamCommit(_)
            | Message::StreamAbort(_)
            | Message::StreamPrepare(_)
            | Message::BeginPrepare(_)
            | Message::Prepare(_)
            | Message::CommitPrepared(_)
            | Message::RollbackPrepared(_) => Err(broken(
                "a message of a transaction that is not committed, although streaming and two_phase are off",
            )),
        }
    }

    fn relation(&mut self, relation: &Relation) -> Result<Step, Fault> {
        let mapping = Mapping::is_outbox(&self.outbox, relation).then(|| Mapping::new(&self.outbox, relation));
        if mapping.is_some() {
            self.outbox_oid = Some(relation.oid);
        } else if self.outbox_oid == Some(relation.oid) {
            return Err(renamed(&self.outbox, relation));
        }
        self.relations.insert(relation.oid, mapping);
        Ok(Step::Nothing)
    }

    fn begin(&mut self, commit_lsn: Lsn, commit_time: Timestamp) -> Result<Step, Fault> {
        if self.open.is_some() {
            return Err(broken("a Begin inside a transaction"));
        }
        if commit_lsn <= self.last_commit_lsn {
            let last = self.last_commit_lsn;
            return Err(broken(&format!("a transaction of commit LSN {commit_lsn} after one of {last}")));
        }
        self.open = Some(Transaction { commit_lsn, commit_time, ordinal: 0 });
        Ok(Step::Nothing)
    }

    fn commit(&mut self, commit: &Commit) -> Result<Step, Fault> {
        let Some(open) = self.open.take() else { return Err(broken("a Commit without a Begin")) };
        if commit.commit_lsn != open.commit_lsn {
            let (begin, end) = (open.commit_lsn, commit.commit_lsn);
            return Err(broken(&format!("a Commit of commit LSN {end} for a Begin of {begin}")));
        }
        self.last_commit_lsn = open.commit_lsn;
        Ok(Step::Commit(commit.end_lsn))
    }

    fn ignore(&mut self, relations: &[Oid], operation: Operation) -> Result<Step, Fault> {
        self.next_ordinal("a change")?;
        let is_outbox = |oid| matches!(self.relations.get(oid), Some(Some(_)));
        Ok(if relations.iter().any(is_outbox) { Step::Ignored(operation) } else { Step::Nothing })
    }

    fn insert(&mut self, insert: &Insert, frame: usize) -> Result<Step, Fault> {
        let (position, commit_time) = self.next_ordinal("an Insert")?;
        let mapping = match self.relations.get(&insert.relation) {
            None => return Err(broken(&format!("an Insert into relation {} before its Relation", insert.relation))),
            Some(None) => return Ok(Step::Nothing),
            Some(Some(mapping)) => mapping,
        };
        let place = (position.commit_lsn, position.ordinal);
        if self.given_out.is_some_and(|last| place <= last) {
            return Ok(Step::Seen);
        }
        self.given_out = Some(place);
        let message = match mapping {
            Ok(mapping) => self.message(mapping, &insert.new, position, commit_time).map(|mut message| {
                message.payload = unpinned(message.payload, frame);
                message
            }),
            Err(error) => Err(error.clone()),
        };
        Ok(match message {
            Ok(message) => Step::Event(Box::new(message)),
            Err(error) => Step::Refused(RefusedEvent { position, fault: refused(&self.outbox, position, error) }),
        })
    }

    fn next_ordinal(&mut self, what: &str) -> Result<(Position, Timestamp), Fault> {
        let Some(open) = &mut self.open else { return Err(broken(&format!("{what} outside a transaction"))) };
        let position = Position { history: self.history, commit_lsn: open.commit_lsn, ordinal: open.ordinal };
        open.ordinal += 1;
        Ok((position, open.commit_time))
    }

    fn message(
        &self,
        mapping: &Mapping,
        row: &Tuple,
        position: Position,
        commit_time: Timestamp,
    ) -> Result<OutboundMessage, EventError> {
        let event = mapping.event(row)?;
        let subject = self.route.subject(&event)?;
        let headers = self.headers(&event, position, commit_time);
        let mut row_headers = event.row_headers;
        // What a column says counts more than what the row's headers say under the same name.
        row_headers.retain(|(name, _)| !headers.iter().any(|(own, _)| own.eq_ignore_ascii_case(name)));
        Ok(OutboundMessage {
            position,
            commit_time,
            subject,
            headers,
            key: OrderingKey::of(&event.aggregate_type, &event.aggregate_id),
            id: event.id,
            row_headers,
            payload: event.payload.unwrap_or_default(),
        })
    }

    fn headers(&self, event: &OutboxEvent, position: Position, time: Timestamp) -> Vec<(&'static str, String)> {
        let options = &self.headers;
        let mut all = Vec::with_capacity(6);
        all.push((headers::MSG_ID, event.id.clone()));
        all.push((headers::POSITION, position.to_string()));
        all.extend(headers::commit_time(time).map(|time| (headers::COMMIT_TIME, time)));
        all.push((headers::AGGREGATE_ID, event.aggregate_id.clone()));
        if options.aggregate_type {
            all.push((headers::AGGREGATE_TYPE, event.aggregate_type.clone()));
        }
        if options.event_type {
            all.push((headers::EVENT_TYPE, event.event_type.clone()));
        }
        if options.schema_version {
            all.extend(event.schema_version.clone().map(|version| (headers::SCHEMA_VERSION, version)));
        }
        if options.tenant_id {
            all.extend(event.tenant_id.clone().map(|tenant| (headers::TENANT_ID, tenant)));
        }
        all.extend(options.content_type.clone().map(|content_type| (headers::CONTENT_TYPE, content_type)));
        if event.payload.is_none() {
            all.push((headers::PAYLOAD, "null".to_owned()));
        }
        all
    }
}

/// Payloads below this are copied out of the buffer that the socket was read into.
const SMALL: usize = 16 * 1024;

/// A slice keeps its whole buffer alive: the other columns of its row, and the rows beside it, which nobody accounts
/// for. A payload that is small, or the lesser part of its row, is copied, so that the window's bytes are what it holds.
fn unpinned(payload: Bytes, frame: usize) -> Bytes {
    if payload.len() < SMALL.max(frame / 2) { Bytes::copy_from_slice(&payload) } else { payload }
}

fn undecodable(error: DecodeError) -> Fault {
    Fault::new(error::UNDECODABLE, Action::Retry, "a message of the replication stream could not be decoded")
        .hint("report it with the PostgreSQL version; until then nothing past it is confirmed")
        .cause(error)
}

fn broken(what: &str) -> Fault {
    Fault::new(error::PROTOCOL, Action::Retry, format!("the replication stream held {what}"))
        .hint("report it with the PostgreSQL version; until then nothing past it is confirmed")
}

fn renamed(outbox: &OutboxOptions, relation: &Relation) -> Fault {
    let OutboxOptions { schema, table, .. } = outbox;
    let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (now_schema, now_table) = (name(relation.schema_name()), name(&relation.name));
    let message = format!("table {schema}.{table} was renamed: its rows now come as {now_schema}.{now_table}");
    let hint = format!(
        "to go on with it, set outbox.table = \"{now_schema}.{now_table}\" and start the relay again; it takes up these rows"
    );
    Fault::new(error::OUTBOX_RENAMED, Action::Retry, message).hint(hint)
}

fn refused(outbox: &OutboxOptions, position: Position, error: EventError) -> Fault {
    let OutboxOptions { schema, table, .. } = outbox;
    let hint = match &error {
        EventError::NoColumn { .. } => "name the table's columns in [outbox.columns], or rename the column back",
        _ => "mend what writes the row; see docs/errors.md#event-refused for ways past it",
    };
    let message = format!("the event at {position} in table {schema}.{table} can never be published");
    Fault::new(error::EVENT_REFUSED, Action::Refuse, message).hint(hint).cause(error)
}
