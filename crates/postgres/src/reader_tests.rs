//! The reader against a scripted server on an in-memory stream, with the clock under control.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a server that does not get what it expects fails the test")]

use bytes::{BufMut, Bytes};
use tokio::io::{AsyncReadExt, DuplexStream};
use tokio::time::{advance, sleep};
use waljet_pgoutput::XLogData;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// A server's end and a consumer's end.
struct Rig {
    server: DuplexStream,
    batches: mpsc::Receiver<Result<Batch, Fault>>,
    budget: Arc<Budget>,
    flushed: watch::Sender<Lsn>,
    proof: watch::Sender<Proof>,
    closing: Option<oneshot::Sender<Closing>>,
}

fn rig(limit: usize) -> Rig {
    let (client, server) = tokio::io::duplex(1 << 20);
    let (batch_sender, batches) = mpsc::channel(4);
    let (flushed, flushed_receiver) = watch::channel(Lsn::ZERO);
    let (proof, proof_receiver) = watch::channel(Proof::default());
    let (closing, closing_receiver) = oneshot::channel();
    let budget = Arc::new(Budget::new(limit));
    let ends = ReaderEnds {
        batches: batch_sender,
        budget: budget.clone(),
        flushed: flushed_receiver,
        proof: proof_receiver,
        closing: closing_receiver,
    };
    let options =
        ReaderOptions { start: Lsn(1), feedback_interval: SECOND, ping_after: SECOND * 5, dead_after: SECOND * 10 };
    tokio::spawn(Reader::new(client, Frames::default(), options, ends).run());
    Rig { server, batches, budget, flushed, proof, closing: Some(closing) }
}

impl Rig {
    async fn send(&mut self, tag: u8, payload: &[u8]) {
        let mut message = BytesMut::new();
        message.put_u8(tag);
        message.put_u32(payload.len() as u32 + 4);
        message.put_slice(payload);
        self.server.write_all(&message).await.unwrap();
    }

    async fn send_copy(&mut self, message: ReplicationMessage) {
        let mut payload = BytesMut::new();
        message.encode(&mut payload);
        self.send(b'd', &payload).await;
    }

    async fn send_change(&mut self, wal_end: u64, data: &'static [u8]) {
        let server_time = Timestamp(0);
        let data =
            XLogData { wal_start: Lsn(wal_end), wal_end: Lsn(wal_end), server_time, data: Bytes::from_static(data) };
        self.send_copy(ReplicationMessage::XLogData(data)).await;
    }

    async fn send_keepalive(&mut self, wal_end: u64, reply_requested: bool) {
        let keepalive = PrimaryKeepalive { wal_end: Lsn(wal_end), server_time: Timestamp(0), reply_requested };
        self.send_copy(ReplicationMessage::PrimaryKeepalive(keepalive)).await;
    }

    /// Reads what the client says next: type and payload.
    async fn message(&mut self) -> (u8, Bytes) {
        let tag = self.server.read_u8().await.unwrap();
        let len = self.server.read_u32().await.unwrap() as usize - 4;
        let mut payload = vec![0; len];
        self.server.read_exact(&mut payload).await.unwrap();
        (tag, payload.into())
    }

    async fn status(&mut self) -> StandbyStatusUpdate {
        let (tag, payload) = self.message().await;
        assert_eq!(tag, b'd');
        StandbyStatusUpdate::decode(payload).unwrap()
    }

    async fn frames(&mut self) -> Vec<Frame> {
        let batch = self.batches.recv().await.unwrap().unwrap();
        self.budget.release(batch.bytes);
        batch.frames
    }

    async fn fault(&mut self) -> Fault {
        loop {
            if let Err(fault) = self.batches.recv().await.unwrap() {
                return fault;
            }
        }
    }

    fn prove(&self, proven: u64) {
        self.proof.send_replace(Proof { proven: Lsn(proven), stopping: false });
    }
}

fn change(wal_end: u64, data: &'static [u8]) -> Frame {
    Frame::Change { wal_end: Lsn(wal_end), data: Bytes::from_static(data) }
}

fn keepalive(wal_end: u64) -> Frame {
    Frame::Keepalive { wal_end: Lsn(wal_end) }
}

#[tokio::test(start_paused = true)]
async fn a_keepalive_is_given_out_as_far_as_it_is_proven_and_behind_what_came_before() {
    let mut rig = rig(1 << 20);
    rig.send_change(10, b"a").await;
    rig.send_keepalive(50, false).await;
    assert_eq!(rig.frames().await, [change(10, b"a")]);
    rig.prove(30);
    assert_eq!(rig.frames().await, [keepalive(30)]);
    rig.send_change(60, b"b").await;
    assert_eq!(rig.frames().await, [change(60, b"b")]);
    rig.prove(70);
    assert_eq!(rig.frames().await, [keepalive(50)]);
}

#[tokio::test(start_paused = true)]
async fn status_goes_on_while_nobody_takes_frames() {
    let mut rig = rig(100);
    for _ in 0..20 {
        rig.send_change(10, b"0123456789").await;
    }
    for _ in 0..60 {
        let status = rig.status().await;
        assert_eq!((status.flushed, status.reply_requested), (Lsn::ZERO, false));
    }
    // A minute without reading is no silence of the server's.
    assert_eq!(rig.frames().await[0], change(10, b"0123456789"));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_told_as_flushed_that_was_not_reported_or_not_received() {
    let mut rig = rig(1 << 20);
    rig.send_change(40, b"a").await;
    rig.frames().await;
    let first = loop {
        let status = rig.status().await;
        if status.written == Lsn(40) {
            break status;
        }
    };
    assert_eq!((first.flushed, first.applied), (Lsn::ZERO, Lsn::ZERO));
    rig.flushed.send_replace(Lsn(30));
    assert_eq!(rig.status().await.flushed, Lsn(30));
    rig.flushed.send_replace(Lsn(99));
    assert_eq!(rig.status().await.flushed, Lsn(40));
}

#[tokio::test(start_paused = true)]
async fn a_reply_request_is_answered_at_once_and_a_storm_of_them_is_not() {
    let mut rig = rig(1 << 20);
    rig.status().await;
    sleep(Duration::from_millis(500)).await;
    let asked = Instant::now();
    rig.send_keepalive(20, true).await;
    assert!(!rig.status().await.reply_requested);
    assert!(asked.elapsed() < Duration::from_millis(5), "{:?}", asked.elapsed());
    for _ in 0..5 {
        rig.send_keepalive(20, true).await;
        rig.status().await;
    }
    assert!(asked.elapsed() >= ANSWER_GAP * 5, "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_insists_on_what_cannot_be_confirmed_is_left_within_a_second() {
    let mut rig = rig(1 << 20);
    let start = Instant::now();
    rig.send_keepalive(20, true).await;
    // It asks again after each answer until the client says CopyDone.
    while rig.message().await.0 == b'd' {
        rig.send_keepalive(20, true).await;
    }
    let fault = rig.fault().await;
    assert_eq!((fault.code, fault.action), (UNAVAILABLE, Action::Retry));
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_server_on_its_way_down_is_left_after_a_grace() {
    let mut rig = rig(1 << 20);
    let start = Instant::now();
    rig.proof.send_replace(Proof { proven: Lsn::ZERO, stopping: true });
    let fault = rig.fault().await;
    assert_eq!((fault.code, fault.action), (UNAVAILABLE, Action::Retry));
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_pinged_and_then_given_up() {
    let mut rig = rig(1 << 20);
    let start = Instant::now();
    while !rig.status().await.reply_requested {}
    assert!(start.elapsed() >= SECOND * 5 && start.elapsed() < SECOND * 7, "{:?}", start.elapsed());
    let fault = rig.fault().await;
    assert_eq!(fault.code, SILENT);
    assert!(start.elapsed() >= SECOND * 10 && start.elapsed() < SECOND * 11, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn frames_before_an_error_are_given_out_first_and_none_after_it() {
    let mut rig = rig(1 << 20);
    rig.send_change(10, b"a").await;
    rig.send(b'N', b"SWARNING\0C55000\0Mskipped loading publication \"p\"\0\0").await;
    rig.send_keepalive(90, false).await;
    rig.prove(90);
    assert_eq!(rig.frames().await, [change(10, b"a")]);
    let fault = rig.fault().await;
    assert_eq!((fault.code, fault.action), (PUBLICATION_MISSING, Action::Gap));
    assert!(fault.message.ends_with("after 0/A"), "{}", fault.message);
}

#[tokio::test(start_paused = true)]
async fn closing_tells_the_last_position_and_waits_for_an_answer() {
    let mut rig = rig(1 << 20);
    rig.send_change(10, b"a").await;
    rig.frames().await;
    let (done, mut told) = oneshot::channel();
    rig.closing.take().unwrap().send(Closing { flushed: Lsn(10), done }).unwrap();
    while !rig.status().await.reply_requested {}
    advance(Duration::from_millis(100)).await;
    assert!(told.try_recv().is_err());
    rig.send_keepalive(10, false).await;
    rig.send(b'c', b"").await;
    rig.send(b'C', b"COPY 0\0").await;
    rig.send(b'Z', b"I").await;
    assert!(told.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_stream_cut_at_any_byte_gives_whole_frames_only() {
    let mut rig = rig(1 << 20);
    let mut payload = BytesMut::new();
    let data =
        XLogData { wal_start: Lsn(1), wal_end: Lsn(7), server_time: Timestamp(0), data: Bytes::from_static(b"abc") };
    ReplicationMessage::XLogData(data).encode(&mut payload);
    let mut message = vec![b'd'];
    message.extend((payload.len() as u32 + 4).to_be_bytes());
    message.extend(&payload);
    for byte in &message {
        rig.server.write_all(&[*byte]).await.unwrap();
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(rig.frames().await, [change(7, b"abc")]);
}
