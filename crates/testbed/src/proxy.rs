//! A TCP proxy that does to connections what networks do.
//!
//! ```text
//! client ── socket ── read ─▶ queue (due times) ─▶ write ── socket ── server
//!                     read ◀─ queue (due times) ◀─ write
//! ```
//!
//! It runs on a thread of its own, so that a test that blocks does not slow the network down.

mod connection;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Builder,
    sync::{mpsc, watch},
    task::JoinSet,
};

use self::connection::serve;
use crate::PortLease;

/// How many orders may wait; each caller waits for its own.
const ORDERS: usize = 64;
/// How long binding the port again may take.
const BIND_LIMIT: Duration = Duration::from_secs(5);

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
    /// Either way.
    Both,
}

impl Direction {
    /// Tells whether bytes that go `way` are meant.
    fn covers(self, way: Direction) -> bool {
        self == way || self == Direction::Both
    }
}

/// What the proxy does to all connections, old and new, until it is set to something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Passes everything on.
    Pass,
    /// Passes everything on, this much later, without lowering the throughput.
    Delay(Duration),
    /// Passes nothing on in this direction; what was sent meanwhile arrives afterwards.
    Stall(Direction),
    /// Closes each connection after this many more bytes, even in the middle of a message.
    Cut {
        /// Whose bytes count.
        direction: Direction,
        /// How many pass.
        after: u64,
    },
    /// Resets each connection, new ones as soon as they are made.
    Reset,
    /// Resets each connection and listens no more, so that new ones are refused.
    Refuse,
    /// Leaves the clients with a connection that is dead on the other side: nothing comes, and what
    /// they send is swallowed. The server sees its side closed. The next mode resets them.
    HalfOpen,
}

/// What every connection watches.
#[derive(Debug, Clone, Copy)]
struct State {
    mode: Mode,
    /// Raised with each change of the mode, so that bytes are counted from there.
    generation: u64,
    /// The port to connect new clients to.
    upstream: u16,
    /// Raised to reset the connections there are.
    resets: u64,
    /// Raised to strand the server's side of the connections there are.
    strands: u64,
}

/// A change of the state, and whom to tell when it is in effect.
struct Order {
    change: Box<dyn FnOnce(&mut State) + Send>,
    done: SyncSender<Result<()>>,
}

/// A proxy on a port of its own in front of a server on this machine.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    /// Closing it ends the thread; an option only so that `drop` can do that.
    orders: Option<mpsc::Sender<Order>>,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

/// How many connections there are and were.
#[derive(Debug, Default)]
struct Counts {
    open: AtomicUsize,
    accepted: AtomicU64,
}

impl Proxy {
    /// Starts a proxy to a port on loopback; it passes everything on.
    ///
    /// # Errors
    ///
    /// No port is free.
    pub fn start(upstream: u16) -> Result<Proxy> {
        let lease = PortLease::take()?;
        let port = lease.port();
        let runtime = Builder::new_current_thread().enable_all().build().context("start the proxy")?;
        // Bound here, so that the port answers at once, and without a runtime, since the caller may be inside one.
        let listener = std::net::TcpListener::bind(("127.0.0.1", port)).context("bind the proxy")?;
        listener.set_nonblocking(true).context("bind the proxy")?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener).context("bind the proxy")?
        };
        let (orders, queue) = mpsc::channel(ORDERS);
        let counts = Arc::new(Counts::default());
        let state = State { mode: Mode::Pass, generation: 0, upstream, resets: 0, strands: 0 };
        let accepting = Accepting { lease, listener: Some(listener), state, counts: counts.clone() };
        let thread = thread::Builder::new().name("proxy".to_owned());
        let thread = thread.spawn(move || runtime.block_on(accepting.run(queue))).context("start the proxy")?;
        Ok(Proxy { port, orders: Some(orders), counts, thread: Some(thread) })
    }

    /// Returns the port to connect to, which stays the same for the proxy's life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes the mode, and returns when it is in effect.
    ///
    /// # Errors
    ///
    /// The port cannot be bound again after [`Mode::Refuse`].
    pub fn set(&self, mode: Mode) -> Result<()> {
        self.order(move |state| {
            state.mode = mode;
            state.generation += 1;
        })
    }

    /// Connects new clients to another port on loopback; the connections there are stay.
    ///
    /// # Errors
    ///
    /// The proxy is gone.
    pub fn set_upstream(&self, upstream: u16) -> Result<()> {
        self.order(move |state| state.upstream = upstream)
    }

    /// Resets the connections there are, on both sides, whatever the mode.
    ///
    /// # Errors
    ///
    /// The proxy is gone.
    pub fn reset_connections(&self) -> Result<()> {
        self.order(|state| state.resets += 1)
    }

    /// Resets the clients that there are and leaves the server with connections that look alive.
    ///
    /// That is what a network failure leaves behind on a server: a walsender that still holds its
    /// slot. The proxy holds these connections until [`Proxy::reset_connections`]; new clients are
    /// served as ever.
    ///
    /// # Errors
    ///
    /// The proxy is gone.
    pub fn strand_server(&self) -> Result<()> {
        self.order(|state| state.strands += 1)
    }

    /// Returns how many connections are open, held ones included.
    pub fn connections(&self) -> usize {
        self.counts.open.load(Ordering::Acquire)
    }

    /// Returns how many connections were ever accepted.
    pub fn accepted(&self) -> u64 {
        self.counts.accepted.load(Ordering::Acquire)
    }

    /// Waits for the proxy's own thread, which never waits for ours.
    fn order(&self, change: impl FnOnce(&mut State) + Send + 'static) -> Result<()> {
        let (done, answer) = sync_channel(1);
        let orders = self.orders.as_ref().context("the proxy is gone")?;
        let order = Order { change: Box::new(change), done };
        orders.try_send(order).map_err(|_| anyhow!("the proxy takes no orders"))?;
        answer.recv().context("the proxy is gone")?
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread of the proxy owns.
struct Accepting {
    lease: PortLease,
    /// `None` while connections are refused.
    listener: Option<TcpListener>,
    state: State,
    counts: Arc<Counts>,
}

impl Accepting {
    /// Accepts connections and takes orders until nobody can give any more.
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        let (state, watching) = watch::channel(self.state);
        // Dropped at the end, which closes all connections.
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                // 1. Orders first, so that a new connection meets the mode that was asked for.
                order = orders.recv() => {
                    let Some(Order { change, done }) = order else { return };
                    state.send_modify(change);
                    self.state = *state.borrow();
                    let _ = done.send(self.listen_or_not().await);
                }
                // 2. Ended connections, so that they do not pile up.
                Some(_) = connections.join_next() => {}
                // 3. New clients.
                client = accept(self.listener.as_ref()) => {
                    self.counts.accepted.fetch_add(1, Ordering::AcqRel);
                    let open = Open::count(self.counts.clone());
                    let watching = watching.clone();
                    connections.spawn(async move {
                        serve(client, watching).await;
                        drop(open);
                    });
                }
            }
        }
    }

    /// Closes the port or binds it again, as the mode wants.
    async fn listen_or_not(&mut self) -> Result<()> {
        if self.state.mode == Mode::Refuse {
            self.listener = None;
            return Ok(());
        }
        let end = Instant::now() + BIND_LIMIT;
        while self.listener.is_none() {
            match TcpListener::bind(("127.0.0.1", self.lease.port())).await {
                Ok(listener) => self.listener = Some(listener),
                Err(error) if Instant::now() > end => return Err(error).context("bind the proxy's port again"),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
        Ok(())
    }
}

/// Waits for a client, for ever while there is no listener.
async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    loop {
        match listener {
            None => std::future::pending().await,
            Some(listener) => match listener.accept().await {
                Ok((client, _)) => return client,
                // The client has gone again, or files have run out for a moment.
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            },
        }
    }
}

/// Counts a connection for as long as it lives, even if its task is aborted.
struct Open(Arc<Counts>);

impl Open {
    fn count(counts: Arc<Counts>) -> Open {
        counts.open.fetch_add(1, Ordering::AcqRel);
        Open(counts)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}
