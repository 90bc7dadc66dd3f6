//! The shared memory segment of a PostgreSQL cluster.
//!
//! The postmaster keeps a tiny System V segment to see whether backends of an earlier life are
//! still attached. After a `kill -9` it tells us the same, and nobody removes it but we.

use std::{ffi::c_int, mem, ptr};

/// The key and the id of a segment, from line 7 of `postmaster.pid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    key: i64,
    id: c_int,
}

impl Segment {
    /// Reads the line.
    pub(super) fn parse(line: &str) -> Option<Segment> {
        let mut fields = line.split_whitespace();
        Some(Segment { key: fields.next()?.parse().ok()?, id: fields.next()?.parse().ok()? })
    }

    /// Tells whether a process is still attached.
    pub(super) fn in_use(self) -> bool {
        self.stat().is_some_and(|found| found.shm_nattch > 0)
    }

    /// Removes the segment if nobody is attached.
    pub(super) fn remove(self) {
        if self.stat().is_some_and(|found| found.shm_nattch == 0) {
            // SAFETY: removing takes no buffer.
            unsafe { libc::shmctl(self.id, libc::IPC_RMID, ptr::null_mut()) };
        }
    }

    /// Looks the segment up, unless its id has gone to another one.
    fn stat(self) -> Option<libc::shmid_ds> {
        // SAFETY: the struct is plain numbers and padding, for which zero is a value, and the call
        // fills in a struct of exactly this type.
        let (result, found) = unsafe {
            let mut found: libc::shmid_ds = mem::zeroed();
            (libc::shmctl(self.id, libc::IPC_STAT, &raw mut found), found)
        };
        (result == 0 && self.same_key(&found)).then_some(found)
    }

    // The field has another name in other C libraries.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn same_key(self, found: &libc::shmid_ds) -> bool {
        // PostgreSQL prints the key as unsigned, the kernel holds it signed.
        i64::from(found.shm_perm.__key as u32) == self.key
    }

    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    fn same_key(self, _found: &libc::shmid_ds) -> bool {
        self.key != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_pid_file_is_read() {
        assert_eq!(Segment::parse("  2883594   163840"), Some(Segment { key: 2_883_594, id: 163_840 }));
        assert_eq!(Segment::parse(""), None);
    }
}
