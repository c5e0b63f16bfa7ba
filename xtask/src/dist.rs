//! A release archive: the binary, its man page and completions, licences and README.

use crate::run::{cargo, root, status, target};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// A review of the concurrency model older than this is warned about.
const REVIEW_DAYS: u64 = 90;

pub(crate) fn build() -> bool {
    warn_of_old_review();
    if !cargo(&["build", "--release", "-p", "ron"]) {
        return false;
    }
    let (binary, folder) = (target().join("release/ron"), target().join("dist/ron"));
    let make = || -> std::io::Result<()> {
        std::fs::create_dir_all(&folder)?;
        std::fs::copy(&binary, folder.join("ron"))?;
        for name in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            std::fs::copy(root().join(name), folder.join(name))?;
        }
        for (file, args) in [
            ("ron.1", &["man"][..]),
            ("ron.bash", &["completions", "bash"]),
            ("_ron", &["completions", "zsh"]),
        ] {
            std::fs::write(folder.join(file), Command::new(&binary).args(args).output()?.stdout)?;
        }
        Ok(())
    };
    if let Err(error) = make() {
        println!("cannot fill {}: {error}", folder.display());
        return false;
    }
    let mut command = Command::new("tar");
    command.arg("-czf").arg(target().join("dist/ron.tar.gz")).arg("-C").arg(target().join("dist")).arg("ron");
    status(command)
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
