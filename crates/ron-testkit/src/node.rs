//! `ron` as a process, in a folder of its own.

use crate::client::{Answer, get, request};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The built binary. It lies beside the test's own, two levels up.
fn binary() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let dir = test.parent().and_then(Path::parent).expect("tests lie in target/PROFILE/deps");
    dir.join("ron")
}

/// A command of `ron` that ends by itself, with an environment free of `RON_` variables.
pub fn ron(args: &[&str], dir: &Path) -> Output {
    ron_with(args, dir, &[])
}

/// The same with these variables.
pub fn ron_with(args: &[&str], dir: &Path, env: &[(&str, &str)]) -> Output {
    command(args, dir).envs(env.iter().copied()).output().expect("the binary is built before the tests")
}

/// A command of `ron`, not started yet, with an environment free of `RON_` variables.
pub fn command(args: &[&str], dir: &Path) -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RON_")) {
        command.env_remove(name);
    }
    command.args(args).current_dir(dir);
    command
}

/// An API key as `tenants[].keys` wants it.
pub fn api_key(key: &str) -> String {
    let hash: String = Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hash}")
}

/// A running node.
#[derive(Debug)]
pub struct Node {
    pub dir: tempfile::TempDir,
    pub addresses: Value,
    child: Child,
}

impl Node {
    /// Writes `config`, with listeners on port 0, and starts `ron run SERVICES`.
    pub fn start(services: &[&str], config: &str) -> Node {
        Node::start_with(services, config, &[])
    }

    pub fn start_with(services: &[&str], config: &str, env: &[(&str, &str)]) -> Node {
        let dir = with_config(config);
        Node::spawn(dir, &[&["run"], services, &["--config", "ron.toml"]].concat(), env)
    }

    /// Like [`Node::start`], with a binary that does not lie beside the caller's.
    pub fn start_binary(binary: &Path, services: &[&str], config: &str) -> Node {
        let args = [&["run"], services, &["--config", "ron.toml"]].concat();
        Node::spawn_binary(binary, with_config(config), &args, &[])
    }

    /// Starts `ron ARGS` in `dir` and waits until it has written its addresses.
    pub fn spawn(dir: tempfile::TempDir, args: &[&str], env: &[(&str, &str)]) -> Node {
        Node::spawn_binary(&binary(), dir, args, env)
    }

    fn spawn_binary(binary: &Path, dir: tempfile::TempDir, args: &[&str], env: &[(&str, &str)]) -> Node {
        let log = std::fs::File::create(dir.path().join("log")).expect("the folder is ours");
        let mut command = Command::new(binary);
        command.args(args).current_dir(dir.path()).envs(env.iter().copied()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a file can be shared")).stderr(log);
        let child = command.spawn().expect("the binary is built before the tests");
        let mut node = Node { dir, addresses: Value::Null, child };
        let begun = Instant::now();
        loop {
            let paths =
                [node.dir.path().join("addresses.json"), node.dir.path().join("ron-data/addresses.json")];
            let text = paths.iter().find_map(|path| std::fs::read_to_string(path).ok());
            if let Some(text) = text {
                node.addresses = serde_json::from_str(&text).expect("addresses.json is replaced as a whole");
                return node;
            }
            if let Some(status) = node.child.try_wait().expect("our own child") {
                panic!("ron {args:?} ended with {status}: {}", node.log());
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "not ready in time: {}", node.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts `ron run gateway --takeover` on the same folder, waits until it has taken this node's place, and returns
    /// the former process.
    pub fn take_over(&mut self) -> Child {
        let log =
            std::fs::File::options().append(true).open(self.dir.path().join("log")).expect("it is there");
        let mut command = command(&["run", "gateway", "--takeover", "--config", "ron.toml"], self.dir.path());
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a file can be shared")).stderr(log);
        #[expect(clippy::zombie_processes, reason = "whoever gets the former process waits for it")]
        let former = std::mem::replace(&mut self.child, command.spawn().expect("the binary is there"));
        let begun = Instant::now();
        loop {
            let text = std::fs::read_to_string(self.dir.path().join("addresses.json")).unwrap_or_default();
            let addresses: Value = serde_json::from_str(&text).unwrap_or_default();
            if addresses["pid"] == self.child.id() {
                self.addresses = addresses;
                return former;
            }
            let ended = self.child.try_wait().expect("our own child");
            assert!(ended.is_none() && begun.elapsed() < Duration::from_secs(20), "{ended:?} {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn admin(&self) -> String {
        self.addresses["admin"].as_str().expect("every node has an admin listener").to_owned()
    }

    /// The address of a service's listener.
    pub fn address(&self, service: &str, scheme: &str) -> String {
        self.addresses[service][scheme].as_str().unwrap_or_else(|| panic!("no {service} {scheme}")).to_owned()
    }

    pub fn gateway(&self) -> String {
        self.address("gateway", "http")
    }

    /// A command of the admin plane with the token.
    pub fn admin_post(&self, path: &str, body: &str) -> Answer {
        self.admin_request("POST", path, body)
    }

    /// A look at the admin plane with the token.
    pub fn admin_get(&self, path: &str) -> Answer {
        self.admin_request("GET", path, "")
    }

    fn admin_request(&self, method: &str, path: &str, body: &str) -> Answer {
        let token =
            std::fs::read_to_string(self.dir.path().join("admin.token")).expect("made at first start");
        let bearer = format!("Bearer {token}");
        request(&self.admin(), method, path, &[("Authorization", &bearer)], body.as_bytes())
            .expect("an answer")
    }

    /// The value of one metric; 0 if it has not been seen.
    pub fn metric(&self, series: &str) -> f64 {
        let page = get(&self.admin(), "/metrics").text();
        page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok()).unwrap_or(0.0)
    }

    /// Waits until a condition holds.
    pub fn eventually(&self, what: &str, mut holds: impl FnMut(&Node) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < Duration::from_secs(10), "{what} never held: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn write_config(&self, config: &str) {
        let temporary = self.dir.path().join("new.toml");
        std::fs::write(&temporary, config).expect("the folder is ours");
        std::fs::rename(temporary, self.dir.path().join("ron.toml")).expect("the folder is ours");
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(status.expect("kill is everywhere").success());
    }

    /// Resident memory in MiB.
    pub fn rss_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: f64 = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0.0);
        kib / 1024.0
    }

    /// Open file descriptors.
    pub fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).map_or(0, Iterator::count)
    }

    /// Waits for the process to end by itself.
    pub fn wait(&mut self) -> i32 {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("our own child") {
                return status.code().unwrap_or(-1);
            }
            assert!(begun.elapsed() < Duration::from_secs(15), "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// SIGTERM, then wait.
    pub fn stop(&mut self) -> i32 {
        self.signal("TERM");
        self.wait()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder with this `ron.toml`.
fn with_config(config: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(dir.path().join("ron.toml"), config).expect("the folder is ours");
    dir
}
