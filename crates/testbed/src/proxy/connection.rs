//! One connection through the proxy: its two directions and its end.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{mpsc, watch},
    time::{Duration, Instant, sleep_until},
};

use super::{Direction, Mode, State};

/// How much is read at once.
const CHUNK: usize = 16 * 1024;
/// How many chunks may be under way in one direction, which bounds the throughput of a delay.
const CHUNKS: usize = 256;

/// How a connection goes on when it is no longer passed on.
enum Fate {
    /// Both sides have closed it, or it was cut.
    Closed,
    /// Both sides are reset.
    Reset,
    /// The client's side is held.
    HalfOpen,
    /// The server's side is held.
    Stranded,
}

/// Why a direction has ended, other than by the end of what was sent.
enum Broken {
    /// The socket failed.
    Socket,
    /// The bytes that [`Mode::Cut`] allows have passed.
    Cut,
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Broken::Socket
    }
}

/// Connects a client to the server and serves it to its end.
pub(super) async fn serve(mut client: TcpStream, mut state: watch::Receiver<State>) {
    let first = *state.borrow_and_update();
    match first.mode {
        Mode::Reset | Mode::Refuse => return reset(client),
        Mode::HalfOpen => return swallow(client, state, first.resets).await,
        Mode::Pass | Mode::Delay(_) | Mode::Stall(_) | Mode::Cut { .. } => {}
    }
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", first.upstream)).await else { return reset(client) };
    // A failure here means that the connection is broken, which the first read shows.
    let _ = client.set_nodelay(true).and(server.set_nodelay(true));
    let passed = Passed::default();
    let fate = {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        let up = pump(from_client, to_server, Direction::ToServer, &passed, &state);
        let down = pump(from_server, to_client, Direction::ToClient, &passed, &state);
        tokio::select! {
            biased;
            // 1. A change of the state ends the connection even if it is busy.
            fate = decide(state.clone(), first) => fate,
            // 2. Its natural end.
            end = async { tokio::try_join!(up, down) } => match end {
                Ok(_) | Err(Broken::Cut) => Fate::Closed,
                Err(Broken::Socket) => Fate::Reset,
            },
        }
    };
    match fate {
        Fate::Closed => {}
        Fate::Reset => {
            reset(client);
            reset(server);
        }
        Fate::HalfOpen => {
            drop(server);
            swallow(client, state, first.resets).await;
        }
        Fate::Stranded => {
            reset(client);
            // Not read from: a peer that is gone acknowledges nothing either.
            let _ = state.wait_for(|state| state.resets != first.resets).await;
            reset(server);
        }
    }
}

/// Waits until the state asks for the end of a connection that began under `first`.
async fn decide(mut state: watch::Receiver<State>, first: State) -> Fate {
    loop {
        let now = *state.borrow_and_update();
        if now.strands != first.strands {
            return Fate::Stranded;
        }
        match now.mode {
            Mode::Reset | Mode::Refuse => return Fate::Reset,
            _ if now.resets != first.resets => return Fate::Reset,
            Mode::HalfOpen => return Fate::HalfOpen,
            Mode::Pass | Mode::Delay(_) | Mode::Stall(_) | Mode::Cut { .. } => {}
        }
        if state.changed().await.is_err() {
            return Fate::Reset;
        }
    }
}

/// Passes bytes on in one direction until the sender ends them.
async fn pump(
    from: ReadHalf<'_>,
    to: WriteHalf<'_>,
    way: Direction,
    passed: &Passed,
    state: &watch::Receiver<State>,
) -> Result<(), Broken> {
    let (queue, due) = mpsc::channel(CHUNKS);
    let reading = read(from, queue, way, state.clone());
    let writing = write(to, due, way, passed, state.clone());
    tokio::try_join!(reading, writing).map(drop)
}

/// Reads chunks and notes when each is due.
async fn read(
    mut from: ReadHalf<'_>,
    queue: mpsc::Sender<(Instant, Vec<u8>)>,
    way: Direction,
    mut state: watch::Receiver<State>,
) -> Result<(), Broken> {
    let mut buffer = vec![0; CHUNK];
    loop {
        // Not even read while stalled, so that the sender feels it soon.
        until_flowing(&mut state, way).await?;
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        let delay = if let Mode::Delay(delay) = state.borrow().mode { delay } else { Duration::ZERO };
        queue.send((Instant::now() + delay, buffer[..count].to_vec())).await.map_err(|_| Broken::Socket)?;
    }
}

/// Writes the chunks when they are due, as far as the mode allows.
async fn write(
    mut to: WriteHalf<'_>,
    mut due: mpsc::Receiver<(Instant, Vec<u8>)>,
    way: Direction,
    passed: &Passed,
    mut state: watch::Receiver<State>,
) -> Result<(), Broken> {
    while let Some((when, chunk)) = due.recv().await {
        sleep_until(when).await;
        until_flowing(&mut state, way).await?;
        let now = *state.borrow();
        let allowed = passed.allow(now, way, chunk.len());
        to.write_all(&chunk[..allowed]).await?;
        if passed.is_used_up(now, way) {
            to.shutdown().await?;
            return Err(Broken::Cut);
        }
    }
    Ok(to.shutdown().await?)
}

/// Waits while this direction is stalled.
async fn until_flowing(state: &mut watch::Receiver<State>, way: Direction) -> Result<(), Broken> {
    let flows = |state: &State| !matches!(state.mode, Mode::Stall(stalled) if stalled.covers(way));
    state.wait_for(flows).await.map(drop).map_err(|_| Broken::Socket)
}

/// Takes what a client sends and answers nothing, until it gives up or the state changes.
async fn swallow(mut client: TcpStream, mut state: watch::Receiver<State>, resets: u64) {
    let mut buffer = vec![0; CHUNK];
    let reading = async { while matches!(client.read(&mut buffer).await, Ok(count) if count > 0) {} };
    let over = state.wait_for(|state| state.mode != Mode::HalfOpen || state.resets != resets);
    tokio::select! {
        () = reading => {}
        _ = over => reset(client),
    }
}

/// Closes a connection so that the peer gets a reset rather than an orderly end.
fn reset(stream: TcpStream) {
    let _ = stream.set_zero_linger();
    drop(stream);
}

/// The bytes of a connection that have passed since the mode was set.
#[derive(Default)]
struct Passed(Mutex<Count>);

#[derive(Clone, Copy, Default)]
struct Count {
    generation: u64,
    bytes: u64,
}

impl Passed {
    /// Says how many of `wanted` bytes may pass, and counts them.
    fn allow(&self, state: State, way: Direction, wanted: usize) -> usize {
        let Mode::Cut { direction, after } = state.mode else { return wanted };
        if !direction.covers(way) {
            return wanted;
        }
        let mut count = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if count.generation != state.generation {
            *count = Count { generation: state.generation, bytes: 0 };
        }
        let allowed = after.saturating_sub(count.bytes).min(wanted as u64);
        count.bytes += allowed;
        allowed as usize
    }

    /// Tells whether no further byte may pass.
    fn is_used_up(&self, state: State, way: Direction) -> bool {
        let count = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(state.mode, Mode::Cut { direction, after }
            if direction.covers(way) && count.generation == state.generation && count.bytes >= after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_from_the_change_of_the_mode() {
        let mode = Mode::Cut { direction: Direction::ToClient, after: 10 };
        let mut state = State { mode, generation: 1, upstream: 0, resets: 0, strands: 0 };
        let passed = Passed::default();
        assert_eq!(passed.allow(state, Direction::ToServer, 100), 100);
        assert_eq!(passed.allow(state, Direction::ToClient, 7), 7);
        assert!(!passed.is_used_up(state, Direction::ToClient));
        assert_eq!(passed.allow(state, Direction::ToClient, 7), 3);
        assert!(passed.is_used_up(state, Direction::ToClient));
        state.generation = 2;
        assert_eq!(passed.allow(state, Direction::ToClient, 7), 7);
    }
}
