//! `waljet run`: checks both ends, then relays until told to stop.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tracing::{info, warn};
use waljet_jetstream::JetStreamSink;
use waljet_pipeline::{Action, Fault, Finding, Pipeline, Stopped};
use waljet_postgres::error::{CATCH_UP, SLOT_ACTIVE};
use waljet_postgres::{Failover, ReplicationSource};

use super::{Global, runtime};
use crate::admin::Admin;
use crate::assemble::{Gap, Views, assemble};
use crate::catch_up::{self, Ended};
use crate::checkpoint::Store;
use crate::config::Config;
use crate::error::{ABORTED, halt};
use crate::preflight::Preflight;
use crate::render::{Exit, Failure};
use crate::signal::{self, Shutdown};
use crate::telemetry;

/// How long requests to the admin endpoint may still take once the relay has ended.
const ADMIN_GRACE: Duration = Duration::from_millis(500);

/// Relay events until SIGTERM or SIGINT.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Go on although the stream and the database do not fit together; events may be missing or come twice
    #[arg(long)]
    accept_gap: bool,
    /// Publish from the table what a lost slot would have sent, as postgres.on_gap = "catch-up" does
    #[arg(long, conflicts_with = "accept_gap")]
    catch_up: bool,
}

/// Does what was typed.
pub(crate) fn run(global: &Global, args: &Run) -> Result<Exit, Failure> {
    let config = global.load()?;
    telemetry::start(&config.log).map_err(|fault| Failure::usage([fault]))?;
    let gap = if args.accept_gap { Gap::Accept } else { Gap::Refuse };
    let runtime = runtime()?;
    let catches_up = args.catch_up || config.catch_up.by_itself;
    let result = runtime.block_on(async {
        let (mut shutdown, _signals) = signal::listen()?;
        loop {
            let failure = match Box::pin(relay(&config, gap, &mut shutdown)).await {
                Err(failure) if catches_up && catch_up::closes(&failure.faults) => failure,
                ended => return ended,
            };
            if !Box::pin(caught_up(&config, &failure.faults, &mut shutdown)).await? {
                return Ok(Exit::Done);
            }
        }
    });
    // A look-up of a name that hangs must not hold up the end.
    runtime.shutdown_background();
    result
}

/// Says that the process is alive while something else is awaited, such as a server that does not answer.
async fn turning<F: Future>(views: &Views, other: F) -> F::Output {
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    tokio::pin!(other);
    loop {
        tokio::select! {
            biased;
            output = &mut other => return output,
            _ = ticks.tick() => views.turn(),
        }
    }
}

/// Counts the connections to NATS that were lost, until it is dropped.
async fn count_lost(views: &Views) -> Infallible {
    let mut sink = views.sink_watch();
    let mut connected = false;
    while sink.changed().await.is_ok() {
        let now = sink.borrow_and_update().connected;
        if connected && !now {
            views.count_lost_sink();
        }
        connected = now;
    }
    std::future::pending().await
}

/// How long after a catch-up that failed the next one begins.
const CATCH_UP_AGAIN: Duration = Duration::from_secs(2);

/// Publishes from the table what the slot lost, for as often as it takes. `false` where it was told to stop.
async fn caught_up(config: &Config, lost: &[Fault], shutdown: &mut Shutdown) -> Result<bool, Failure> {
    for fault in lost {
        warn!(code = %fault.code, error = fault.summary(), "what the slot lost is taken from the table");
    }
    loop {
        let attempt = async {
            let prepared = catch_up::prepare(config, Failover::Off).await?;
            let admin = serve_admin(config, prepared.views()).await?;
            let tell = |settled, rows| info!(settled, rows, "catching up");
            let ended = Box::pin(prepared.run(shutdown, tell)).await;
            end_admin(admin).await;
            ended
        };
        let failure = match attempt.await {
            Ok(ended) => return Ok(ended == Ended::CaughtUp),
            Err(failure) => failure,
        };
        // Another relay does it, or did.
        if failure.faults.iter().any(|fault| fault.code == SLOT_ACTIVE) {
            tokio::time::sleep(CATCH_UP_AGAIN).await;
            return Ok(true);
        }
        let again =
            |fault: &Fault| fault.action == Action::Retry || fault.code == CATCH_UP && fault.action == Action::Gap;
        if failure.faults.is_empty() || !failure.faults.iter().all(again) {
            return Err(failure);
        }
        for fault in &failure.faults {
            let hint = fault.hint.as_deref();
            warn!(code = %fault.code, error = fault.summary(), hint, "the catch-up is begun anew");
        }
        tokio::select! {
            () = shutdown.draining() => return Ok(false),
            () = tokio::time::sleep(CATCH_UP_AGAIN) => {}
        }
    }
}

/// Serves the admin endpoint, checks both ends and moves events.
async fn relay(config: &Config, gap: Gap, shutdown: &mut Shutdown) -> Result<Exit, Failure> {
    let relay = assemble(config, gap)?;
    let admin = serve_admin(config, &relay.views).await?;
    info!(
        version = env!("CARGO_PKG_VERSION"),
        slot = config.source.slot,
        publication = config.source.publication,
        table = %config.source.table,
        stream = config.stream.stream,
        subjects = config.stream.subject_space,
        "starting"
    );
    let result = tokio::select! {
        biased;
        () = shutdown.draining() => Ok(Exit::Done),
        checked = turning(&relay.views, checked(config)) => match checked {
            Ok(()) => tokio::select! {
                result = Box::pin(pipeline(relay.pipeline, shutdown)) => result,
                never = count_lost(&relay.views) => match never {},
            },
            Err(failure) => Err(failure),
        },
    };
    end_admin(admin).await;
    result
}

/// Ends the admin endpoint.
async fn end_admin(admin: Option<(oneshot::Sender<()>, JoinHandle<()>)>) {
    if let Some((end, task)) = admin {
        drop(end);
        // Whoever still reads an answer has had the time to.
        let _ = tokio::time::timeout(ADMIN_GRACE, task).await;
    }
}

/// Binds the admin endpoint and answers there until the sender is dropped.
async fn serve_admin(
    config: &Config,
    views: &Arc<Views>,
) -> Result<Option<(oneshot::Sender<()>, JoinHandle<()>)>, Fault> {
    let Some(listen) = &config.admin_listen else { return Ok(None) };
    let admin = Admin::bind(listen).await?;
    info!(address = %admin.address(), "admin endpoint listens");
    let (sender, receiver) = oneshot::channel::<()>();
    let registry = views.registry.clone();
    let source = Arc::clone(views);
    let task = tokio::spawn(async move {
        let end = async move { drop(receiver.await) };
        if let Err(error) = admin.serve(Arc::new(move || source.snapshot()), registry, end).await {
            warn!(%error, "admin endpoint ended");
        }
    });
    Ok(Some((sender, task)))
}

/// Checks both ends. What may heal is waited for by the pipeline; all else ends the start.
async fn checked(config: &Config) -> Result<(), Failure> {
    let preflight = Preflight::make(config).await;
    for (end, check) in preflight.checks() {
        match &check.finding {
            Finding::Good(found) => tracing::debug!(end, check = check.name, found, "check passed"),
            Finding::Warning { message, hint } => warn!(end, check = check.name, found = message, hint, "check warns"),
            Finding::Fault(fault) if fault.action == Action::Retry => {
                let hint = fault.hint.as_deref();
                warn!(end, check = check.name, code = %fault.code, error = fault.summary(), hint, "waiting until this is mended");
            }
            // Printed at the end, all together.
            Finding::Fault(_) => {}
        }
    }
    let (faults, _) = preflight.into_faults();
    if faults.is_empty() {
        return Ok(());
    }
    let gap = faults.iter().any(|fault| fault.action == Action::Gap);
    Err(Failure { exit: if gap { Exit::Gap } else { Exit::CheckFault }, faults })
}

/// Runs the pipeline: the first signal lets it drain, the second drops it.
async fn pipeline(
    pipeline: Pipeline<ReplicationSource, JetStreamSink, Store>,
    shutdown: &mut Shutdown,
) -> Result<Exit, Failure> {
    let (stop, stopped) = watch::channel(false);
    let mut running = Box::pin(pipeline.run(stopped));
    let mut aborting = shutdown.clone();
    loop {
        tokio::select! {
            biased;
            // 1. Nothing may keep the second signal waiting.
            () = aborting.aborting() => {
                let fault = halt(ABORTED, "aborted by a second signal before all was acknowledged");
                return Err(fault.hint("nothing is lost: what was not confirmed comes again at the next start").into());
            }
            // 2. The first signal is passed on once.
            () = shutdown.draining(), if !*stop.borrow() => drop(stop.send_replace(true)),
            // 3. The work itself.
            ended = &mut running => return ended.map(|Stopped { .. }| Exit::Done).map_err(Failure::from),
        }
    }
}
