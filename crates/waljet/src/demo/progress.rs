//! What is said while the demo goes: a line that moves on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinHandle;
use waljet_testbed::{Counters, stored};

use crate::render::note;

/// How often the moving line moves.
const MOVE: Duration = Duration::from_millis(250);

/// How often a plain line is written.
const WRITE: Duration = Duration::from_secs(2);

/// Where the demo speaks.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    /// The moving line; none where standard error is no terminal.
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Speaks to standard error.
    pub(super) fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed_precise} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(MOVE);
            bar
        });
        Self { bar }
    }

    /// Says what happens now.
    pub(super) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(format!("demo: {text}")),
            None => note(&format!("demo: {text}")),
        }
    }

    /// Shows how committed and stored move on, until the task is aborted.
    pub(super) fn watch(&self, counters: Arc<Counters>, nats: String) -> JoinHandle<()> {
        let progress = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(if progress.bar.is_some() { MOVE } else { WRITE }).await;
                let committed = Counters::get(&counters.events);
                // A broker that is being killed does not answer; the next look will.
                let answer = tokio::time::timeout(WRITE, stored(&nats)).await;
                let stored = match answer {
                    Ok(Ok(stored)) => stored.to_string(),
                    _ => "broker away".to_owned(),
                };
                let text = format!("events committed by the workers {committed}, messages stored {stored}");
                match &progress.bar {
                    Some(bar) => bar.set_message(text),
                    None => note(&format!("demo: {text}")),
                }
            }
        })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
