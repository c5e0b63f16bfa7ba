//! The keys of `[registry]`.

use ron_kernel::admission::client_ip::TrustedProxies;
use ron_kernel::config::Problems;
use ron_kernel::http::ServerLimits;
use ron_kernel::http::client::Address;
use ron_kernel::tls::TlsSettings;
use ron_kernel::units::{Size, Span};
use ron_kernel::{choice, settings};
use ron_log::{B3, NoteKey};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

settings! {
    /// The registry.
    pub struct RegistrySettings {
        /// Whether `ron up` starts the registry.
        enabled: bool = true => Restart;
        /// Address of the plain listener. Port 0 picks a free one.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8082)) => Restart;
        /// A TLS listener beside the plain one.
        tls: Option<TlsSettings> = None => Restart;
        /// Folder of the store.
        dir: String = "registry".to_owned() => Restart;
        /// The trust-roots file: the first signer set, and the log's name. `ron registry genesis` makes one.
        trust_roots: String = "trust-roots.json".to_owned() => Restart;
        /// The hash that pins the trust roots. Empty: those of the first start are pinned in the store.
        trust_roots_b3: String = String::new() => Restart;
        /// Who may write. Approvals' signatures are checked in any case.
        auth: Auth = Auth::Capability => Hot;
        /// Flush each commit to the disk before it is acknowledged. False only with `node.danger_ok`.
        fsync: bool = true => Restart;
        /// Commit a proposal as soon as its quorum is met.
        auto_commit: bool = false => Hot;
        /// Refuse a commit if HEAD moved at all since its `base_version`, not only what it touches.
        strict_head: bool = false => Hot;
        /// Copies of the log, each by the address of its checkpoint: a signed note, or the JSON of a registry's
        /// `/registry/head` or of a follower's `/node/follow/checkpoint` on its admin listener. They are asked at the start and each minute: while one has
        /// seen more of the log than there is, or something else, nothing is signed and nothing written. At most 32.
        mirrors: Vec<String> = Vec::new() => Hot;
        /// Sizes, counts and times.
        limits: LimitSettings = LimitSettings::default() => Hot;
        /// Capacities of the channels.
        channels: ChannelSettings = ChannelSettings::default() => Hot;
        /// Signed checkpoints.
        checkpoint: CheckpointSettings = CheckpointSettings::default() => Hot;
        /// What is let go.
        retention: RetentionSettings = RetentionSettings::default() => Hot;
        /// Streams of updates.
        stream: StreamSettings = StreamSettings::default() => Hot;
        /// Witnesses that cosign checkpoints.
        witness: WitnessSettings = WitnessSettings::default() => Hot;
    }
}

choice! {
    /// Who may write.
    pub enum Auth {
        /// Whoever has a capability with the scope `registry:propose`, `registry:approve` or `registry:commit`.
        Capability = "capability",
        /// Anybody; only on a loopback listener or with `node.danger_ok`.
        Open = "open",
    }
}

settings! {
    /// Sizes, counts and times.
    pub struct LimitSettings {
        /// Requests per second over all clients; 0 is off.
        rps: u64 = 0 => Hot;
        /// Requests being answered at one time; streams and requests that wait are counted apart.
        inflight: usize = 512 => Hot;
        /// Largest request body.
        max_body_bytes: Size = Size::mib(1) => Hot;
        /// Proposals pending at one time.
        pending_max: usize = 10_000 => Hot;
        /// How long a proposal may be pending, if it does not end sooner by itself.
        proposal_ttl: Span = Span::secs(72 * 3600) => Hot;
        /// Connections open at one time.
        max_conns: usize = 4096 => Hot;
        /// Connections of one client address; trusted proxies are exempt.
        max_conns_per_ip: usize = 256 => Hot;
        /// Proxies in front of the registry, as addresses or prefixes. `ron up` adds its own gateway.
        trusted_proxies: Vec<String> = Vec::new() => Hot;
        /// Output over input of a compressed request body.
        decompress_ratio_cap: u64 = 10 => Hot;
        /// For a handshake or a request head as a whole, and between two pieces of a body.
        read_timeout: Span = Span::secs(5) => Hot;
        /// Between two pieces of a response that the client takes.
        write_timeout: Span = Span::secs(5) => Hot;
        /// For a connection without a request.
        idle_timeout: Span = Span::secs(60) => Hot;
    }
}

settings! {
    /// Capacities of the channels.
    pub struct ChannelSettings {
        /// Proposals, commits and withdrawals that wait for the Committer.
        proposals: usize = 512 => Restart;
        /// Approvals that wait for the Committer.
        approvals: usize = 512 => Restart;
        /// News of commits that a slow listener may be behind.
        committed: usize = 1024 => Restart;
        /// Bus events that this service may be behind; the bus itself has 1024.
        events: usize = 1024 => Restart;
    }
}

settings! {
    /// Signed checkpoints.
    pub struct CheckpointSettings {
        /// A checkpoint is made when the last one is so old and something was committed since.
        interval: Span = Span::secs(60) => Hot;
        /// And when so many entries were committed since.
        entries: u64 = 1000 => Hot;
    }
}

choice! {
    /// By what is judged what is let go.
    pub enum Policy {
        /// Nothing is.
        None = "none",
        /// Entries older than `max_age`.
        Age = "age",
        /// All but the newest `max_count` entries.
        Count = "count",
        /// The oldest, until the rest has `target_bytes`.
        Size = "size",
    }
}

settings! {
    /// What is let go: records and payloads, under a signed checkpoint and by whole bundles of 256; never hash tiles.
    pub struct RetentionSettings {
        /// By what it is judged. Whole bundles of 256 entries are let go, and none that the newest checkpoint does not cover, so
        /// that up to 255 more stay than are asked for. It is looked at with each checkpoint and each `checkpoint.interval`.
        policy: Policy = Policy::None => Hot;
        /// Age at which an entry is let go.
        max_age: Span = Span::secs(30 * 86_400) => Hot;
        /// Entries that are kept.
        max_count: u64 = 100_000 => Hot;
        /// Bytes of records and payloads that are kept.
        target_bytes: Size = Size::mib(1024) => Hot;
    }
}

settings! {
    /// Streams of updates, as server-sent events and over WebSocket.
    pub struct StreamSettings {
        /// Streams open at one time, and requests that wait: long-polls, and commits that wait for a checkpoint.
        max_clients: usize = 1024 => Hot;
        /// Entries that may wait for a client that has stalled; with more it is told that it lags.
        buffer: u64 = 64 => Hot;
        /// How long a client may take nothing before it has stalled.
        stall: Span = Span::secs(5) => Hot;
        /// Silence after which a sign of life is sent.
        heartbeat: Span = Span::secs(15) => Hot;
    }
}

settings! {
    /// Witnesses (C2SP tlog-witness).
    pub struct WitnessSettings {
        /// Witnesses, each as base address, space, verifier key: `https://host:port name+hash+base64`, as the witness
        /// states it; `/add-checkpoint` is asked. Only cosignatures by that key are taken. At most 32.
        urls: Vec<String> = Vec::new() => Hot;
        /// How many of the witnesses must have cosigned a checkpoint before it is served; 0 serves it at once.
        quorum: u64 = 0 => Hot;
    }
}

impl RegistrySettings {
    /// What can be judged without files.
    pub fn validate(&self, danger_ok: bool, amnesia: bool, problems: &mut Problems) {
        let limits = &self.limits;
        TrustedProxies::check(&limits.trusted_proxies, "registry.limits.trusted_proxies", problems);
        let positive = [
            ("limits.inflight", limits.inflight as u64),
            ("limits.pending_max", limits.pending_max as u64),
            ("limits.max_conns", limits.max_conns as u64),
            ("limits.max_conns_per_ip", limits.max_conns_per_ip as u64),
            ("limits.decompress_ratio_cap", limits.decompress_ratio_cap),
            ("channels.proposals", self.channels.proposals as u64),
            ("channels.approvals", self.channels.approvals as u64),
            ("channels.committed", self.channels.committed as u64),
            ("checkpoint.entries", self.checkpoint.entries),
            ("retention.max_count", self.retention.max_count),
            ("retention.target_bytes", self.retention.target_bytes.0),
            ("limits.max_body_bytes", limits.max_body_bytes.0),
        ];
        for (key, _) in positive.into_iter().filter(|(_, value)| *value == 0) {
            problems.add(format!("registry.{key}"), "must be at least 1");
        }
        let times = [
            ("limits.proposal_ttl", limits.proposal_ttl),
            ("limits.read_timeout", limits.read_timeout),
            ("limits.write_timeout", limits.write_timeout),
            ("limits.idle_timeout", limits.idle_timeout),
            ("checkpoint.interval", self.checkpoint.interval),
            ("retention.max_age", self.retention.max_age),
            ("stream.stall", self.stream.stall),
            ("stream.heartbeat", self.stream.heartbeat),
        ];
        for (key, _) in times.into_iter().filter(|(_, value)| value.0 < Duration::from_millis(10)) {
            problems.add(format!("registry.{key}"), "must be at least 10ms");
        }
        for (key, value) in [("dir", &self.dir), ("trust_roots", &self.trust_roots)] {
            if value.is_empty() {
                problems.add(format!("registry.{key}"), "must not be empty");
            }
        }
        if self.channels.events != ron_kernel::bus::BUS_CAPACITY {
            problems.add("registry.channels.events", "is 1024: the bus is one for the whole process");
        }
        if !self.trust_roots_b3.is_empty() && B3::parse(&self.trust_roots_b3).is_none() {
            problems.add("registry.trust_roots_b3", "is not b3: and 64 lowercase hexadecimal digits");
        }
        let mut listens = std::iter::once(self.listen).chain(self.tls.iter().map(|tls| tls.listen));
        if self.auth == Auth::Open && listens.any(|listen| !listen.ip().is_loopback()) && !danger_ok {
            problems.add(
                "registry.auth",
                "is \"open\" on an address that is not loopback: anybody could write; set node.danger_ok = true if that is meant",
            );
        }
        if !self.fsync && !danger_ok {
            problems.add(
                "registry.fsync",
                "is false: commits would be lost in a crash; set node.danger_ok = true if that is meant",
            );
        }
        if amnesia && problems.is_set("registry.dir") {
            problems.add("registry.dir", "is set, but node.amnesia is on: no file may be written");
        }
        self.validate_others(problems);
    }

    /// Witnesses and mirrors.
    fn validate_others(&self, problems: &mut Problems) {
        let mut known = Vec::new();
        for (index, url) in self.witness.urls.iter().enumerate() {
            match crate::witness::parse(url) {
                Ok((_, _, key)) if known.contains(&key) => {
                    problems.add(format!("registry.witness.urls[{index}]"), "has the key of another witness");
                }
                Ok((_, _, key)) => known.push(key),
                Err(error) => problems.add(format!("registry.witness.urls[{index}]"), error),
            }
        }
        for (index, url) in self.mirrors.iter().enumerate() {
            if let Err(error) = crate::mirror::parse(url) {
                problems.add(format!("registry.mirrors[{index}]"), error);
            }
        }
        if self.mirrors.len() > crate::mirror::MIRRORS_MAX {
            problems.add("registry.mirrors", "names more than 32 mirrors");
        }
        if self.witness.urls.len() > crate::witness::WITNESSES_MAX {
            problems.add("registry.witness.urls", "names more than 32 witnesses");
        }
        if self.witness.quorum > self.witness.urls.len() as u64 {
            problems.add("registry.witness.quorum", "is more than there are witness.urls");
        }
    }

    /// The files whose change should lead to a reload.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        self.tls.iter().flat_map(|tls| tls.files(base)).collect()
    }

    /// What the kernel's server is told.
    pub fn server_limits(&self) -> ServerLimits {
        let limits = &self.limits;
        ServerLimits {
            conns_max: limits.max_conns,
            conns_per_ip_max: limits.max_conns_per_ip,
            headers_max: 100,
            header_bytes_max: 16 << 10,
            read_timeout: limits.read_timeout.0,
            write_timeout: limits.write_timeout.0,
            idle_timeout: limits.idle_timeout.0,
            trusted_proxies: TrustedProxies::read(&limits.trusted_proxies),
            proxy_protocol: false,
        }
    }
}

/// A witness's address, the path before `/add-checkpoint`, and its key.
pub(crate) type WitnessAddress = (Address, String, NoteKey);
