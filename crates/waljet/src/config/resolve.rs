//! One value a key, out of the layers: flag, environment, file, preset, default.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use waljet_pipeline::{Code, Columns, Fault};

use super::key::{Key, Kind, later, nearest, variable};
use super::keys::KEYS;
use super::origin::{Given, Origin};
use super::value::{Raw, Value};
use crate::error::{CONFIG_CONFLICT, CONFIG_NOT_IN_THIS_VERSION, CONFIG_UNKNOWN_KEY, CONFIG_VALUE, SECRET_FILE, halt};

/// Reads the file of a secret.
pub(crate) type ReadFile<'a> = &'a dyn Fn(&Path) -> io::Result<String>;

/// The effective value of every key.
#[derive(Debug)]
pub(crate) struct Effective {
    /// In the order of the table of keys.
    pub(crate) entries: Vec<Entry>,
    /// Keys of which a value was given that is not one.
    pub(crate) faulty: BTreeSet<&'static str>,
}

/// One key with its effective value.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The key.
    pub(crate) key: &'static Key,
    /// The value; `None` where the key is unset.
    pub(crate) value: Option<Value>,
    /// Where the value comes from.
    pub(crate) origin: Origin,
    /// The file that a secret was read from.
    pub(crate) secret_file: Option<String>,
}

impl Effective {
    /// Returns the entry of a key.
    pub(crate) fn entry(&self, path: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key.path == path)
    }

    /// Returns the value of a key.
    pub(crate) fn value(&self, path: &str) -> Option<&Value> {
        self.entry(path).and_then(|entry| entry.value.as_ref())
    }

    /// Returns whether a value was given for a key, be it a faulty one.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.faulty.contains(path) || self.value(path).is_some()
    }
}

/// Chooses and reads the value of every key, and adds all faults to `faults`.
pub(crate) fn resolve(given: &[Given], read: ReadFile<'_>, faults: &mut Vec<Fault>) -> Effective {
    faults.extend(given.iter().filter(|given| !is_known(&given.path)).map(unknown_key));
    let mut effective = Effective { entries: Vec::new(), faulty: BTreeSet::new() };
    for key in KEYS {
        let entry = choose(key, given, read).unwrap_or_else(|fault| {
            faults.push(fault);
            effective.faulty.insert(key.path);
            None
        });
        effective.entries.push(entry.unwrap_or_else(|| default(key)));
    }
    apply_preset(&mut effective);
    effective
}

/// Returns whether a path is a key, or the `_file` twin of one.
fn is_known(path: &str) -> bool {
    Key::find(path).is_some() || twin_of(path).is_some()
}

/// Returns the key whose value is read from the file that `path` names.
fn twin_of(path: &str) -> Option<&'static Key> {
    path.strip_suffix("_file").and_then(Key::find).filter(|key| key.has_file_twin())
}

/// Says what a key that does not exist was probably meant to be.
fn unknown_key(given: &Given) -> Fault {
    if let Some(what) = later(&given.path) {
        let message = format!("{} ({}): {what} is not in this version", given.path, given.origin);
        return halt(CONFIG_NOT_IN_THIS_VERSION, message).hint(format!("remove {}", given.path));
    }
    let named = |path: &str| match given.origin {
        Origin::Environment(_) => variable(path),
        _ => path.to_owned(),
    };
    let shown = match &given.origin {
        Origin::Environment(name) => format!("environment variable {name}"),
        origin => format!("{} ({origin})", given.path),
    };
    let hint = nearest(&given.path).map_or_else(
        || "`waljet config reference` lists all keys".to_owned(),
        |near| format!("did you mean {}?", named(&near)),
    );
    halt(CONFIG_UNKNOWN_KEY, format!("{shown}: no such key")).hint(hint)
}

/// Takes the value of the highest layer that has one.
fn choose(key: &'static Key, given: &[Given], read: ReadFile<'_>) -> Result<Option<Entry>, Fault> {
    let ours = given
        .iter()
        .filter(|given| given.path == key.path || twin_of(&given.path).is_some_and(|twin| twin.path == key.path));
    let mut ours: Vec<&Given> = ours.collect();
    ours.sort_by(|a, b| b.origin.cmp(&a.origin));
    let Some(top) = ours.first() else { return Ok(None) };
    if let Some(other) = ours.get(1).filter(|other| other.origin.same_layer(&top.origin)) {
        let message = format!("{} ({}) and {} ({}) are both set", top.path, top.origin, other.path, other.origin);
        return Err(halt(CONFIG_CONFLICT, message).hint("remove one of them"));
    }
    let origin = top.origin.clone();
    if top.path == key.path {
        let value = parse(key, &top.raw, &origin)?;
        return Ok(Some(Entry { key, value: Some(value), origin, secret_file: None }));
    }
    let Some(Value::Text(file)) = Value::parse(Kind::Path, &top.raw) else {
        return Err(halt(
            CONFIG_VALUE,
            format!("{} ({origin}): expected the path of a file, found {}", top.path, top.raw.shown(Kind::Path)),
        ));
    };
    let secret = read_secret(&top.path, &origin, &file, read)?;
    let value = parse(key, &Raw::Untyped(secret), &origin)?;
    Ok(Some(Entry { key, value: Some(value), origin, secret_file: Some(file) }))
}

/// Reads a value of the key's kind, or says what was expected and what was found where.
fn parse(key: &'static Key, raw: &Raw, origin: &Origin) -> Result<Value, Fault> {
    if let Some(value) = Value::parse(key.kind, raw) {
        return Ok(value);
    }
    let found = raw.shown(key.kind);
    let fault = |code: Code, what: String| halt(code, format!("{} ({origin}): {what}", key.path));
    match (key.kind, raw) {
        (Kind::Choice { later, .. }, Raw::Text(text) | Raw::Untyped(text)) if later.contains(&text.as_str()) => {
            let text = format!("{found} is not in this version, which has {}", key.kind.expects());
            Err(fault(CONFIG_NOT_IN_THIS_VERSION, text))
        }
        _ => Err(fault(CONFIG_VALUE, format!("expected {}, found {found}", key.kind.expects()))),
    }
}

/// Reads a secret; a line break at the end, which editors and `echo` leave, is not part of it.
fn read_secret(path: &str, origin: &Origin, file: &str, read: ReadFile<'_>) -> Result<String, Fault> {
    let what = |what: &str| halt(SECRET_FILE, format!("{path} ({origin}): file {file:?} {what}"));
    let text = read(Path::new(file)).map_err(|error| {
        what("cannot be read").cause(error).hint("check the path, and that the user of this process may read the file")
    })?;
    let secret = text.trim_end_matches(['\r', '\n']);
    if secret.is_empty() { Err(what("is empty")) } else { Ok(secret.to_owned()) }
}

/// Makes the entry of a key that is given nowhere.
fn default(key: &'static Key) -> Entry {
    let value = key.default.and_then(|text| Value::parse(key.kind, &Raw::Untyped(text.to_owned())));
    Entry { key, value, origin: Origin::Default, secret_file: None }
}

/// Fills in the column names that the preset stands for.
fn apply_preset(effective: &mut Effective) {
    let Some(Value::Text(preset)) = effective.value("outbox.preset").cloned() else { return };
    let (columns, own) = if preset == "debezium" { (Columns::debezium(), false) } else { (Columns::waljet(), true) };
    let more = [("outbox.columns.sequence", "seq"), ("outbox.columns.xid", "xid")];
    let more = more.map(|(path, name)| (path, if own { name.to_owned() } else { String::new() }));
    for (path, name) in preset_columns(columns).into_iter().chain(more) {
        let entry = effective.entries.iter_mut().find(|entry| entry.key.path == path && entry.value.is_none());
        if let Some(entry) = entry {
            entry.value = Some(Value::Text(name));
            entry.origin = Origin::Preset(preset.clone());
        }
    }
}

/// Returns the column of each key; the empty text for one that the preset does not have.
fn preset_columns(columns: Columns) -> [(&'static str, String); 8] {
    [
        ("outbox.columns.id", columns.id),
        ("outbox.columns.aggregate_type", columns.aggregate_type),
        ("outbox.columns.aggregate_id", columns.aggregate_id),
        ("outbox.columns.event_type", columns.event_type),
        ("outbox.columns.payload", columns.payload),
        ("outbox.columns.headers", columns.headers.unwrap_or_default()),
        ("outbox.columns.tenant_id", columns.tenant_id.unwrap_or_default()),
        ("outbox.columns.schema_version", columns.schema_version.unwrap_or_default()),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use super::*;

    fn no_file(_: &Path) -> io::Result<String> {
        Err(io::Error::from(io::ErrorKind::NotFound))
    }

    fn in_file(path: &str, raw: Raw) -> Given {
        Given { path: path.to_owned(), raw, origin: Origin::File { path: "w.toml".into(), line: 3 } }
    }

    fn in_env(path: &str, value: &str) -> Given {
        Given { path: path.to_owned(), raw: Raw::Untyped(value.into()), origin: Origin::Environment(variable(path)) }
    }

    fn resolved(given: &[Given]) -> (Effective, Vec<String>) {
        let mut faults = Vec::new();
        let effective = resolve(given, &no_file, &mut faults);
        (effective, faults.iter().map(|fault| format!("{} [{}]", fault.message, fault.code)).collect())
    }

    #[test]
    fn every_default_is_a_value_of_its_key() {
        let (effective, faults) = resolved(&[]);
        assert_eq!(faults, Vec::<String>::new());
        for entry in &effective.entries {
            assert_eq!(
                entry.key.default.is_some(),
                entry.value.is_some() && entry.origin == Origin::Default,
                "{}",
                entry.key.path
            );
        }
    }

    #[test]
    fn a_flag_goes_before_the_environment_and_that_before_the_file() {
        let file = in_file("log.format", Raw::Text("text".into()));
        let env = in_env("log.format", "json");
        let flag =
            Given { path: "log.format".into(), raw: Raw::Untyped("auto".into()), origin: Origin::Flag("--log-format") };
        let shown = |given: &[Given]| {
            let (effective, _) = resolved(given);
            let entry = effective.entry("log.format").unwrap();
            format!("{} {}", entry.value.as_ref().unwrap(), entry.origin)
        };
        assert_eq!(shown(&[]), "\"auto\" default");
        assert_eq!(shown(std::slice::from_ref(&file)), "\"text\" w.toml:3");
        assert_eq!(shown(&[file.clone(), env.clone()]), "\"json\" environment WALJET_LOG__FORMAT");
        assert_eq!(shown(&[flag, file, env]), "\"auto\" flag --log-format");
    }

    #[test]
    fn all_faults_are_found_at_once() {
        let (effective, faults) = resolved(&[
            in_file("postgres.slot", Raw::Text("Bad-Slot".into())),
            in_file("postgres.slto", Raw::Text("x".into())),
            in_env("window.max_events", "0"),
            in_file("dead_letter.order", Raw::Text("park".into())),
            in_file("cloudevents", Raw::Other("a table")),
        ]);
        assert_eq!(
            faults,
            [
                "postgres.slto (w.toml:3): no such key [config-unknown-key]",
                "cloudevents (w.toml:3): CloudEvents is not in this version [config-not-in-this-version]",
                "postgres.slot (w.toml:3): expected 1 to 63 lower-case letters, digits and underscores, found \"Bad-Slot\" [config-value]",
                "window.max_events (environment WALJET_WINDOW__MAX_EVENTS): expected a whole number from 1 to 4096, found \"0\" [config-value]",
                "dead_letter.order (w.toml:3): \"park\" is not in this version, which has \"halt\" [config-not-in-this-version]",
            ]
        );
        assert!(effective.is_set("postgres.slot"));
    }

    #[test]
    fn an_unknown_variable_is_answered_with_a_variable() {
        let fault = unknown_key(&in_env("postgres_url", "x"));
        assert_eq!(fault.message, "environment variable WALJET_POSTGRES_URL: no such key");
        assert_eq!(fault.hint.as_deref(), Some("did you mean WALJET_POSTGRES__URL?"));
    }

    #[test]
    fn a_secret_is_read_from_the_file_that_its_twin_names_without_the_line_break() {
        let read =
            |path: &Path| Ok(if path == Path::new("/run/pw") { "hunter2\r\n".to_owned() } else { "\n".to_owned() });
        let mut faults = Vec::new();
        let given =
            [in_file("nats.password_file", Raw::Text("/run/pw".into())), in_env("nats.token_file", "/run/empty")];
        let effective = resolve(&given, &read, &mut faults);
        let Some(Value::Secret(secret)) = effective.value("nats.password") else { unreachable!("a secret") };
        assert_eq!(secret.expose(), "hunter2");
        assert_eq!(faults.len(), 1);
        assert_eq!(
            faults[0].message,
            "nats.token_file (environment WALJET_NATS__TOKEN_FILE): file \"/run/empty\" is empty"
        );
    }

    #[test]
    fn a_secret_and_its_file_in_one_layer_are_refused_and_in_two_the_higher_wins() {
        let key = in_file("nats.password", Raw::Text("a".into()));
        let (_, faults) = resolved(&[key.clone(), in_file("nats.password_file", Raw::Text("/x".into()))]);
        assert_eq!(
            faults,
            ["nats.password (w.toml:3) and nats.password_file (w.toml:3) are both set [config-conflict]"]
        );
        let (effective, faults) =
            resolved(&[in_env("nats.password", "b"), in_file("nats.password_file", Raw::Text("/x".into()))]);
        assert_eq!(faults, Vec::<String>::new());
        assert_eq!(effective.value("nats.password"), Some(&Value::Secret(crate::secret::Secret::new("b"))));
        assert!(matches!(resolved(&[key]).0.value("nats.password"), Some(Value::Secret(_))));
    }

    #[test]
    fn a_preset_names_the_columns_that_are_not_set() {
        let (effective, _) = resolved(&[
            in_file("outbox.preset", Raw::Text("debezium".into())),
            in_file("outbox.columns.payload", Raw::Text("body".into())),
        ]);
        let shown =
            |path: &str| format!("{} {}", effective.value(path).unwrap(), effective.entry(path).unwrap().origin);
        assert_eq!(shown("outbox.columns.event_type"), "\"type\" preset debezium");
        assert_eq!(shown("outbox.columns.payload"), "\"body\" w.toml:3");
        assert_eq!(shown("outbox.columns.headers"), "\"\" preset debezium");
    }
}
