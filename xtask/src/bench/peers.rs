//! The origin and the proxies in front of it; the registry and etcd.

use super::process::{CLIENT_CORE, PROXY_CORE, pin};
use ron_testkit::{Node, api_key};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The key of the tenant whose requests pass.
pub(crate) const KEY: &str = "bench";
/// A rate that no load reaches.
const HIGH: u64 = 100_000_000;

/// Something that answers requests.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) name: &'static str,
    pub(crate) pid: u32,
    pub(crate) http: String,
    pub(crate) https: String,
    running: Running,
}

/// Ends with its owner.
#[derive(Debug)]
enum Running {
    Node(Box<Node>),
    Child(Child),
}

impl Server {
    /// The folder of a node of ours.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match &self.running {
            Running::Node(node) => Some(node.dir.path()),
            Running::Child(_) => None,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Running::Child(child) = self {
            // SIGTERM, so that a master takes its workers along.
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            let _ = child.wait();
        }
    }
}

/// Files for nginx and HAProxy, and the certificate that all three show.
pub(crate) fn prepare(dir: &Path) -> bool {
    let (cert, key, both) = (dir.join("cert.pem"), dir.join("key.pem"), dir.join("both.pem"));
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
    command.args(["-subj", "/CN=localhost", "-days", "30", "-keyout"]).arg(&key).arg("-out").arg(&cert);
    let made = command.output().is_ok_and(|output| output.status.success());
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    made && std::fs::write(both, read(&cert) + &read(&key)).is_ok()
        && std::fs::write(dir.join("big"), vec![b'x'; 10 << 20]).is_ok()
}

/// nginx with 1 KiB at `/small` and 10 MiB at `/big`.
pub(crate) fn origin(dir: &Path) -> Option<Server> {
    let http = free_address();
    let server = format!(
        "root {};\nlisten {http} backlog=4096;\nlocation = /small {{ return 200 \"{}\"; }}",
        dir.display(),
        "x".repeat(1024)
    );
    nginx("origin", dir, CLIENT_CORE, &server, "", http, String::new())
}

pub(crate) fn nginx_proxy(dir: &Path, origin: &Server) -> Option<Server> {
    let (http, https) = (free_address(), free_address());
    let server = format!(
        "listen {http} backlog=4096;\nlisten {https} ssl http2 backlog=4096;\n\
         ssl_certificate {0}/cert.pem;\nssl_certificate_key {0}/key.pem;\nssl_protocols TLSv1.3;\n\
         location / {{ proxy_pass http://origin; proxy_http_version 1.1; proxy_set_header Connection \"\"; \
         proxy_max_temp_file_size 0; }}",
        dir.display()
    );
    let upstream = format!(
        "upstream origin {{ server {}; keepalive 256; keepalive_requests 1000000000; keepalive_timeout 1h; }}",
        origin.http
    );
    nginx("nginx", dir, PROXY_CORE, &server, &upstream, http, https)
}

fn nginx(
    name: &'static str,
    dir: &Path,
    core: &str,
    server: &str,
    upstream: &str,
    http: String,
    https: String,
) -> Option<Server> {
    let own = dir.join(name.replace(' ', "-"));
    std::fs::create_dir_all(&own).ok()?;
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|kind| format!("{kind}_temp_path {}/{kind};\n", own.display()))
        .collect();
    let config = format!(
        "daemon off;\nuser root;\nworker_processes 1;\npid {0}/pid;\n\
         error_log {0}/error.log crit;\nevents {{ worker_connections 12000; }}\n\
         http {{\naccess_log off;\nsendfile on;\ntcp_nopush on;\nkeepalive_timeout 1h;\n\
         keepalive_requests 1000000000;\n{temporary}{upstream}\nserver {{\n{server}\n}}\n}}\n",
        own.display()
    );
    std::fs::write(own.join("nginx.conf"), config).ok()?;
    let mut command = Command::new("taskset");
    command.args(["-c", core, "nginx", "-e"]).arg(own.join("error.log")).arg("-p").arg(&own);
    command.arg("-c").arg(own.join("nginx.conf"));
    started(name, command, http, https)
}

pub(crate) fn haproxy(dir: &Path, origin: &Server) -> Option<Server> {
    let (http, https) = (free_address(), free_address());
    let config = format!(
        "global\n  nbthread 1\n  maxconn 2000\ndefaults\n  mode http\n  timeout client 1h\n  timeout server 1h\n\
         \x20 timeout connect 5s\n  option http-keep-alive\n  http-reuse always\nfrontend front\n  bind {http}\n\
         \x20 bind {https} ssl crt {}/both.pem alpn h2,http/1.1 ssl-min-ver TLSv1.3\n  default_backend back\n\
         backend back\n  server origin {}\n",
        dir.display(),
        origin.http
    );
    let path = dir.join("haproxy.cfg");
    std::fs::write(&path, config).ok()?;
    let mut command = Command::new("taskset");
    command.args(["-c", PROXY_CORE, "haproxy", "-db", "-f"]).arg(path);
    started("haproxy", command, http, https)
}

/// ron with every protection on: quotas, tenants, the fair queue, deadlines.
pub(crate) fn ron(binary: &Path, dir: &Path, origin: &str, tenants: &str) -> Server {
    let config = format!(
        "[node]\nworker_threads = 1\n[admin]\nlisten = \"127.0.0.1:0\"\n\
         [gateway]\nlisten = \"127.0.0.1:0\"\nmax_conns = 20000\nmax_conns_per_ip = 20000\nidle_timeout = \"1h\"\n\
         [gateway.tls]\ncert = \"{0}/cert.pem\"\nkey = \"{0}/key.pem\"\n\
         [gateway.quotas]\nglobal_rps = {HIGH}\nper_ip_rps = {HIGH}\n[gateway.auth]\nmode = \"api_key\"\n\
         [[gateway.upstreams]]\nname = \"o\"\nservers = [\"http://{origin}\"]\n\
         [[gateway.routes]]\npath = \"/*\"\nupstream = \"o\"\nauth = \"required\"\n{tenants}",
        dir.display()
    );
    let node = Node::start_binary(binary, &["gateway"], &config);
    pin(node.pid(), PROXY_CORE);
    Server {
        name: "ron",
        pid: node.pid(),
        http: node.gateway(),
        https: node.address("gateway", "https"),
        running: Running::Node(Box::new(node)),
    }
}

/// A registry that flushes each commit, with limits that no load of ours reaches.
pub(crate) fn registry(bench: &super::Bench, name: &'static str, roots: &str) -> Server {
    let file = bench.dir.join(format!("{}.json", name.replace(' ', "-")));
    std::fs::write(&file, roots).expect("the folder is ours");
    let config = format!(
        "[node]\nworker_threads = 1\n[admin]\nlisten = \"127.0.0.1:0\"\n\
         [registry]\nlisten = \"127.0.0.1:0\"\nauth = \"open\"\ntrust_roots = \"{}\"\n\
         [registry.limits]\ninflight = 4096\nmax_conns = 8192\nmax_conns_per_ip = 8192\n\
         [registry.channels]\nproposals = 4096\n[registry.stream]\nmax_clients = 4096\n",
        file.display()
    );
    let node = Node::start_binary(&bench.binary, &["registry"], &config);
    pin(node.pid(), PROXY_CORE);
    Server {
        name,
        pid: node.pid(),
        http: node.address("registry", "http"),
        https: String::new(),
        running: Running::Node(Box::new(node)),
    }
}

/// etcd alone, as it is installed: it flushes before it answers.
pub(crate) fn etcd(dir: &Path) -> Option<Server> {
    let (http, peer) = (free_address(), free_address());
    let data = tempfile::tempdir_in(dir).ok()?.keep();
    let mut command = Command::new("taskset");
    command.args(["-c", PROXY_CORE, "etcd", "--log-level", "error", "--data-dir"]).arg(data);
    for (flag, address) in
        [("--listen-client-urls", &http), ("--advertise-client-urls", &http), ("--listen-peer-urls", &peer)]
    {
        command.args([flag, &format!("http://{address}")]);
    }
    let server = started("etcd", command, http, String::new())?;
    // It accepts before it has a leader.
    let begun = Instant::now();
    let put = br#"{"key":"AAAA","value":"AAAA"}"#;
    while !ron_testkit::request(&server.http, "POST", "/v3/kv/put", &[], put).is_ok_and(|it| it.status == 200)
    {
        if begun.elapsed() > Duration::from_secs(10) {
            println!("etcd does not answer");
            return None;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(server)
}

/// PostgreSQL with its own settings, which flush before they answer, and a log that moves by compare-and-set.
pub(crate) fn postgres(dir: &Path) -> Option<Server> {
    let folders = std::fs::read_dir("/usr/lib/postgresql").ok()?.flatten().map(|folder| folder.path());
    let programs = folders.max()?.join("bin");
    let data = tempfile::tempdir_in(dir).ok()?.keep();
    // It does not run as root, and must be able to reach its folder.
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).ok()?;
    let user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"];
    let is_root = std::fs::metadata("/proc/self").ok()?.uid() == 0;
    let as_user: &[&str] = if is_root { &user } else { &["env"] };
    let run = |program: &str| {
        let mut command = Command::new("taskset");
        command.args(["-c", PROXY_CORE]).args(as_user).arg(programs.join(program)).current_dir(&data);
        command
    };
    if is_root {
        Command::new("chown").arg("postgres").arg(&data).status().ok()?;
    }
    let made = run("initdb").args(["-A", "trust", "-U", "postgres", "-D", "."]).output().ok()?;
    if !made.status.success() {
        println!("postgresql: {}", String::from_utf8_lossy(&made.stderr));
        return None;
    }
    let http = free_address();
    let mut command = run("postgres");
    command.args(["-D", ".", "-k", ".", "-h", "127.0.0.1", "-c", "max_connections=600", "-p"]);
    command.arg(http.rsplit_once(':')?.1);
    let server = started("postgresql", command, http, String::new())?;
    let (host, port) = server.http.rsplit_once(':')?;
    let schema = "CREATE TABLE head (version bigint); INSERT INTO head VALUES (0); \
        CREATE TABLE log (version bigint PRIMARY KEY, body text)";
    let mut psql = Command::new("psql");
    psql.args(["-q", "-h", host, "-p", port, "-U", "postgres", "-c", schema, "postgres"]);
    let begun = Instant::now();
    // It accepts before it answers.
    while !psql.output().ok()?.status.success() {
        if begun.elapsed() > Duration::from_secs(10) {
            println!("postgresql does not answer");
            return None;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Some(server)
}

/// ron's edge, with limits that no load of ours reaches.
pub(crate) fn edge(bench: &super::Bench, packs: &str) -> Server {
    let config = format!(
        "[node]\nworker_threads = 1\n[admin]\nlisten = \"127.0.0.1:0\"\n[edge]\nlisten = \"127.0.0.1:0\"\n\
         [edge.ingress]\nrps_limit = 0\nmax_inflight = 4096\ntimeout = \"120s\"\n{packs}"
    );
    let node = Node::start_binary(&bench.binary, &["edge"], &config);
    pin(node.pid(), PROXY_CORE);
    Server {
        name: "ron",
        pid: node.pid(),
        http: node.address("edge", "http"),
        https: String::new(),
        running: Running::Node(Box::new(node)),
    }
}

/// nginx with the files of `root`; tiles are compressed already.
pub(crate) fn files(dir: &Path, name: &'static str, origin: bool) -> Option<Server> {
    let http = free_address();
    let server = format!(
        "root {}/root;\nlisten {http} backlog=4096;\nopen_file_cache max=20000 inactive=1h;\n\
         add_header Cache-Control \"public, max-age=3600\";\n\
         location /edge/packs/ {{ default_type application/vnd.mapbox-vector-tile; \
         add_header Content-Encoding gzip; add_header Vary Accept-Encoding; }}",
        dir.display()
    );
    nginx(name, dir, if origin { CLIENT_CORE } else { PROXY_CORE }, &server, "", http, String::new())
}

/// nginx that keeps what the origin sends on disk.
pub(crate) fn nginx_cache(dir: &Path, origin: &str) -> Option<Server> {
    let http = free_address();
    let server = format!(
        "listen {http} backlog=4096;\nlocation / {{ proxy_pass http://{origin}; proxy_cache kept; proxy_cache_lock on; }}"
    );
    let kept = format!("proxy_cache_path {}/kept keys_zone=kept:16m;", dir.display());
    nginx("nginx cache", dir, PROXY_CORE, &server, &kept, http, String::new())
}

/// Varnish, which keeps what the origin sends in memory.
pub(crate) fn varnish(dir: &Path, origin: &str) -> Option<Server> {
    let http = free_address();
    let mut command = Command::new("taskset");
    command.args(["-c", PROXY_CORE, "varnishd", "-F", "-a", &http, "-b", origin]);
    command.args(["-s", "malloc,256m", "-n"]).arg(dir.join("varnish"));
    started("varnish", command, http, String::new())
}

/// Martin with one pack, if it is installed.
pub(crate) fn martin(pack: &Path) -> Option<Server> {
    Command::new("martin").arg("--version").output().ok()?;
    let http = free_address();
    let mut command = Command::new("taskset");
    command.args(["-c", PROXY_CORE, "martin", "--workers", "1", "--listen-addresses", &http]).arg(pack);
    started("martin", command, http, String::new())
}

/// A tenant with a rate of its own; the highest if none is given.
pub(crate) fn tenant(key: &str, rps: Option<u64>) -> String {
    let rps = rps.unwrap_or(HIGH);
    format!("[[gateway.tenants]]\nid = \"{key}\"\nrps = {rps}\nkeys = [\"{}\"]\n", api_key(key))
}

fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("a bound socket has an address").to_string()
}

/// Starts a server and waits until it accepts.
fn started(name: &'static str, mut command: Command, http: String, https: String) -> Option<Server> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
    let server = Server { name, pid: child.id(), http, https, running: Running::Child(child) };
    let begun = Instant::now();
    while TcpStream::connect(&server.http).is_err() {
        if begun.elapsed() > Duration::from_secs(10) {
            println!("{name} does not listen");
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(server)
}
