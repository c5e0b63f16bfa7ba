//! The keys of `[edge]`.

use crate::address::Address;
use crate::cas;
use crate::depot;
use crate::egress::{OriginUrl, normal_host};
use crate::packs::is_remote;
use crate::s3::{self, Credentials, ObjectUrl};
use ron_kernel::admission::client_ip::TrustedProxies;
use ron_kernel::config::Problems;
use ron_kernel::http::ServerLimits;
use ron_kernel::tls::{ClientTlsSettings, TlsSettings};
use ron_kernel::units::{Size, Span};
use ron_kernel::{choice, settings};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Fields and bytes of a request head.
const HEADERS_MAX: usize = 100;
const HEADER_BYTES_MAX: usize = 32 << 10;

const PACK_NAME_MAX: usize = 64;
/// Objects that come from origins; each has its fields in memory, some KiB.
const RESPONSES_MAX: usize = 100_000;

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
        /// Where assets that are not stored come from: the origin with the longest prefix that fits.
        origins: Vec<OriginSettings> = Vec::new() => Hot;
        /// Hosts of which everything is served through the cache, except what begins with `/edge/`.
        sites: Vec<SiteSettings> = Vec::new() => Hot;
        /// How origins are asked.
        fill: FillSettings = FillSettings::default() => Hot;
        /// When an origin is asked again: after a connection that failed, a time-out, a 502, 503 or 504.
        retry: RetrySettings = RetrySettings::default() => Hot;
        /// What is let in.
        ingress: IngressSettings = IngressSettings::default() => Hot;
        /// Parts of HTTP that can be turned off.
        http: HttpSettings = HttpSettings::default() => Hot;
        /// Packs of map tiles, each a PMTiles or an MBTiles file. A file that is replaced is mounted anew.
        packs: Vec<PackSettings> = Vec::new() => Hot;
        /// The object store of packs at `s3://`, and of `cas.backend = "s3"`.
        s3: S3Settings = S3Settings::default() => Hot;
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
        /// Connections of one client address; trusted proxies are exempt.
        max_conns_per_ip: usize = 256 => Hot;
        /// Proxies in front of the edge, as addresses or prefixes. `ron up` adds its own gateway.
        trusted_proxies: Vec<String> = Vec::new() => Hot;
        /// Decoded over encoded size of an origin's answer that comes encoded though nobody asked for it.
        decompress_max_ratio: u64 = 10 => Hot;
        /// Largest size of such an answer, decoded.
        decompress_abs_bytes: Size = Size::mib(10) => Hot;
    }
}

settings! {
    /// An origin of assets.
    pub struct OriginSettings {
        /// Which paths behind `/edge/assets`, such as `/img/`.
        prefix: String = String::new() => Required;
        /// What stands in the prefix's place, such as `https://img.example.org/`. HTTPS only.
        url: String = String::new() => Required;
        /// How long an answer is good that says nothing about it itself.
        ttl: Span = Span::secs(3600) => Hot;
        /// Whether its name may lead to an address of this machine or of a private network.
        allow_private: bool = false => Hot;
        /// CA file, PEM, that its certificate is checked against. Empty: the system's CA certificates.
        ca_file: String = String::new() => Hot;
        /// Requests to it at one time.
        max_inflight: usize = 64 => Hot;
        /// Requests to it per second, of which one second's worth may be sent at once. 0: off.
        rps: u64 = 0 => Hot;
    }
}

settings! {
    /// Hosts of which everything is served through the cache.
    pub struct SiteSettings {
        /// Names that clients ask for, without a port, or `*` for every one.
        hosts: Vec<String> = Vec::new() => Required;
        /// Where it comes from, such as `https://www.example.org`.
        origin: String = String::new() => Required;
        /// Whether the origin may be an `http://` one.
        allow_http: bool = false => Hot;
        /// Whether its name may lead to an address of this machine or of a private network.
        allow_private: bool = false => Hot;
        /// CA file, PEM, that its certificate is checked against. Empty: the system's CA certificates.
        ca_file: String = String::new() => Hot;
        /// Requests to it at one time.
        max_inflight: usize = 256 => Hot;
        /// Requests to it per second, of which one second's worth may be sent at once. 0: off.
        rps: u64 = 0 => Hot;
        /// How long at most a response is good that says when it was last modified but not how long it is good: a tenth of the time since then, as RFC 9111 suggests. 0: not at all.
        heuristic_max: Span = Span::secs(0) => Hot;
        /// Whether a response whose `Age` is anything but one plain number, or a list of such written without blanks, counts as stale and is confirmed before it is reused. Off: of a list the first number counts, and what is no number is ignored, as RFC 9111 has it.
        cautious_age: bool = false => Hot;
        /// Whether a 304 with another tag than that of what is stored confirms it all the same; the stored tag stays. For origins whose tags change with the coding, or from server to server. Off: it is fetched anew, as RFC 9111 has it.
        accept_changed_tag: bool = false => Hot;
    }
}

settings! {
    /// How origins are asked.
    pub struct FillSettings {
        /// Tasks that take objects out of the queue and have them fetched. 0: 64.
        workers: usize = 0 => Restart;
        /// Objects that may wait for one of them, and as many again whose origins have not answered yet.
        work_capacity: usize = 512 => Restart;
        /// Largest object that is fetched.
        max_object_bytes: Size = Size::mib(64) => Hot;
        /// Until an answer begins, all tries together.
        deadline: Span = Span::secs(5) => Hot;
        /// Longest silence within an answer.
        stall_timeout: Span = Span::secs(5) => Hot;
        /// An object up to this size is there as a whole before its answer begins, so that its tag is known.
        buffer_bytes: Size = Size::mib(1) => Hot;
        /// How long it is remembered that there is nothing, if the origin does not say.
        negative_ttl: Span = Span::secs(10) => Hot;
    }
}

settings! {
    /// When an origin is asked again.
    pub struct RetrySettings {
        /// First pause; each further one is twice as long.
        base: Span = Span::millis(50) => Hot;
        /// Longest pause.
        max: Span = Span::millis(800) => Hot;
        /// Tries in all.
        tries: u64 = 3 => Hot;
        /// Whether up to `base` is added to each pause, so that many do not ask at the same moment.
        jitter: bool = true => Hot;
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
        /// In the object store of `edge.s3`, with the files under `dir` as a cache in front of it.
        S3 = "s3",
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
        /// Bucket of the object store, for `backend = "s3"`.
        bucket: String = String::new() => Restart;
        /// What keys in the bucket begin with, such as `edge/`.
        prefix: String = String::new() => Restart;
        /// Bytes of all objects on disk; when there are more, those go that are wanted least.
        max_bytes: Size = Size::mib(10 << 10) => Hot;
        /// Bytes of all objects in memory, likewise.
        memory_bytes: Size = Size::mib(256) => Hot;
        /// When the bytes of an object are checked against its address.
        verify: Verify = Verify::FirstRead => Hot;
        /// Whether an object that is put here must be on disk before it is acknowledged; for what an origin has the disk is not waited for.
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
        /// Its file; packs are replaced by renaming another file to this name. Or the URL of a PMTiles archive on a server
        /// that sends parts of files and gives them strong ETags, such as `https://tiles.example.org/planet.pmtiles`, or of
        /// one in the object store of `edge.s3`, such as `s3://tiles/planet.pmtiles`.
        path: String = String::new() => Required;
        /// The address that the file must have (`b3:…`); nothing of it is served before that is known. Empty: any. Only for
        /// a file of this machine.
        b3: String = String::new() => Hot;
        /// Whether the URL's host may have a private, loopback or link-local address.
        allow_private: bool = false => Hot;
        /// CA certificates for the URL's host, PEM. Empty: the system's.
        ca_file: String = String::new() => Hot;
    }
}

settings! {
    /// An S3-compatible object store.
    pub struct S3Settings {
        /// Where it is, such as `https://s3.example.org`. Empty: Amazon's, of the region.
        endpoint: String = String::new() => Hot;
        /// What requests are signed for; stores that know no regions take the default.
        region: String = "us-east-1".to_owned() => Hot;
        /// File of keys, of mode 0600, as Amazon's own tools write it: `aws_access_key_id`, `aws_secret_access_key` and perhaps
        /// `aws_session_token` under `[default]`. Empty: the variables `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and
        /// `AWS_SESSION_TOKEN`.
        credentials_file: String = String::new() => Hot;
        /// Whether a bucket stands in the path of a URL; else in front of the host's name.
        path_style: bool = true => Hot;
        /// Whether the endpoint may be an `http://` one. What is read there is not encrypted; the secret key is not sent.
        allow_http: bool = false => Hot;
        /// Whether its name may lead to an address of this machine or of a private network.
        allow_private: bool = false => Hot;
        /// CA file, PEM, that its certificate is checked against. Empty: the system's CA certificates.
        ca_file: String = String::new() => Hot;
    }
}

settings! {
    /// Which web pages may read.
    pub struct CorsSettings {
        /// Origins such as `https://www.example.org`, or `*` for every one. Empty: none.
        allow_origins: Vec<String> = Vec::new() => Hot;
    }
}

/// How TLS is spoken to a server whose certificate is checked against this file.
pub(crate) fn client_tls(ca_file: &str) -> ClientTlsSettings {
    ClientTlsSettings { ca: ca_file.to_owned(), ..ClientTlsSettings::default() }
}

impl CasSettings {
    /// The URL of the object in the bucket that stands before all others.
    pub(crate) fn first_key(&self) -> String {
        format!("s3://{}/{}{}", self.bucket, self.prefix, depot::PROBE)
    }
}

impl PackSettings {
    /// Whether it is in the object store, and so read with the node's own keys.
    pub fn is_object(&self) -> bool {
        s3::is_object(&self.path)
    }
}

impl EdgeSettings {
    pub fn validate(&self, amnesia: bool, problems: &mut Problems) {
        let ingress = &self.ingress;
        TrustedProxies::check(&ingress.trusted_proxies, "edge.ingress.trusted_proxies", problems);
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
        self.validate_origins(problems);
        if self.cas.scrub_interval.0 < SCRUB_INTERVAL_MIN {
            problems.add("edge.cas.scrub_interval", "must be at least 1s");
        }
        if self.cas.dir.is_empty() {
            problems.add("edge.cas.dir", "must name a folder");
        }
        if amnesia && problems.is_set("edge.cas.dir") {
            problems.add("edge.cas.dir", "is set, but node.amnesia is on: no file may be written");
        }
        for (index, pin) in self.cas.pins.iter().enumerate() {
            if pin.starts_with("b3:") && Address::parse(pin).is_none() {
                problems
                    .add(format!("edge.cas.pins[{index}]"), "is no address: b3: and 64 digits in lower case");
            }
        }
        self.validate_packs(problems);
        self.validate_s3(problems);
        self.validate_depot(amnesia, problems);
        for (index, origin) in self.cors.allow_origins.iter().enumerate() {
            let rest = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            let good = rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', ' ', '*']));
            if origin != "*" && !good {
                let message = format!("{origin:?} is no origin: write https://HOST without a path, or *");
                problems.add(format!("edge.cors.allow_origins[{index}]"), message);
            }
        }
    }

    fn validate_origins(&self, problems: &mut Problems) {
        let url = |at: String, text: &str, allow_http: bool, problems: &mut Problems| match OriginUrl::parse(
            text, allow_http,
        ) {
            Ok(url) => Some(url),
            Err(bad) => {
                problems.add(at, format!("{text:?} is no origin: {bad}"));
                None
            }
        };
        for (index, origin) in self.origins.iter().enumerate() {
            let at = format!("edge.origins[{index}]");
            url(format!("{at}.url"), &origin.url, false, problems);
            if !origin.prefix.starts_with('/') {
                problems.add(format!("{at}.prefix"), "must begin with a slash");
            }
            if self.origins[..index].iter().any(|other| other.prefix == origin.prefix) {
                problems.add(format!("{at}.prefix"), "is the prefix of two origins");
            }
            if origin.max_inflight == 0 {
                problems.add(format!("{at}.max_inflight"), "must be at least 1");
            }
        }
        for (index, site) in self.sites.iter().enumerate() {
            let at = format!("edge.sites[{index}]");
            let origin = url(format!("{at}.origin"), &site.origin, site.allow_http, problems);
            if origin.is_some_and(|origin| origin.path != "/") {
                problems.add(format!("{at}.origin"), "must have no path: a site is served as it is");
            }
            if site.hosts.is_empty() {
                problems.add(format!("{at}.hosts"), "needs at least one host, or *");
            }
            for host in &site.hosts {
                let taken = self.sites[..index].iter().any(|other| other.hosts.contains(host));
                if taken {
                    problems.add(format!("{at}.hosts"), format!("{host:?} is served twice"));
                }
                if host != "*" && normal_host(host).as_ref() != Some(host) {
                    problems.add(
                        format!("{at}.hosts"),
                        format!("{host:?} is no host in lower case without a port"),
                    );
                }
            }
            if site.max_inflight == 0 {
                problems.add(format!("{at}.max_inflight"), "must be at least 1");
            }
        }
        for (key, zero) in [
            ("fill.work_capacity", self.fill.work_capacity == 0),
            ("fill.max_object_bytes", self.fill.max_object_bytes.0 == 0),
            ("fill.deadline", self.fill.deadline.0.is_zero()),
            ("fill.stall_timeout", self.fill.stall_timeout.0.is_zero()),
            ("retry.tries", self.retry.tries == 0),
        ] {
            if zero {
                problems.add(format!("edge.{key}"), "is 0: no origin could be asked");
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
            self.validate_remote(index, pack, problems);
            if !pack.b3.is_empty() && Address::parse(&pack.b3).is_none() {
                let message = "is no address: b3: and 64 digits in lower case";
                problems.add(format!("edge.packs[{index}].b3"), message);
            }
        }
    }

    fn validate_remote(&self, index: usize, pack: &PackSettings, problems: &mut Problems) {
        let mut add = |key: &str, message: &str| problems.add(format!("edge.packs[{index}].{key}"), message);
        if !is_remote(&pack.path) {
            if pack.allow_private || !pack.ca_file.is_empty() {
                add("path", "is a file: allow_private and ca_file are for packs at https://");
            }
            return;
        }
        if pack.is_object() {
            // What is wrong with the endpoint is said of the endpoint.
            match ObjectUrl::parse(&pack.path).and_then(|object| object.locate(&self.s3)) {
                Ok(_) | Err(s3::BadObject::Endpoint(_)) => {}
                Err(bad) => add("path", &bad.to_string()),
            }
            if pack.allow_private || !pack.ca_file.is_empty() {
                add("path", "is in the object store: allow_private and ca_file are those of [edge.s3]");
            }
        } else if !pack.path.to_ascii_lowercase().starts_with("https://") {
            add(
                "path",
                "is a URL of a kind that is not supported: a file, https://HOST/PATH or s3://BUCKET/KEY",
            );
        } else if let Err(bad) = OriginUrl::parse(&pack.path, false) {
            add("path", &bad.to_string());
        }
        if !pack.b3.is_empty() {
            add("b3", "is for a file: the address of a pack elsewhere is not found out");
        }
    }

    fn validate_depot(&self, amnesia: bool, problems: &mut Problems) {
        let cas = &self.cas;
        if cas.backend != Backend::S3 {
            for (key, value) in [("bucket", &cas.bucket), ("prefix", &cas.prefix)] {
                if !value.is_empty() {
                    problems.add(format!("edge.cas.{key}"), "is for backend = \"s3\"");
                }
            }
            return;
        }
        if amnesia {
            problems.add("edge.cas.backend", "is \"s3\", but node.amnesia is on: nothing may be kept");
        }
        if self.mode == Mode::Offline {
            problems.add("edge.cas.backend", "is \"s3\", but edge.mode is \"offline\": no server is asked");
        }
        if !cas.prefix.is_empty() && !cas.prefix.ends_with('/') {
            problems.add("edge.cas.prefix", "must end with a slash");
        }
        match ObjectUrl::parse(&cas.first_key()).and_then(|object| object.locate(&self.s3)) {
            Ok(_) | Err(s3::BadObject::Endpoint(_)) => {}
            Err(bad @ s3::BadObject::Key) => problems.add("edge.cas.prefix", bad.to_string()),
            Err(bad) => problems.add("edge.cas.bucket", bad.to_string()),
        }
    }

    fn validate_s3(&self, problems: &mut Problems) {
        if !self.s3.has_region() {
            problems.add("edge.s3.region", "is no region: lower-case letters, digits and hyphens");
        } else if let Err(bad) = self.s3.place() {
            let message = format!("{:?} is no URL of a store: {bad}", self.s3.endpoint);
            let http = message.contains("https://") && self.s3.endpoint.starts_with("http://");
            let advice = if http { "; allow_http = true allows http://" } else { "" };
            problems.add("edge.s3.endpoint", message + advice);
        }
    }

    /// What is wrong with the CA files of origins, sites, packs and the object store, and with its file of keys; reads them.
    pub fn validate_files(&self, base: &Path, problems: &mut Problems) {
        let origins =
            self.origins.iter().enumerate().map(|(index, it)| (format!("origins[{index}]"), &it.ca_file));
        let sites = self.sites.iter().enumerate().map(|(index, it)| (format!("sites[{index}]"), &it.ca_file));
        let packs = self.packs.iter().enumerate().map(|(index, it)| (format!("packs[{index}]"), &it.ca_file));
        let store = [("s3".to_owned(), &self.s3.ca_file)];
        let all = origins.chain(sites).chain(packs).chain(store);
        for (at, file) in all.filter(|(_, file)| !file.is_empty()) {
            client_tls(file).check(base, &format!("edge.{at}.ca_file"), problems);
        }
        let keys = &self.s3.credentials_file;
        if !keys.is_empty()
            && let Err(error) = Credentials::load(keys, base)
        {
            problems.add("edge.s3.credentials_file", error.to_string());
        }
    }

    /// Files that are read again when they change.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        let mut files = self.tls.as_ref().map_or_else(Vec::new, |tls| tls.files(base));
        let named = self.origins.iter().map(|it| &it.ca_file).chain(self.sites.iter().map(|it| &it.ca_file));
        let named = named.chain(self.packs.iter().map(|it| &it.ca_file));
        let named = named.chain([&self.s3.ca_file, &self.s3.credentials_file]);
        files.extend(named.filter(|file| !file.is_empty()).map(|file| base.join(file)));
        let here = self.packs.iter().filter(|pack| !is_remote(&pack.path));
        files.extend(here.map(|pack| base.join(&pack.path)));
        files
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
            trusted_proxies: TrustedProxies::read(&ingress.trusted_proxies),
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
        cas::Settings { max_bytes, responses_max: RESPONSES_MAX, trust: self.trust(), pins }
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
