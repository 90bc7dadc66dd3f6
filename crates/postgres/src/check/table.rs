//! The outbox table and its columns.

use waljet_pipeline::{Action, Check, Fault};

use crate::control::{Control, text};
use crate::error::{COLUMN_MISSING, COLUMN_UNPUBLISHED};
use crate::publication;
use crate::source::SourceOptions;
use crate::sql::quote_literal;

/// The first version whose publications can send generated columns.
const GENERATED_SENT: u32 = 180_000;

pub(super) async fn check(control: &Control, options: &SourceOptions) -> Result<Vec<Check>, Fault> {
    let table = &options.table;
    let name = format!("table {table}");
    let state = publication::inspect(control, &options.publication, table).await?;
    if let Some(fault) = state.table_fault(table) {
        return Ok(vec![Check::fault(name, fault)]);
    }
    let kind = if state.kind == Some('p') { "partitioned table" } else { "table" };
    let mut checks = vec![Check::good(name, kind)];
    checks.extend(columns(control, options).await?);
    Ok(checks)
}

async fn columns(control: &Control, options: &SourceOptions) -> Result<Vec<Check>, Fault> {
    const NAME: &str = "columns";
    let (table, wanted) = (&options.table, &options.columns);
    let sql = format!(
        "SELECT a.attname AS name, a.attgenerated AS generated, a.atttypid::regtype::text AS type \
         FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = {} AND c.relname = {} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
        quote_literal(&table.schema),
        quote_literal(&table.name)
    );
    let rows = control.rows(&format!("read the columns of {table}"), &sql).await?;
    let find = |column: &String| rows.iter().find(|row| text(row, "name") == column);
    let missing: Vec<&str> = wanted.iter().filter(|column| find(column).is_none()).map(String::as_str).collect();
    if !missing.is_empty() {
        let there: Vec<&str> = rows.iter().map(|row| text(row, "name")).collect();
        let message = format!("table {table} lacks {}; it has {}", missing.join(", "), there.join(", "));
        let fault = Fault::new(COLUMN_MISSING, Action::Halt, message);
        return Ok(vec![Check::fault(NAME, fault.hint("mend [outbox.columns], or choose another outbox.preset"))]);
    }
    let mapped = || wanted.iter().filter_map(find);
    if let Some(row) = mapped().find(|row| !text(row, "generated").is_empty()) {
        return Ok(vec![generated(control, options, text(row, "name"))]);
    }
    if let Some(row) = mapped().find(|row| matches!(text(row, "type"), "oid" | "lo")) {
        let message = format!("column {:?} is a large object's number, and only the number is sent", text(row, "name"));
        let fault = Fault::new(COLUMN_UNPUBLISHED, Action::Halt, message);
        return Ok(vec![Check::fault(NAME, fault.hint("keep the content in a bytea or jsonb column"))]);
    }
    let mut checks = vec![Check::good(NAME, format!("{} mapped, all there", wanted.len()))];
    // The first one is that of the id.
    if let Some(row) = wanted.first().and_then(find).filter(|row| is_number(text(row, "type"))) {
        let message = format!(
            "ids are numbers (column {:?} is {}), unique within this table only: a stream takes an event of another \
             table with the same number for a copy",
            text(row, "name"),
            text(row, "type")
        );
        checks.push(Check::warning("id", message, "give each table a stream of its own, or use uuid for its ids"));
    }
    Ok(checks)
}

fn is_number(column_type: &str) -> bool {
    matches!(column_type, "smallint" | "integer" | "bigint")
}

fn generated(control: &Control, options: &SourceOptions, column: &str) -> Check {
    let message = format!("column {column:?} of {} is generated, and generated columns are not sent", options.table);
    let hint = if control.version >= GENERATED_SENT {
        let publication = crate::sql::quote_ident(&options.publication);
        format!(
            "ALTER PUBLICATION {publication} SET (publish_generated_columns = stored); then map another column until the slot is past it"
        )
    } else {
        "map an ordinary column".to_owned()
    };
    Check::fault("columns", Fault::new(COLUMN_UNPUBLISHED, Action::Halt, message).hint(hint))
}
