//! Creates what is missing, in the order that keeps rows from being skipped: table, publication, slot.

use std::time::Duration;

use waljet_pipeline::Fault;

use crate::checkpoint::CHECKPOINT_TABLE;
use crate::connect::ConnectOptions;
use crate::control::{Control, flag};
use crate::publication::{self, TableName};
use crate::slot::{self, DEFAULT_CREATE_WAIT, Failover};
use crate::sql::{quote_ident, quote_literal};

const OUTBOX: &str = include_str!("../../../migrations/0001_outbox.up.sql");
const OUTBOX_PARTITIONED: &str = include_str!("../../../migrations/0002_outbox_partitioned.up.sql");

const CHECKPOINT: &str = include_str!("../../../migrations/0003_checkpoint.up.sql");

/// The name that the migrations use; further relations of theirs begin with it.
const MIGRATION_TABLE: &str = "public.outbox";

/// What to create, and where.
#[derive(Clone, Debug)]
pub struct ProvisionOptions {
    /// The database, as a role that may create these.
    pub connect: ConnectOptions,
    /// The outbox table.
    pub table: TableName,
    /// Which form it has, if it is created.
    pub form: TableForm,
    /// The publication's name.
    pub publication: String,
    /// The slot's name.
    pub slot: String,
    /// Whether standbys copy the slot.
    pub failover: Failover,
    /// How long the slot may wait for transactions that are older than it.
    pub create_wait: Duration,
    /// Whether the checkpoint is kept in a table.
    pub checkpoint: bool,
    /// Whether the slot is created, too; a backfill creates it by itself.
    pub create_slot: bool,
}

/// The form of a table that is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableForm {
    /// One table.
    #[default]
    Plain,
    /// Partitioned by `created_at`.
    Partitioned,
}

impl ProvisionOptions {
    /// Makes options with the defaults.
    #[must_use]
    pub fn new(
        connect: ConnectOptions,
        table: TableName,
        publication: impl Into<String>,
        slot: impl Into<String>,
    ) -> Self {
        Self {
            connect,
            table,
            form: TableForm::Plain,
            publication: publication.into(),
            slot: slot.into(),
            failover: Failover::Off,
            create_wait: DEFAULT_CREATE_WAIT,
            checkpoint: true,
            create_slot: true,
        }
    }
}

/// One step as SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    kind: Kind,
    /// What it creates: `table public.outbox`.
    pub what: String,
    /// One or more statements, each ending with a semicolon.
    pub sql: String,
}

/// What a step is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Schema,
    Table,
    Checkpoint,
    Publication,
    Slot,
}

/// One step that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// What it was about.
    pub what: String,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was missing and was created.
    Created,
    /// It was there and was left as it is.
    Existed,
}

/// Returns all steps as SQL, for reading or for another tool; [`init`] takes those that are needed.
#[must_use]
pub fn plan(options: &ProvisionOptions) -> Vec<Statement> {
    let schema = &options.table.schema;
    let statement = |kind, what: String, sql: String| Statement { kind, what, sql };
    let mut plan = vec![
        statement(
            Kind::Schema,
            format!("schema {schema}"),
            format!("CREATE SCHEMA IF NOT EXISTS {};", quote_ident(schema)),
        ),
        statement(Kind::Table, format!("table {}", options.table), table_sql(&options.table, options.form)),
        statement(
            Kind::Publication,
            format!("publication {}", options.publication),
            format!("{};", publication::create_statement(&options.publication, &options.table)),
        ),
        statement(
            Kind::Slot,
            format!("slot {}", options.slot),
            format!("{};", slot::create_statement(&options.slot, options.failover)),
        ),
    ];
    if !options.create_slot {
        plan.pop();
    }
    if options.checkpoint {
        plan.insert(2, statement(Kind::Checkpoint, format!("table {CHECKPOINT_TABLE}"), CHECKPOINT.to_owned()));
    }
    plan
}

/// Creates what is missing. What is there is left as it is, and verified.
///
/// # Errors
///
/// A step failed, or something that is there cannot be used: the hint holds what mends it.
pub async fn init(options: &ProvisionOptions) -> Result<Vec<Done>, Fault> {
    slot::validate_name(&options.slot)?;
    let control = Control::connect(&options.connect).await?;
    let mut done = Vec::new();
    for step in plan(options) {
        let outcome = match step.kind {
            Kind::Schema => create_schema(&control, options, &step).await?,
            Kind::Table => create_table(&control, options, &step).await?,
            Kind::Checkpoint => create_checkpoint(&control, &step).await?,
            Kind::Publication => create_publication(&control, options, &step).await?,
            Kind::Slot => create_slot(&control, options).await?,
        };
        done.push(Done { what: step.what, outcome });
    }
    Ok(done)
}

async fn create_schema(control: &Control, options: &ProvisionOptions, step: &Statement) -> Result<Outcome, Fault> {
    // Asked first, since IF NOT EXISTS needs the privilege even if there is nothing to create.
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = {}) AS present",
        quote_literal(&options.table.schema)
    );
    if flag(&control.row(&format!("look for {}", step.what), &sql).await?, "present") {
        return Ok(Outcome::Existed);
    }
    control.rows(&format!("create {}", step.what), &step.sql).await?;
    Ok(Outcome::Created)
}

async fn create_table(control: &Control, options: &ProvisionOptions, step: &Statement) -> Result<Outcome, Fault> {
    let state = publication::inspect(control, &options.publication, &options.table).await?;
    if state.kind.is_some() {
        return state.table_fault(&options.table).map_or(Ok(Outcome::Existed), Err);
    }
    // Statements that are sent together are one transaction.
    control.rows(&format!("create {}", step.what), &step.sql).await?;
    Ok(Outcome::Created)
}

async fn create_checkpoint(control: &Control, step: &Statement) -> Result<Outcome, Fault> {
    let sql = format!("SELECT to_regclass('{CHECKPOINT_TABLE}') IS NOT NULL AS present");
    if flag(&control.row(&format!("look for {}", step.what), &sql).await?, "present") {
        return Ok(Outcome::Existed);
    }
    let created = control.rows(&format!("create {}", step.what), &step.sql).await;
    created.map_err(|fault| {
        fault.hint(
            "let the owner of the database run what waljet init --print prints, or set checkpoint.store = \"nats\"",
        )
    })?;
    Ok(Outcome::Created)
}

async fn create_publication(control: &Control, options: &ProvisionOptions, step: &Statement) -> Result<Outcome, Fault> {
    let state = publication::inspect(control, &options.publication, &options.table).await?;
    if state.exists {
        return state.fault(&options.publication, &options.table).map_or(Ok(Outcome::Existed), Err);
    }
    control.rows(&format!("create {}", step.what), &step.sql).await?;
    Ok(Outcome::Created)
}

async fn create_slot(control: &Control, options: &ProvisionOptions) -> Result<Outcome, Fault> {
    if let Some(state) = slot::read(control, &options.slot).await? {
        return state.unusable(options.connect.dbname()).map_or(Ok(Outcome::Existed), Err);
    }
    slot::create_with(control, &options.connect, &options.slot, options.failover, options.create_wait).await?;
    Ok(Outcome::Created)
}

fn table_sql(table: &TableName, form: TableForm) -> String {
    let migration = match form {
        TableForm::Plain => OUTBOX,
        TableForm::Partitioned => OUTBOX_PARTITIONED,
    };
    substitute(migration, table)
}

/// Puts another table's name in the place of each relation of a migration, inside quoted names of literals, too.
fn substitute(migration: &str, table: &TableName) -> String {
    let mut sql = String::with_capacity(migration.len());
    let mut rest = migration;
    while let Some((before, after)) = rest.split_once(MIGRATION_TABLE) {
        let end = after.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(after.len());
        let (suffix, tail) = after.split_at(end);
        let name = TableName::new(table.schema.clone(), format!("{}{suffix}", table.name)).quoted();
        sql.push_str(before);
        // Within a literal, as in nextval('…'), single quotes are doubled.
        if before.ends_with('\'') {
            sql.push_str(&name.replace('\'', "''"));
        } else {
            sql.push_str(&name);
        }
        rest = tail;
    }
    sql.push_str(rest);
    sql
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed parse fails the test")]
mod tests {
    use super::*;

    #[test]
    fn another_name_takes_the_place_of_every_relation() {
        let table = TableName::new("My \"App", "it's");
        let sql = substitute("A public.outbox.seq, public.outbox_default; nextval('public.outbox_seq') x", &table);
        assert_eq!(
            sql,
            "A \"My \"\"App\".\"it's\".seq, \"My \"\"App\".\"it's_default\"; nextval('\"My \"\"App\".\"it''s_seq\"') x"
        );
        for form in [TableForm::Plain, TableForm::Partitioned] {
            assert!(!table_sql(&table, form).contains(MIGRATION_TABLE));
        }
    }

    #[test]
    fn the_plan_creates_the_publication_before_the_slot() {
        let connect = ConnectOptions::parse("host=h user=u").unwrap();
        let options = ProvisionOptions::new(connect, TableName::new("public", "outbox"), "p", "s");
        let what: Vec<_> = plan(&options).into_iter().map(|step| step.what).collect();
        assert_eq!(
            what,
            ["schema public", "table public.outbox", "table waljet.checkpoint", "publication p", "slot s"]
        );
    }
}
