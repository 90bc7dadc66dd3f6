//! Whether a slot that is gone leaves a gap: it does where the stream shows that the slot was read from.

use waljet_pipeline::{Action, Check, Checkpoints, Fault, Finding, Position, date, pending_gap};
use waljet_postgres::SharedControl;
use waljet_postgres::error::{SLOT_INVALIDATED, SLOT_MISSING, other_cluster, slot_moved};

use crate::checkpoint::Store;
use crate::config::Config;

/// Makes the fault of a slot that is gone the fault of a gap, where the stream holds an event of this relay.
///
/// A slot that was never read from is merely missing, and `init` creates it.
pub(crate) async fn look(config: &Config, checks: &mut [Check]) {
    let gone = checks.iter_mut().find_map(|check| match &mut check.finding {
        Finding::Fault(fault) if [SLOT_MISSING, SLOT_INVALIDATED].contains(&fault.code) => Some(fault),
        _ => None,
    });
    let Some(fault) = gone else { return };
    // A broker that does not answer is a fault of its own, which is told beside this one.
    if let Some(last) = last_stored(config).await {
        name(fault, &config.source.slot, &config.stream.stream, &last);
        if let Ok(Some(stored)) = Store::new(config, SharedControl::default()).load().await {
            date(fault, &stored);
        }
    }
}

/// Reads the position of the last event that the stream holds; `None` where it holds none or does not answer.
pub(crate) async fn last_stored(config: &Config) -> Option<Position> {
    let client = waljet_jetstream::connect(&config.nats).await.ok()?;
    let (stream, space) = (&config.stream.stream, &config.stream.subject_space);
    waljet_jetstream::read_tail(&client, &config.nats, stream, space).await.ok()?.position
}

/// Finds a slot that stands past the stored checkpoint, a checkpoint of another cluster, and a gap that was found before. `None`
/// where there is none of it, or an end does not answer, which is told beside this.
pub(crate) async fn moved(config: &Config) -> Option<Fault> {
    // The slot first: a relay that runs stores a position before it moves the slot.
    let slot = waljet_postgres::slot::show(&config.source.connect, &config.source.slot).await.ok()?;
    let store = Store::new(config, SharedControl::default());
    let stored = store.load().await.ok()??;
    let history = waljet_postgres::identify(&config.source.connect).await.ok()?;
    if history.system_id != stored.confirmed.history.system_id {
        return Some(other_cluster(stored.confirmed.history.system_id, history.system_id));
    }
    let (stands, confirmed) = (slot.and_then(|slot| slot.confirmed_flush), stored.confirmed.lsn);
    // After a promotion the timeline's history decides, which a relay reads when it starts.
    let moved =
        stands.filter(|stands| history == stored.confirmed.history && stands.bytes_since(confirmed) > store.own_wal());
    let moved = moved.map(|stands| {
        let mut fault = slot_moved(&config.source.slot, stands, confirmed);
        date(&mut fault, &stored);
        fault
    });
    moved.or_else(|| stored.gap.as_deref().map(pending_gap))
}

/// Says between which ends events may be missing.
fn name(fault: &mut Fault, slot: &str, stream: &str, last: &Position) {
    let remedy = "waljet slot create, and waljet run --accept-gap";
    let (what, remedy) = if fault.code == SLOT_MISSING {
        (format!("slot {slot:?} does not exist"), remedy.to_owned())
    } else {
        (fault.message.clone(), format!("waljet slot drop --yes, {remedy}"))
    };
    fault.action = Action::Gap;
    fault.message =
        format!("{what}; the last event in stream {stream:?} is at {last}, and what was committed since is in no slot");
    fault.hint = Some(format!(
        "waljet run --catch-up publishes what is missing from the table; or compare the ids in the table with Nats-Msg-Id in the stream from there on, and bring what is missing by \
         hand; then {remedy}"
    ));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use waljet_postgres::error::SLOT_NAME;

    use super::*;

    #[test]
    fn a_slot_that_is_gone_names_the_last_stored_position_and_how_to_go_on() {
        let last = "7431:1:0/16B3748:0".parse().unwrap();
        let mut fault = Fault::new(SLOT_MISSING, Action::Halt, "slot \"w\" does not exist").hint("waljet init");
        name(&mut fault, "w", "OUTBOX", &last);
        assert_eq!(fault.action, Action::Gap);
        let message = "slot \"w\" does not exist; the last event in stream \"OUTBOX\" is at 7431:1:0/16B3748:0, and \
                       what was committed since is in no slot";
        assert_eq!(fault.message, message);
        assert!(fault.hint.unwrap().ends_with("then waljet slot create, and waljet run --accept-gap"));

        let mut fault = Fault::new(SLOT_INVALIDATED, Action::Gap, "slot \"w\" was invalidated (wal_removed)");
        name(&mut fault, "w", "OUTBOX", &last);
        assert!(fault.message.starts_with("slot \"w\" was invalidated (wal_removed); the last event"));
        assert!(fault.hint.unwrap().contains("then waljet slot drop --yes, waljet slot create, and"));
    }

    #[tokio::test]
    async fn other_faults_are_left_alone_without_asking_the_broker() {
        let config = crate::config::parsed("[postgres]\nurl = \"postgres://a@b/c\"\n");
        let mut checks = [Check::fault("slot", Fault::new(SLOT_NAME, Action::Halt, "as it was"))];
        look(&config, &mut checks).await;
        let Finding::Fault(fault) = &checks[0].finding else { unreachable!("it was a fault") };
        assert_eq!((fault.action, fault.message.as_str()), (Action::Halt, "as it was"));
    }
}
