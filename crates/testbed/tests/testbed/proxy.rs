//! The proxy in front of an echo server.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use waljet_testbed::{Direction, Mode, Proxy};

/// How long to listen for silence.
const SILENCE: Duration = Duration::from_millis(80);

/// How a connection ended, as the server saw it.
#[derive(Debug, PartialEq)]
enum End {
    Closed,
    Reset,
}

/// Serves connections that get back what they send, and reports how each ended.
fn echo() -> (u16, mpsc::Receiver<End>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (ends, seen) = mpsc::sync_channel(16);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let ends = ends.clone();
            thread::spawn(move || {
                let mut buffer = [0; 4096];
                let end = loop {
                    match stream.read(&mut buffer) {
                        Ok(0) => break End::Closed,
                        Ok(count) => drop(stream.write_all(&buffer[..count])),
                        Err(_) => break End::Reset,
                    }
                };
                let _ = ends.send(end);
            });
        }
    });
    (port, seen)
}

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream
}

/// Sends a text and returns what has come back, at least a byte.
fn ask(stream: &mut TcpStream, text: &str) -> std::io::Result<String> {
    stream.write_all(text.as_bytes())?;
    answer(stream)
}

fn answer(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut buffer = [0; 4096];
    let count = stream.read(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..count]).into_owned())
}

fn is_silent(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    let error = answer(stream).err().map(|error| error.kind());
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    matches!(error, Some(ErrorKind::WouldBlock | ErrorKind::TimedOut))
}

fn is_reset(stream: &mut TcpStream) -> bool {
    // The reset is under way: it may meet the write or the read.
    (0..50).any(|_| {
        let kind = ask(stream, "x").err().map(|error| error.kind());
        matches!(kind, Some(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe))
    })
}

#[test]
fn it_passes_everything_on_and_counts() {
    let (upstream, ends) = echo();
    let proxy = Proxy::start(upstream).unwrap();
    let (mut one, mut two) = (connect(&proxy), connect(&proxy));
    assert_eq!(ask(&mut one, "one").unwrap(), "one");
    assert_eq!(ask(&mut two, "two").unwrap(), "two");
    assert_eq!((proxy.connections(), proxy.accepted()), (2, 2));
    drop(two);
    assert_eq!(ends.recv_timeout(Duration::from_secs(5)).unwrap(), End::Closed);
    assert_eq!(ask(&mut one, "one").unwrap(), "one");
}

#[test]
fn a_delay_is_added_each_way_and_does_not_add_up() {
    let proxy = Proxy::start(echo().0).unwrap();
    let mut stream = connect(&proxy);
    ask(&mut stream, "x").unwrap();
    proxy.set(Mode::Delay(Duration::from_millis(40))).unwrap();
    let started = Instant::now();
    for _ in 0..20 {
        stream.write_all(b"0123456789").unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    let mut all = [0; 200];
    stream.read_exact(&mut all).unwrap();
    let took = started.elapsed();
    assert!(took > Duration::from_millis(80) && took < Duration::from_millis(800), "{took:?}");
}

#[test]
fn what_is_stalled_arrives_afterwards() {
    let proxy = Proxy::start(echo().0).unwrap();
    let mut stream = connect(&proxy);
    for direction in [Direction::Both, Direction::ToClient, Direction::ToServer] {
        proxy.set(Mode::Stall(direction)).unwrap();
        stream.write_all(b"later").unwrap();
        assert!(is_silent(&mut stream), "{direction:?}");
        proxy.set(Mode::Pass).unwrap();
        assert_eq!(answer(&mut stream).unwrap(), "later");
    }
}

#[test]
fn a_cut_comes_after_exactly_so_many_bytes() {
    let proxy = Proxy::start(echo().0).unwrap();
    let mut stream = connect(&proxy);
    assert_eq!(ask(&mut stream, "before").unwrap(), "before");
    proxy.set(Mode::Cut { direction: Direction::ToClient, after: 5 }).unwrap();
    assert_eq!(ask(&mut stream, "abc").unwrap(), "abc");
    assert_eq!(ask(&mut stream, "defg").unwrap(), "de");
    assert!(matches!(answer(&mut stream).as_deref(), Ok("") | Err(_)));
    let mut next = connect(&proxy);
    assert_eq!(ask(&mut next, "abcdefg").unwrap(), "abcde");
}

#[test]
fn resets_hit_once_or_for_as_long_as_they_are_set() {
    let (upstream, ends) = echo();
    let proxy = Proxy::start(upstream).unwrap();
    let mut stream = connect(&proxy);
    ask(&mut stream, "x").unwrap();
    proxy.reset_connections().unwrap();
    assert!(is_reset(&mut stream));
    assert_eq!(ends.recv_timeout(Duration::from_secs(5)).unwrap(), End::Reset);
    let mut stream = connect(&proxy);
    ask(&mut stream, "x").unwrap();
    proxy.set(Mode::Reset).unwrap();
    assert!(is_reset(&mut stream) && is_reset(&mut connect(&proxy)));
    proxy.set(Mode::Pass).unwrap();
    assert_eq!(ask(&mut connect(&proxy), "x").unwrap(), "x");
}

#[test]
fn refused_clients_find_the_same_port_again() {
    let proxy = Proxy::start(echo().0).unwrap();
    let mut stream = connect(&proxy);
    ask(&mut stream, "x").unwrap();
    for _ in 0..3 {
        proxy.set(Mode::Refuse).unwrap();
        let refused = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert!(is_reset(&mut stream));
        proxy.set(Mode::Pass).unwrap();
        stream = connect(&proxy);
        assert_eq!(ask(&mut stream, "x").unwrap(), "x");
    }
}

#[test]
fn half_open_clients_hear_nothing_and_the_server_has_let_them_go() {
    let (upstream, ends) = echo();
    let proxy = Proxy::start(upstream).unwrap();
    let mut old = connect(&proxy);
    ask(&mut old, "x").unwrap();
    proxy.set(Mode::HalfOpen).unwrap();
    ends.recv_timeout(Duration::from_secs(5)).unwrap();
    let mut new = connect(&proxy);
    for stream in [&mut old, &mut new] {
        stream.write_all(b"anybody?").unwrap();
        assert!(is_silent(stream));
    }
    proxy.set(Mode::Pass).unwrap();
    assert!(is_reset(&mut old) && is_reset(&mut new));
    assert_eq!(ask(&mut connect(&proxy), "x").unwrap(), "x");
}

#[test]
fn a_stranded_server_keeps_the_old_connection_beside_the_new() {
    let (upstream, ends) = echo();
    let proxy = Proxy::start(upstream).unwrap();
    let mut old = connect(&proxy);
    ask(&mut old, "x").unwrap();
    proxy.strand_server().unwrap();
    assert!(is_reset(&mut old));
    assert_eq!(ask(&mut connect(&proxy), "x").unwrap(), "x");
    assert_eq!(ends.recv_timeout(Duration::from_secs(5)).unwrap(), End::Closed, "the new one");
    assert!(ends.recv_timeout(SILENCE).is_err(), "the old one looks alive to the server");
    assert_eq!(proxy.connections(), 1);
    proxy.reset_connections().unwrap();
    assert_eq!(ends.recv_timeout(Duration::from_secs(5)).unwrap(), End::Reset);
}

#[test]
fn another_server_can_take_the_place_of_the_first() {
    let proxy = Proxy::start(echo().0).unwrap();
    let mut stream = connect(&proxy);
    ask(&mut stream, "x").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    proxy.set_upstream(listener.local_addr().unwrap().port()).unwrap();
    assert_eq!(ask(&mut stream, "old").unwrap(), "old");
    let _new = connect(&proxy);
    listener.accept().unwrap();
}

#[test]
fn clients_of_a_server_that_is_down_are_reset() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let proxy = Proxy::start(port).unwrap();
    assert!(is_reset(&mut connect(&proxy)));
}
