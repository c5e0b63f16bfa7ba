//! The registry's chapter of `docs/operating.md`, run as it stands there.

use ron_testkit::{command, ron};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The commands of a chapter, in order.
fn commands(chapter: &str) -> String {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md"))
        .unwrap();
    let from = page.find(&format!("\n## {chapter}\n")).expect("the chapter");
    let text = &page[from + 4..];
    let text = &text[..text.find("\n## ").unwrap_or(text.len())];
    text.split("```sh\n").skip(1).filter_map(|block| block.split("```").next()).collect()
}

#[test]
fn the_story_of_a_registry_is_true() {
    let dir = tempfile::tempdir().unwrap();
    // The test's own binary by the name that the page uses; what the script starts ends with it.
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(command(&[], dir.path()).get_program(), bin.join("ron")).unwrap();
    let commands = commands("Run a registry");
    let script = format!("set -eu\ntrap 'kill $node $follower 2>/dev/null || true' EXIT\n{commands}");
    std::fs::write(dir.path().join("story.sh"), &script).unwrap();
    let mut shell = Command::new("timeout");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RON_")) {
        shell.env_remove(name);
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let ran = shell
        .args(["120", "sh", "story.sh"])
        .current_dir(dir.path())
        .env("PATH", path)
        .env("RON_ADMIN__LISTEN", "127.0.0.1:0")
        .env("RON_REGISTRY__LISTEN", "127.0.0.1:0")
        .env("RON_REGISTRY__CHECKPOINT__INTERVAL", "200ms")
        .output()
        .unwrap();
    let (out, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}\n{error}");
    for said in [
        "2 approvals; 2 of 3 signers must approve: enough to commit",
        "good: version 1 is in example.org/registry",
        "Carol's key is revoked",
        "good: 5 entries, whole and approved",
    ] {
        assert!(out.contains(said), "{said:?} is missing in {out}\n{error}");
    }
    assert!(error.contains("422 revoked_key"), "{error}");
    // The follower saw each version once, in order, though it was away.
    let seen = std::fs::read_to_string(dir.path().join("seen.jsonl")).unwrap();
    let versions: Vec<u64> = seen
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["version"].as_u64().unwrap())
        .collect();
    assert_eq!(versions, [1, 2, 3, 4]);
    // What was restored is what was there.
    let verify = ["registry", "verify", "--dir", "ron-data/registry"];
    let verified = ron(&[&verify[..], &["--trust-roots", "ron-data/trust-roots.json"]].concat(), dir.path());
    assert!(verified.status.success(), "{verified:?}");
    // Where the node's folder is, its roots are found.
    let verified = ron(&verify, dir.path());
    assert!(verified.status.success(), "{verified:?}");
}
