//! Starting, draining, ending.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, get, ron};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn slow_origin() -> Origin {
    Origin::start(|path| match path {
        "/slow" => Script::After(Duration::from_millis(800)),
        "/stuck" => Script::Silence,
        "/begun" => Script::Chunks(vec![b"abc".to_vec(); 100], Duration::from_millis(100)),
        _ => Script::Body(b"hi".to_vec()),
    })
}

#[test]
fn a_request_in_flight_is_answered_and_a_stuck_one_refused_at_the_deadline() {
    let origin = slow_origin();
    let text = config(&origin.url(), "", "").replace("[admin]", "[node]\ndrain_deadline = \"2s\"\n[admin]");
    let mut node = Node::start(&["gateway"], &text);
    let ask = |path: &str| {
        let mut client = Client::connect(&node.gateway()).unwrap();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
        client
    };
    let (mut slow, mut stuck, mut begun) = (ask("/slow"), ask("/stuck"), ask("/begun"));
    let (admin, gateway) = (node.admin(), node.gateway());
    std::thread::sleep(Duration::from_millis(300));
    let since = Instant::now();
    node.signal("TERM");
    node.eventually("writes are refused first, the admin plane still answers", |_| {
        let ready = get(&admin, "/readyz");
        ready.status == 503 && ready.json()["services"]["gateway"] == "draining"
    });
    node.eventually("the listener is closed", |_| std::net::TcpStream::connect(&gateway).is_err());
    let answer = slow.read_answer("GET").unwrap();
    assert_eq!(
        (answer.status, answer.text(), answer.header("connection")),
        (200, "slow".into(), Some("close"))
    );
    let refused = stuck.read_answer("GET").unwrap();
    assert_eq!((refused.status, refused.reason()), (503, "draining"));
    let cut = begun.read_to_end().unwrap();
    assert!(!cut.ends_with(b"0\r\n\r\n"), "a response under way is cut, not ended as if it were whole");
    assert_eq!(node.wait(), 0, "{}", node.log());
    let elapsed = since.elapsed();
    assert!((Duration::from_millis(1900)..Duration::from_millis(3000)).contains(&elapsed), "{elapsed:?}");
    let log = node.log();
    assert!(log.contains("GET /stuck for") && log.contains("aborted at the drain deadline"), "{log}");
    assert!(!node.dir.path().join("addresses.json").exists());
}

#[test]
fn a_second_signal_exits_at_once() {
    let origin = slow_origin();
    let mut node = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    let mut stuck = Client::connect(&node.gateway()).unwrap();
    stuck.send(b"GET /stuck HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let since = Instant::now();
    node.signal("INT");
    node.eventually("the first signal is seen", |node| node.log().contains("SIGINT"));
    node.signal("TERM");
    assert_eq!(node.wait(), 1);
    assert!(since.elapsed() < Duration::from_millis(1500));
}

#[test]
fn a_signal_while_a_node_is_being_built_ends_it_in_order() {
    let origin = slow_origin();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ron.toml"), config(&origin.url(), "", "")).unwrap();
    assert!(ron(&["key", "new", "--out", "made.key"], dir.path()).status.success());
    // A key that nobody has written yet holds the start up for as long as it takes.
    let key = dir.path().join("node.key");
    let fifo = std::process::Command::new("mkfifo").args(["-m", "600"]).arg(&key).status();
    assert!(fifo.unwrap().success());
    let mut child =
        ron_testkit::command(&["run", "gateway", "--config", "ron.toml"], dir.path()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let catches_term = || {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        caught.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() >> 14 & 1 == 1)
    };
    let begun = Instant::now();
    while !catches_term() {
        if begun.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("SIGTERM would kill it while it is being built");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(killed.unwrap().success());
    std::fs::write(&key, std::fs::read(dir.path().join("made.key")).unwrap()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!dir.path().join("addresses.json").exists());
}

#[test]
fn up_makes_what_it_needs_greets_and_reuses_it() {
    let dir = tempfile::tempdir().unwrap();
    let free = |service: &str| format!("{service}.listen=127.0.0.1:0");
    let (gateway, admin, edge) = (free("gateway"), free("admin"), free("edge"));
    let (registry, overlay) = (free("registry"), free("overlay"));
    let set: Vec<&str> = [&gateway, &admin, &edge, &registry, &overlay]
        .into_iter()
        .flat_map(|set| ["--set", set.as_str()])
        .collect();
    let args = [&["up"], &set[..]].concat();
    let mut node = Node::spawn(dir, &args, &[]);
    node.eventually("the greeting is printed", |node| node.log().contains("Try:"));
    let log = node.log();
    let lines: Vec<&str> = log.lines().filter_map(|line| line.trim().strip_prefix("curl ")).collect();
    assert_eq!(lines.len(), 3, "{log}");
    for line in lines {
        let words: Vec<&str> = line
            .split('\'')
            .flat_map(
                |part| if part.starts_with("some") { vec![part] } else { part.split_whitespace().collect() },
            )
            .collect();
        let output = std::process::Command::new("curl").arg("-sf").args(words).output().unwrap();
        assert!(output.status.success(), "curl {line} failed");
    }
    let second = ron(&args, node.dir.path());
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1));
    assert!(text.contains("in use by another ron (process") && text.contains("--data DIR"), "{text}");
    assert_eq!(node.stop(), 0);
    let key = std::fs::read(node.dir.path().join("ron-data/node.key")).unwrap();
    let dir = std::mem::replace(&mut node.dir, tempfile::tempdir().unwrap());
    let again = Node::spawn(dir, &args, &[]);
    assert_eq!(std::fs::read(again.dir.path().join("ron-data/node.key")).unwrap(), key);
    let disabled = tempfile::tempdir().unwrap();
    let without = Node::spawn(
        disabled,
        &[
            "up",
            "--set",
            &admin,
            "--set",
            "gateway.enabled=false",
            "--set",
            "edge.enabled=false",
            "--set",
            "overlay.enabled=false",
            "--set",
            "registry.enabled=false",
        ],
        &[],
    );
    assert!(without.addresses["gateway"].is_null());
}

#[test]
fn the_data_folder_is_where_the_file_says() {
    let origin = slow_origin();
    let dir = tempfile::tempdir().unwrap();
    let text = config(&origin.url(), "", "")
        .replace("[admin]", "[node]\ndata = \"elsewhere\"\nworker_threads = 1\n[admin]");
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    let output = std::process::Command::new("timeout")
        .args(["--signal=TERM", "1", env!("CARGO_BIN_EXE_ron"), "run", "gateway", "--config", "ron.toml"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(dir.path().join("elsewhere/node.key").exists(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn amnesia_writes_nothing_and_says_everything_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ron"))
        .args([
            "run",
            "gateway",
            "--set",
            "node.amnesia=true",
            "--set",
            "gateway.listen=127.0.0.1:0",
            "--set",
            "admin.listen=127.0.0.1:0",
        ])
        .current_dir(dir.path())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    let said: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(get(said["admin"].as_str().unwrap(), "/readyz").status, 200);
    let bearer = format!("Bearer {}", said["admin_token"].as_str().unwrap());
    let admin = said["admin"].as_str().unwrap();
    let stopped =
        ron_testkit::request(admin, "POST", "/admin/shutdown", &[("Authorization", &bearer)], b"").unwrap();
    assert_eq!(stopped.status, 202);
    assert!(child.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_log_is_json_off_a_terminal_and_text_on_request() {
    let origin = slow_origin();
    let json = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    json.eventually("it logs", |node| !node.log().is_empty());
    let first: serde_json::Value = serde_json::from_str(json.log().lines().next().unwrap()).unwrap();
    assert_eq!((&first["level"], &first["message"]), (&"INFO".into(), &"ready".into()));
    let text = config(&origin.url(), "", "")
        .replace("[admin]", "[log]\nformat = \"text\"\nlevel = \"debug\"\n[admin]");
    let node = Node::start(&["gateway"], &text);
    get(&node.gateway(), "/x?secret=1");
    node.eventually("a debug line", |node| node.log().contains("DEBUG"));
    assert!(!node.log().contains("secret=1"), "no query in the log");
}

#[test]
fn a_straggler_of_http2_is_named_by_what_it_asked_for() {
    let origin = slow_origin();
    let mut node = Node::start(&["gateway"], &config(&origin.url(), "", "[node]\ndrain_deadline = \"1s\""));
    let url = format!("http://{}/stuck", node.gateway());
    let mut curl = std::process::Command::new("curl")
        .args(["-s", "--http2-prior-knowledge", "-o", "/dev/null", "-w", "%{http_code}", &url])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    node.eventually("it is under way", |node| node.metric("inflight_requests{service=\"gateway\"}") == 1.0);
    assert_eq!(node.stop(), 0);
    let mut status = String::new();
    std::io::Read::read_to_string(&mut curl.stdout.take().unwrap(), &mut status).unwrap();
    curl.wait().unwrap();
    assert_eq!(status, "503");
    assert!(node.log().contains("gateway stream GET /stuck for"), "{}", node.log());
}

/// A gateway in this process, with these flags besides.
fn in_process(flags: &[(&str, String)]) -> ron::node::Node {
    use ron_kernel::observe::{LogLevel, LogSettings, Logs};
    let logs = Logs::start(&LogSettings { level: LogLevel::Error, ..LogSettings::default() });
    let free = "127.0.0.1:0".to_owned();
    let own = [("admin.listen", free.clone()), ("gateway.listen", free), ("node.amnesia", "true".to_owned())];
    let flag = |(key, value): &(&str, String)| ((*key).to_owned(), value.clone(), "test".to_owned());
    let flags = own.iter().chain(flags).map(flag).collect();
    let sources = ron_kernel::config::Sources { flags, ..Default::default() };
    ron::node::Node::start(sources, &ron::node::Which::Named(vec!["gateway".to_owned()]), false, logs)
        .unwrap()
}

#[test]
fn what_is_refused_at_the_drain_deadline_is_counted() {
    let origin = Origin::start(|_| Script::Silence);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let node = runtime.block_on(async {
        in_process(&[
            ("node.drain_deadline", "1s".to_owned()),
            ("gateway.upstreams", format!("[{{ name = \"o\", servers = [\"{}\"] }}]", origin.url())),
            ("gateway.routes", "[{ path = \"/*\", upstream = \"o\" }]".to_owned()),
        ])
    });
    let mut client = Client::connect(node.addresses["gateway"]["http"].as_str().unwrap()).unwrap();
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let kernel = node.kernel.clone();
    while !kernel.metrics().scrape().contains("inflight_requests{service=\"gateway\"} 1") {
        std::thread::yield_now();
    }
    kernel.end(ron_kernel::kernel::Ending::Asked);
    runtime.block_on(node.run());
    assert_eq!(client.read_answer("GET").unwrap().reason(), "draining");
    let page = kernel.metrics().scrape();
    assert!(page.contains("rejected_total{service=\"gateway\",reason=\"draining\"} 1"), "{page}");
}

#[test]
fn two_nodes_run_in_one_process_and_end_apart() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (first, second) = runtime.block_on(async { (in_process(&[]), in_process(&[])) });
    let address = |node: &ron::node::Node| node.addresses["admin"].as_str().unwrap().to_owned();
    let (a, b) = (address(&first), address(&second));
    assert_eq!((get(&a, "/readyz").status, get(&b, "/readyz").status), (200, 200));
    first.kernel.end(ron_kernel::kernel::Ending::Asked);
    runtime.block_on(first.run());
    assert!(std::net::TcpStream::connect(&a).is_err());
    assert_eq!(get(&b, "/readyz").status, 200, "the other goes on");
}

#[test]
fn a_strict_boot_is_ready_when_everything_behind_it_has_been_seen() {
    let flag = || Arc::new(AtomicBool::new(false));
    let (healthy, published) = (flag(), flag());
    let (well, known) = (healthy.clone(), published.clone());
    let no = || Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec());
    let origin = Origin::start(move |path| match path {
        "/health" if !well.load(Ordering::SeqCst) => no(),
        "/keys" if !known.load(Ordering::SeqCst) => no(),
        "/keys" => Script::Body(
            br#"{"keys":[{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#
                .to_vec(),
        ),
        _ => Script::Body(b"hi".to_vec()),
    });
    let auth = format!("auth = {{ mode = \"jwt\", jwt = {{ jwks_url = \"{}/keys\" }} }}", origin.url());
    let health = "name = \"o\"\nhealth = { path = \"/health\", interval = \"100ms\" }\n";
    let text =
        config(&origin.url(), &format!("strict_boot = true\n{auth}"), "").replace("name = \"o\"\n", health);
    let node = Node::start(&["gateway"], &text);
    let unmet = |node: &Node, scope: &str| {
        let ready = get(&node.admin(), &format!("/readyz?scope={scope}"));
        let named = ready.json()["missing"].to_string().contains("gateway.strict_boot");
        assert_eq!(ready.status == 503, named, "{}", ready.text());
        named
    };
    assert!(unmet(&node, "write") && unmet(&node, "read"));
    assert_eq!(get(&node.admin(), "/healthz").status, 200, "it lives");
    node.eventually("it says for what it waits", |node| node.log().contains("upstream.o jwks"));
    node.eventually("and to whoever asks", |node| {
        get(&node.admin(), "/readyz").json()["why"]["gateway.strict_boot"] == "waits for upstream.o jwks"
    });
    healthy.store(true, Ordering::SeqCst);
    node.eventually("the upstream is seen", |node| {
        node.log().contains("waiting_for=jwks") || node.log().contains("\"jwks\"")
    });
    assert!(unmet(&node, "write"));
    published.store(true, Ordering::SeqCst);
    node.eventually("everything is", |node| !unmet(node, "write") && !unmet(node, "read"));
    healthy.store(false, Ordering::SeqCst);
    node.eventually("an upstream fails", |node| get(&node.admin(), "/readyz").json()["degraded"] == true);
    assert!(!unmet(&node, "write"), "the boot is over");
    let waiting = config("http://127.0.0.1:1", "strict_boot = true", "");
    let node = Node::start(&["gateway"], &waiting);
    assert!(unmet(&node, "write"));
    node.write_config(&waiting.replace("strict_boot = true", "strict_boot = false"));
    assert_eq!(node.admin_post("/admin/reload", "").status, 200);
    node.eventually("whoever does not want to wait need not", |node| !unmet(node, "write"));
}
