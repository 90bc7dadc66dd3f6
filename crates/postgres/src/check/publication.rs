//! The publication and what it leaves out.

use waljet_pipeline::{Check, Fault};

use crate::control::Control;
use crate::publication;
use crate::source::SourceOptions;
use crate::sql::quote_ident;

pub(super) async fn check(control: &Control, options: &SourceOptions) -> Result<Vec<Check>, Fault> {
    let (publication, table) = (&options.publication, &options.table);
    let name = format!("publication {publication:?}");
    let state = publication::inspect(control, publication, table).await?;
    let fault = state.fault(publication, table).or_else(|| state.columns_fault(publication, table, &options.columns));
    if let Some(fault) = fault {
        // A table that is missing was told of before.
        let told = state.exists && state.table_fault(table).is_some();
        return Ok(if told { Vec::new() } else { vec![Check::fault(name, fault)] });
    }
    let mut checks = vec![Check::good(name.clone(), format!("sends inserts into {table}"))];
    if let Some(filter) = &state.filters {
        checks.push(Check::warning(
            name.clone(),
            format!("has a row filter, and rows that do not match are never sent: {filter}"),
            format!("ALTER PUBLICATION {} SET TABLE {};", quote_ident(publication), table.quoted()),
        ));
    }
    if !state.also.is_empty() {
        checks.push(Check::warning(
            name,
            format!("also publishes {}, which the relay ignores; without a primary key, updates and deletes of the application fail", state.also),
            format!("ALTER PUBLICATION {} SET (publish = 'insert');", quote_ident(publication)),
        ));
    }
    Ok(checks)
}
