//! Ports that stay ours for as long as we want them.
//!
//! Binding port 0 and closing it again hands the port to whoever comes next, so a server that is
//! killed and started again would not get it back. Ports are taken below the range from which the
//! kernel serves outgoing connections, and are held by a lock on a file per port.

use std::{
    fs::{self, File},
    net::TcpListener,
    ops::Range,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};

use crate::folder;

/// Where ports are looked for; Linux serves outgoing connections from 32768 up.
const PORTS: Range<u16> = 21_000..32_000;

/// A port on loopback that no other test of this user takes while the lease lives.
#[derive(Debug)]
pub struct PortLease {
    port: u16,
    /// Closing the file gives the port back.
    _lock: File,
}

impl PortLease {
    /// Takes a free port.
    ///
    /// # Errors
    ///
    /// The folder of the leases cannot be written, or every port is taken.
    pub fn take() -> Result<PortLease> {
        let dir = folder::base()?.join("ports");
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let count = PORTS.end - PORTS.start;
        let first = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos()) / 1000;
        for step in 0..u32::from(count) {
            let port = PORTS.start + ((first + step) % u32::from(count)) as u16;
            let path = dir.join(port.to_string());
            let lock = File::options().create(true).truncate(false).write(true).open(&path);
            let lock = lock.with_context(|| format!("open the port lease {}", path.display()))?;
            // The bind finds what others run there, and what other users have leased.
            if lock.try_lock().is_ok() && TcpListener::bind(("127.0.0.1", port)).is_ok() {
                return Ok(PortLease { port, _lock: lock });
            }
        }
        bail!("no free port between {} and {}", PORTS.start, PORTS.end)
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_lease_is_given_once() {
        let leases: Vec<_> = (0..50).map(|_| PortLease::take().unwrap()).collect();
        let ports: HashSet<_> = leases.iter().map(PortLease::port).collect();
        assert_eq!(ports.len(), leases.len());
    }
}
