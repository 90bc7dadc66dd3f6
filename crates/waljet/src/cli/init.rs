//! `waljet init`: creates what is missing, in the order that keeps rows from being skipped.

use clap::Args;
use serde_json::json;
use waljet_pipeline::{Checkpoints, Fault};
use waljet_postgres::error::CATCH_UP;
use waljet_postgres::provision::TableForm;
use waljet_postgres::{Failover, ProvisionOptions, SharedControl};

use super::{Global, runtime};
use crate::catch_up::{self, Ended};
use crate::checkpoint::Store;
use crate::config::{CheckpointStore, Config};
use crate::error::{OUTPUT, halt};
use crate::gap;
use crate::render::{Exit, Failure, data, note};
use crate::signal;

/// Create what is missing.
#[derive(Debug, Args)]
pub(crate) struct Init {
    /// Print the SQL, and the stream's settings as comments, and connect to nothing
    #[arg(long)]
    print: bool,
    /// Create the table partitioned by `created_at`
    #[arg(long)]
    partitioned: bool,
    /// Let standbys copy the slot (PostgreSQL 17 and later)
    #[arg(long)]
    failover: bool,
    /// Publish the rows that are in the table already, up to where the new slot begins
    #[arg(long, conflicts_with = "print")]
    backfill: bool,
}

/// Does what was typed.
pub(crate) fn run(global: &Global, args: &Init) -> Result<Exit, Failure> {
    let config = global.load_quietly()?;
    let options = options(&config, args);
    if args.print {
        data(&printed(&config, &options)?)?;
        return Ok(Exit::Done);
    }
    runtime()?.block_on(async {
        if args.backfill {
            let options = ProvisionOptions { create_slot: false, ..options };
            create(&config, &options).await?;
            return backfill(&config, options.failover).await;
        }
        create(&config, &options).await?;
        Ok(Exit::Done)
    })
}

/// Returns what is to be there in the database.
fn options(config: &Config, args: &Init) -> ProvisionOptions {
    let source = &config.source;
    let options =
        ProvisionOptions::new(source.connect.clone(), source.table.clone(), &source.publication, &source.slot);
    ProvisionOptions {
        form: if args.partitioned { TableForm::Partitioned } else { TableForm::Plain },
        failover: if args.failover { Failover::On } else { Failover::Off },
        checkpoint: config.checkpoint.store == CheckpointStore::Postgres,
        ..options
    }
}

/// Creates everything; what was done before a fault is said before it.
async fn create(config: &Config, options: &ProvisionOptions) -> Result<(), Failure> {
    let steps = waljet_postgres::init(options).await?;
    // The slot comes last, since rows that are written before table and publication exist would be skipped in it.
    let new_slot =
        options.create_slot && steps.last().is_some_and(|slot| slot.outcome == waljet_postgres::Outcome::Created);
    for done in steps {
        say(done.outcome == waljet_postgres::Outcome::Created, &done.what)?;
    }
    for done in waljet_jetstream::init(&config.nats, &config.stream).await? {
        say(done.outcome == waljet_jetstream::Outcome::Created, &done.what)?;
    }
    if let Store::Nats(bucket) = Store::new(config, SharedControl::default()) {
        let done = bucket.init(&config.stream).await?;
        say(done.outcome == waljet_jetstream::Outcome::Created, &done.what)?;
    }
    if new_slot && let Some(last) = gap::last_stored(config).await {
        note(&format!(
            "warning: slot {:?} is new, and the last event in stream {:?} is at {last}: what was committed in between \
             is in no slot; compare the ids in the table with Nats-Msg-Id in the stream",
            options.slot, config.stream.stream
        ));
    }
    Ok(())
}

/// Publishes what is in the table, and creates the slot that goes on from there.
async fn backfill(config: &Config, failover: Failover) -> Result<Exit, Failure> {
    let name = &config.source.slot;
    let unfinished = match Store::new(config, SharedControl::default()).load().await? {
        Some(stored) => stored.gap.is_some_and(|gap| gap.ends_with(&format!("[{CATCH_UP}]"))),
        None => false,
    };
    if waljet_postgres::slot::show(&config.source.connect, name).await?.is_some() && !unfinished {
        let what = format!("slot {name:?} exists: what was committed since it was created comes from it");
        return Err(halt(CATCH_UP, what)
            .hint("where that slot was never read from, waljet slot drop --yes, and once more")
            .into());
    }
    let (mut shutdown, _signals) = signal::listen()?;
    let prepared = catch_up::prepare(config, failover).await?;
    let tell = |settled, rows| note(&format!("backfill: {settled} of {rows} rows are in the stream"));
    Ok(match Box::pin(prepared.run(&mut shutdown, tell)).await? {
        Ended::CaughtUp => {
            say(true, &format!("slot {name}"))?;
            Exit::Done
        }
        Ended::Stopped => {
            note("stopped; waljet init --backfill goes on, and sends nothing again");
            Exit::Failed
        }
    })
}

/// Writes one line about one step.
fn say(created: bool, what: &str) -> Result<(), Failure> {
    data(&format!("{}  {what}\n", if created { "created" } else { "exists " }))
}

/// Writes all steps as SQL; the stream's settings are comments, so that the whole can be given to psql.
fn printed(config: &Config, options: &ProvisionOptions) -> Result<String, Fault> {
    let mut text = String::new();
    for statement in waljet_postgres::plan(options) {
        text.push_str(&format!("-- {}\n{}\n\n", statement.what, statement.sql.trim_end()));
    }
    let settings = waljet_jetstream::plan(&config.stream, None);
    let settings =
        serde_json::to_value(&settings).map_err(|error| halt(OUTPUT, "write the stream's settings").cause(error))?;
    let name = &config.stream.stream;
    text.push_str(&format!("-- stream {}, as nats stream add {name} --config FILE takes it:\n", json!(name)));
    for line in format!("{settings:#}").lines() {
        text.push_str(&format!("-- {line}\n"));
    }
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use super::*;
    use crate::config::parsed;

    #[test]
    fn what_is_printed_is_sql_with_the_stream_in_comments() {
        let config = parsed("[postgres]\nurl = \"postgres://a@b/c\"\n");
        let args = Init { print: true, partitioned: false, failover: false, backfill: false };
        let text = printed(&config, &options(&config, &args)).unwrap();
        let order = [
            "-- schema public\n",
            "-- table public.outbox\n",
            "-- table waljet.checkpoint\n",
            "-- publication waljet\n",
            "-- slot waljet\n",
            "-- stream \"OUTBOX\"",
        ];
        let places: Vec<usize> = order.iter().map(|start| text.find(start).unwrap()).collect();
        assert!(places.is_sorted(), "{text}");
        let stream = &text[places[5]..];
        assert!(stream.lines().all(|line| line.starts_with("-- ")), "{stream}");
        assert!(stream.contains("\"outbox.>\""), "{stream}");
    }
}
