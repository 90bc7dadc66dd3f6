//! A connection pooler in between, as `pgbouncer` answers: SQL passes, replication does not.

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use waljet_integration::newest;

use super::{LIMIT, found, run_ends};

/// Listens on a port of its own and passes on what is no replication.
async fn pooler(upstream: u16) -> Result<(u16, JoinHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let task = tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                // A client that goes away is none of the test's business.
                let _ = serve(client, upstream).await;
            });
        }
    });
    Ok((port, task))
}

async fn serve(mut client: TcpStream, upstream: u16) -> Result<()> {
    let start = loop {
        let length = client.read_u32().await? as usize;
        let mut packet = vec![0; length.checked_sub(4).context("a length")?];
        client.read_exact(&mut packet).await?;
        // A request for TLS or GSS: not here.
        if packet.len() == 4 {
            client.write_all(b"N").await?;
        } else {
            break packet;
        }
    };
    if start.windows(12).any(|window| window == b"replication\0") {
        let fields = b"SERROR\0C08P01\0Munsupported startup parameter: replication\0\0";
        client.write_all(b"E").await?;
        client.write_u32(fields.len() as u32 + 4).await?;
        client.write_all(fields).await?;
        return Ok(client.shutdown().await?);
    }
    let mut server = TcpStream::connect(("127.0.0.1", upstream)).await?;
    server.write_u32(start.len() as u32 + 4).await?;
    server.write_all(&start).await?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_is_recognised_by_check_and_ends_the_start() -> Result<()> {
    let mut rig = newest().await?;
    let (port, task) = pooler(rig.postgres.port()).await?;
    let url = rig.postgres.url_at(port);
    rig.set("postgres.url", &url)?;
    // Plain SQL passes, so that everything up to the replication connection looks well.
    rig.init().await?;
    let told = found(&rig, "postgres-pooler").await?.hints(&["connect to PostgreSQL directly, not to a pooler"]);
    ensure!(told.causes.contains("unsupported startup parameter: replication"), "{told:?}");
    run_ends(&mut rig, 3, "postgres-pooler").await?;
    task.abort();

    let url = rig.postgres.url();
    rig.set("postgres.url", &url)?;
    rig.start_relay()?;
    rig.ready().await?;
    super::insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await
}
