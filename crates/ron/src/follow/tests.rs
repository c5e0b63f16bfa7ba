//! What a governed set does to a configuration, and what readiness says of it.

use super::layers::Layers;
use super::notice::Notice;
use super::set::Set;
use crate::config::Config;
use ron_kernel::config::{Loaded, Problems, Sources, attempt, show};
use ron_kernel::health::Scope;
use ron_kernel::kernel::{Kernel, Service};
use ron_log::B3;
use serde_json::{Value, json};
use std::sync::Mutex;

const FILE: &str = "[[gateway.upstreams]]\nname = \"own\"\nservers = [\"http://127.0.0.1:1\"]\n\
                    [[gateway.routes]]\npath = \"/own\"\nhosts = [\"A.example\"]\nmethods = [\"GET\"]\nupstream = \"own\"\n";

fn service() -> Service {
    let service = Kernel::new().service("kernel");
    service.ready();
    service
}

fn file(text: &str) -> Sources {
    Sources { file: Some(("ron.toml".into(), text.to_owned())), ..Sources::default() }
}

/// A set of these items, approved by two.
fn set(version: u64, items: &[(&str, &str, Value)]) -> Set {
    let item = |(kind, id, body): &(&str, &str, Value)| json!({"kind": kind, "id": id, "version": version, "approved": ["ann", "bob"], "body": body});
    let body = json!({"version": version, "items": items.iter().map(item).collect::<Vec<_>>()}).to_string();
    Set::parse(&format!("{}\n{body}\n", B3::of(body.as_bytes()))).expect("a set")
}

fn route(path: &str, upstream: &str) -> Value {
    json!({"path": path, "upstream": upstream})
}

fn read(text: &str, set: &Set) -> (Loaded<Config>, Problems) {
    attempt::<Config>(&Sources { added: set.added(), ..file(text) })
}

#[test]
fn items_become_entries_beside_those_of_the_file_and_say_who_approved_them() {
    let key = "ed25519:6kpsY-KcUgq-9VB7Ey7F-ZVHdq6-vnuSQh7qaRRG0iw";
    let governed = set(
        7,
        &[
            ("route", "r", json!({"path": "/r", "upstream": "u", "max_body_bytes": 2048})),
            ("upstream", "u", json!({"name": "u", "servers": ["http://10.0.0.1:80"]})),
            ("tenant", "t", json!({"id": "t", "quantum": 3})),
            ("origin", "o", json!({"prefix": "/img/", "url": "https://img.example/"})),
            ("pack", "p", json!({"name": "p", "path": "packs/p.pmtiles"})),
            ("peer", "n", json!({"address": format!("{key}@10.0.0.2:9500")})),
            ("x-free", "f", json!(1)),
        ],
    );
    let (loaded, problems) = read(FILE, &governed);
    assert_eq!(problems.lines(), Vec::<String>::new());
    let config = &loaded.value;
    assert_eq!((config.gateway.routes.len(), config.gateway.upstreams.len()), (2, 2));
    assert_eq!(config.gateway.routes[1].max_body_bytes.map(|size| size.0), Some(2048));
    assert_eq!((config.gateway.tenants[0].quantum, config.edge.origins.len()), (3, 1));
    assert_eq!((config.edge.packs[0].name.as_str(), config.overlay.peers.len()), ("p", 1));
    let shown = show(&loaded);
    let place = |path: &str| shown.iter().find(|row| row.0 == path).unwrap().2.clone();
    assert_eq!(place("gateway.routes[0].path"), "ron.toml:5");
    assert_eq!(place("gateway.routes[1].path"), "registry version 7 approved by [ann, bob] (route r)");
    assert_eq!(place("overlay.peers"), "registry version 7 approved by [ann, bob] (peer n)");
    assert_eq!(place("gateway.routes[1].cost"), "default");
}

#[test]
fn what_the_file_has_too_and_what_is_the_files_alone_is_refused() {
    let check = |kind: &str, body: Value, expected: &str| {
        let (_, problems) = read(FILE, &set(7, &[(kind, "x", body.clone())]));
        let lines = problems.lines();
        assert_eq!(lines.len(), 1, "{body}: {lines:?}");
        assert!(lines[0].contains(expected), "{body}: {lines:?}");
        assert!(lines[0].starts_with("registry version 7 approved by [ann, bob]"), "{lines:?}");
    };
    // The same host and path, whatever the methods and the spelling; another host is another route.
    let same =
        |hosts: Value| json!({"path": "/%6Fwn", "upstream": "own", "hosts": hosts, "methods": ["POST"]});
    check(
        "route",
        same(json!(["b.example", "a.example"])),
        "gateway.routes[1].path: is taken by gateway.routes[0]",
    );
    assert!(read(FILE, &set(7, &[("route", "x", same(json!(["b.example"])))])).1.is_empty());
    let upstream = |servers: Value, tls: Value| json!({"name": "u", "servers": servers, "tls": tls});
    check("upstream", json!({"name": "own", "servers": ["http://h:1"]}), "upstreams[1].name");
    check(
        "upstream",
        upstream(json!(["unix:a.sock"]), json!({})),
        "servers[0]: may be set in the node's own file only",
    );
    check("upstream", upstream(json!(["http://h:1"]), json!({"ca": "ca.pem"})), "tls.ca: may be set");
    let origin = |key: &str, value: Value| {
        let mut body = json!({"prefix": "/a/", "url": "https://a.example/"});
        body[key] = value;
        body
    };
    check("origin", origin("allow_private", json!(true)), "allow_private: may be set");
    check("origin", origin("url", json!("http://a.example/")), "origins[0].url");
    for path in ["/etc/passwd", "../x.pmtiles", "a/../../x"] {
        check("pack", json!({"name": "p", "path": path}), "leads out of the node's data folder");
    }
    let remote = |key: &str, value: Value| {
        let mut body = json!({"name": "p", "path": "https://a.example/p.pmtiles"});
        body[key] = value;
        body
    };
    assert!(read(FILE, &set(7, &[("pack", "x", remote("b3", json!("")))])).1.is_empty());
    check("pack", remote("allow_private", json!(true)), "allow_private: may be set");
    check("pack", remote("ca_file", json!("ca.pem")), "ca_file: may be set");
    check(
        "pack",
        remote("path", json!("s3://tiles/p.pmtiles")),
        "path: may be set in the node's own file only",
    );
    let key = "ed25519:6kpsY-KcUgq-9VB7Ey7F-ZVHdq6-vnuSQh7qaRRG0iw";
    check("peer", json!({"address": format!("{key}@unix:/run/x.sock")}), "is a local path");
    check("peer", json!({"address": "x", "more": 1}), "overlay.peers");
    check("route", route("/x", "nowhere"), "there is no upstream \"nowhere\"");
}

/// A node's configuration, read again with whatever set is chosen.
struct Live {
    layers: Layers,
    file: Mutex<String>,
    service: Service,
}

impl Live {
    fn new(newest: Set, good: Set) -> Live {
        let service = service();
        let notice = Notice::new(&service);
        let (_, layers) = Layers::begin::<Config>(notice, &file(FILE), newest, good).unwrap();
        Live { layers, file: Mutex::new(FILE.to_owned()), service }
    }

    /// The paths of the routes in force then.
    fn again(&self) -> Result<Vec<String>, Problems> {
        let (loaded, problems) = read(&self.file.lock().unwrap(), &self.layers.chosen());
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(loaded.value.gateway.routes.into_iter().map(|route| route.path).collect())
    }

    fn reload(&self, text: &str) -> Result<Vec<String>, Problems> {
        text.clone_into(&mut self.file.lock().unwrap());
        self.layers.reload(|| self.again())
    }

    fn ready(&self) -> Value {
        self.service.kernel().health().readiness(None, Scope::Write).unwrap().to_json()
    }
}

#[test]
fn a_set_that_does_not_validate_leaves_the_last_good_one_and_says_why() {
    let live = Live::new(Set::default(), Set::default());
    let govern =
        |version, items: &[(&str, &str, Value)]| live.layers.govern(set(version, items), || live.again());
    assert_eq!(govern(1, &[("route", "a", route("/a", "own"))]).unwrap(), ["/own", "/a"]);
    assert_eq!(live.ready()["degraded"], false);
    let bad = [("route", "a", route("/a", "own")), ("route", "b", route("/b", "gone"))];
    assert!(govern(2, &bad).is_err());
    let ready = live.ready();
    assert_eq!((&ready["ready"], &ready["degraded"]), (&json!(true), &json!(true)));
    assert_eq!(ready["missing"], json!(["registry_follow"]));
    let why = ready["why"]["registry_follow"].as_str().unwrap();
    assert!(why.starts_with("version 2 is rejected: ") && why.contains("no upstream \"gone\""), "{why}");
    let sets = live.layers.sets();
    assert_eq!((sets.in_force.version, sets.good.version, sets.newest.version), (1, 1, 2));
    // The file is read again: the last good set stays, until the file makes the newest good.
    assert_eq!(live.reload(FILE).unwrap(), ["/own", "/a"]);
    let more = format!("{FILE}[[gateway.upstreams]]\nname = \"gone\"\nservers = [\"http://127.0.0.1:2\"]\n");
    assert_eq!(live.reload(&more).unwrap(), ["/own", "/a", "/b"]);
    assert_eq!(live.ready()["missing"], json!([]));
    // A file that is wrong itself changes nothing, and is not the registry's fault.
    assert!(live.reload("[gateway]\nmax_conns = 0\n").unwrap_err().lines()[0].contains("max_conns"));
    assert_eq!((live.layers.sets().in_force.version, live.ready()["missing"].clone()), (2, json!([])));
    // One with which no governed set goes wins over all of them.
    let taken = format!("{more}[[gateway.routes]]\npath = \"/a\"\nupstream = \"own\"\n");
    assert_eq!(live.reload(&taken).unwrap(), ["/own", "/a"]);
    assert_eq!(
        (live.layers.sets().in_force.len(), live.ready()["missing"].clone()),
        (0, json!(["registry_follow"]))
    );
    assert_eq!(govern(3, &[("route", "c", route("/c", "own"))]).unwrap(), ["/own", "/a", "/c"]);
    assert_eq!(live.ready()["missing"], json!([]));
}

#[test]
fn a_start_takes_the_newest_kept_set_that_goes_with_the_file() {
    let [good, bad] = [route("/a", "own"), route("/b", "gone")];
    let [good, bad] = [set(3, &[("route", "a", good)]), set(4, &[("route", "b", bad)])];
    let in_force =
        |newest: &Set, older: &Set| Live::new(newest.clone(), older.clone()).layers.sets().in_force.version;
    assert_eq!(in_force(&good, &Set::default()), 3);
    assert_eq!(in_force(&bad, &good), 3);
    assert_eq!(in_force(&bad, &bad), 0);
    assert_eq!(Live::new(bad, good).ready()["missing"], json!(["registry_follow"]));
    let wrong = file("[gateway]\nmax_conns = 0\n");
    assert!(
        Layers::begin::<Config>(Notice::new(&service()), &wrong, Set::default(), Set::default()).is_err()
    );
}

#[test]
fn a_set_is_kept_as_it_was_and_no_other_way() {
    let kept = set(9, &[("route", "a", route("/ä", "own"))]);
    let text = kept.text();
    assert_eq!((Set::parse(&text).unwrap(), Set::parse(&text).unwrap().version), (kept, 9));
    assert!(Set::parse(&text.replace("own", "two")).is_none());
    assert!(Set::parse("").is_none());
}

#[test]
fn readiness_tells_each_cause_for_as_long_as_it_lasts() {
    let service = service();
    let notice = Notice::new(&service);
    let told = || {
        let ready = service.kernel().health().readiness(None, Scope::Write).unwrap().to_json();
        (ready["missing"].clone(), ready["why"].clone())
    };
    assert!(notice.contact(Some("silent".to_owned())));
    assert!(!notice.contact(Some("silent".to_owned())), "no news");
    notice.rejected(Some("bad".to_owned()));
    assert_eq!(told(), (json!(["registry_follow"]), json!({"registry_follow": "bad"})));
    notice.rejected(None);
    assert_eq!(told().1, json!({"registry_follow": "silent"}));
    notice.fork(Some("two".to_owned()));
    assert_eq!(
        (told().0, notice.trouble()),
        (json!(["registry_follow", "registry_fork"]), Some("two".to_owned()))
    );
    notice.fork(None);
    assert!(notice.contact(None));
    assert_eq!((told().0, notice.trouble()), (json!([]), None));
}
