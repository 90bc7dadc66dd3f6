//! Configuration: every mistake is told, all at once, before anything is connected to.

use anyhow::{Result, ensure};
use waljet_integration::newest;

use super::{Told, fails, said, said_with};

#[tokio::test(flavor = "multi_thread")]
async fn all_mistakes_are_told_at_once_with_the_nearest_key_and_what_a_key_takes() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("postgres.slto", "a")?;
    rig.set_raw("window.max_event", "7")?;
    rig.set_raw("window.max_events", "0")?;
    rig.set("window.max_bytes", "much")?;
    rig.set("dead_letter.order", "park")?;
    rig.set("dead_letter.store", "postgres")?;
    rig.set("nats.url", "http://127.0.0.1")?;
    rig.set("route.subject", "{aggregate_type}")?;
    let env = [("WALJET_POSTGRES__SLTO", "a"), ("WALJET_NATS__STRAEM", "b"), ("WALJET_SLOT", "c")];
    for command in [&["run"][..], &["check"], &["init"], &["config", "validate"]] {
        let said = said_with(&rig, &env, command).await?;
        ensure!(said.code == 2 && said.out.is_empty(), "{command:?} ended with {}: {}", said.code, said.out);
        for part in [
            "postgres.slto",
            "did you mean postgres.slot?",
            "did you mean window.max_events?",
            "window.max_events",
            "expected a whole number from 1 to 4096, found 0 [config-value]",
            "window.max_bytes",
            "\"park\" is not in this version",
            "dead_letter.store",
            "nats.url",
            "route.subject",
            "WALJET_POSTGRES__SLTO: no such key [config-unknown-key]",
            "did you mean WALJET_POSTGRES__SLOT?",
            "did you mean WALJET_NATS__STREAM?",
            "WALJET_SLOT: no such key [config-unknown-key]",
        ] {
            ensure!(said.err.contains(part), "{part:?} is missing after {command:?} in\n{}", said.err);
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_named_and_is_missing_or_no_toml_is_no_default() -> Result<()> {
    let mut rig = newest().await?;
    // The file of the rig comes first; the later one counts.
    let missing = rig.config().with_file_name("missing.toml");
    rig.set_raw("window.max_events", "= 1")?;
    let told = fails(&rig, &["check"], 2, "config-syntax").await?;
    told.says(&["waljet.toml"]);
    std::fs::remove_file(rig.config())?;
    let told = fails(&rig, &["check"], 2, "config-file").await?;
    ensure!(told.causes.contains("No such file"), "{told:?}");
    told.says(&["waljet.toml\" cannot be read"]);
    ensure!(!missing.exists());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_comes_from_its_file_and_is_shown_nowhere() -> Result<()> {
    let mut rig = newest().await?;
    let file = rig.config().with_file_name("password");
    rig.set("nats.user", "relay")?;
    rig.set("nats.password_file", &file.display().to_string())?;
    let told = fails(&rig, &["check"], 2, "secret-file").await?;
    told.says(&["nats.password", &file.display().to_string()]);
    std::fs::write(&file, "right-secret\n")?;
    let shown = said(&rig, &["config", "show"]).await?;
    ensure!(shown.code == 0 && shown.out.contains("\npassword = <hidden>"), "{}", shown.out);
    ensure!(shown.out.contains(&format!("from file {}", file.display())), "{}", shown.out);
    let env = [("RUST_LOG", "trace"), ("WALJET_POSTGRES__URL", "postgres://app:other-secret@127.0.0.1:1/x")];
    for args in [&["config", "show", "--json"][..], &["check"], &["status"], &["slot", "show"], &["init"]] {
        let said = said_with(&rig, &env, args).await?;
        ensure!(!said.out.contains("-secret") && !said.err.contains("-secret"), "{args:?}: {}{}", said.out, said.err);
    }
    rig.set("nats.password", "third-secret")?;
    let both = said(&rig, &["check"]).await?;
    ensure!(both.code == 2 && !both.err.contains("-secret"), "{} {}", both.code, both.err);
    Told::find(&both.err, "config-conflict")?.says(&["nats.password", "nats.password_file"]);
    Ok(())
}
