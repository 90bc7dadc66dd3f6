//! Which PostgreSQL and which nats-server to use.
//!
//! Two pairs matter: the newest versions there are, and the oldest that the product supports.
//! `tools.sh` at the root of the repository fetches both and prints the variables read here.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

/// The oldest PostgreSQL that is looked at when no variable names one.
const OLDEST_POSTGRES: u32 = 14;

/// The binaries of one PostgreSQL and of one nats-server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The folder that holds `postgres` and `initdb`.
    pub postgres: PathBuf,
    /// The nats-server executable.
    pub nats: PathBuf,
}

impl Pair {
    /// Finds the newest pair: `WALJET_PG_BIN` and `WALJET_NATS_SERVER`, else the newest installed.
    ///
    /// # Errors
    ///
    /// A variable names something that is no server, or nothing is installed.
    pub fn newest() -> Result<Pair> {
        Ok(Pair {
            postgres: find_postgres("WALJET_PG_BIN", |majors| majors.last().cloned())?,
            nats: find_nats("WALJET_NATS_SERVER")?,
        })
    }

    /// Finds the oldest supported pair: `WALJET_OLD_PG_BIN` and `WALJET_OLD_NATS_SERVER`, else the
    /// oldest installed, which may be the newest as well.
    ///
    /// # Errors
    ///
    /// A variable names something that is no server, or nothing is installed.
    pub fn oldest() -> Result<Pair> {
        Ok(Pair {
            postgres: find_postgres("WALJET_OLD_PG_BIN", |majors| majors.first().cloned())?,
            nats: find_nats("WALJET_OLD_NATS_SERVER")?,
        })
    }

    /// Asks the PostgreSQL of the pair for its major version, such as 18.
    ///
    /// # Errors
    ///
    /// The binary does not run or prints something else.
    pub fn postgres_major(&self) -> Result<u32> {
        let text = version(&self.postgres.join("postgres"))?;
        numbers(&text).first().copied().with_context(|| format!("read the version of PostgreSQL from {text:?}"))
    }

    /// Asks the nats-server of the pair for its version, such as `(2, 15, 1)`.
    ///
    /// # Errors
    ///
    /// The binary does not run or prints something else.
    pub fn nats_version(&self) -> Result<(u32, u32, u32)> {
        let text = version(&self.nats)?;
        match numbers(&text)[..] {
            [major, minor, patch, ..] => Ok((major, minor, patch)),
            _ => bail!("read the version of nats-server from {text:?}"),
        }
    }

    /// Tells whether the PostgreSQL of the pair was built with TLS.
    ///
    /// Only a server built without it carries the sentence that says so.
    ///
    /// # Errors
    ///
    /// The binary cannot be read.
    pub fn postgres_has_tls(&self) -> Result<bool> {
        const WITHOUT: &[u8] = b"SSL is not supported by this build";
        let path = self.postgres.join("postgres");
        let binary = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(!binary.windows(WITHOUT.len()).any(|window| window == WITHOUT))
    }
}

/// Runs `program --version` and returns what it printed, without the line's end.
pub(crate) fn version(program: &Path) -> Result<String> {
    let shown = program.display();
    let output = Command::new(program).arg("--version").output().with_context(|| format!("run {shown} --version"))?;
    ensure!(output.status.success(), "{shown} --version failed ({}); is it built for this machine?", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn find_postgres(variable: &str, choose: impl Fn(&[PathBuf]) -> Option<PathBuf>) -> Result<PathBuf> {
    if let Some(dir) = env::var_os(variable) {
        let dir = PathBuf::from(dir);
        ensure!(
            is_postgres(&dir),
            "{variable} is {:?}, but there is no postgres and initdb in it\nhint: run `export $(./tools.sh --pairs)` \
             in the root of the repository",
            dir.display()
        );
        return Ok(dir);
    }
    choose(&installed_postgres()).with_context(|| {
        format!(
            "no PostgreSQL server found\nhint: run `export $(./tools.sh --pairs)` in the root of the repository, or \
             set {variable} to the folder that holds postgres and initdb"
        )
    })
}

/// Lists the installed servers, oldest major version first.
fn installed_postgres() -> Vec<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for root in ["/usr/lib/postgresql", "/usr/local/opt", "/opt/homebrew/opt"] {
        for entry in fs::read_dir(root).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let major = name.strip_prefix("postgresql@").unwrap_or(&name).parse::<u32>();
            let bin = entry.path().join("bin");
            if let (Ok(major), true) = (major, is_postgres(&bin)) {
                found.push((major, bin));
            }
        }
    }
    if found.is_empty() {
        // A link in the path may lead into a prefix where only the target has initdb beside it.
        let on_path = on_path("postgres").and_then(|path| path.canonicalize().ok());
        if let Some(bin) = on_path.as_deref().and_then(Path::parent).filter(|bin| is_postgres(bin)) {
            let major = version(&bin.join("postgres")).ok().and_then(|text| numbers(&text).first().copied());
            found.extend(major.map(|major| (major, bin.to_owned())));
        }
    }
    found.retain(|(major, _)| *major >= OLDEST_POSTGRES);
    found.sort();
    found.into_iter().map(|(_, bin)| bin).collect()
}

fn is_postgres(bin: &Path) -> bool {
    bin.join("postgres").is_file() && bin.join("initdb").is_file()
}

fn find_nats(variable: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        let path = PathBuf::from(path);
        ensure!(
            path.is_file(),
            "{variable} is {:?}, but there is no such file\nhint: run `export $(./tools.sh --pairs)` in the root of \
             the repository",
            path.display()
        );
        return Ok(path);
    }
    let usual = ["/usr/sbin/nats-server", "/usr/local/bin/nats-server", "/opt/homebrew/bin/nats-server"];
    on_path("nats-server").or_else(|| usual.iter().map(PathBuf::from).find(|path| path.is_file())).with_context(|| {
        format!(
            "no nats-server found\nhint: run `export $(./tools.sh --pairs)` in the root of the repository, or set \
             {variable} to the executable"
        )
    })
}

fn on_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// Picks the numbers out of a version text, up to the first word after them.
pub(crate) fn numbers(text: &str) -> Vec<u32> {
    let digits = text.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = digits.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(digits.len());
    digits[..end].split('.').filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn versions_are_read_from_what_the_servers_print() {
        assert_eq!(numbers("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), [15, 18]);
        assert_eq!(numbers("postgres (PostgreSQL) 19beta1"), [19]);
        assert_eq!(numbers("nats-server: v2.15.1"), [2, 15, 1]);
        assert!(numbers("nothing").is_empty());
    }
}
