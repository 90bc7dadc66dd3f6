//! The replication connection before the stream: framing, start-up, authentication, simple queries.
//!
//! ```text
//! every message   tag (1)  length (4, counts itself)  payload
//! start-up        -> StartupMessage   <- R… (authentication)  S* K  Z
//! query           -> Q                <- T D* C  Z            or E Z
//! stream          -> Q                <- W, then CopyData both ways
//! ```

use std::time::Duration;

use bytes::{Buf, BytesMut};
use pgwire_replication::PgWireError;
use pgwire_replication::protocol::BackendMessage;
use pgwire_replication::protocol::framing::{
    MAX_MESSAGE_SIZE, write_password_message, write_query, write_startup_message,
};
use pgwire_replication::protocol::{messages::auth, parse_auth_request};
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{self, ScramSha256};
use postgres_protocol::message::backend::Header;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::time::timeout;
use tokio_postgres::config::ChannelBinding;
use waljet_pipeline::{Action, Fault};

use crate::connect::ConnectOptions;
use crate::error::{self, AUTHENTICATION, AUTHENTICATION_METHOD, ServerError};

/// How long a query may take that the server answers from memory.
pub(crate) const QUERY_TIMEOUT: Duration = Duration::from_secs(30);

/// Room that is made for one read. A payload keeps its whole block alive, so larger blocks would cost
/// memory when few of the received messages are kept.
const READ_BLOCK: usize = 64 * 1024;

/// Version 3.0 of the protocol, as an `Int32`.
const PROTOCOL_VERSION: i32 = 196_608;

/// Settings that change how values are written, or whether warnings come; a role's or a database's own must not
/// reach us.
pub(crate) const PINNED: &[(&str, &str)] = &[
    ("DateStyle", "ISO"),
    ("IntervalStyle", "postgres"),
    ("TimeZone", "UTC"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    // From 18, the only word about a publication that is missing at a place in the WAL is a warning.
    ("client_min_messages", "warning"),
];

/// Received bytes, and the messages in them.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    bytes: BytesMut,
}

impl Frames {
    /// Reads what is there into the buffer; 0 is the end.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost by a cancelled call.
    pub(crate) async fn fill<R: AsyncRead + Unpin>(&mut self, stream: &mut R) -> std::io::Result<usize> {
        let wanted = match Header::parse(&self.bytes) {
            // A large message gets its room at once rather than block by block.
            Ok(Some(header)) => usize::try_from(header.len()).unwrap_or(0) + 1,
            _ => 0,
        };
        let missing = wanted.min(MAX_MESSAGE_SIZE).saturating_sub(self.bytes.len());
        // What is left of a block is used up first, unless the message would not fit.
        if self.bytes.capacity() - self.bytes.len() < missing.max(READ_BLOCK / 16) {
            self.bytes.reserve(missing.max(READ_BLOCK));
        }
        stream.read_buf(&mut self.bytes).await
    }

    /// Splits off the next message, if it is complete. Its payload is a slice of what was received.
    pub(crate) fn next(&mut self) -> Result<Option<BackendMessage>, Fault> {
        let Some(header) = Header::parse(&self.bytes).map_err(error::protocol)? else { return Ok(None) };
        let len = usize::try_from(header.len()).map_err(error::protocol)?;
        if len > MAX_MESSAGE_SIZE {
            return Err(error::protocol(format_args!("it announced a message of {len} bytes")));
        }
        if self.bytes.len() <= len {
            return Ok(None);
        }
        let mut payload = self.bytes.split_to(len + 1);
        payload.advance(5);
        Ok(Some(BackendMessage { tag: header.tag(), payload: payload.freeze() }))
    }
}

/// A replication connection that is not streaming yet.
#[derive(Debug)]
pub(crate) struct Wire<S> {
    pub(crate) stream: S,
    pub(crate) frames: Frames,
}

/// One row of text values.
pub(crate) type TextRow = Vec<Option<String>>;

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    /// Starts a session with `replication=database`, up to the first `ReadyForQuery`.
    pub(crate) async fn start(
        stream: S,
        options: &ConnectOptions,
        end_point: Option<Vec<u8>>,
        limit: Duration,
    ) -> Result<Self, Fault> {
        let mut wire = Self { stream, frames: Frames::default() };
        timeout(limit, wire.start_up(options, end_point))
            .await
            .map_err(|_| error::timed_out("start a replication session", limit))??;
        Ok(wire)
    }

    async fn start_up(&mut self, options: &ConnectOptions, end_point: Option<Vec<u8>>) -> Result<(), Fault> {
        let mut parameters = vec![
            ("user", options.user()),
            ("database", options.dbname()),
            ("replication", "database"),
            ("application_name", options.application_name()),
            ("client_encoding", "UTF8"),
        ];
        parameters.extend_from_slice(PINNED);
        if let Some(options) = options.config().get_options() {
            parameters.push(("options", options));
        }
        write_startup_message(&mut self.stream, PROTOCOL_VERSION, &parameters).await.map_err(unwritten)?;
        self.authenticate(options, end_point).await?;
        loop {
            let message = self.read("start a replication session").await?;
            match message.tag {
                b'Z' => return Ok(()),
                b'K' | b'S' | b'N' | b'v' => {}
                tag => return Err(unexpected(tag)),
            }
        }
    }

    async fn authenticate(&mut self, options: &ConnectOptions, end_point: Option<Vec<u8>>) -> Result<(), Fault> {
        let password = options.password()?;
        let known = || {
            password.as_deref().ok_or_else(|| {
                Fault::new(
                    AUTHENTICATION,
                    Action::Halt,
                    format!("the server asks for a password of {}, and there is none", options.user()),
                )
                .hint("set a password or a password file in [postgres]")
            })
        };
        let binding = options.channel_binding();
        let mut scram: Option<ScramSha256> = None;
        let mut bound = false;
        loop {
            let message = self.read("authenticate").await?;
            if message.tag != b'R' {
                // NegotiateProtocolVersion may come first.
                if matches!(message.tag, b'v' | b'N') {
                    continue;
                }
                return Err(unexpected(message.tag));
            }
            let (method, data) = parse_auth_request(&message.payload).map_err(error::protocol)?;
            if binding == ChannelBinding::Require
                && !bound
                && matches!(method, auth::OK | auth::CLEARTEXT_PASSWORD | auth::MD5_PASSWORD)
            {
                return Err(Fault::new(
                    AUTHENTICATION,
                    Action::Halt,
                    "channel_binding=require, and the server did not bind the password to the channel",
                )
                .hint("use sslmode=verify-full and a scram-sha-256 line in pg_hba.conf"));
            }
            match method {
                auth::OK => return Ok(()),
                auth::CLEARTEXT_PASSWORD => self.send_password(known()?).await?,
                auth::MD5_PASSWORD => {
                    let salt = data
                        .first_chunk::<4>()
                        .ok_or_else(|| error::protocol("it sent an md5 salt that is too short"))?;
                    let hash = md5_hash(options.user().as_bytes(), known()?, *salt);
                    self.send_password(hash.as_bytes()).await?;
                }
                auth::SASL => {
                    let (mechanism, channel) = choose_mechanism(data, binding, end_point.clone())?;
                    bound = mechanism == sasl::SCRAM_SHA_256_PLUS;
                    let client = ScramSha256::new(known()?, channel);
                    let mut payload = Vec::from(mechanism.as_bytes());
                    payload.push(0);
                    payload.extend(u32::try_from(client.message().len()).map_err(error::protocol)?.to_be_bytes());
                    payload.extend(client.message());
                    write_password_message(&mut self.stream, &payload).await.map_err(unwritten)?;
                    scram = Some(client);
                }
                auth::SASL_CONTINUE => {
                    let client = scram.as_mut().ok_or_else(|| unexpected(b'R'))?;
                    client.update(data).map_err(refused)?;
                    write_password_message(&mut self.stream, client.message()).await.map_err(unwritten)?;
                }
                auth::SASL_FINAL => scram.as_mut().ok_or_else(|| unexpected(b'R'))?.finish(data).map_err(refused)?,
                method => return Err(method_fault(method)),
            }
        }
    }

    async fn send_password(&mut self, password: &[u8]) -> Result<(), Fault> {
        let mut payload = password.to_vec();
        payload.push(0);
        write_password_message(&mut self.stream, &payload).await.map_err(unwritten)
    }

    /// Runs a command and returns its rows.
    pub(crate) async fn query(&mut self, context: &str, sql: &str) -> Result<Vec<TextRow>, Fault> {
        self.query_within(context, sql, QUERY_TIMEOUT).await
    }

    /// As [`query`](Self::query), with a limit of its own.
    pub(crate) async fn query_within(
        &mut self,
        context: &str,
        sql: &str,
        limit: Duration,
    ) -> Result<Vec<TextRow>, Fault> {
        let run = async {
            write_query(&mut self.stream, sql).await.map_err(unwritten)?;
            let mut rows = Vec::new();
            loop {
                let message = self.read(context).await?;
                match message.tag {
                    b'D' => rows.push(
                        data_row(&message.payload).ok_or_else(|| error::protocol("it sent a row that ends early"))?,
                    ),
                    b'Z' => return Ok(rows),
                    b'T' | b'C' | b'S' | b'N' => {}
                    tag => return Err(unexpected(tag)),
                }
            }
        };
        timeout(limit, run).await.map_err(|_| error::timed_out(context, limit))?
    }

    /// Runs `START_REPLICATION`, up to the server's word that the stream begins.
    pub(crate) async fn copy_both(&mut self, context: &str, sql: &str) -> Result<(), Fault> {
        let run = async {
            write_query(&mut self.stream, sql).await.map_err(unwritten)?;
            loop {
                let message = self.read(context).await?;
                match message.tag {
                    b'W' => return Ok(()),
                    b'S' | b'N' => {}
                    tag => return Err(unexpected(tag)),
                }
            }
        };
        timeout(QUERY_TIMEOUT, run).await.map_err(|_| error::timed_out(context, QUERY_TIMEOUT))?
    }

    /// Waits for one message; an `ErrorResponse` becomes a fault.
    async fn read(&mut self, context: &str) -> Result<BackendMessage, Fault> {
        loop {
            if let Some(message) = self.frames.next()? {
                if message.tag == b'E' {
                    return Err(ServerError::parse(&message.payload).into_fault(context));
                }
                return Ok(message);
            }
            let read = self.frames.fill(&mut self.stream).await.map_err(|error| error::lost(context, error))?;
            if read == 0 {
                return Err(error::lost(context, std::io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

fn choose_mechanism(
    offered: &[u8],
    wanted: ChannelBinding,
    end_point: Option<Vec<u8>>,
) -> Result<(&'static str, sasl::ChannelBinding), Fault> {
    let offers = |name: &str| offered.split(|byte| *byte == 0).any(|mechanism| mechanism == name.as_bytes());
    let end_point = end_point.filter(|_| wanted != ChannelBinding::Disable);
    match end_point {
        Some(digest) if offers(sasl::SCRAM_SHA_256_PLUS) => {
            Ok((sasl::SCRAM_SHA_256_PLUS, sasl::ChannelBinding::tls_server_end_point(digest)))
        }
        _ if wanted == ChannelBinding::Require => Err(Fault::new(
            AUTHENTICATION,
            Action::Halt,
            "channel_binding=require, and the server or its certificate does not allow channel binding",
        )),
        // Telling the server that we could have bound the channel lets it notice somebody in between who
        // took its offer away.
        Some(_) if offers(sasl::SCRAM_SHA_256) => Ok((sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested())),
        None if offers(sasl::SCRAM_SHA_256) => Ok((sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported())),
        _ => {
            let names = String::from_utf8_lossy(offered).replace('\0', " ");
            Err(Fault::new(
                AUTHENTICATION_METHOD,
                Action::Halt,
                format!("expected SCRAM-SHA-256 to be offered, found {}", names.trim()),
            ))
        }
    }
}

fn method_fault(method: i32) -> Fault {
    let name = match method {
        2 => "Kerberos V5",
        6 => "SCM credentials",
        7 | 8 => "GSSAPI",
        9 => "SSPI",
        _ => "an authentication method that waljet does not know",
    };
    Fault::new(AUTHENTICATION_METHOD, Action::Halt, format!("the server asks for {name}"))
        .hint("use scram-sha-256 or cert in the pg_hba.conf line for this role")
}

fn data_row(payload: &[u8]) -> Option<TextRow> {
    let mut rest = payload;
    let count = rest.try_get_u16().ok()?;
    let mut row = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let Ok(len) = usize::try_from(rest.try_get_i32().ok()?) else {
            row.push(None);
            continue;
        };
        let (value, tail) = rest.split_at_checked(len)?;
        row.push(Some(String::from_utf8_lossy(value).into_owned()));
        rest = tail;
    }
    Some(row)
}

/// Makes the fault of a message that could not be written.
pub(crate) fn unwritten(error: PgWireError) -> Fault {
    error::lost("write to the server", std::io::Error::other(error))
}

fn refused(error: std::io::Error) -> Fault {
    Fault::new(AUTHENTICATION, Action::Halt, "could not authenticate by SCRAM").cause(error)
}

fn unexpected(tag: u8) -> Fault {
    error::protocol(format_args!("it sent a message of type {:?}", char::from(tag)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a script that does not match fails the test")]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    /// Runs the start-up against a scripted server, which gets the password messages and answers in turn.
    async fn start(url: &str, answers: &'static [&'static [u8]]) -> Result<(), Fault> {
        let (client, mut server) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            let mut buffer = vec![0; 4096];
            for answer in answers {
                let _ = server.read(&mut buffer).await;
                let _ = server.write_all(answer).await;
            }
            // Kept open: what is missing shows as a time-out, not as a lost connection.
            std::future::pending::<()>().await;
        });
        let options = ConnectOptions::parse(url).unwrap();
        Wire::start(client, &options, None, Duration::from_secs(1)).await.map(|_| ())
    }

    const OK: &[u8] = b"R\0\0\0\x08\0\0\0\0S\0\0\0\x08a\0b\0K\0\0\0\x0c\0\0\0\x01\0\0\0\x02Z\0\0\0\x05I";
    const PASSWORD: &[u8] = b"R\0\0\0\x08\0\0\0\x03";
    const POOLER_ERROR: &[u8] = b"E\0\0\0\x3fSFATAL\0C08P01\0Munsupported startup parameter: replication\0\0";

    #[tokio::test(start_paused = true)]
    async fn a_session_starts_with_and_without_a_password() {
        assert!(start("host=h user=u", &[OK]).await.is_ok());
        assert!(start("host=h user=u password=p", &[PASSWORD, OK]).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn each_way_to_fail_has_its_code() {
        let why = async |url: &str, answers| start(url, answers).await.unwrap_err().code;
        assert_eq!(why("host=h user=u", &[PASSWORD]).await, AUTHENTICATION);
        assert_eq!(why("host=h user=u password=p channel_binding=require", &[OK]).await, AUTHENTICATION);
        assert_eq!(why("host=h user=u", &[b"R\0\0\0\x08\0\0\0\x07"]).await, AUTHENTICATION_METHOD);
        let sasl: &[u8] = b"R\0\0\0\x0f\0\0\0\x0aFOO\0\0\0\0";
        assert_eq!(why("host=h user=u password=p", Box::leak(Box::new([sasl]))).await, AUTHENTICATION_METHOD);
        assert_eq!(why("host=h user=u", &[POOLER_ERROR]).await, error::POOLER);
        assert_eq!(why("host=h user=u", &[b"T\0\0\0\x04"]).await, error::PROTOCOL);
        assert_eq!(why("host=h user=u", &[b"R\0\0\0\x02"]).await, error::PROTOCOL);
        assert_eq!(why("host=h user=u", &[]).await, error::SILENT);
    }

    #[test]
    fn a_row_that_ends_early_is_no_row() {
        let whole = b"\0\x02\0\0\0\x01a\xff\xff\xff\xff";
        assert_eq!(data_row(whole), Some(vec![Some("a".to_owned()), None]));
        for end in 0..whole.len() {
            assert_eq!(data_row(&whole[..end]), None, "{end}");
        }
    }
}
