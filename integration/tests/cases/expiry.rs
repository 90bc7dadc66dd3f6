//! A user whose credentials run out, on a server that trusts an operator's signatures.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use nkeys::KeyPair;
use serde_json::{Value, json};
use waljet_integration::status;
use waljet_testbed::{Rig, wait_for};

use super::{CONFIRMED, END, LIMIT, position};
use crate::wrong_things::{insert, red, rig};

/// Encodes without padding, with the alphabet for URLs.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let digits = |chunk: &[u8]| {
        let number = chunk.iter().fold(0_u32, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        let digit = move |place: usize| ALPHABET[(number >> (18 - 6 * place)) as usize & 63] as char;
        (0..=chunk.len()).map(digit).collect::<String>()
    };
    bytes.chunks(3).map(digits).collect()
}

/// Makes a JWT as `nsc` does.
fn jwt(issuer: &KeyPair, subject: &KeyPair, expires: Option<u64>, mut nats: Value, kind: &str) -> Result<String> {
    nats["type"] = kind.into();
    nats["version"] = 2.into();
    let mut claims = json!({
        "jti": kind, "iat": 1, "iss": issuer.public_key(), "sub": subject.public_key(), "name": kind, "nats": nats,
    });
    if let Some(expires) = expires {
        claims["exp"] = expires.into();
    }
    let header = json!({ "typ": "JWT", "alg": "ed25519-nkey" });
    let signed = format!("{}.{}", base64(header.to_string().as_bytes()), base64(claims.to_string().as_bytes()));
    let signature = issuer.sign(signed.as_bytes())?;
    Ok(format!("{signed}.{}", base64(&signature)))
}

/// An operator with an account that may use JetStream.
struct Operator {
    account: KeyPair,
    config: String,
}

fn operator() -> Result<Operator> {
    let operator = KeyPair::new_operator();
    let (account, system) = (KeyPair::new_account(), KeyPair::new_account());
    let unlimited = json!({ "limits": {
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1,
        "leaf": -1, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
    } });
    let no_storage = json!({ "limits": {
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
    } });
    let config = format!(
        "operator: {:?}\nsystem_account: {}\nresolver: MEMORY\nresolver_preload: {{ {}: {:?}, {}: {:?} }}\n",
        jwt(&operator, &operator, None, json!({}), "operator")?,
        system.public_key(),
        account.public_key(),
        jwt(&operator, &account, None, unlimited, "account")?,
        system.public_key(),
        jwt(&operator, &system, None, no_storage, "account")?,
    );
    Ok(Operator { account, config })
}

impl Operator {
    /// Writes the credentials of a new user.
    fn credentials(&self, path: &Path, lifetime: Duration) -> Result<()> {
        let user = KeyPair::new_user();
        let expires = (SystemTime::now().duration_since(UNIX_EPOCH)? + lifetime).as_secs();
        let limits = json!({ "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1 });
        let jwt = jwt(&self.account, &user, Some(expires), limits, "user")?;
        let seed = user.seed()?;
        let text = format!(
            "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        );
        std::fs::write(path, text).context("write the credentials")
    }
}

async fn events(rig: &Rig, stored: u64) -> Result<()> {
    wait_for("events to be stored", LIMIT, async || {
        let status = status(rig).await?;
        ensure!(status["events"]["stored"] == stored && status["ready"] == true, "{status}");
        Ok::<_, anyhow::Error>(true)
    })
    .await
    .with_context(|| rig.log())
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_expired_are_read_again_until_they_are_good() -> Result<()> {
    let operator = operator()?;
    let mut rig = rig(|options| options.nats.extra = operator.config.clone()).await?;
    let path = rig.config().with_file_name("relay.creds");
    rig.set("nats.credentials", &path.to_string_lossy())?;
    operator.credentials(&path, Duration::from_secs(3600))?;
    rig.init().await?;
    operator.credentials(&path, Duration::from_secs(6))?;
    rig.start_relay()?;
    insert(&rig, 1..=3).await?;
    events(&rig, 3).await?;

    red(&rig, "[nats-authentication]", LIMIT).await?;
    insert(&rig, 4..=4).await?;
    let pending = position(&rig, END).await?;
    insert(&rig, 5..=6).await?;
    // Refused again and again, it goes on trying.
    wait_for("further attempts", LIMIT, async || {
        let fault = status(&rig).await?["sink"]["fault"].clone();
        ensure!(fault["attempts"].as_u64() > Some(5), "{fault}");
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    ensure!(position(&rig, CONFIRMED).await? < pending, "something was confirmed");
    operator.credentials(&path, Duration::from_secs(3600))?;
    events(&rig, 6).await?;
    assert!(rig.relay()?.ended()?.is_none());
    Ok(())
}
