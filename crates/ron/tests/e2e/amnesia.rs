//! `node.amnesia`: a whole node that is used, and what it did to the filesystem.

use crate::follow::{Registry, following_at, put, route};
use crate::whole::{Keys, Whole};
use ron_testkit::{Answer, Origin, Script, command, get, request, ron};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use tempfile::NamedTempFile;

/// Calls that change a folder or a file by its name, or a file's length.
const CHANGES: &str = "creat,mkdir,mkdirat,mknod,mknodat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,\
    symlink,symlinkat,truncate,ftruncate,fallocate,chmod,fchmod,fchmodat,chown,fchown,fchownat,lchown,utimensat,setxattr,fsetxattr,bind";

/// What a line of the trace did that amnesia does not allow.
fn change(line: &str) -> Option<&str> {
    // A call that was interrupted by another thread's is written in two parts; the first has the arguments.
    let call = line.split_once(' ')?.1.trim_start();
    let (name, arguments) = call.split_once('(')?;
    let failed = call.contains(") = -1 ");
    match name {
        "open" | "openat" | "openat2" => {
            let writes = ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"]
                .iter()
                .any(|it| arguments.contains(it));
            let device = arguments.contains("\"/dev/") || arguments.contains("\"/proc/");
            (writes && !device).then_some(call)
        }
        // A socket with a path is a file.
        "bind" => arguments.contains("AF_UNIX").then_some(call),
        _ => (CHANGES.split(',').any(|change| change.trim() == name) && !failed).then_some(call),
    }
}

#[test]
fn lines_of_a_trace_are_judged_by_what_they_do() {
    for line in [
        "12 openat(AT_FDCWD, \"/x/a\", O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 9",
        "12 openat(AT_FDCWD, \"/x/a\", O_RDWR|O_CLOEXEC <unfinished ...>",
        "12 mkdir(\"/x\", 0777) = 0",
        "12 bind(9, {sa_family=AF_UNIX, sun_path=\"/x/s\"}, 110) = 0",
        "12 rename(\"/x/a\", \"/x/b\" <unfinished ...>",
    ] {
        assert!(change(line).is_some(), "{line}");
    }
    for line in [
        "12 openat(AT_FDCWD, \"/etc/ssl\", O_RDONLY|O_CLOEXEC) = 9",
        "12 openat(AT_FDCWD, \"/dev/null\", O_RDWR|O_CLOEXEC) = 9",
        "12 bind(9, {sa_family=AF_INET, sin_port=htons(0)}, 16) = 0",
        "12 unlink(\"/x/none\") = -1 ENOENT (No such file or directory)",
        "12 +++ exited with 0 +++",
    ] {
        assert!(change(line).is_none(), "{line}");
    }
}

/// Every file and folder below one, with its length and time.
fn listing(dir: &Path, into: &mut BTreeMap<PathBuf, (u64, SystemTime)>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let meta = entry.metadata().unwrap();
        into.insert(entry.path(), (meta.len(), meta.modified().unwrap()));
        if meta.is_dir() {
            listing(&entry.path(), into);
        }
    }
}

fn bearer(addresses: &Value) -> String {
    format!("Bearer {}", addresses["admin_token"].as_str().unwrap())
}

#[test]
fn a_whole_node_under_amnesia_is_used_and_strace_sees_no_file_written() {
    let dir = tempfile::tempdir().unwrap();
    folders(dir.path());
    let upstream = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let keys = Keys { rest: "[node]\namnesia = true", ..Keys::default() };
    let whole = Whole::make(&dir.path().join("conf"), upstream, &keys);
    let mut before = BTreeMap::new();
    listing(dir.path(), &mut before);
    let node = Traced::start(dir.path(), &["up"]);
    use_all(&whole, &node.addresses);
    node.reload_and_stop();
    let mut after = BTreeMap::new();
    listing(dir.path(), &mut after);
    assert_eq!(before, after);
}

#[test]
fn a_node_under_amnesia_follows_a_registry_and_strace_sees_no_file_written() {
    let origin = Origin::start(|_| Script::Body(b"governed".to_vec()));
    let registry = Registry::start();
    let url = format!("http://{}", registry.address());
    let dir = tempfile::tempdir().unwrap();
    folders(dir.path());
    let conf = dir.path().join("conf");
    std::fs::write(conf.join("roots.json"), registry.roots.canonical()).unwrap();
    let text = following_at(&url, &registry.roots, "").replace("[node]\n", "[node]\namnesia = true\n");
    std::fs::write(conf.join("ron.toml"), text).unwrap();
    let mut before = BTreeMap::new();
    listing(dir.path(), &mut before);

    let node = Traced::start(dir.path(), &["run", "gateway"]);
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    registry.commit(&[upstream, route("r", "u")]);
    let serves = |node: &Traced, path: &str| {
        let gateway = node.addresses["gateway"]["http"].as_str().unwrap();
        eventually(path, || get(gateway, path).text() == "governed");
    };
    serves(&node, "/r");
    let follow = |node: &Traced| node.ask("GET", "/node/follow").json();
    // What is wrong is kept apart from what is good, in memory as on a disk.
    let bad = registry.commit(&[route("bad", "nowhere")]);
    eventually("it is rejected", || {
        follow(&node)["rejected"].is_object() || follow(&node)["trouble"].is_string()
    });
    serves(&node, "/r");
    node.reload_and_stop();

    // The next process knows nothing, and gets there again from the trust roots on.
    let mended = registry.commit(&[json!({"op": "delete", "kind": "route", "id": "bad"}), route("s", "u")]);
    assert!(mended > bad);
    let node = Traced::start(dir.path(), &["run", "gateway"]);
    serves(&node, "/r");
    serves(&node, "/s");
    eventually("it has followed", || follow(&node)["version"] == mended);
    node.reload_and_stop();
    let mut after = BTreeMap::new();
    listing(dir.path(), &mut after);
    assert_eq!(before, after);
}

/// The folders that a node is given: its configuration's, the one it is started in, and what the environment names.
fn folders(dir: &Path) {
    for name in ["conf", "cwd", "home", "tmp"] {
        std::fs::create_dir(dir.join(name)).unwrap();
    }
}

/// A node under amnesia, and under strace.
struct Traced {
    child: Child,
    out: BufReader<ChildStdout>,
    trace: NamedTempFile,
    addresses: Value,
}

impl Traced {
    /// Starts it with the configuration in `conf`.
    fn start(dir: &Path, args: &[&str]) -> Traced {
        let trace = NamedTempFile::new().unwrap();
        let run = command(&[args, &["--config", "../conf/ron.toml"]].concat(), &dir.join("cwd"));
        let calls = format!("trace=open,openat,openat2,{}", CHANGES.replace(' ', ""));
        let mut traced = Command::new("strace");
        traced.args(["-f", "-qq", "-s", "256", "-e", &calls, "-o"]).arg(trace.path());
        traced.arg(run.get_program()).args(run.get_args()).current_dir(dir.join("cwd"));
        for (name, folder) in [("HOME", "home"), ("TMPDIR", "tmp"), ("XDG_RUNTIME_DIR", "tmp")] {
            traced.env(name, dir.join(folder));
        }
        traced.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = traced.spawn().expect("strace is installed by `cargo xtask test`");
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let addresses: Value = serde_json::from_str(&line).expect("one line says where it is");
        Traced { child, out, trace, addresses }
    }

    /// A request to its admin plane.
    fn ask(&self, method: &str, path: &str) -> Answer {
        let (admin, token) = (self.addresses["admin"].as_str().unwrap(), bearer(&self.addresses));
        request(admin, method, path, &[("Authorization", &token)], b"").unwrap()
    }

    /// Ends it; it has said one line and written nothing.
    fn reload_and_stop(mut self) {
        assert_eq!(self.ask("POST", "/admin/reload").status, 200);
        assert_eq!(self.ask("POST", "/admin/shutdown").status, 202);
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "", "one line is all that is said");
        assert!(self.child.wait().unwrap().success());
        let trace = std::fs::read_to_string(self.trace.path()).unwrap();
        assert!(trace.contains("conf/ron.toml"), "the trace is of the node");
        let changes: Vec<&str> = trace.lines().filter_map(change).collect();
        assert!(changes.is_empty(), "{changes:#?}");
    }
}

/// Something of everything that would be kept.
fn use_all(whole: &Whole, addresses: &Value) {
    let address = |service: &str| addresses[service]["http"].as_str().unwrap();
    let admin = addresses["admin"].as_str().unwrap();
    assert_eq!(get(address("gateway"), "/x").text(), "hi");
    let edge = address("edge");
    assert_eq!(whole.send(edge, "PUT", "/edge/assets/a.txt", b"an asset").status, 201);
    assert_eq!(get(edge, "/edge/assets/a.txt").text(), "an asset");
    assert_eq!(get(edge, "/edge/assets/far/b").text(), "from afar");
    assert_eq!(get(edge, "/edge/assets/far/b").header("cache-status"), Some("ron-edge; hit"));
    eventually("the pack is checked", || get(edge, "/edge/packs").json()["packs"][0]["verified"] == true);
    assert_eq!(get(edge, "/edge/packs/sample/0/0/0").status, 200);
    let registry = address("registry");
    let committed = whole.commit(registry, "one", &json!({"n": 1}));
    assert_eq!(committed.status, 201, "{}", committed.text());
    eventually("a checkpoint is signed", || {
        get(registry, "/registry/head").json()["checkpoint"]["size"] == json!(2)
    });
    let token = bearer(addresses);
    let published =
        request(admin, "POST", "/overlay/topics/news", &[("Authorization", &token)], b"hello").unwrap();
    assert_eq!(published.status, 202, "{}", published.text());
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} never held");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn paths_that_would_be_written_are_refused_under_amnesia() {
    let dir = tempfile::tempdir().unwrap();
    // Also those that are set to what they are by default.
    let text = "[node]\namnesia = true\n[edge.cas]\ndir = \"cas\"\n[registry]\ndir = \"kept\"\n\
                [gateway.access_log]\nenabled = true\nfile = \"a.log\"\n";
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    let checked = ron(&["config", "check", "ron.toml"], dir.path());
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert_eq!(checked.status.code(), Some(64));
    for key in ["edge.cas.dir", "registry.dir", "gateway.access_log.file"] {
        assert!(said.contains(&format!("{key}: is set, but node.amnesia is on")), "{said}");
    }
}
