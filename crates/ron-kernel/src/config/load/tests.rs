//! Layers, origins, every problem at once, and reload.

#![expect(unreachable_pub, reason = "the macro declares public types")]

use super::*;
use crate::config::{Flag, Store, markdown, schema, show};
use crate::units::{Size, Span};
use crate::{choice, settings};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

choice! {
    /// How to balance.
    pub enum Balance {
        P2c = "p2c",
        RoundRobin = "round_robin",
    }
}

settings! {
    /// An entry.
    pub struct Route {
        /// The path.
        path: String = String::new() => Required;
        /// How long.
        timeout: Span = Span::secs(5) => Hot;
    }
}

settings! {
    /// A table.
    pub struct Inner {
        /// The largest body.
        max_body: Size = Size::mib(1) => Hot;
        /// How to balance.
        balance: Balance = Balance::P2c => Hot;
        /// Hosts.
        hosts: Vec<String> = Vec::new() => Hot;
    }
}

settings! {
    /// The root.
    pub struct Root {
        /// Where to listen.
        listen: String = "127.0.0.1:1".to_owned() => Restart;
        /// How many.
        count: u64 = 3 => Hot;
        /// Inside.
        inner: Inner = Inner::default() => Hot;
        /// Entries.
        routes: Vec<Route> = Vec::new() => Hot;
    }
}

impl Validate for Root {
    fn validate_files(&self, _: Option<&Path>, _: &mut Problems) {}

    fn validate(&self, problems: &mut Problems) {
        if self.count > 9 {
            problems.add("count", "must be at most 9");
        }
        for (index, route) in self.routes.iter().enumerate() {
            if !route.path.starts_with('/') {
                problems.add(format!("routes[{index}].path"), "must begin with /");
            }
        }
    }
}

fn file(text: &str) -> Sources {
    Sources { file: Some(("f.toml".into(), text.to_owned())), ..Sources::default() }
}

fn read(text: &str) -> Result<Loaded<Root>, Problems> {
    load(&file(text))
}

#[test]
fn every_problem_is_found_at_once_with_its_line_and_key() {
    let text = "count = 99\nlsten = \"x\"\n\n[inner]\nmax_body = \"5 parsecs\"\nbalance = \"best\"\nhosts = [1]\n\n[[routes]]\ntimeout = 5\n";
    let lines = read(text).unwrap_err().lines();
    let expected = [
        "f.toml:1: count: must be at most 9",
        "f.toml:2: lsten: unknown key; did you mean `listen`?",
        "f.toml:5: inner.max_body: \"5 parsecs\" is no size: write a whole number and B, KiB, MiB or GiB, such as \"64KiB\"",
        "f.toml:6: inner.balance: \"best\" is not one of p2c, round_robin",
        "f.toml:7: inner.hosts[0]: expected a string, found an integer",
        "f.toml:9: routes[0].path: is required",
        "f.toml:10: routes[0].timeout: expected a duration such as \"5s\", found an integer",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn broken_toml_is_reported_with_its_line_and_the_rest_is_still_checked() {
    let lines = read("count = 99\nlisten = \n").unwrap_err().lines();
    assert!(lines.iter().any(|line| line.starts_with("f.toml:2: is no valid TOML")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("count: must be at most 9")), "{lines:?}");
}

#[test]
fn flags_win_over_environment_over_file_over_defaults_and_say_so() {
    let loaded: Loaded<Root> = load(&Sources {
        file: Some(("f.toml".into(), "count = 1\nlisten = \"file\"\n[inner]\nmax_body = \"1KiB\"\n".into())),
        env: vec![
            ("RON_COUNT".into(), "2".into()),
            ("RON_INNER__MAX_BODY".into(), "2KiB".into()),
            ("RON_INNER__HOSTS".into(), "[\"a\"]".into()),
            ("RON_TOKEN".into(), "secret".into()),
            ("PATH".into(), "/bin".into()),
        ],
        flags: vec![("count".into(), "3".into(), "--count".into())],
        ..Sources::default()
    })
    .unwrap();
    assert_eq!(
        (loaded.value.count, loaded.value.inner.max_body, loaded.value.inner.hosts.len()),
        (3, Size::kib(2), 1)
    );
    let shown = show(&loaded);
    let place = |path: &str| shown.iter().find(|row| row.0 == path).unwrap().2.clone();
    assert_eq!(place("count"), "flag --count");
    assert_eq!(place("inner.max_body"), "environment RON_INNER__MAX_BODY");
    assert_eq!(place("listen"), "f.toml:2");
    assert_eq!(place("inner.balance"), "default");
}

#[test]
fn a_variable_that_names_no_key_and_a_former_name_are_errors() {
    let sources = Sources {
        file: Some(("f.toml".into(), "old_count = 1\n".into())),
        env: vec![("RON_CUONT".into(), "2".into())],
        renamed: &[("old_count", "count")],
        ..Sources::default()
    };
    let lines = load::<Root>(&sources).unwrap_err().lines();
    assert_eq!(lines[0], "f.toml:1: old_count: is now called `count`");
    assert_eq!(lines[1], "environment RON_CUONT: cuont: unknown key; did you mean `count`?");
}

#[test]
fn a_table_from_a_flag_is_merged_and_its_origins_are_told_apart() {
    let sources = Sources {
        file: Some(("f.toml".into(), "[inner]\nmax_body = \"1KiB\"\nhosts = [\"a\"]\n".into())),
        env: vec![("RON_INNER".into(), "{ max_body = \"2KiB\" }".into())],
        flags: vec![("inner".into(), "{ balance = \"round_robin\" }".into(), "--set inner".into())],
        ..Sources::default()
    };
    let loaded: Loaded<Root> = load(&sources).unwrap();
    let inner = &loaded.value.inner;
    assert_eq!((inner.max_body, inner.balance, inner.hosts.len()), (Size::kib(2), Balance::RoundRobin, 1));
    let shown = show(&loaded);
    let place = |path: &str| shown.iter().find(|row| row.0 == path).unwrap().2.clone();
    assert_eq!(place("inner.max_body"), "environment RON_INNER");
    assert_eq!(place("inner.balance"), "flag --set inner");
    assert_eq!(place("inner.hosts"), "f.toml:3");
}

#[test]
fn entries_of_a_registry_are_added_to_lists_and_say_who_approved_them() {
    let origin = |version, approved| Origin::Registry { version, item: "route a".to_owned(), approved };
    let by = || Some(vec!["ann".to_owned(), "bob".to_owned()]);
    let entry = |json: serde_json::Value, origin| Node::from_json(&json, &origin);
    let route = |path: &str| serde_json::json!({"path": path, "timeout": "7s"});
    let mut sources = file("[[routes]]\npath = \"/file\"\n");
    sources.added = vec![
        ("routes", entry(route("/a"), origin(7, by()))),
        ("routes", entry(route("/b"), origin(3, None))),
        ("inner.hosts", entry("h".into(), origin(7, by()))),
    ];
    let loaded: Loaded<Root> = load(&sources).unwrap();
    let paths: Vec<&str> = loaded.value.routes.iter().map(|route| route.path.as_str()).collect();
    assert_eq!((paths, loaded.value.inner.hosts.len()), (vec!["/file", "/a", "/b"], 1));
    let shown = show(&loaded);
    let place = |path: &str| shown.iter().find(|row| row.0 == path).unwrap().2.clone();
    assert_eq!(place("routes[0].path"), "f.toml:2");
    assert_eq!(place("routes[1].timeout"), "registry version 7 approved by [ann, bob] (route a)");
    assert_eq!(place("routes[2].path"), "registry version 3, before the approvals known here (route a)");
    assert_eq!(place("inner.hosts"), "registry version 7 approved by [ann, bob] (route a)");
    sources.added = vec![("routes", entry(serde_json::json!({"pth": 1.5, "x": null}), origin(8, by())))];
    let lines = load::<Root>(&sources).unwrap_err().lines();
    assert!(
        lines.iter().all(|line| line.starts_with("registry version 8 approved by [ann, bob]")),
        "{lines:?}"
    );
    assert!(lines.iter().any(|line| line.ends_with("routes[1].path: is required")), "{lines:?}");
}

#[test]
fn a_value_that_no_key_takes_is_one_problem() {
    for (value, what) in [("99999999999999999999", "a number that is too large"), ("2026-01-01", "a date")] {
        let lines = read(&format!("count = {value}\n")).unwrap_err().lines();
        assert_eq!(lines, [format!("f.toml:1: count: expected a whole number, found {what}")]);
    }
}

#[test]
fn a_variable_in_small_letters_or_a_short_token_is_an_error() {
    let sources = Sources {
        env: vec![
            ("RON_COUNT".into(), "2".into()),
            ("RON_count".into(), "3".into()),
            ("RON_ADMIN__TOKEN".into(), "short".into()),
        ],
        ..Sources::default()
    };
    let lines = load::<Root>(&sources).unwrap_err().lines();
    assert_eq!(
        lines,
        [
            "environment RON_count: is not in capitals: write RON_COUNT",
            "environment RON_ADMIN__TOKEN: the admin token must have at least 16 characters",
        ]
    );
}

#[test]
fn a_reload_swaps_as_a_whole_or_not_at_all() {
    let text = Arc::new(std::sync::Mutex::new("count = 1\n".to_owned()));
    let applied = Arc::new(AtomicUsize::new(0));
    let (source, seen) = (text.clone(), applied.clone());
    let store = Store::new(
        read("count = 1\n").unwrap(),
        move || Ok(attempt(&file(&source.lock().unwrap()))),
        move |_| {
            let seen = seen.clone();
            Ok(Box::new(move || {
                seen.fetch_add(1, Ordering::SeqCst);
            }))
        },
    );
    let set = |new: &str| new.clone_into(&mut text.lock().unwrap());
    set("count = 2\n[[routes]]\npath = \"/a\"\n");
    let (version, changed) = store.reload().unwrap();
    let keys: Vec<&str> = changed.iter().map(|change| change.key.as_str()).collect();
    assert_eq!((version, &keys[..]), (1, &["count", "routes", "routes[0].path", "routes[0].timeout"][..]));
    assert_eq!(changed[2].to_string(), "routes[0].path: nothing -> \"/a\"");
    set("count = 5\nlisten = \"elsewhere\"\n");
    let refused = store.reload().unwrap_err().lines();
    assert!(
        refused[0].starts_with("f.toml:2: listen: changed, but takes effect only at a restart"),
        "{refused:?}"
    );
    set("count = 77\n");
    store.reload().unwrap_err();
    let both = |text: &str| {
        set(text);
        store.reload().unwrap_err().lines()
    };
    let lines = both("count = 77\nlisten = \"elsewhere\"\n");
    assert!(
        lines[0].contains("count: must be at most 9") && lines[1].contains("listen: changed"),
        "{lines:?}"
    );
    // Where nothing can be said about a key, nothing is.
    for text in ["listen = 5\n", "count = 77\n", "lsten = \"127.0.0.1:1\"\n", "listen = \"x\"\n]\n"] {
        assert!(!both(text).iter().any(|line| line.contains("restart")), "{text}: {:?}", both(text));
    }
    assert_eq!((store.current().value.count, applied.load(Ordering::SeqCst)), (2, 1));
}

#[test]
fn the_document_and_the_schema_come_from_the_declaration() {
    let page = markdown::<Root>();
    assert!(page.contains("## `[inner]`"), "{page}");
    assert!(
        page.contains("| `max_body` | a size such as \"64KiB\" | `\"1MiB\"` | reload | The largest body. |"),
        "{page}"
    );
    assert!(page.contains("## `[[routes]]`"), "{page}");
    assert!(page.contains("| `path` | a string | required | reload | The path. |"), "{page}");
    assert!(
        page.contains("| `listen` | a string | `\"127.0.0.1:1\"` | restart | Where to listen. |"),
        "{page}"
    );
    let schema = schema::<Root>();
    assert_eq!(schema["properties"]["routes"]["items"]["required"][0], "path");
    assert_eq!(schema["properties"]["inner"]["properties"]["balance"]["enum"][1], "round_robin");
    assert_eq!(KeyDoc::all::<Root>()[0].flag, Flag::Restart);
}
