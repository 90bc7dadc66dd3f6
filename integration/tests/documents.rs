//! What the pages say about the tree: links, names of tests, files. No server runs.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// The top of the tree.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the tree is there")
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// Returns the files below a folder that end in `extension`.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, extension)?);
        } else if path.extension().is_some_and(|ending| ending == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns all pages, the README among them.
fn pages() -> Result<Vec<PathBuf>> {
    let mut pages = files(&root().join("docs"), "md")?;
    // Every other page of the top, whichever there are.
    for entry in std::fs::read_dir(root())? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "md") {
            pages.push(path);
        }
    }
    ensure!(pages.len() > 5, "only {pages:?} were found");
    Ok(pages)
}

/// Returns a page without its blocks of code.
fn prose(page: &str) -> String {
    page.split("```").step_by(2).collect()
}

/// Returns the targets of `[text](target)`.
fn links(page: &str) -> Vec<String> {
    let ends = page.split("](").skip(1);
    ends.filter_map(|rest| Some(rest.split_once(')')?.0.split_whitespace().next()?.to_owned())).collect()
}

/// Returns the spans of code, without those of whole blocks.
fn spans(page: &str) -> Vec<String> {
    prose(page).split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Returns the anchors of a page's headings, as they are made from their text.
fn anchors(page: &str) -> HashSet<String> {
    let headings =
        page.lines().filter_map(|line| line.strip_prefix('#').map(|rest| rest.trim_start_matches('#').trim()));
    let mut anchors = HashSet::new();
    for heading in headings {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect();
        let same = (1..).map(|n| format!("{anchor}-{n}")).find(|next| !anchors.contains(next));
        anchors.insert(if anchors.contains(&anchor) { same.unwrap_or_default() } else { anchor });
    }
    anchors
}

#[test]
fn every_relative_link_leads_to_a_file_and_to_a_heading_of_it() -> Result<()> {
    let mut broken = Vec::new();
    let mut count = 0;
    for page in pages()? {
        let text = read(&page)?;
        for link in links(&prose(&text)).iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            count += 1;
            let (file, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { page.clone() } else { page.with_file_name(file) };
            let there = target.exists() && target.canonicalize()?.starts_with(root());
            let heading = match anchor {
                Some(anchor) if there && target.is_file() => anchors(&read(&target)?).contains(anchor),
                Some(_) => false,
                None => true,
            };
            if !there || !heading {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    ensure!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
    ensure!(count > 2, "only {count} links were found");
    Ok(())
}

/// Where tests are looked for.
struct Tests {
    sources: Vec<(PathBuf, String)>,
}

impl Tests {
    fn read() -> Result<Self> {
        let mut sources = Vec::new();
        for folder in ["crates", "integration"] {
            for file in files(&root().join(folder), "rs")? {
                sources.push((file.clone(), read(&file)?));
            }
        }
        Ok(Self { sources })
    }

    /// Returns whether there is a function of this name.
    fn function(&self, name: &str) -> bool {
        self.sources.iter().any(|(_, text)| text.contains(&format!("fn {name}(")))
    }

    /// Returns whether there is a test of this name.
    fn test(&self, name: &str) -> bool {
        let function = format!("fn {name}(");
        self.sources.iter().filter_map(|(_, text)| text.split_once(&function)).any(|(before, _)| {
            let mut above = before.lines().rev().take(4);
            above.any(|line| line.trim() == "#[test]" || line.trim().starts_with("#[tokio::test"))
        })
    }

    /// Returns whether there is a file or folder of tests of this name, such as `faults`.
    fn module(&self, name: &str) -> bool {
        let tests = [format!("/tests/{name}.rs"), format!("/tests/{name}/")];
        self.sources.iter().any(|(file, _)| tests.iter().any(|part| file.to_string_lossy().contains(part)))
    }
}

#[test]
fn every_test_that_the_guarantees_rest_on_exists() -> Result<()> {
    let page = read(&root().join("docs/guarantees.md"))?;
    let tests = Tests::read()?;
    let mut missing = Vec::new();
    let mut count = 0;
    for shown in page.split("*Shown by:*").skip(1) {
        for span in spans(shown.split("\n\n").next().unwrap_or_default()) {
            count += 1;
            let path = root().join(span.trim_start_matches("./"));
            // `pipeline::source` is a module of a crate.
            let of_crate = span.split_once("::").is_some_and(|(name, rest)| {
                root().join("crates").join(name).join("src").join(rest.replace("::", "/")).with_extension("rs").exists()
            });
            let there = path.exists() || path.with_extension("rs").exists();
            if !(there || of_crate || tests.function(&span) || tests.module(&span) || source_has(&tests.sources, &span))
            {
                missing.push(span);
            }
        }
    }
    ensure!(missing.is_empty(), "docs/guarantees.md names tests that do not exist: {missing:?}");
    ensure!(count > 10, "only {count} names were found");
    Ok(())
}

#[test]
fn every_fault_case_names_tests_that_exist_or_says_why_it_has_none() -> Result<()> {
    let page = read(&root().join("docs/fault-cases.md"))?;
    let tests = Tests::read()?;
    let mut wrong = Vec::new();
    let mut numbers = HashSet::new();
    for row in page.lines().filter(|line| line.starts_with("| FC-")) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [case, _, here, shown] = cells[..] else {
            wrong.push(format!("{row}: expected four columns"));
            continue;
        };
        let number = case.split(' ').next().unwrap_or_default();
        if !numbers.insert(number) {
            wrong.push(format!("{number} is listed twice"));
        }
        let names = spans(shown);
        if names.is_empty() || here.is_empty() {
            wrong.push(format!("{number} names no test and gives no reason"));
        }
        // Where there is no test the column says so in words.
        let reason = shown.starts_with("none: ");
        wrong.extend(
            names.iter().filter(|name| !reason && !tests.test(name)).map(|name| format!("{number}: no test {name}")),
        );
    }
    ensure!(wrong.is_empty(), "docs/fault-cases.md: {wrong:#?}");
    ensure!(numbers.len() == 78, "{} cases were found", numbers.len());
    Ok(())
}

/// Returns whether a name is the first part of a test's name, as `cargo test` takes it.
fn source_has(sources: &[(PathBuf, String)], start: &str) -> bool {
    let word = !start.is_empty() && start.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit());
    word && sources.iter().any(|(_, text)| text.contains(&format!("fn {start}")))
}

#[test]
fn pages_name_no_path_outside_of_the_tree() -> Result<()> {
    let outside = ["/root/", "/tmp/", "/home/", "../../.."];
    for page in pages()? {
        let text = read(&page)?;
        for part in outside {
            ensure!(!text.contains(part), "{} names {part}", page.display());
        }
    }
    Ok(())
}

#[test]
fn what_the_readme_tells_to_run_is_there() -> Result<()> {
    for file in ["docker-compose.yml", "demo", "test", "tools.sh", ".ci/run", "Cargo.lock"] {
        ensure!(root().join(file).is_file(), "{file} is missing");
    }
    for page in pages()? {
        let text = read(&page)?;
        // A script in code: `./demo --short`, or a line of a block.
        for part in text.split("./").skip(1).zip(text.split("./")) {
            let (after, before) = part;
            let starts = before.chars().next_back().is_none_or(|c| c.is_whitespace() || "`(\"'".contains(c));
            let name: String = after.chars().take_while(|c| c.is_ascii_alphanumeric() || "._-/".contains(*c)).collect();
            let name = name.trim_end_matches(['.', '/']);
            if starts && !name.is_empty() {
                ensure!(root().join(name).exists(), "{} names ./{name}, which is not there", page.display());
            }
        }
    }
    Ok(())
}

#[test]
fn scripts_can_be_run() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    for file in ["demo", "test", "tools.sh", ".ci/run", ".ci/dependencies"] {
        let mode = std::fs::metadata(root().join(file))?.permissions().mode();
        ensure!(mode & 0o111 == 0o111, "{file} has the mode {mode:o}");
        ensure!(read(&root().join(file))?.starts_with("#!"), "{file} does not say what runs it");
    }
    Ok(())
}

#[test]
fn broken_pages_are_found() {
    let page = "# A title, or `two`\n\nSee [a](b.md#c) and `code` and [x](https://y).\n```sh\n[no](link)\n```\n## A title, or two\n";
    assert_eq!(links(&prose(page)), ["b.md#c", "https://y"]);
    assert_eq!(spans("a `b` c `d`"), ["b", "d"]);
    assert!(anchors(page).contains("a-title-or-two") && anchors(page).contains("a-title-or-two-1"));
}
