//! The public suite of tests for HTTP caches, run through sites of the edge, with a ratchet: what once passed must pass.
//!
//! It is run twice, as its two editions contradict each other. This one has seven required tests (`age-parse-…`) that
//! want an `Age` which is a list or cannot be read to make a response stale, where RFC 9111 section 5.1 has a cache take
//! the first member, and ignore what it cannot read; and one that has an origin confirm another tag than it was asked
//! about and wants that believed, which section 4.3.4 forbids. The later edition wants what the RFC does, and so does a
//! site unless it is told otherwise: with the options for that it is to pass those eight.
//!
//! A line of the ratchet has a test's kind and name, what came of it through each of the sites in their order, and behind
//! a `#` why not all of them pass; a required or optimal test that fails without such a reason fails the run.

use crate::run::{cargo, root, status, target};
use crate::tools;
use ron_testkit::Node;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Of the suite's two editions this is the one that packages are made of.
const PACKAGE: &str = "http-cache-tests@0.4.5";
/// Says which tests there are and what they are for, one line of JSON.
const LIST: &str = "import tests from './tests/index.mjs'; \
    console.log(JSON.stringify(tests.flatMap(suite => suite.tests.filter(test => !test.browser_only) \
    .map(test => [test.id, test.kind || 'required', test.depends_on || []]))))";

/// Through which sites the suite is run: what they are called, and what they are told.
const SITES: [(&str, &str); 2] = [
    ("as sites are", ""),
    ("with cautious_age and accept_changed_tag", "cautious_age = true\naccept_changed_tag = true\n"),
];

/// Runs the suite. With `accept` the result becomes what must be reached from now on.
pub(crate) fn run(accept: bool) -> bool {
    let Some(suite) = install().filter(|_| cargo(&["build", "-p", "ron"])) else { return false };
    let ratchet = std::fs::read_to_string(file()).unwrap_or_default();
    let known = Known::read(&ratchet);
    let mut columns = Vec::new();
    for (at, (site, options)) in SITES.iter().enumerate() {
        println!("\nrunning the suite {site}");
        let passed_before = |id: &String| known.get(id.as_str()).is_some_and(|it| it.passed[at]);
        match best_of_two(&suite, options, passed_before) {
            Ok(results) => columns.push(results),
            Err(problem) => {
                println!("{problem}");
                return false;
            }
        }
    }
    compare(&columns, &known, accept)
}

/// Some tests wait for a second to pass and fail where a machine is slow: those get another chance.
fn best_of_two(
    suite: &Path,
    options: &str,
    passed_before: impl Fn(&String) -> bool,
) -> Result<Results, String> {
    let mut best = results(suite, options)?;
    if best.iter().any(|(id, (_, outcome))| *outcome != Outcome::Pass && passed_before(id)) {
        for (id, result) in results(suite, options)? {
            if result.1 == Outcome::Pass {
                best.insert(id, result);
            }
        }
    }
    Ok(best)
}

fn file() -> PathBuf {
    root().join("xtask/conformance.txt")
}

/// The suite's folder; installed if it is not there.
fn install() -> Option<PathBuf> {
    if !tools::ensure(&tools::FOR_CONFORMANCE) {
        return None;
    }
    let folder = target().join("conformance");
    let suite = folder.join("node_modules/http-cache-tests");
    if !suite.join("cli.mjs").exists() {
        std::fs::create_dir_all(&folder).ok()?;
        std::fs::write(folder.join("package.json"), "{\"private\":true}\n").ok()?;
        let mut npm = Command::new("npm");
        npm.args([
            "install",
            "--no-audit",
            "--no-fund",
            "--no-save",
            "--ignore-scripts",
            PACKAGE,
            "--prefix",
        ]);
        npm.arg(&folder);
        status(npm);
    }
    suite.join("cli.mjs").exists().then_some(suite)
}

/// Ends with the run.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What came of a test.
#[derive(PartialEq)]
enum Outcome {
    Pass,
    Fail(String),
    /// Where something more basic is not there, a test says nothing.
    Unmet,
}

impl Outcome {
    fn word(&self) -> &'static str {
        match self {
            Outcome::Pass => "pass",
            Outcome::Fail(_) => "fail",
            Outcome::Unmet => "unmet",
        }
    }
}

/// Of each test its kind, and what came of it.
type Results = BTreeMap<String, (String, Outcome)>;

fn results(suite: &Path, options: &str) -> Result<Results, String> {
    let free =
        TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).map_err(|error| error.to_string())?;
    let port = free.port().to_string();
    let mut server = Command::new("node");
    server.arg("server/server.mjs").current_dir(suite).stdout(Stdio::null()).stderr(Stdio::null());
    server.envs([
        ("npm_config_protocol", "http"),
        ("npm_config_port", &port),
        ("npm_config_pidfile", "/dev/null"),
    ]);
    let _server = Running(server.spawn().map_err(|error| error.to_string())?);
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", free.port())).is_err() {
        if begun.elapsed() > Duration::from_secs(30) {
            return Err("the suite's own server does not start".to_owned());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let config = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[edge]\nlisten = \"127.0.0.1:0\"\n\
         [edge.ingress]\nrps_limit = 0\ntimeout = \"20s\"\n[edge.fill]\ndeadline = \"20s\"\n\
         [[edge.sites]]\nhosts = [\"*\"]\norigin = \"http://127.0.0.1:{port}\"\nallow_http = true\nallow_private = true\n\
         heuristic_max = \"1d\"\n{options}"
    );
    let node = Node::start_binary(&target().join("debug/ron"), &["edge"], &config);
    let base = format!("http://{}", node.address("edge", "http"));
    let mut client = Command::new("node");
    client.args(["--no-warnings", "cli.mjs"]).current_dir(suite);
    // Both must be there, and empty: then all tests are run.
    client.envs([("npm_config_base", base.as_str()), ("npm_config_id", ""), ("npm_package_config_id", "")]);
    let found = json(client)?;
    let mut list = Command::new("node");
    list.args(["--no-warnings", "--input-type=module", "-e", LIST]).current_dir(suite);
    let mut results = Results::new();
    for test in json(list)?.as_array().into_iter().flatten() {
        let (Some(id), Some(kind)) = (test[0].as_str(), test[1].as_str()) else { continue };
        let passes = |id: &Value| id.as_str().is_some_and(|id| found[id] == Value::Bool(true));
        let outcome = match &found[id] {
            Value::Bool(true) => Outcome::Pass,
            _ if !test[2].as_array().into_iter().flatten().all(passes) => Outcome::Unmet,
            Value::Array(said) => {
                Outcome::Fail(said.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(": "))
            }
            _ => Outcome::Fail("not run".to_owned()),
        };
        results.insert(id.to_owned(), (kind.to_owned(), outcome));
    }
    Ok(results)
}

/// What a command prints, from the first brace or bracket on.
fn json(mut command: Command) -> Result<Value, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let start = text.find(['{', '[']).unwrap_or(0);
    serde_json::from_str(&text[start..]).map_err(|error| {
        format!(
            "the suite did not say what came of it: {error}\n{text}{}",
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// What the ratchet says of a test: through which sites it was passed, and why not through all.
struct Known<'a> {
    passed: [bool; SITES.len()],
    reason: Option<&'a str>,
}

impl Known<'_> {
    /// Reads lines such as `required some-test fail pass # because`.
    fn read(ratchet: &str) -> BTreeMap<&str, Known<'_>> {
        let read = |line| {
            let (test, reason) = match str::split_once(line, " # ") {
                Some((test, reason)) => (test, Some(reason)),
                None => (line, None),
            };
            let mut words = test.split(' ').skip(1);
            let id = words.next()?;
            Some((id, Known { passed: SITES.map(|_| words.next() == Some("pass")), reason }))
        };
        ratchet.lines().filter_map(read).collect()
    }
}

fn compare(columns: &[Results], known: &BTreeMap<&str, Known<'_>>, accept: bool) -> bool {
    let (mut written, mut lost, mut won, mut unexplained) = (String::new(), 0, 0, 0);
    // By site and kind: how many passed, how many there are, and of how many it is said why they do not pass.
    let mut scores: BTreeMap<(usize, &str), (usize, usize, usize)> = BTreeMap::new();
    for (id, (kind, _)) in columns.first().into_iter().flatten() {
        let before = known.get(id.as_str());
        let outcomes: Vec<_> = columns.iter().filter_map(|it| it.get(id)).map(|(_, it)| it).collect();
        let passed_all = outcomes.iter().all(|it| **it == Outcome::Pass);
        let reason = before.and_then(|it| it.reason).filter(|_| !passed_all);
        for (at, outcome) in outcomes.iter().enumerate() {
            let passed = **outcome == Outcome::Pass;
            let scored = if **outcome == Outcome::Unmet { "unmet" } else { kind };
            let score = scores.entry((at, scored)).or_default();
            score.0 += usize::from(passed);
            score.1 += 1;
            score.2 += usize::from(!passed && reason.is_some());
            let (passed_before, site) = (before.map(|it| it.passed[at]), SITES[at].0);
            match (passed_before, outcome) {
                (Some(true), Outcome::Fail(failure)) => {
                    println!("LOST {kind} {id} {site}: {failure}");
                    lost += 1;
                }
                (Some(true), Outcome::Unmet) => {
                    println!("LOST {kind} {id} {site}: what it rests on fails");
                    lost += 1;
                }
                (Some(false), Outcome::Pass) => won += 1,
                (_, Outcome::Fail(failure))
                    if reason.is_none() && ["required", "optimal"].contains(&&**kind) =>
                {
                    println!("fails without a reason: {kind} {id} {site}: {failure}");
                    unexplained += 1;
                }
                _ => {}
            }
        }
        let words: Vec<_> = outcomes.iter().map(|it| it.word()).collect();
        let tail = reason.map(|reason| format!(" # {reason}")).unwrap_or_default();
        let _ = writeln!(written, "{kind} {id} {}{tail}", words.join(" "));
    }
    for ((at, kind), (passed, all, explained)) in &scores {
        let site = SITES[*at].0;
        println!(
            "{site}: {kind}: {passed} of {all} passed, {explained} not for a reason that the ratchet gives"
        );
    }
    println!("{lost} lost, {won} won, {unexplained} unexplained against {}", file().display());
    if accept {
        return std::fs::write(file(), written).is_ok();
    }
    if won > 0 && lost == 0 {
        println!("`cargo xtask conformance --accept` keeps what was won");
    }
    lost == 0 && unexplained == 0
}
