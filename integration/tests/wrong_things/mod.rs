//! Whatever is set up wrongly is named with its code, what was found, and what mends it.

mod admission;
mod broker;
mod checkpoint;
mod configuration;
mod event;
mod gap;
mod link;
mod pooler;
mod publication;
mod slot;
mod stream;

use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream;
use waljet_testbed::{Rig, RigOptions, connect, wait_for};

/// How long a relay may take to say what it stands at, and to go on once that is mended.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// What a command said.
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) async fn said(rig: &Rig, args: &[&str]) -> Result<Said> {
    said_with(rig, &[], args).await
}

pub(crate) async fn said_with(rig: &Rig, env: &[(&str, &str)], args: &[&str]) -> Result<Said> {
    let Output { status, stdout, stderr } = rig.waljet_with(env, args).await?;
    let code = status.code().context("it was killed")?;
    Ok(Said { code, out: String::from_utf8(stdout)?, err: String::from_utf8(stderr)? })
}

/// What a command says about one fault.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) message: String,
    pub(crate) causes: String,
    pub(crate) hint: String,
}

impl Told {
    /// Finds the fault of a code, with what stands below it.
    pub(crate) fn find(text: &str, code: &str) -> Result<Self> {
        let mut lines = text.lines().skip_while(|line| !line.ends_with(&format!("[{code}]")));
        let message = lines.next().with_context(|| format!("expected a fault of code {code}, found\n{text}"))?;
        let mut told = Self { message: message.to_owned(), causes: String::new(), hint: String::new() };
        for line in lines.map(str::trim_start) {
            if let Some(cause) = line.strip_prefix("cause: ") {
                told.causes.push_str(cause);
            } else if let Some(hint) = line.strip_prefix("hint: ") {
                told.hint = hint.to_owned();
            } else {
                break;
            }
        }
        Ok(told)
    }

    /// Asserts what the message holds: the object, what was expected and what was found.
    pub(crate) fn says(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.message.contains(part), "{part:?} is missing in the message of {self:?}");
        }
        self
    }

    /// Asserts what the remedy holds.
    pub(crate) fn hints(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.hint.contains(part), "{part:?} is missing in the hint of {self:?}");
        }
        self
    }

    /// Returns the first statement of the remedy.
    pub(crate) fn sql(&self) -> Result<&str> {
        let start = ["ALTER ", "CREATE ", "SELECT "].iter().filter_map(|verb| self.hint.find(verb)).min();
        let statement = start.and_then(|start| self.hint.get(start..)).and_then(|text| text.split(';').next());
        statement.with_context(|| format!("there is no statement in the hint of {self:?}"))
    }

    /// Does what the remedy says.
    pub(crate) async fn mend(&self, rig: &Rig) -> Result<()> {
        let sql = self.sql()?;
        sql_on(rig, sql).await.with_context(|| format!("do what the hint says: {sql}"))
    }
}

/// Runs `check`, which must find a fault of this code and so end with 3.
pub(crate) async fn found(rig: &Rig, code: &str) -> Result<Told> {
    let said = said(rig, &["check"]).await?;
    ensure!(said.code == 3, "check ended with {}:\n{}{}", said.code, said.out, said.err);
    let told = Told::find(&said.out, code)?;
    assert!(told.message.starts_with("FAULT"), "{told:?}");
    Ok(told)
}

/// Runs `check`, which must find no fault, and returns what it printed.
pub(crate) async fn good(rig: &Rig) -> Result<String> {
    let said = said(rig, &["check"]).await?;
    ensure!(said.code == 0, "check ended with {}:\n{}{}", said.code, said.out, said.err);
    Ok(said.out)
}

/// Runs a command, which must end with this exit code and this fault.
pub(crate) async fn fails(rig: &Rig, args: &[&str], exit: i32, code: &str) -> Result<Told> {
    let said = said(rig, args).await?;
    ensure!(said.code == exit, "{args:?} ended with {}, expected {exit}:\n{}{}", said.code, said.out, said.err);
    let told = Told::find(&said.err, code)?;
    assert!(told.message.starts_with("error: "), "{told:?}");
    Ok(told)
}

/// Starts the relay, which must end by itself with this exit code and this fault.
pub(crate) async fn run_ends(rig: &mut Rig, exit: i32, code: &str) -> Result<Told> {
    let before = rig.log().len();
    rig.start_relay()?;
    let status = rig.relay()?.wait(LIMIT)?;
    let log = rig.log().split_off(before);
    ensure!(status.code() == Some(exit), "run ended with {status}, expected {exit}:\n{log}");
    Told::find(&log, code)
}

/// Waits until readiness is red for a reason that holds `part`.
pub(crate) async fn red(rig: &Rig, part: &str, limit: Duration) -> Result<String> {
    let what = format!("readiness to be red with {part}");
    let red = wait_for(&what, limit, async || {
        let answer = rig.get("/readyz").await?;
        ensure!(answer.status == 503 && answer.body.contains(part), "{} {}", answer.status, answer.body);
        Ok::<_, anyhow::Error>(Some(answer.body))
    });
    red.await.with_context(|| format!("its log:\n{}", rig.log()))
}

/// Starts servers with other options than the usual ones; the relay is not started yet.
pub(crate) async fn rig(change: impl FnOnce(&mut RigOptions)) -> Result<Rig> {
    let mut options = waljet_integration::options(&waljet_testbed::Pair::newest()?)?;
    change(&mut options);
    Rig::start(options).await
}

/// Adds settings of PostgreSQL to the options.
pub(crate) fn settings(options: &mut RigOptions, settings: &[(&str, &str)]) {
    let owned = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    options.postgres.settings.extend(owned);
}

pub(crate) async fn sql_on(rig: &Rig, sql: &str) -> Result<()> {
    Ok(connect(&rig.postgres.url()).await?.batch_execute(sql).await?)
}

/// Commits rows, one transaction each, of one key and with rising versions.
pub(crate) async fn insert(rig: &Rig, versions: std::ops::RangeInclusive<u32>) -> Result<()> {
    let client = connect(&rig.postgres.url()).await?;
    for version in versions {
        let sql = format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             VALUES ('order', '1', 'changed', '{{\"version\": {version}}}')"
        );
        client.batch_execute(&sql).await?;
    }
    Ok(())
}

/// Returns the slot's confirmed position.
pub(crate) async fn confirmed(rig: &Rig) -> Result<String> {
    let sql = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 'waljet'";
    Ok(connect(&rig.postgres.url()).await?.query_one(sql, &[]).await?.try_get(0)?)
}

/// A stream as `init` would not make it.
pub(crate) fn stream_config(subject: &str) -> jetstream::stream::Config {
    jetstream::stream::Config {
        name: waljet_testbed::STREAM.to_owned(),
        subjects: vec![subject.to_owned()],
        duplicate_window: Duration::from_secs(120),
        ..jetstream::stream::Config::default()
    }
}

/// Runs `check`, which must give this warning with a remedy that holds `hint`, whatever else it finds.
pub(crate) async fn found_warning(rig: &Rig, warning: &str, hint: &str) -> Result<()> {
    let out = said(rig, &["check"]).await?.out;
    let mut lines = out.lines().skip_while(|line| !line.contains(warning));
    ensure!(lines.next().is_some(), "expected {warning:?} in\n{out}");
    let remedy = lines.next().unwrap_or_default();
    ensure!(remedy.contains("hint: ") && remedy.contains(hint), "expected {hint:?} in {remedy:?}");
    Ok(())
}
