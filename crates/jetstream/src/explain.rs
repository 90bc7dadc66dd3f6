//! Why the broker is silent: a look at the stream after acknowledgements failed to come.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use waljet_pipeline::{Action, Fault};

use crate::api::{Api, ApiError};
use crate::{error, subject};

/// How acknowledgements failed to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// Not within this time.
    Timeout(Duration),
    /// The server says that nobody takes the subject.
    NoResponders,
}

/// A look that goes on however often the wait for it is cancelled.
pub(crate) struct Explaining(Mutex<Pin<Box<dyn Future<Output = Fault> + Send>>>);

impl Explaining {
    /// Begins to look.
    pub(crate) fn begin(api: Api, stream: String, about: String, silence: Silence) -> Self {
        Self(Mutex::new(Box::pin(async move { explain(&api, &stream, &about, silence).await })))
    }

    /// Waits for what is found. Not to be called again once it returned.
    ///
    /// # Cancel safety
    ///
    /// A cancelled call goes on with the next one.
    pub(crate) async fn done(&mut self) -> Fault {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).as_mut().await
    }
}

impl fmt::Debug for Explaining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Explaining").finish_non_exhaustive()
    }
}

/// Looks the stream up and says which of the causes it is. All of them may heal.
async fn explain(api: &Api, stream: &str, about: &str, silence: Silence) -> Fault {
    let what = match silence {
        Silence::Timeout(limit) => format!("publish to {about:?}: no acknowledgement within {limit:?}"),
        Silence::NoResponders => format!("publish to {about:?}: no stream takes it"),
    };
    let fault = |code, why: String| {
        let fault = Fault::new(code, Action::Retry, format!("{what}; {why}"));
        match error::remedy(code, stream) {
            Some(hint) => fault.hint(hint),
            None => fault,
        }
    };
    let info = match api.stream_info(stream).await {
        Ok(info) => info,
        Err(ApiError::Broker { err_code: 10059, .. }) => {
            return fault(error::STREAM_MISSING, format!("there is no stream {stream:?}"));
        }
        Err(ApiError::Other(cause)) if cause.code == error::TIMEOUT => {
            return fault(error::TIMEOUT, format!("the broker does not tell the state of stream {stream:?} either"))
                .hint("check that the servers run, and that the stream has a leader: nats stream info");
        }
        Err(error) => return error.fault(&what, stream),
    };
    let config = &info.config;
    if config.sealed {
        return fault(error::STREAM_SEALED, format!("stream {stream:?} is sealed"));
    }
    if config.no_ack {
        return fault(error::STREAM_NO_ACK, format!("stream {stream:?} does not acknowledge (no_ack)"))
            .hint(format!("nats stream edit {stream} --ack"));
    }
    if !config.subjects.iter().any(|filter| subject::covers(filter, about)) {
        let subjects = config.subjects.join(", ");
        return fault(error::STREAM_SUBJECTS, format!("stream {stream:?} takes {subjects} only"));
    }
    if info.cluster.as_ref().is_some_and(|cluster| cluster.leader.as_deref().unwrap_or_default().is_empty()) {
        return fault(error::STREAM_LEADERLESS, format!("stream {stream:?} has no leader"));
    }
    match silence {
        Silence::Timeout(_) => fault(
            error::ACK_TIMEOUT,
            format!("stream {stream:?} is there; whether the message is stored will be looked up"),
        ),
        Silence::NoResponders => fault(error::JETSTREAM_UNAVAILABLE, format!("stream {stream:?} is there by now")),
    }
}
