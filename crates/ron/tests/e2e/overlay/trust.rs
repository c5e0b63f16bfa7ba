//! What vouches for a peer and for its bytes: a CA, checksums, and proof before a message is passed on.

use super::{Follower, Raw, connected, connects, node, open, peers, publish, reject, text};
use oap::frame::{APP_GOSSIP, FRAME_MAX, Frame};
use ron_testkit::{Node, ron};
use std::path::Path;
use std::process::Command;

fn openssl(dir: &Path, args: &[&str]) {
    let output = Command::new("openssl").args(args).current_dir(dir).output().expect("openssl is installed");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Makes a CA, or, for one that is there, a key of a node and its certificate.
fn certify(dir: &Path, ca: &str, name: Option<&str>) {
    let (ca_key, ca_cert) = (format!("{ca}.key"), format!("{ca}.pem"));
    let Some(name) = name else {
        return openssl(
            dir,
            &[
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=test",
                "-keyout",
                &ca_key,
                "-out",
                &ca_cert,
            ],
        );
    };
    let [key, request, cert] = ["key", "csr", "pem"].map(|kind| format!("{name}.{kind}"));
    assert!(ron(&["key", "new", "--out", &key], dir).status.success());
    openssl(dir, &["req", "-new", "-key", &key, "-subj", "/CN=node", "-out", &request]);
    std::fs::write(dir.join("leaf.ext"), "basicConstraints = critical, CA:FALSE\n").unwrap();
    openssl(
        dir,
        &[
            "x509",
            "-req",
            "-in",
            &request,
            "-CA",
            &ca_cert,
            "-CAkey",
            &ca_key,
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            "leaf.ext",
            "-out",
            &cert,
        ],
    );
}

#[test]
fn nodes_that_one_ca_has_signed_meet_and_others_do_not() {
    let dir = tempfile::tempdir().unwrap();
    for ca in ["ours", "theirs"] {
        certify(dir.path(), ca, None);
    }
    for (ca, name) in [("ours", "a"), ("ours", "b"), ("theirs", "c")] {
        certify(dir.path(), ca, Some(name));
    }
    let start = |name: &str, ca: &str, keys: &str| {
        let path = |file: String| dir.path().join(file).display().to_string();
        let (key, cert, ca) =
            (path(format!("{name}.key")), path(format!("{name}.pem")), path(format!("{ca}.pem")));
        node(
            keys,
            &format!("[overlay.tls]\nca = \"{ca}\"\ncert = \"{cert}\"\n[node]\nkey_file = \"{key}\"\n"),
        )
    };
    let a = start("a", "ours", "admit = \"any\"");
    let b = start("b", "ours", &peers(&[&a]));
    connects(&b, 1);
    assert_eq!(connected(&b)[0]["tls"], true);
    // One of another CA, and one with nothing but its key.
    let c = start("c", "theirs", &peers(&[&a]));
    let d = node(&peers(&[&a]), "");
    for stranger in [&c, &d] {
        stranger.eventually("it is refused and says so", |it| {
            it.admin_get("/overlay/peers").json()["peers"][0]["error"].is_string()
        });
        assert!(connected(stranger).is_empty());
    }
    a.eventually("counted", |a| a.metric("handshake_failures_total{reason=\"certificate\"}") >= 1.0);
    assert_eq!(a.metric("sessions_active"), 1.0);
    let follower = Follower::start(&b, "t");
    publish(&a, "t", "between the two");
    assert_eq!(follower.payloads(1), ["between the two"]);
}

#[test]
fn checksums_are_agreed_on_where_nothing_else_would_notice() {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}/oap.sock", dir.path().display());
    let a = Node::start(&["overlay"], &text(&socket, "admit = \"any\"", ""));
    let plain = open("", "");
    let secure = node("admit = \"any\"", "");
    let over_unix = node(&peers(&[&a]), "");
    let over_tcp = node(&peers(&[&plain]), "[overlay.tls]\nmode = \"off\"\n");
    let over_tls = node(&peers(&[&secure]), "");
    for (node, checked) in [(&over_unix, true), (&over_tcp, true), (&over_tls, false)] {
        connects(node, 1);
        assert_eq!(connected(node)[0]["crc32c"], checked);
    }
    let follower = Follower::start(&over_tcp, "t");
    publish(&plain, "t", "checked");
    assert_eq!(follower.payloads(1), ["checked"]);
    // A peer whose bytes arrive as they were sent, and one of which a bit was flipped.
    let mut raw = Raw::hello_with(&plain, [5; 32], &["crc32c"]);
    let message = raw.message("t", b"by hand");
    raw.send(&message);
    assert_eq!(follower.payloads(1), ["by hand"]);
    let before = reject(&plain, "malformed");
    let encoded = Frame::event(APP_GOSSIP, 7, "x").encode(FRAME_MAX).unwrap();
    let mut bytes = encoded.to_vec();
    bytes.extend(encoded.checksum());
    bytes[20] ^= 1;
    raw.send_bytes(&bytes);
    assert_eq!(raw.goaway().as_deref(), Some("protocol"));
    plain.eventually("counted", |node| reject(node, "malformed") == before + 1.0);
}

#[test]
fn a_message_that_was_taken_on_its_origins_word_is_proved_to_the_next() {
    // The middle one knows its origin by TLS; who is behind it must see the signature.
    let a = node("admit = \"any\"", "");
    let b = node(&format!("admit = \"any\"\n{}", peers(&[&a])), "");
    connects(&a, 1);
    publish(&a, "t", "to one");
    b.eventually("it is there", |b| b.metric("gossip_messages_total{result=\"delivered\"}") == 1.0);
    let c = node(&peers(&[&b]), "");
    c.eventually("it has caught up", |c| c.metric("gossip_messages_total{result=\"delivered\"}") == 1.0);
    let follower = Follower::start(&c, "t");
    publish(&a, "t", "to both");
    assert_eq!(follower.payloads(1), ["to both"]);
    for node in [&a, &b, &c] {
        assert_eq!(node.metric("gossip_messages_total{result=\"invalid\"}"), 0.0);
    }
}
