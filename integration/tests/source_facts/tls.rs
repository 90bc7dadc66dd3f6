//! TLS and passwords. Only servers built with TLS can show this; the newest of the two that was is taken.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_integration::{commit_singly, options};
use waljet_testbed::{Pair, Rig, connect, wait_for};

use super::LIMIT;

/// The name in the server's certificate.
const NAME: &str = "db.waljet.test";

/// A password that has to be escaped in a URL, in SQL, in TOML and in a shell.
const PASSWORD: &str = "p@ss:w/ö r%d?#'\"\\$&";

/// The same in a URL.
const PASSWORD_IN_URL: &str = "p%40ss%3Aw%2F%C3%B6%20r%25d%3F%23%27%22%5C%24%26";

/// A folder with an authority (`ca.crt`), another one (`other.crt`), and a certificate for [`NAME`] of the first.
fn certificates(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).context("make a folder for certificates")?;
    let openssl = |line: &str| -> Result<()> {
        let output = Command::new("openssl").args(line.split(' ')).current_dir(dir).output();
        let output = output.context("run openssl, which this test makes its certificates with")?;
        ensure!(output.status.success(), "openssl {line}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!("req -x509 {key} -keyout ca.key -out ca.crt -days 2 -subj /CN=authority"))?;
    openssl(&format!("req -x509 {key} -keyout other.key -out other.crt -days 2 -subj /CN=other"))?;
    openssl(&format!("req {key} -keyout server.key -out server.csr -subj /CN={NAME}"))?;
    std::fs::write(dir.join("san"), format!("subjectAltName=DNS:{NAME}\n"))?;
    openssl("x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 2 -extfile san")
}

/// Starts a rig whose role `relay` needs TLS and a password, and the rest neither.
async fn with_tls(dir: &Path) -> Result<Rig> {
    let pairs = [Pair::newest()?, Pair::oldest()?];
    let mut pairs = pairs.iter().filter(|pair| pair.postgres_has_tls().unwrap_or(false));
    let pair = pairs.next().context("neither PostgreSQL was built with TLS")?;
    certificates(dir)?;
    let mut options = options(pair)?;
    options.postgres.settings.push(("ssl".into(), "on".into()));
    for name in ["server.key", "server.crt"] {
        options.postgres.files.push((name.into(), std::fs::read(dir.join(name))?));
    }
    options.postgres.hba = ["hostssl all relay 127.0.0.1/32 scram-sha-256", "host all relay 127.0.0.1/32 reject"]
        .map(str::to_owned)
        .into();
    let rig = Rig::start(options).await?;
    rig.init().await?;
    let client = connect(&rig.postgres.url()).await?;
    let password = PASSWORD.replace('\'', "''");
    client.batch_execute(&format!("CREATE ROLE relay LOGIN REPLICATION PASSWORD '{password}'")).await?;
    Ok(rig)
}

/// Sets how the relay reaches the server: by which name, how far verified, by whose word.
fn reach(rig: &mut Rig, host: &str, mode: &str, authority: &Path) -> Result<()> {
    let port = rig.postgres.port();
    // The address is given, so that no name has to be looked up.
    rig.set("postgres.url", &format!("host={host} hostaddr=127.0.0.1 port={port} user=relay dbname=postgres"))?;
    rig.set("postgres.password", PASSWORD)?;
    rig.set("postgres.sslmode", mode)?;
    rig.set("postgres.sslrootcert", &authority.display().to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_full_wants_the_name_and_verify_ca_only_the_authority() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("waljet-certificates-{}", std::process::id()));
    let result = modes(&dir).await;
    std::fs::remove_dir_all(&dir).context("remove the certificates")?;
    result
}

async fn modes(dir: &Path) -> Result<()> {
    let mut rig = with_tls(dir).await?;
    let (ours, other) = (dir.join("ca.crt"), dir.join("other.crt"));
    let cases = [
        (NAME, "verify-full", &ours, true),
        ("db2.waljet.test", "verify-full", &ours, false),
        (NAME, "verify-full", &other, false),
        ("db2.waljet.test", "verify-ca", &ours, true),
        (NAME, "verify-ca", &other, false),
        (NAME, "disable", &ours, false),
    ];
    for (host, mode, authority, passes) in cases {
        reach(&mut rig, host, mode, authority)?;
        let output = rig.waljet(&["check"]).await?;
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success(), passes, "{host} {mode} {authority:?}: {said}");
        ensure!(passes || mode == "disable" || said.contains("postgres-tls"), "{host} {mode}: {said}");
        ensure!(!said.contains(PASSWORD));
    }

    // Fails closed: a relay that cannot verify ends with the check, and no session was opened.
    reach(&mut rig, "db2.waljet.test", "verify-full", &ours)?;
    rig.start_relay()?;
    let exit = rig.relay()?.wait(Duration::from_secs(10))?;
    assert_eq!(exit.code(), Some(3), "{}", rig.log());

    for (host, mode) in [(NAME, "verify-full"), ("db2.waljet.test", "verify-ca")] {
        reach(&mut rig, host, mode, &ours)?;
        rig.start_relay()?;
        streams_encrypted(&rig).await?;
        rig.relay()?.kill()?;
    }
    // The password in the URL, by percent-encoding.
    let (port, authority) = (rig.postgres.port(), ours.display());
    let url = format!(
        "postgres://relay:{PASSWORD_IN_URL}@127.0.0.1:{port}/postgres?sslmode=verify-ca&sslrootcert={authority}"
    );
    let config = format!("[postgres]\nurl = {url:?}\n[nats]\nurl = {:?}\n", rig.nats.url());
    let path = dir.join("url.toml");
    std::fs::write(&path, config)?;
    let output = rig.waljet(&["check", "--config", &path.display().to_string()]).await;
    let output = output.context("check")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{said}");
    ensure!(!rig.log().contains(PASSWORD), "the password is in the log");
    Ok(())
}

/// Events flow, and both sessions are encrypted.
async fn streams_encrypted(rig: &Rig) -> Result<()> {
    rig.ready().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()?;
    let sql = "SELECT count(*), count(*) FILTER (WHERE ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
               WHERE usename = 'relay'";
    wait_for("two encrypted sessions", LIMIT, async || {
        let row = client.query_one(sql, &[]).await?;
        let found: (i64, i64) = (row.get(0), row.get(1));
        ensure!(found == (2, 2), "found {found:?}");
        Ok::<_, anyhow::Error>(true)
    })
    .await
}
