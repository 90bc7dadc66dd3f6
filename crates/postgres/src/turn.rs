//! Whose turn it is to make up for a lost slot: one relay's at a time.

use waljet_pgoutput::Lsn;
use waljet_pipeline::{Action, Fault, Identity};

use crate::connect::ConnectOptions;
use crate::control::{Control, flag};
use crate::dial::{HANDSHAKE_TIMEOUT, dial};
use crate::error::SLOT_ACTIVE;
use crate::replication;
use crate::sql::quote_literal;
use crate::wire::Wire;

/// Held by a session-level advisory lock, so that it ends with the process. Until it is dropped, no other relay of this slot
/// begins a catch-up.
#[derive(Debug)]
pub struct Turn {
    _control: Control,
    server: Identity,
}

impl Turn {
    /// Takes the turn, and asks the server who it is.
    ///
    /// # Errors
    ///
    /// [`SLOT_ACTIVE`] where another relay has it; any fault of the connection.
    ///
    /// # Cancel safety
    ///
    /// A cancelled call gives it back.
    pub async fn take(connect: &ConnectOptions, slot: &str) -> Result<Self, Fault> {
        let control = Control::connect(connect).await?;
        let key = quote_literal(&format!("catch-up of slot {slot}"));
        let sql = format!("SELECT pg_try_advisory_lock(hashtextextended({key}, 0)) AS taken");
        if !flag(&control.row("take the turn of a catch-up", &sql).await?, "taken") {
            let what = format!("another relay makes up for slot {slot:?}");
            return Err(Fault::new(SLOT_ACTIVE, Action::Retry, what));
        }
        let stream = dial(connect, &control.endpoint).await?;
        let end_point = stream.server_end_point();
        let mut wire = Wire::start(stream, connect, end_point, HANDSHAKE_TIMEOUT).await?;
        let system = replication::identify_system(&mut wire).await?;
        let switch_points = replication::switch_points(&mut wire, system.history.timeline).await?;
        let server = Identity {
            history: system.history,
            wal_end: system.wal_end,
            switch_points,
            slot_confirmed: Lsn::ZERO,
            handed_over: false,
        };
        Ok(Self { _control: control, server })
    }

    /// Who the server is.
    #[must_use]
    pub fn server(&self) -> &Identity {
        &self.server
    }
}
