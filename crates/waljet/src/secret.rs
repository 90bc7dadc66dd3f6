//! Values that are never printed.

use std::fmt;

/// What stands in place of a secret wherever one would be printed.
pub(crate) const HIDDEN: &str = "<hidden>";

/// A text that prints as [`HIDDEN`].
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    /// Hides `text` from all printing.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text, for the one who hands it to a server.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}

/// Returns `url` with everything hidden that may be a secret: the password of a URL, or the only part
/// before the `@` where it is a token; `password=` among the parameters; in a connection string of the
/// form `key=value` the value of `password`.
pub(crate) fn redact_url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return if url.contains('=') { redact_conninfo(url) } else { redact_authority(url, "") };
    };
    redact_authority(rest, &format!("{scheme}://"))
}

/// Hides the password of `user:password@host/path?query`.
fn redact_authority(rest: &str, scheme: &str) -> String {
    let (before_query, query) = rest.split_once('?').map_or((rest, None), |(before, query)| (before, Some(query)));
    // The last @ ends the user part: a password that was not percent-encoded may hold one, and a slash too.
    let mut shown = match before_query.rsplit_once('@') {
        None => format!("{scheme}{before_query}"),
        Some((user, host)) => match user.split_once(':') {
            Some((name, _)) => format!("{scheme}{name}:{HIDDEN}@{host}"),
            // NATS takes a lone part as a token; PostgreSQL takes it as a user, which is no secret.
            None if scheme.starts_with("postgres") => format!("{scheme}{user}@{host}"),
            None => format!("{scheme}{HIDDEN}@{host}"),
        },
    };
    if let Some(query) = query {
        let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
            Some((key, _)) if key.to_ascii_lowercase().contains("password") => format!("{key}={HIDDEN}"),
            _ => parameter.to_owned(),
        });
        shown.push('?');
        shown.push_str(&parameters.collect::<Vec<_>>().join("&"));
    }
    shown
}

/// Hides the value of every key that has `password` in its name, quoted or not.
fn redact_conninfo(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some((key, after)) = rest.split_once('=') {
        let value_start = after.len() - after.trim_start().len();
        let value = &after[value_start..];
        let end = value_end(value);
        shown.push_str(key);
        shown.push('=');
        let secret = key.to_ascii_lowercase().contains("password");
        shown.push_str(if secret { HIDDEN } else { &value[..end] });
        rest = &value[end..];
    }
    shown.push_str(rest);
    shown
}

/// Returns where the first value of a connection string ends: at white space outside of single quotes.
fn value_end(value: &str) -> usize {
    let (mut quoted, mut escaped) = (false, false);
    for (at, c) in value.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\'' => quoted = !quoted,
            c if c.is_whitespace() && !quoted => return at,
            _ => {}
        }
    }
    value.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_prints_as_hidden() {
        let secret = Secret::new("hunter2");
        assert_eq!(format!("{secret} {secret:?}"), "<hidden> <hidden>");
        assert_eq!(secret.expose(), "hunter2");
    }

    #[test]
    fn passwords_and_tokens_of_urls_are_hidden() {
        let cases = [
            ("postgres://app:pw@db:5432/x?sslmode=require", "postgres://app:<hidden>@db:5432/x?sslmode=require"),
            ("postgres://app@db/x", "postgres://app@db/x"),
            ("postgres://app:p@w/d@db/x", "postgres://app:<hidden>@db/x"),
            ("postgresql://db/x?user=a&password=pw", "postgresql://db/x?user=a&password=<hidden>"),
            ("nats://tok@host:4222", "nats://<hidden>@host:4222"),
            ("tls://u:p@host", "tls://u:<hidden>@host"),
            ("u:p@host:4222", "u:<hidden>@host:4222"),
            ("host:4222", "host:4222"),
            ("host=db password='p w' user=x", "host=db password=<hidden> user=x"),
            ("host=db password = p\\ w user=x", "host=db password =<hidden> user=x"),
            ("host=db sslpassword=abc", "host=db sslpassword=<hidden>"),
        ];
        for (url, shown) in cases {
            assert_eq!(redact_url(url), shown);
        }
    }
}
