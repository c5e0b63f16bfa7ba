//! Commands that end by themselves: what they print and the code they leave.

use ron_testkit::{command, ron, ron_with};
use std::process::{Command, Output, Stdio};

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

#[test]
fn config_check_names_every_mistake_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let bad = "[gateway]\nlisten = \"127.0.0.1:0\"\nmax_inflght = 3\nread_timeout = \"5 parsecs\"\n\n[node]\ndrain_deadline = \"9s\"\n\n[gateway.drr]\nrate_limit_rps = 5\n";
    std::fs::write(dir.path().join("bad.toml"), bad).unwrap();
    let output = ron(&["config", "check", "bad.toml"], dir.path());
    let text = text(&output);
    assert_eq!(code(&output), 64, "{text}");
    assert!(
        text.contains("bad.toml:3: gateway.max_inflght: unknown key; did you mean `max_inflight`?"),
        "{text}"
    );
    assert!(text.contains("bad.toml:4: gateway.read_timeout: \"5 parsecs\" is no duration"), "{text}");
    assert!(text.contains("bad.toml:7: node.drain_deadline: is 9s; it must be between 1s and 5s"), "{text}");
    assert!(text.contains("gateway.drr.rate_limit_rps: is now called `gateway.quotas.global_rps`"), "{text}");
}

#[test]
fn config_check_reads_the_files_that_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let tls = "[gateway.tls]\ncert = \"no.pem\"\nkey = \"no.key\"\nclient_ca = \"no.ca\"\nbogus = 1\n";
    std::fs::write(dir.path().join("c.toml"), tls).unwrap();
    let output = ron(&["config", "check", "c.toml"], dir.path());
    assert_eq!(code(&output), 64);
    for word in
        ["gateway.tls.cert", "no.pem", "ron init", "gateway.tls.key", "gateway.tls.client_ca", "bogus"]
    {
        assert!(text(&output).contains(word), "{word} is not in {}", text(&output));
    }
    let missing = ron(&["config", "check", "nowhere.toml"], dir.path());
    assert_eq!(code(&missing), 64);
    assert!(text(&missing).contains("nowhere.toml: cannot be read"), "{}", text(&missing));
}

#[test]
fn config_show_says_where_each_value_came_from() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.toml"), "[node]\nworker_threads = 3\n").unwrap();
    let output = ron(&["config", "show", "--config", "c.toml", "--set", "log.level=debug"], dir.path());
    let shown = text(&output);
    assert!(shown.contains("node.worker_threads = 3  # c.toml:2"), "{shown}");
    assert!(shown.contains("log.level = \"debug\"  # flag --set log.level"), "{shown}");
    assert!(shown.contains("gateway.max_conns = 4096  # default"), "{shown}");
    let json = ron(&["config", "show", "--config", "c.toml", "--json"], dir.path());
    let rows: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(
        rows.as_array().unwrap().iter().any(|row| row["key"] == "node.worker_threads" && row["value"] == "3")
    );
    let wrong = ron(&["config", "show", "--set", "nonsense"], dir.path());
    assert_eq!((code(&wrong), text(&wrong).contains("KEY=VALUE")), (64, true));
}

#[test]
fn the_schema_is_json_and_knows_the_keys() {
    let dir = tempfile::tempdir().unwrap();
    let schema: serde_json::Value =
        serde_json::from_slice(&ron(&["config", "schema"], dir.path()).stdout).unwrap();
    assert_eq!(schema["properties"]["gateway"]["properties"]["routes"]["items"]["required"][0], "path");
    assert_eq!(schema["additionalProperties"], false);
}

#[test]
fn config_check_finds_a_short_admin_token_without_telling_it() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.toml"), "[gateway]\nmax_conns = 0\n").unwrap();
    let output = ron_with(&["config", "check", "c.toml"], dir.path(), &[("RON_ADMIN__TOKEN", "tooshort")]);
    let text = text(&output);
    assert_eq!(code(&output), 64, "{text}");
    assert!(text.contains("environment RON_ADMIN__TOKEN: the admin token must have at least 16"), "{text}");
    assert!(text.contains("gateway.max_conns: must be at least 1") && !text.contains("tooshort"), "{text}");
}

#[test]
fn an_unknown_variable_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let binary = std::env::var_os("CARGO_BIN_EXE_ron").unwrap_or_else(|| env!("CARGO_BIN_EXE_ron").into());
    let output = Command::new(binary)
        .args(["config", "show"])
        .env("RON_GATEWAY__MAX_CONN", "5")
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert_eq!(code(&output), 64);
    assert!(
        text(&output).contains("environment RON_GATEWAY__MAX_CONN: gateway.max_conn: unknown key"),
        "{}",
        text(&output)
    );
}

#[test]
fn keys_are_private_readable_by_openssl_and_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let made = ron(&["key", "new", "--out", "k.pem"], dir.path());
    let public = text(&made);
    assert!(public.starts_with("ed25519:") && public.trim().len() == 8 + 43, "{public}");
    assert_eq!(text(&ron(&["key", "show", "k.pem"], dir.path())), public);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(dir.path().join("k.pem")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    let again = ron(&["key", "new", "--out", "k.pem"], dir.path());
    assert_eq!(code(&again), 1);
    let openssl = Command::new("openssl")
        .args(["pkey", "-in", "k.pem", "-noout", "-text"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(text(&openssl).contains("ED25519"), "{}", text(&openssl));
    std::fs::write(dir.path().join("junk.pem"), "junk").unwrap();
    let junk = ron(&["key", "show", "junk.pem"], dir.path());
    assert_eq!(code(&junk), 1);
    assert!(text(&junk).contains("is no Ed25519 or ML-DSA-44 key"), "{}", text(&junk));
    std::fs::copy(dir.path().join("k.pem"), dir.path().join("open.pem")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(dir.path().join("open.pem"), mode).unwrap();
    let open = ron(&["key", "show", "open.pem"], dir.path());
    assert_eq!(code(&open), 1);
    assert!(text(&open).contains("chmod 600"), "{}", text(&open));
}

#[test]
fn tokens_are_minted_narrowed_and_inspected() {
    let dir = tempfile::tempdir().unwrap();
    ron(&["init", "ron-data"], dir.path());
    let minted = ron(
        &["token", "mint", "--scope", "edge:write,edge:purge", "--tenant", "acme", "--ttl", "5m"],
        dir.path(),
    );
    let token = String::from_utf8(minted.stdout).unwrap().trim().to_owned();
    assert!(!token.contains(char::is_whitespace), "the token alone: {token}");
    let narrowed =
        ron(&["token", "attenuate", &token, "--scope", "edge:write", "--path", "/edge/cas"], dir.path());
    let narrowed = String::from_utf8(narrowed.stdout).unwrap().trim().to_owned();
    let inspected = ron(&["token", "inspect", &narrowed, "--json"], dir.path());
    let seen: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    assert_eq!((seen["blocks"].as_array().unwrap().len(), &seen["trusted"]), (2, &true.into()));
    assert!(seen["ends_at"].is_u64() && seen["expired"] == false, "{seen}");
    let ended = ron(&["token", "attenuate", &token, "--ttl", "0s"], dir.path());
    let ended = String::from_utf8(ended.stdout).unwrap().trim().to_owned();
    let inspected = text(&ron(&["token", "inspect", &ended], dir.path()));
    assert!(inspected.contains("good by its time: no more, since "), "{inspected}");
    let stranger = text(&ron(&["key", "new", "--out", "s.pem"], dir.path()));
    let keys = format!("node.token_keys=[\"{}\"]", stranger.trim());
    let distrusted = ron(&["token", "inspect", &narrowed, "--set", &keys], dir.path());
    assert!(text(&distrusted).contains("signed by a trusted key: no"), "{}", text(&distrusted));
    let none = ron(&["token", "mint"], dir.path());
    assert_eq!((code(&none), text(&none).contains("at least one scope")), (64, true));
    let word = ron(&["token", "mint", "--scope", "a b"], dir.path());
    assert_eq!((code(&word), text(&word).contains("a scope must be")), (64, true));
    let unkeyed = ron(&["token", "mint", "--scope", "a", "--key", "none.pem"], dir.path());
    assert!(text(&unkeyed).contains("--key FILE"), "{}", text(&unkeyed));
    for (flags, wanted) in [
        (["--path", "edge"], "must begin with /"),
        (["--method", ""], "the method must be"),
        (["--tenant", "other"], "--tenant other: the token was not minted for it"),
    ] {
        let refused = ron(&[&["token", "attenuate", &token][..], &flags].concat(), dir.path());
        assert_eq!((code(&refused), text(&refused).contains(wanted)), (64, true), "{}", text(&refused));
    }
    // The id is needed most when the list that it belongs into is not good.
    std::fs::write(dir.path().join("ron-data/revoked.txt"), "nonsense\n").unwrap();
    let broken = ["--set", "gateway.auth.revocations=revoked.txt", "--set", "gateway.auth.mode=biscuit"];
    let shown = ron(&[&["config", "show"][..], &broken].concat(), dir.path());
    assert!(text(&shown).contains("line 1 is no id of a token"), "{}", text(&shown));
    let inspected = ron(&[&["token", "inspect", &token][..], &broken].concat(), dir.path());
    assert!(text(&inspected).contains("signed by a trusted key: yes"), "{}", text(&inspected));
}

#[test]
fn bad_usage_is_64_and_help_is_0() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&["fly"][..], &["run"], &["run", "teapot"], &["config"], &["key", "new"], &[]] {
        let output = ron(args, dir.path());
        assert_eq!(code(&output), 64, "{args:?}: {}", text(&output));
    }
    assert!(text(&ron(&["run", "teapot"], dir.path())).contains("known: gateway"));
    for args in [&["--help"][..], &["up", "--help"], &["--version"], &["completions", "bash"], &["man"]] {
        let output = ron(args, dir.path());
        assert_eq!(code(&output), 0, "{args:?}");
        assert!(!output.stdout.is_empty(), "{args:?}");
    }
    let page = text(&ron(&["man"], dir.path()));
    for wanted in [".SS \"ron up\"", ".SS \"ron registry put\"", "takeover", "EXIT STATUS", "RON_TOKEN"] {
        assert!(page.contains(wanted), "{wanted}: {page}");
    }
    assert!(!page.contains("ron\\-up(1)"), "a page that there is not");
    // A reader that has seen enough is nobody's fault.
    for args in [["completions", "bash"], ["config", "schema"]] {
        let mut child =
            command(&args, dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((code(&output), output.stderr.len()), (0, 0), "{args:?}: {}", text(&output));
    }
}

#[test]
fn init_makes_a_valid_node_and_changes_nothing_that_exists() {
    let dir = tempfile::tempdir().unwrap();
    let made = ron(&["init", "n", "--tls"], dir.path());
    assert_eq!(code(&made), 0, "{}", text(&made));
    let checked = ron(&["config", "check", "n/ron.toml"], dir.path());
    assert_eq!(code(&checked), 0, "{}", text(&checked));
    let again = ron(&["init", "n"], dir.path());
    assert_eq!(code(&again), 1);
    assert!(text(&again).contains("exists already"), "{}", text(&again));
}

#[test]
fn a_port_in_use_is_named_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    std::fs::write(
        dir.path().join("c.toml"),
        format!("[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"{address}\"\n"),
    )
    .unwrap();
    let output = ron(&["run", "gateway", "--config", "c.toml"], dir.path());
    assert_eq!(code(&output), 1);
    let text = text(&output);
    assert!(
        text.contains(&format!("gateway: cannot listen on {address}"))
            && text.contains("port 0 picks a free one"),
        "{text}"
    );
}

#[test]
fn an_admin_plane_for_everyone_needs_danger_ok() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.toml"), "[admin]\nlisten = \"0.0.0.0:0\"\n").unwrap();
    let output = ron(&["config", "check", "c.toml"], dir.path());
    assert_eq!(code(&output), 64);
    assert!(text(&output).contains("admin.listen: is not a loopback address"), "{}", text(&output));
    let allowed = ron(&["config", "show", "--config", "c.toml", "--set", "node.danger_ok=true"], dir.path());
    assert_eq!(code(&allowed), 0);
}
