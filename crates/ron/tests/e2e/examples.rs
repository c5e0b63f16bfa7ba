//! The examples of the configuration page, started as they stand there but for addresses and
//! deadlines, and put to use.

use crate::auth::{jwks, jwt};
use ron::documents::EXAMPLES;
use ron_testkit::{Answer, Node, Origin, Script, get, request, ron};
use serde_json::json;
use std::process::Command;

/// An example with its listeners on free ports and its servers replaced by these.
fn example(name: &str, servers: &[&Origin]) -> String {
    let (_, _, text) = EXAMPLES.iter().find(|(known, ..)| *known == name).unwrap();
    let mut text = text.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:8443", "127.0.0.1:0");
    for (index, server) in servers.iter().enumerate() {
        text = text.replace(&format!("127.0.0.1:{}", 9001 + index), &server.address);
    }
    // A machine with much else to do is not to fail a test.
    text = text.replace("timeout = \"1s\"", "timeout = \"20s\"");
    text = text.replace("max_bytes = \"256KiB\"", "max_bytes = \"256KiB\"\ntimeout = \"20s\"");
    assert!(!text.contains("127.0.0.1:900"), "every server is replaced");
    format!("{text}\n[admin]\nlisten = \"127.0.0.1:0\"\n")
}

fn echo() -> Origin {
    Origin::start(|path| Script::Body(json!({"path": path}).to_string().into_bytes()))
}

fn ask(node: &Node, method: &str, path: &str, field: (&str, &str)) -> Answer {
    request(&node.gateway(), method, path, &[field], b"").unwrap()
}

#[test]
fn a_public_api_gives_each_of_three_tenants_its_own() {
    let (a, b) = (echo(), echo());
    let node = Node::start(&["gateway"], &example("public_api", &[&a, &b]));
    let with = |key: &str, method: &str| {
        let answer = ask(&node, method, "/v1/things", ("X-Api-Key", key));
        (answer.status, answer.reason().to_owned())
    };
    for key in ["gold-key", "silver-key"] {
        assert_eq!((with(key, "GET").0, with(key, "DELETE").0), (200, 200), "{key}");
    }
    assert_eq!(with("trial-key", "GET").0, 200);
    assert_eq!(with("trial-key", "DELETE"), (403, "forbidden".to_owned()));
    assert_eq!(get(&node.gateway(), "/v1/things").reason(), "unauth");
    assert_eq!(get(&node.gateway(), "/status").status, 200);
    node.eventually("a trial has a rate", |_| with("trial-key", "GET") == (429, "quota_tenant".to_owned()));
    assert_eq!(with("gold-key", "GET").0, 200, "which is nobody else's");
}

#[test]
fn a_frontend_gets_whole_pages_for_its_users() {
    let (users, orders) = (echo(), echo());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ron.toml"), example("frontend", &[&users, &orders])).unwrap();
    std::fs::write(dir.path().join("issuer.json"), jwks(&[1])).unwrap();
    std::fs::write(dir.path().join("revoked.txt"), "jti:lost\n").unwrap();
    let node = Node::spawn(dir, &["run", "gateway", "--config", "ron.toml"], &[]);
    node.eventually("everything is there", |node| get(&node.admin(), "/readyz").status == 200);
    let view = |path: &str, over: serde_json::Value| {
        let mut claims = json!({"iss": "https://issuer.example", "aud": "shop"});
        claims.as_object_mut().unwrap().extend(over.as_object().unwrap().clone());
        let token = format!("Bearer {}", jwt(1, "1", claims));
        ask(&node, "GET", path, ("Authorization", &token))
    };
    assert_eq!(
        view("/view/account/7", json!({})).json(),
        json!({"user": {"path": "/users/7"}, "orders": {"path": "/orders?user=7&last=10"}, "errors": []})
    );
    assert_eq!(view("/view/order/9", json!({})).reason(), "forbidden");
    let order = view("/view/order/9", json!({"scope": "orders", "groups": ["staff"]}));
    assert_eq!(order.json()["parcel"], json!({"path": "/orders/9/parcel"}));
    assert!(node.metric("fq_served_cost_total{tenant=\"staff\"}") > 0.0);
    assert_eq!(view("/orders/1", json!({"jti": "lost"})).reason(), "token_revoked");
    assert_eq!(get(&node.gateway(), "/view/account/7").reason(), "unauth");
}

#[test]
fn an_internal_gateway_knows_services_by_their_certificates() {
    let ledger = echo();
    let dir = tempfile::tempdir().unwrap();
    assert!(ron(&["init", "ron-data", "--tls"], dir.path()).status.success());
    std::fs::write(dir.path().join("ron-data/ron.toml"), example("internal", &[&ledger])).unwrap();
    let node = Node::spawn(dir, &["run", "gateway", "--config", "ron-data/ron.toml"], &[]);
    let tls = node.dir.path().join("ron-data/tls");
    let curl = |more: &[&str], path: &str| {
        let url = format!("https://{}{path}", node.address("gateway", "https"));
        let mut command = Command::new("curl");
        command.current_dir(&tls).args(["-sS", "--cacert", "ca.pem"]).args(more).arg(url);
        String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
    };
    let client = ["--cert", "client.pem", "--key", "client.key"];
    assert_eq!(curl(&client, "/ledger/1"), "{\"path\":\"/ledger/1\"}");
    assert_eq!(curl(&[], "/ledger/1"), "", "nobody gets in without a certificate");
    assert!(node.metric("fq_served_cost_total{tenant=\"billing\"}") > 0.0);
    for path in ["/ledger/1", "/open/1"] {
        assert_eq!(get(&node.gateway(), path).reason(), "unauth", "without TLS there is no certificate");
    }
}
