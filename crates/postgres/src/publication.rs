//! Whether a publication sends the rows of the outbox table, and under which name.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use tokio_postgres::SimpleQueryRow;
use waljet_pipeline::{Action, Fault};

use crate::control::{Control, flag, optional, text};
use crate::error::{
    COLUMN_UNPUBLISHED, CONNECT_OPTIONS, PUBLICATION_INSERT, PUBLICATION_MISSING, PUBLICATION_ROOT, PUBLICATION_TABLE,
    TABLE_KIND, TABLE_MISSING,
};
use crate::sql::{quote_ident, quote_literal};

/// A table's name with its schema.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct TableName {
    /// The schema.
    pub schema: String,
    /// The table.
    pub name: String,
}

impl TableName {
    /// Makes a name of its parts.
    #[must_use]
    pub fn new(schema: impl Into<String>, name: impl Into<String>) -> Self {
        Self { schema: schema.into(), name: name.into() }
    }

    /// Returns the name for use in SQL.
    #[must_use]
    pub fn quoted(&self) -> String {
        format!("{}.{}", quote_ident(&self.schema), quote_ident(&self.name))
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.schema, self.name)
    }
}

impl FromStr for TableName {
    type Err = Fault;

    /// Takes `schema.table`, or `table` for one in `public`, as they are: case counts, no quotes.
    fn from_str(text: &str) -> Result<Self, Fault> {
        let (schema, name) = text.split_once('.').unwrap_or(("public", text));
        if schema.is_empty() || name.is_empty() {
            let message = format!("expected a table name such as public.outbox, found {text:?}");
            return Err(Fault::new(CONNECT_OPTIONS, Action::Halt, message));
        }
        Ok(Self::new(schema, name))
    }
}

/// What the catalogue says about one publication and one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Membership {
    /// Whether the publication exists.
    pub(crate) exists: bool,
    /// Whether it publishes inserts.
    pub(crate) insert: bool,
    /// What it publishes besides.
    pub(crate) also: String,
    /// Whether rows of partitions come under a parent's name.
    pub(crate) via_root: bool,
    /// The table's `relkind`; none where there is no such table.
    pub(crate) kind: Option<char>,
    /// The table's `relpersistence`.
    pub(crate) persistence: char,
    /// The name that rows come under; none where they do not come.
    pub(crate) published_as: Option<String>,
    /// Row filters that apply.
    pub(crate) filters: Option<String>,
    /// The column list, where there is one.
    pub(crate) columns: Option<Vec<String>>,
    /// Everything that decides the above, as one text that changes with any change of it.
    pub(crate) fingerprint: String,
    /// Whether a transaction that changes it may be committed in the WAL and not be visible yet.
    pub(crate) in_doubt: bool,
}

/// Separates values in one text column; no name holds it.
const SEPARATOR: char = '\u{1f}';

/// Makes the query whose one row [`Membership::from_row`] reads.
pub(crate) fn select(version: u32, publication: &str, table: &TableName) -> String {
    // Schemas, row filters and column lists came with 15.
    let (schemas, filter, columns) = if version >= 150_000 {
        (
            "UNION ALL SELECT a.relid, a.level, pn.oid, pn.xmin, pn.xmax, NULL, NULL::int2[] \
             FROM p JOIN pg_publication_namespace pn ON pn.pnpubid = p.oid JOIN a ON a.relnamespace = pn.pnnspid",
            "pg_get_expr(pr.prqual, pr.prrelid)",
            "pr.prattrs::int2[]",
        )
    } else {
        ("", "NULL", "NULL::int2[]")
    };
    let (publication, schema, name) =
        (quote_literal(publication), quote_literal(&table.schema), quote_literal(&table.name));
    format!(
        "WITH p AS (SELECT * , xmin AS pxmin, xmax AS pxmax FROM pg_publication WHERE pubname = {publication}), \
         t AS (SELECT c.oid, c.relkind, c.relpersistence, c.relnamespace, c.xmax AS cxmax, n.xmin AS nxmin \
               FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
               WHERE n.nspname = {schema} AND c.relname = {name}), \
         u AS (SELECT t.oid AS relid, 1::bigint AS level FROM t \
               UNION SELECT x.relid::oid, x.level FROM t, \
               pg_partition_ancestors(t.oid::regclass) WITH ORDINALITY AS x(relid, level)), \
         a AS (SELECT u.relid, u.level, c.relnamespace FROM u JOIN pg_class c ON c.oid = u.relid), \
         m(relid, level, oid, rxmin, rxmax, filter, attrs) AS ( \
               SELECT a.relid, a.level, pr.oid, pr.xmin, pr.xmax, {filter}, {columns} \
               FROM p JOIN pg_publication_rel pr ON pr.prpubid = p.oid JOIN a ON a.relid = pr.prrelid {schemas} \
               UNION ALL SELECT a.relid, a.level, p.oid, p.pxmin, p.pxmax, NULL, NULL::int2[] \
               FROM p, a WHERE p.puballtables), \
         top AS (SELECT relid FROM m ORDER BY level DESC LIMIT 1), \
         s AS (SELECT (pg_snapshot_xmin(pg_current_snapshot())::text::numeric % 4294967296)::bigint AS oldest) \
         SELECT p.oid IS NOT NULL AS pub_exists, p.pubinsert, p.pubviaroot, \
         concat_ws(', ', CASE WHEN p.pubupdate THEN 'update' END, CASE WHEN p.pubdelete THEN 'delete' END, \
                   CASE WHEN p.pubtruncate THEN 'truncate' END) AS also, \
         t.relkind, t.relpersistence, \
         CASE WHEN EXISTS (SELECT FROM m) THEN \
           CASE WHEN p.pubviaroot THEN (SELECT relid::regclass::text FROM top) \
                WHEN t.relkind = 'p' THEN 'its partitions' ELSE t.oid::regclass::text END END AS published_name, \
         CASE WHEN p.pubviaroot THEN (SELECT relid FROM top) = t.oid ELSE t.relkind <> 'p' END AS own_name, \
         (SELECT string_agg(filter, ' AND ') FROM m) AS filters, \
         (SELECT string_agg(f.attname, E'\\x1f') FROM m JOIN pg_attribute f ON f.attrelid = m.relid AND f.attnum = ANY (m.attrs) \
          WHERE m.attrs IS NOT NULL) AS columns, \
         concat_ws(';', p.oid, p.pxmin, p.pubinsert, p.pubviaroot, p.puballtables, t.oid, t.relkind, t.relpersistence, \
           t.relnamespace, t.nxmin, \
           (SELECT string_agg(concat_ws(':', m.relid, m.oid, m.rxmin), ',' ORDER BY m.level, m.oid) FROM m), \
           (SELECT string_agg(u.relid::text, ',' ORDER BY u.level) FROM u)) AS fingerprint, \
         EXISTS (SELECT FROM s, (SELECT pxmax AS x FROM p UNION ALL SELECT cxmax FROM t UNION ALL SELECT rxmax FROM m) d \
                 WHERE d.x::text <> '0' \
                 AND ((d.x::text::bigint - s.oldest + 4294967296) % 4294967296) < 2147483648) AS in_doubt \
         FROM (SELECT) one LEFT JOIN p ON true LEFT JOIN t ON true"
    )
}

/// Asks the catalogue.
pub(crate) async fn inspect(control: &Control, publication: &str, table: &TableName) -> Result<Membership, Fault> {
    let context = format!("read publication {publication:?}");
    let row = control.row(&context, &select(control.version, publication, table)).await?;
    Ok(Membership::from_row(&row, table))
}

impl Membership {
    /// Reads the row of [`select`].
    pub(crate) fn from_row(row: &SimpleQueryRow, table: &TableName) -> Self {
        let char_of = |column| text(row, column).chars().next();
        let published = optional(row, "published_name");
        Self {
            exists: flag(row, "pub_exists"),
            insert: flag(row, "pubinsert"),
            also: text(row, "also").to_owned(),
            via_root: flag(row, "pubviaroot"),
            kind: char_of("relkind"),
            persistence: char_of("relpersistence").unwrap_or('p'),
            published_as: published.map(|name| if flag(row, "own_name") { table.to_string() } else { name }),
            filters: optional(row, "filters"),
            columns: optional(row, "columns").map(|names| names.split(SEPARATOR).map(str::to_owned).collect()),
            fingerprint: text(row, "fingerprint").to_owned(),
            in_doubt: flag(row, "in_doubt"),
        }
    }

    /// Returns why the table cannot be an outbox.
    pub(crate) fn table_fault(&self, table: &TableName) -> Option<Fault> {
        let quoted = table.quoted();
        let kind = match self.kind {
            None => {
                let fault = Fault::new(TABLE_MISSING, Action::Halt, format!("table {table} does not exist"));
                return Some(fault.hint("waljet init creates it, or mend outbox.table"));
            }
            Some('r' | 'p') => match self.persistence {
                'u' => "it is unlogged",
                't' => "it is temporary",
                _ => return None,
            },
            Some('v' | 'm') => "it is a view",
            Some('f') => "it is a foreign table",
            Some(_) => "it is not a table",
        };
        let fault = Fault::new(TABLE_KIND, Action::Halt, format!("rows of {table} do not reach the WAL: {kind}"));
        Some(if self.persistence == 'u' {
            fault.hint(format!("ALTER TABLE {quoted} SET LOGGED;"))
        } else {
            fault.hint("use an ordinary or a partitioned table")
        })
    }

    /// Returns why rows of the table do not come, or not under its name.
    pub(crate) fn fault(&self, publication: &str, table: &TableName) -> Option<Fault> {
        let (quoted, table_sql) = (quote_ident(publication), table.quoted());
        if !self.exists {
            let message = format!("publication {publication:?} does not exist");
            return Some(
                Fault::new(PUBLICATION_MISSING, Action::Halt, message)
                    .hint(format!("{};", create_statement(publication, table))),
            );
        }
        if let Some(fault) = self.table_fault(table) {
            return Some(fault);
        }
        let Some(published_as) = &self.published_as else {
            let message = format!("publication {publication:?} does not hold table {table}");
            return Some(
                Fault::new(PUBLICATION_TABLE, Action::Halt, message)
                    .hint(format!("ALTER PUBLICATION {quoted} ADD TABLE {table_sql};")),
            );
        };
        if !self.insert {
            let message = format!("publication {publication:?} does not publish inserts");
            return Some(
                Fault::new(PUBLICATION_INSERT, Action::Halt, message)
                    .hint(format!("ALTER PUBLICATION {quoted} SET (publish = 'insert');")),
            );
        }
        if *published_as != table.to_string() {
            let message = format!("publication {publication:?} sends rows of {table} under the name of {published_as}");
            let hint = if self.kind == Some('p') && !self.via_root {
                format!("ALTER PUBLICATION {quoted} SET (publish_via_partition_root = true);")
            } else {
                format!("set outbox.table to {published_as}")
            };
            return Some(Fault::new(PUBLICATION_ROOT, Action::Halt, message).hint(hint));
        }
        None
    }

    /// Returns which of the columns the publication's column list leaves out.
    pub(crate) fn columns_fault(&self, publication: &str, table: &TableName, wanted: &[String]) -> Option<Fault> {
        let sent = self.columns.as_ref()?;
        let left_out: Vec<&str> = wanted.iter().filter(|name| !sent.contains(name)).map(String::as_str).collect();
        if left_out.is_empty() {
            return None;
        }
        let message =
            format!("publication {publication:?} does not send these columns of {table}: {}", left_out.join(", "));
        let hint = format!("ALTER PUBLICATION {} SET TABLE {};", quote_ident(publication), table.quoted());
        Some(Fault::new(COLUMN_UNPUBLISHED, Action::Halt, message).hint(hint))
    }
}

/// Makes the statement that creates a publication for the table.
pub(crate) fn create_statement(publication: &str, table: &TableName) -> String {
    format!(
        "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert', publish_via_partition_root = true)",
        quote_ident(publication),
        table.quoted()
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a missing fault fails the test")]
mod tests {
    use super::*;

    fn good() -> Membership {
        Membership {
            exists: true,
            insert: true,
            kind: Some('r'),
            persistence: 'p',
            published_as: Some("public.outbox".into()),
            ..Membership::default()
        }
    }

    #[test]
    fn each_hole_has_its_code_and_the_statement_that_mends_it() {
        let table = TableName::new("public", "outbox");
        let why = |membership: Membership| {
            membership.fault("My \"Pub", &table).map(|fault| (fault.code, fault.hint.unwrap_or_default()))
        };
        assert_eq!(why(good()), None);
        let create = "CREATE PUBLICATION \"My \"\"Pub\" FOR TABLE \"public\".\"outbox\" \
                      WITH (publish = 'insert', publish_via_partition_root = true);";
        assert_eq!(why(Membership::default()), Some((PUBLICATION_MISSING, create.into())));
        assert_eq!(why(Membership { kind: None, ..good() }).unwrap().0, TABLE_MISSING);
        assert_eq!(
            why(Membership { persistence: 'u', ..good() }),
            Some((TABLE_KIND, "ALTER TABLE \"public\".\"outbox\" SET LOGGED;".into()))
        );
        assert_eq!(
            why(Membership { published_as: None, ..good() }),
            Some((PUBLICATION_TABLE, "ALTER PUBLICATION \"My \"\"Pub\" ADD TABLE \"public\".\"outbox\";".into()))
        );
        assert_eq!(why(Membership { insert: false, ..good() }).unwrap().0, PUBLICATION_INSERT);
        let leaves = Membership { kind: Some('p'), published_as: Some("its partitions".into()), ..good() };
        assert_eq!(
            why(leaves),
            Some((
                PUBLICATION_ROOT,
                "ALTER PUBLICATION \"My \"\"Pub\" SET (publish_via_partition_root = true);".into()
            ))
        );
        let root = Membership { published_as: Some("root".into()), via_root: true, ..good() };
        assert_eq!(why(root), Some((PUBLICATION_ROOT, "set outbox.table to root".into())));
    }

    #[test]
    fn a_column_list_that_leaves_a_mapped_column_out_is_named() {
        let table = TableName::new("public", "outbox");
        let listed = Membership { columns: Some(vec!["id".into()]), ..good() };
        let wanted = ["id".to_owned(), "payload".to_owned()];
        let fault = listed.columns_fault("p", &table, &wanted).unwrap();
        assert!(fault.message.ends_with(": payload"), "{}", fault.message);
        assert!(good().columns_fault("p", &table, &wanted).is_none());
    }

    #[test]
    fn a_table_name_without_a_schema_is_in_public() {
        assert_eq!("outbox".parse::<TableName>().unwrap(), TableName::new("public", "outbox"));
        assert_eq!("a.B".parse::<TableName>().unwrap().quoted(), "\"a\".\"B\"");
        assert!(".x".parse::<TableName>().is_err());
    }
}
