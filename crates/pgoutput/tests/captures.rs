//! What real servers sent decodes, and encodes to the same bytes.
//!
//! Each file in `captures` is a connection: its options, then one `CopyData` payload a line after the
//! name of the message in it. A file that is added there is tested with no further change.

#![allow(clippy::unwrap_used, reason = "a capture that cannot be read should stop the test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use waljet_pgoutput::{
    Decoder, Kind, Message, Oid, ProtocolVersion, Relation, ReplicationMessage, Streaming, Tuple, Type, Update, Value,
};

/// A connection's options and payloads.
struct Capture {
    file: String,
    version: ProtocolVersion,
    streaming: Streaming,
    payloads: Vec<(String, Bytes)>,
}

impl Capture {
    /// Reads all files.
    fn all() -> Vec<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures");
        let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        files.map(|path| Self::parse(path.display().to_string(), &fs::read_to_string(&path).unwrap())).collect()
    }

    fn parse(file: String, text: &str) -> Self {
        let mut lines = text.lines().filter(|line| !line.starts_with('#'));
        let options: Vec<&str> = lines.next().unwrap().split(' ').collect();
        let &["proto_version", version, "streaming", streaming] = options.as_slice() else {
            unreachable!("{file} starts with other options")
        };
        let version = ProtocolVersion::ALL.into_iter().find(|known| known.to_string() == version).unwrap();
        let all = [Streaming::Off, Streaming::On, Streaming::Parallel];
        let streaming = all.into_iter().find(|known| known.as_str() == streaming).unwrap();
        let payloads =
            lines.map(|line| line.split_once(": ").unwrap()).map(|(name, hex)| (name.to_owned(), bytes(hex))).collect();
        Self { file, version, streaming, payloads }
    }

    /// Decodes all payloads.
    fn messages(&self) -> Vec<Message> {
        let mut decoder = Decoder::new(self.version, self.streaming);
        let mut messages = Vec::new();
        for (number, (name, payload)) in self.payloads.iter().enumerate() {
            let place = format!("payload {number} of {}", self.file);
            let replication = ReplicationMessage::decode(payload.clone()).expect(&place);
            let mut encoded = BytesMut::new();
            replication.encode(&mut encoded);
            assert_eq!(encoded, payload, "{place}");
            let ReplicationMessage::XLogData(xlog_data) = replication else {
                assert_eq!(name, "Primary keepalive", "{place}");
                continue;
            };
            let message = decoder.decode(xlog_data.data.clone()).expect(&place);
            assert_eq!(message.kind().name(), name, "{place}");
            assert_eq!(message.to_bytes().unwrap(), xlog_data.data, "{place}");
            messages.push(message);
        }
        messages
    }
}

fn bytes(hex: &str) -> Bytes {
    let digits: Vec<u8> = hex.chars().map(|digit| u8::try_from(digit.to_digit(16).unwrap()).unwrap()).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Decodes the one file whose name contains `part`.
fn messages_of(part: &str) -> Vec<Message> {
    Capture::all().iter().find(|capture| capture.file.contains(part)).unwrap().messages()
}

#[test]
fn every_message_of_a_server_encodes_to_the_same_bytes() {
    let mut kinds = BTreeSet::new();
    for capture in Capture::all() {
        kinds.extend(capture.messages().iter().map(|message| message.kind().byte()));
    }
    assert_eq!(kinds, Kind::ALL.map(Kind::byte).into(), "some kind is in no capture");
}

#[test]
fn a_type_that_is_not_built_in_comes_before_the_relation_that_uses_it() {
    let messages = messages_of("postgres-15-version-1");
    let is_mood = |message: &Message| matches!(message, Message::Type(Type { name, .. }) if name == "mood");
    let typ = messages.iter().position(is_mood).unwrap();
    let Message::Type(Type { oid, schema, .. }) = &messages[typ] else { unreachable!() };
    assert_eq!(schema, "public");
    let uses = |message: &Message| {
        matches!(message, Message::Relation(Relation { columns, .. })
            if columns.iter().any(|column| column.name == "mood" && column.type_oid == *oid))
    };
    assert!(typ < messages.iter().position(uses).unwrap());
}

#[test]
fn a_domain_has_the_name_of_its_base_type_in_a_schema_that_is_left_out() {
    let messages = messages_of("postgres-15-version-1");
    let mut types = messages.iter().filter_map(|message| match message {
        Message::Type(typ) if typ.name == "text" => Some(typ),
        _ => None,
    });
    let typ = types.next().unwrap();
    assert_ne!(typ.oid, Oid(25), "a domain's own oid");
    assert_eq!(typ.schema, "");
    assert_eq!(typ.schema_name(), b"pg_catalog");
}

#[test]
fn a_toasted_value_that_did_not_change_is_told_apart_from_null() {
    let messages = messages_of("postgres-15-version-1");
    let first_update = messages.iter().find_map(|message| match message {
        Message::Update(Update { new: Tuple(values), .. }) => Some(values),
        _ => None,
    });
    let expected = [
        Value::Text("1".into()),
        Value::Text("uno".into()),
        Value::Text("happy".into()),
        Value::UnchangedToast,
        Value::Text("1.50".into()),
        Value::Text("\\x00ff".into()),
    ];
    assert_eq!(first_update.unwrap()[..], expected);
}

#[test]
fn an_enum_keeps_its_label_in_binary_form() {
    let messages = messages_of("postgres-18-version-1-binary");
    let first_update = messages.iter().find_map(|message| match message {
        Message::Update(update) => Some(&update.new),
        _ => None,
    });
    assert_eq!(first_update.unwrap().get(0), Some(&Value::Binary(Bytes::from_static(&[0, 0, 0, 1]))));
    assert_eq!(first_update.unwrap().get(2), Some(&Value::Binary("happy".into())));
}

#[test]
fn only_parallel_streaming_tells_where_a_transaction_was_aborted() {
    for (file, told) in [("version-2", false), ("version-3", false), ("version-4", true)] {
        for message in messages_of(file) {
            if let Message::StreamAbort(abort) = message {
                assert_eq!(abort.abort.is_some(), told, "{file}");
            }
        }
    }
}
