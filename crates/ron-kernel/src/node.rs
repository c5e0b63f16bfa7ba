//! The settings of the process itself, and where its files are.

use crate::config::Problems;
use crate::units::Span;
use crate::{choice, settings};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

choice! {
    /// What follows when a service fails closed.
    pub enum OnFatal {
        /// The process ends with code 1, for whoever restarts it.
        Exit = "exit",
        /// The process goes on with the other services.
        Degrade = "degrade",
    }
}

settings! {
    /// The node as a whole.
    pub struct NodeSettings {
        /// Folder for everything the node keeps; other relative paths are relative to it. Empty: the folder of the config file.
        data: String = String::new() => Restart;
        /// The node's Ed25519 key, PKCS#8 PEM of mode 0600; made on first start.
        key_file: String = "node.key".to_owned() => Restart;
        /// Public keys whose capabilities are believed, as `ed25519:…`. Empty: the node's own.
        token_keys: Vec<String> = Vec::new() => Hot;
        /// Threads that run tasks. 0: one per core.
        worker_threads: usize = 0 => Restart;
        /// Keep nothing: no file is created or changed.
        amnesia: bool = false => Restart;
        /// How long a shutdown waits for what is in flight, 1s to 5s.
        drain_deadline: Span = Span::secs(3) => Hot;
        /// What follows when a service fails closed.
        on_fatal: OnFatal = OnFatal::Exit => Hot;
        /// Allow what is dangerous: the chaos hooks of the admin plane, an admin listener that is not on loopback.
        danger_ok: bool = false => Hot;
        /// Routes, tenants, upstreams, origins, packs and peers from a registry, beside the file's own. Left out: none.
        follow: Option<FollowSettings> = None => Restart;
    }
}

settings! {
    /// Following a registry. What it says is checked from the trust roots on, and added to the file's lists if the whole
    /// is valid; else the last good set stays. The same id, or the same host and path, in both: the file wins, and nothing
    /// of the registry is taken. Addresses of private networks, plain HTTP origins and local paths are the file's to allow.
    pub struct FollowSettings {
        /// Base URL of the registry, `https://host:port` or `http://host:port`. Empty: the registry in this process.
        url: String = String::new() => Restart;
        /// File with the trust roots, as `ron registry genesis` makes it: who may approve.
        trust_roots: String = String::new() => RequiredRestart;
        /// The hash of the trust roots (`b3:…`), so that no other file is taken. Empty: any.
        trust_roots_b3: String = String::new() => Restart;
    }
}

settings! {
    /// The admin plane.
    pub struct AdminSettings {
        /// Address of the admin listener, loopback only. Port 0 picks a free one.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 9600)) => Restart;
        /// File with the admin token, mode 0600; made on first start. RON_ADMIN__TOKEN takes its place.
        token_file: String = "admin.token".to_owned() => Restart;
    }
}

impl NodeSettings {
    pub fn validate(&self, problems: &mut Problems) {
        let deadline = self.drain_deadline.0;
        if !(Duration::from_secs(1)..=Duration::from_secs(5)).contains(&deadline) {
            problems.add(
                "node.drain_deadline",
                format!("is {}; it must be between 1s and 5s", self.drain_deadline),
            );
        }
        for (index, key) in self.token_keys.iter().enumerate() {
            if let Err(error) = key.parse::<crate::key::PublicKey>() {
                problems.add(format!("node.token_keys[{index}]"), error);
            }
        }
        if self.worker_threads > 1024 {
            problems.add("node.worker_threads", "must be at most 1024");
        }
    }
}

impl AdminSettings {
    pub fn validate(&self, node: &NodeSettings, problems: &mut Problems) {
        if !self.listen.ip().is_loopback() && !node.danger_ok {
            problems.add(
                "admin.listen",
                "is not a loopback address: the admin plane must not be public; use 127.0.0.1, or set node.danger_ok = true",
            );
        }
    }
}

/// Where the node's files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDir(PathBuf);

impl DataDir {
    /// `node.data` if it is set, else the folder of the config file.
    pub fn of(node: &NodeSettings, config_file: Option<&Path>) -> DataDir {
        let beside = config_file.and_then(Path::parent).unwrap_or(Path::new(""));
        let dir = if node.data.is_empty() { beside.to_owned() } else { beside.join(&node.data) };
        DataDir(if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir })
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A configured path: absolute, or relative to the data folder.
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Replaces a file so that a reader sees the old one or the new one, whole.
    pub fn write_atomically(&self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        let temporary = self.0.join(format!(".{name}.{}", std::process::id()));
        let written = std::fs::write(&temporary, bytes);
        let written = written.and_then(|()| std::fs::rename(&temporary, self.0.join(name)));
        // What remains of it is of no use to anybody.
        written.inspect_err(|_| drop(std::fs::remove_file(&temporary)))
    }
}
