//! Events that cannot be stored: the relay stands at them, says so, and stores nothing behind them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::stream::Config;
use waljet_integration::{broker, newest};
use waljet_testbed::{Rig, connect, wait_for};

use super::{LIMIT, confirmed, insert, red, rig, said, sql_on, stream_config};

/// A refused event is tried again every 30 s.
const LOOKED_AT_AGAIN: Duration = Duration::from_secs(45);

/// Asserts that the relay stands: nothing more is stored or confirmed, and it does not end.
async fn stands(rig: &mut Rig, stored: u64, at: &str) -> Result<()> {
    wait_for("the events behind to be received", LIMIT, async || {
        let status = waljet_integration::status(rig).await?;
        ensure!(status["window"]["events"].as_u64() >= Some(4), "{}", status["window"]);
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    let now = (rig.stored().await?, confirmed(rig).await?);
    ensure!(now == (stored, at.to_owned()), "expected {stored} stored and {at} confirmed, found {now:?}");
    ensure!(rig.get("/livez").await?.status == 200);
    ensure!(rig.relay()?.ended()?.is_none(), "the relay ended:\n{}", rig.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_too_large_holds_the_line_until_the_limit_is_raised() -> Result<()> {
    let mut rig = rig(|options| options.nats.extra = "max_payload: 64KB".into()).await?;
    rig.init().await?;
    let stream = |max_message_size| Config { max_message_size, ..stream_config("outbox.>") };
    broker(&rig).await?.update_stream(stream(32_000)).await?;
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    let at = confirmed(&rig).await?;
    let large = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                 VALUES ('order', '1', 'changed', jsonb_build_object('version', 4, 'text', repeat('x', 100000)))";
    sql_on(&rig, large).await?;
    insert(&rig, 5..=7).await?;
    let reason = red(&rig, "[message-too-large]", LIMIT).await?;
    assert!(reason.contains("the server's max_payload is 65536"), "{reason}");
    assert!(!reason.contains("xxx") && !rig.log().contains("xxx"), "the payload is shown");
    stands(&mut rig, 3, &at).await?;

    // Neither limit is told to a client that is connected.
    rig.nats.reload("max_payload: 1MB").await?;
    broker(&rig).await?.update_stream(stream(1_000_000)).await?;
    rig.settle(LOOKED_AT_AGAIN).await?;
    rig.ready().await?;
    let books = rig.books().await?;
    books.check()?;
    ensure!(books.stored == 7, "{books}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_with_a_header_that_is_not_for_rows_holds_the_line_until_it_is_gone_past() -> Result<()> {
    let headers = [
        (r#"{"Nats-Rollup": "all"}"#, "header \"Nats-Rollup\" is reserved"),
        (r#"{"nats-expected-stream": "OTHER"}"#, "header \"nats-expected-stream\" is reserved"),
        (r#"{"trace": "a\r\nNats-Rollup: all"}"#, "the value of header \"trace\" has a control character"),
        (r#"{"a b": "c"}"#, "header name \"a b\""),
    ];
    let mut rig = newest().await?;
    // What the window holds when it is stopped is not going to be stored.
    rig.set("shutdown.drain_timeout", "100ms")?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers)
               VALUES ('order', '1', 'changed', '{}', $1::text::jsonb)";
    let mut stored = 0;
    for (row, why) in headers {
        insert(&rig, 1..=1).await?;
        stored += 1;
        wait_for("the event before", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == stored)).await?;
        let mut at = String::new();
        wait_for("the event before to be confirmed", LIMIT, async || {
            at = confirmed(&rig).await?;
            let status = waljet_integration::status(&rig).await?;
            ensure!(
                status["window"]["events"] == 0 && status["source"]["confirmed_lsn"] == at.as_str(),
                "{at} {status}"
            );
            Ok::<_, anyhow::Error>(true)
        })
        .await?;

        client.execute(sql, &[&row]).await.with_context(|| row.to_owned())?;
        let past: String = client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await?.try_get(0)?;
        insert(&rig, 2..=4).await?;
        let reason = red(&rig, "[event-refused]", LIMIT).await?;
        assert!(reason.contains(why) && reason.contains("table public.outbox"), "{reason}");
        assert!(!reason.contains("all") || row.contains("Nats-Rollup\": "), "{reason}");
        stands(&mut rig, stored, &at).await?;

        // The way past it, as docs/errors.md has it.
        rig.relay()?.terminate(LIMIT)?;
        let done = said(&rig, &["slot", "advance", "--to", &past, "--yes"]).await?;
        ensure!(done.code == 0, "{}", done.err);
        rig.relay()?.start_again()?;
        rig.ready().await?;
        stored += 3;
        wait_for("the events behind", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == stored)).await?;
    }
    Ok(())
}
