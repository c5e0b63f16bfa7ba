//! A release archive, laid out as it is installed: the binary, its man page and completions, a unit, a container file,
//! documents and licences. `tar -C /usr/local --strip-components 1 -xzf` of it is an installation.

use crate::run::{cargo, root, status, target};
use crate::tools;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// A review of the concurrency model older than this is warned about.
const REVIEW_DAYS: u64 = 90;

/// Where each file goes, and what `ron` is asked for it.
const GENERATED: [(&str, &[&str]); 4] = [
    ("share/man/man1/ron.1", &["man"]),
    ("share/bash-completion/completions/ron", &["completions", "bash"]),
    ("share/zsh/site-functions/_ron", &["completions", "zsh"]),
    ("share/fish/vendor_completions.d/ron.fish", &["completions", "fish"]),
];

/// Where each file of the tree goes.
const COPIED: [(&str, &str); 13] = [
    ("packaging/ron.service", "lib/systemd/system/ron.service"),
    ("packaging/Containerfile", "share/doc/ron/Containerfile"),
    ("README.md", "share/doc/ron/README.md"),
    ("ARCHITECTURE.md", "share/doc/ron/ARCHITECTURE.md"),
    ("CHANGELOG.md", "share/doc/ron/CHANGELOG.md"),
    ("docs/config.md", "share/doc/ron/config.md"),
    ("docs/concurrency.md", "share/doc/ron/concurrency.md"),
    ("docs/operating.md", "share/doc/ron/operating.md"),
    ("docs/registry-format.md", "share/doc/ron/registry-format.md"),
    ("docs/oap-1.md", "share/doc/ron/oap-1.md"),
    ("docs/gateway-dashboard.json", "share/doc/ron/gateway-dashboard.json"),
    ("LICENSE-MIT", "share/doc/ron/LICENSE-MIT"),
    ("LICENSE-APACHE", "share/doc/ron/LICENSE-APACHE"),
];

pub(crate) fn build() -> bool {
    warn_of_old_review();
    let Some((platform, binary)) = compile() else { return false };
    let name = format!("ron-{}-{platform}", env!("CARGO_PKG_VERSION"));
    let folder = target().join("dist").join(&name);
    if let Err(error) = fill(&folder, &binary) {
        println!("cannot fill {}: {error}", folder.display());
        return false;
    }
    let archive = target().join("dist").join(format!("{name}.tar.gz"));
    let mut command = Command::new("tar");
    // The same files make the same archive, whoever packs them.
    command.args(["--owner=0", "--group=0", "--numeric-owner", "--sort=name", "-czf"]).arg(&archive);
    command.arg("-C").arg(target().join("dist")).arg(&name);
    let packed = status(command);
    if packed {
        println!("made {}", archive.display());
    }
    packed
}

/// The binary, linked with everything it needs where the machine can do that.
fn compile() -> Option<(String, PathBuf)> {
    let (arch, musl) = (std::env::consts::ARCH, format!("{}-unknown-linux-musl", std::env::consts::ARCH));
    if tools::musl(&musl) {
        let good = cargo(&["build", "--release", "-p", "ron", "--target", &musl]);
        return good.then(|| (format!("{arch}-linux-static"), target().join(&musl).join("release/ron")));
    }
    println!("not static: the archive needs this machine's C library, or a newer one");
    let good = cargo(&["build", "--release", "-p", "ron"]);
    good.then(|| (format!("{arch}-linux"), target().join("release/ron")))
}

fn fill(folder: &Path, binary: &Path) -> std::io::Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    let place = |name: &str| -> std::io::Result<PathBuf> {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        Ok(path)
    };
    std::fs::copy(binary, place("bin/ron")?)?;
    for (from, to) in COPIED {
        std::fs::copy(root().join(from), place(to)?)?;
    }
    for (to, args) in GENERATED {
        let made = Command::new(binary).args(args).output()?;
        if !made.status.success() || made.stdout.is_empty() {
            return Err(std::io::Error::other(format!("ron {} gave nothing", args.join(" "))));
        }
        std::fs::write(place(to)?, made.stdout)?;
    }
    Ok(())
}

fn warn_of_old_review() {
    let page = std::fs::read_to_string(root().join("docs/concurrency.md")).unwrap_or_default();
    let date = page.split("Last review: ").nth(1).and_then(|rest| rest.get(..10)).unwrap_or("1970-01-01");
    let parts: Vec<u64> = date.split('-').filter_map(|part| part.parse().ok()).collect();
    let [year, month, day] = parts[..] else { return };
    // Days since 1970, near enough for a warning.
    let reviewed = year.saturating_sub(1970) * 36_525 / 100 + month.saturating_sub(1) * 306 / 10 + day;
    let today = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / 86_400;
    if today > reviewed + REVIEW_DAYS {
        println!(
            "warning: the concurrency model was last reviewed on {date}, more than {REVIEW_DAYS} days ago"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_document_is_in_the_archive() {
        let copied = |file: &str| COPIED.iter().any(|(from, _)| from.strip_prefix("docs/") == Some(file));
        for entry in std::fs::read_dir(root().join("docs")).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            assert!(copied(&name), "{name}");
        }
    }

    #[test]
    fn every_file_of_the_archive_is_there_to_be_copied() {
        for (from, _) in COPIED {
            assert!(root().join(from).is_file(), "{from}");
        }
    }

    #[test]
    fn the_archive_is_laid_out_as_it_is_installed() {
        let made = tempfile::tempdir().expect("a temporary folder");
        let dir = made.path().join("ron");
        // Any program that answers does for the layout.
        fill(&dir, Path::new("/bin/echo")).expect("the folder is ours");
        let files =
            GENERATED.map(|(to, _)| to).into_iter().chain(COPIED.map(|(_, to)| to)).chain(["bin/ron"]);
        for file in files {
            assert!(dir.join(file).metadata().is_ok_and(|it| it.len() > 0), "{file}");
        }
    }
}
