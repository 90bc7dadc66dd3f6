//! Several nats-servers on loopback that form one cluster.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};

use super::{Nats, NatsOptions};
use crate::{PortLease, http::http_get, process::lock, spawn::off_thread, wait::poll};

/// How long the members may take to agree on a leader and to catch up with it.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// The place of one server in a cluster.
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// The leases of all members' route ports, which end with the last member.
    routes: Arc<Vec<PortLease>>,
    index: usize,
}

impl Member {
    /// Returns the block of the configuration.
    pub(super) fn config(&self) -> String {
        let routes: Vec<String> =
            self.routes.iter().map(|route| format!("\"nats://127.0.0.1:{}\"", route.port())).collect();
        let own = self.routes[self.index].port();
        format!("cluster {{\n  name: testbed\n  listen: \"127.0.0.1:{own}\"\n  routes: [{}]\n}}\n", routes.join(", "))
    }
}

/// A cluster of nats-servers with JetStream; dropping it stops them all.
#[derive(Debug)]
pub struct NatsCluster {
    nodes: Vec<Nats>,
}

impl NatsCluster {
    /// Starts `size` servers, named `n1` and so on, and waits until they are one cluster.
    ///
    /// # Errors
    ///
    /// A server does not start, or they do not agree on a leader within half a minute.
    pub async fn start(options: NatsOptions, size: usize) -> Result<NatsCluster> {
        let nodes = off_thread(move || {
            let routes = Arc::new((0..size).map(|_| PortLease::take()).collect::<Result<Vec<_>>>()?);
            let node = |index| {
                let options = NatsOptions { name: format!("n{}", index + 1), ..options.clone() };
                Nats::create(options, Some(Member { routes: routes.clone(), index }))
            };
            let nodes = (0..size).map(node).collect::<Result<Vec<_>>>()?;
            // All at once: none becomes healthy before most are there.
            nodes.iter().try_for_each(|node| lock(&node.server).spawn())?;
            nodes.iter().try_for_each(|node| lock(&node.server).wait_until_served())?;
            Ok(nodes)
        })
        .await?;
        let cluster = NatsCluster { nodes };
        cluster.wait_ready().await?;
        Ok(cluster)
    }

    /// Returns the servers, `n1` first.
    pub fn nodes(&self) -> &[Nats] {
        &self.nodes
    }

    /// Returns the server with this name, which is what the broker calls a stream's leader.
    pub fn node(&self, name: &str) -> Option<&Nats> {
        self.nodes.iter().find(|node| node.name() == name)
    }

    /// Returns the URLs of all servers, separated by commas.
    pub fn url(&self) -> String {
        self.nodes.iter().map(Nats::url).collect::<Vec<_>>().join(",")
    }

    /// Waits until all members run, have a leader, and have caught up with it.
    ///
    /// Healthy members and a leader are not enough: streams with three replicas are refused for
    /// seconds after that. What counts is the leader's own view of the others.
    ///
    /// # Errors
    ///
    /// They do not get there within half a minute.
    pub async fn wait_ready(&self) -> Result<()> {
        let ports: Vec<(String, u16)> =
            self.nodes.iter().map(|node| (node.name().to_owned(), node.monitor_port())).collect();
        off_thread(move || {
            let leads = |(name, port): &(String, u16)| {
                http_get(*port, "/jsz").is_ok_and(|answer| is_ready_leader(&answer.body, name, ports.len()))
            };
            let ready = || Ok(ports.iter().any(leads).then_some(()));
            poll("the nats-servers to form a cluster", READY_LIMIT, ready)
        })
        .await
    }

    /// Returns the server that leads the cluster's own metadata, as the members see it.
    ///
    /// # Errors
    ///
    /// No member that runs knows of a leader.
    pub async fn meta_leader(&self) -> Result<&Nats> {
        let ports: Vec<u16> = self.nodes.iter().map(Nats::monitor_port).collect();
        let name = off_thread(move || {
            let mut names = ports.iter().filter_map(|port| leader(&http_get(*port, "/jsz").ok()?.body));
            names.next().context("find the leader of the cluster: no member knows of one")
        })
        .await?;
        self.node(&name).with_context(|| format!("the cluster is led by {name:?}, which is none of its members"))
    }
}

/// Reads the leader's name from an answer to `/jsz`.
fn leader(jsz: &str) -> Option<String> {
    let rest = jsz.split_once("\"meta_cluster\"")?.1.split_once("\"leader\"")?.1;
    let name = rest.split('"').nth(1)?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// Tells whether `/jsz` of the server `name` says that it leads and that all others are current.
fn is_ready_leader(jsz: &str, name: &str, size: usize) -> bool {
    let dense: String = jsz.split_whitespace().collect();
    leader(&dense).is_some_and(|found| found == name)
        && (dense.contains(&format!("\"cluster_size\":{size},"))
            || dense.contains(&format!("\"cluster_size\":{size}}}")))
        && dense.matches("\"current\":true").count() + 1 == size
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSZ: &str = r#"{ "streams": 0, "meta_cluster": { "name": "testbed", "leader": "n2", "peer": "x",
        "replicas": [ { "name": "n1", "current": true, "active": 5 }, { "name": "n3", "current": true } ],
        "cluster_size": 3 } }"#;

    #[test]
    fn only_the_leader_with_all_replicas_current_counts() {
        assert_eq!(leader(JSZ).as_deref(), Some("n2"));
        assert!(is_ready_leader(JSZ, "n2", 3));
        assert!(!is_ready_leader(JSZ, "n1", 3));
        assert!(!is_ready_leader(&JSZ.replacen("true", "false", 1), "n2", 3));
        assert!(!is_ready_leader(&JSZ.replace("cluster_size\": 3", "cluster_size\": 2"), "n2", 3));
    }
}
