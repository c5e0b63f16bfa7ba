//! The keys of `[edge]`.

use crate::address::Address;
use crate::cas;
use ron_kernel::admission::client_ip::TrustedProxies;
use ron_kernel::config::Problems;
use ron_kernel::http::ServerLimits;
use ron_kernel::tls::TlsSettings;
use ron_kernel::units::{Size, Span};
use ron_kernel::{choice, settings};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Fields and bytes of a request head.
const HEADERS_MAX: usize = 100;
const HEADER_BYTES_MAX: usize = 32 << 10;

const PACK_NAME_MAX: usize = 64;
const CAS_DIR: &str = "cas";
const SCRUB_INTERVAL_MIN: Duration = Duration::from_secs(1);

choice! {
    /// Whether origins are asked for what is not stored.
    pub enum Mode {
        /// They are; what no origin stands for is refused (403 `not_allowed`).
        Live = "live",
        /// They are not: what is not stored is not found (404 `not_found`).
        Offline = "offline",
    }
}

settings! {
    /// The asset edge.
    pub struct EdgeSettings {
        /// Whether `ron up` starts the edge.
        enabled: bool = true => Restart;
        /// Address of the plain listener. Port 0 picks a free one.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8081)) => Restart;
        /// A TLS listener beside the plain one.
        tls: Option<TlsSettings> = None => Restart;
        /// Whether origins are asked for what is not stored.
        mode: Mode = Mode::Live => Hot;
        /// What is let in.
        ingress: IngressSettings = IngressSettings::default() => Hot;
        /// Parts of HTTP that can be turned off.
        http: HttpSettings = HttpSettings::default() => Hot;
        /// Packs of map tiles, each a PMTiles or an MBTiles file. A file that is replaced is mounted anew.
        packs: Vec<PackSettings> = Vec::new() => Hot;
        /// The store.
        cas: CasSettings = CasSettings::default() => Hot;
        /// Which web pages may read.
        cors: CorsSettings = CorsSettings::default() => Hot;
    }
}

settings! {
    /// What is let in.
    pub struct IngressSettings {
        /// A request's budget until its answer begins; also for a request head, and between two pieces of a body in either direction.
        timeout: Span = Span::secs(5) => Hot;
        /// Requests being answered at one time.
        max_inflight: usize = 512 => Hot;
        /// Requests per second, of which one second's worth may come at once. 0: off.
        rps_limit: u64 = 500 => Hot;
        /// Largest body of a command; objects have `cas.max_put_bytes`.
        body_bytes: Size = Size::mib(1) => Hot;
        /// For a connection without a request.
        idle_timeout: Span = Span::secs(60) => Hot;
        /// Connections open at one time. The longest idle one gives way to a newcomer.
        max_conns: usize = 4096 => Hot;
        /// Connections of one client address.
        max_conns_per_ip: usize = 256 => Hot;
    }
}

settings! {
    /// Parts of HTTP that can be turned off.
    pub struct HttpSettings {
        /// Answer a request for several ranges with all of them, as multipart/byteranges. Off: with the whole object.
        multi_range: bool = true => Hot;
    }
}

choice! {
    /// Where objects are kept.
    pub enum Backend {
        /// In files, under `dir`.
        Disk = "disk",
        /// In memory, for as long as the process lives.
        Memory = "memory",
    }
}

choice! {
    /// When the bytes of an object are checked against its address.
    pub enum Verify {
        /// Once for each object and process, and again when its file has changed.
        FirstRead = "first_read",
        /// At every read.
        Always = "always",
        /// By the scrub only.
        Never = "never",
    }
}

choice! {
    /// Whether an object must be on disk before it is acknowledged.
    pub enum Fsync {
        Always = "always",
        /// A power cut may take what was acknowledged last; the index knows what it lost.
        Never = "never",
    }
}

settings! {
    /// The content-addressed store.
    pub struct CasSettings {
        /// Where objects are kept. Memory under `node.amnesia`.
        backend: Backend = Backend::Disk => Restart;
        /// Folder of the store.
        dir: String = CAS_DIR.to_owned() => Restart;
        /// Bytes of all objects on disk; when there are more, those go that are wanted least.
        max_bytes: Size = Size::mib(10 << 10) => Hot;
        /// Bytes of all objects in memory, likewise.
        memory_bytes: Size = Size::mib(256) => Hot;
        /// When the bytes of an object are checked against its address.
        verify: Verify = Verify::FirstRead => Hot;
        /// Whether an object must be on disk before it is acknowledged.
        fsync: Fsync = Fsync::Always => Restart;
        /// Largest object that is taken.
        max_put_bytes: Size = Size::mib(16 << 10) => Hot;
        /// How often every object is read and checked.
        scrub_interval: Span = Span::secs(24 * 3600) => Hot;
        /// Objects that never go: paths of assets, or addresses (`b3:…`).
        pins: Vec<String> = Vec::new() => Hot;
    }
}

settings! {
    /// A pack of map tiles.
    pub struct PackSettings {
        /// What it is called in paths: letters, digits, `-` and `_`.
        name: String = String::new() => Required;
        /// Its file. Packs are replaced by renaming another file to this name.
        path: String = String::new() => Required;
        /// The address that the file must have (`b3:…`); nothing of it is served before that is known. Empty: any.
        b3: String = String::new() => Hot;
    }
}

settings! {
    /// Which web pages may read.
    pub struct CorsSettings {
        /// Origins such as `https://www.example.org`, or `*` for every one. Empty: none.
        allow_origins: Vec<String> = Vec::new() => Hot;
    }
}

impl EdgeSettings {
    pub fn validate(&self, amnesia: bool, problems: &mut Problems) {
        let ingress = &self.ingress;
        for (key, value) in [
            ("max_inflight", ingress.max_inflight),
            ("max_conns", ingress.max_conns),
            ("max_conns_per_ip", ingress.max_conns_per_ip),
        ] {
            if value == 0 {
                problems.add(format!("edge.ingress.{key}"), "is 0: nothing could be served");
            }
        }
        for (key, value) in [("timeout", ingress.timeout), ("idle_timeout", ingress.idle_timeout)] {
            if value.0.is_zero() {
                problems.add(format!("edge.ingress.{key}"), "is 0: nothing could be done in time");
            }
        }
        if self.cas.scrub_interval.0 < SCRUB_INTERVAL_MIN {
            problems.add("edge.cas.scrub_interval", "must be at least 1s");
        }
        if self.cas.dir.is_empty() {
            problems.add("edge.cas.dir", "must name a folder");
        }
        if amnesia && self.cas.dir != CAS_DIR {
            problems.add("edge.cas.dir", "is set, but node.amnesia is on: no file may be written");
        }
        for (index, pin) in self.cas.pins.iter().enumerate() {
            if pin.starts_with("b3:") && Address::parse(pin).is_none() {
                problems
                    .add(format!("edge.cas.pins[{index}]"), "is no address: b3: and 64 digits in lower case");
            }
        }
        self.validate_packs(problems);
        for (index, origin) in self.cors.allow_origins.iter().enumerate() {
            let rest = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            let good = rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', ' ', '*']));
            if origin != "*" && !good {
                let message = format!("{origin:?} is no origin: write https://HOST without a path, or *");
                problems.add(format!("edge.cors.allow_origins[{index}]"), message);
            }
        }
    }

    fn validate_packs(&self, problems: &mut Problems) {
        for (index, pack) in self.packs.iter().enumerate() {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            if !(1..=PACK_NAME_MAX).contains(&pack.name.len()) || !pack.name.bytes().all(plain) {
                let message = format!("{:?} is no name: 1 to 64 letters, digits, - and _", pack.name);
                problems.add(format!("edge.packs[{index}].name"), message);
            }
            if self.packs[..index].iter().any(|other| other.name == pack.name) {
                let message = format!("{:?} is the name of two packs: each needs its own", pack.name);
                problems.add(format!("edge.packs[{index}].name"), message);
            }
            if pack.path.is_empty() {
                problems.add(format!("edge.packs[{index}].path"), "must name a file");
            }
            if !pack.b3.is_empty() && Address::parse(&pack.b3).is_none() {
                let message = "is no address: b3: and 64 digits in lower case";
                problems.add(format!("edge.packs[{index}].b3"), message);
            }
        }
    }

    /// Files that are read again when they change.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        let tls = self.tls.as_ref().map_or_else(Vec::new, |tls| tls.files(base));
        tls.into_iter().chain(self.packs.iter().map(|pack| base.join(&pack.path))).collect()
    }

    pub(crate) fn server_limits(&self) -> ServerLimits {
        let ingress = &self.ingress;
        ServerLimits {
            conns_max: ingress.max_conns,
            conns_per_ip_max: ingress.max_conns_per_ip,
            headers_max: HEADERS_MAX,
            header_bytes_max: HEADER_BYTES_MAX,
            read_timeout: ingress.timeout.0,
            write_timeout: ingress.timeout.0,
            idle_timeout: ingress.idle_timeout.0,
            trusted_proxies: TrustedProxies::default(),
            proxy_protocol: false,
        }
    }

    /// Whether objects are in memory.
    pub(crate) fn in_memory(&self, amnesia: bool) -> bool {
        amnesia || self.cas.backend == Backend::Memory
    }

    pub(crate) fn store(&self, in_memory: bool) -> cas::Settings {
        let max_bytes = if in_memory { self.cas.memory_bytes.0 } else { self.cas.max_bytes.0 };
        let pins = self.cas.pins.iter().map(|pin| pin.trim_start_matches('/').to_owned()).collect();
        cas::Settings { max_bytes, trust: self.trust(), pins }
    }

    /// Which bytes need no check.
    pub(crate) fn trust(&self) -> cas::Trust {
        match self.cas.verify {
            Verify::FirstRead => cas::Trust::IfChecked,
            Verify::Always => cas::Trust::Never,
            Verify::Never => cas::Trust::Always,
        }
    }
}
