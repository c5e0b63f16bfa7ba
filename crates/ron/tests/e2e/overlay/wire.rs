//! Nodes with a wire between them that can be cut and, where the system knows how, loses packets.

use super::{connected, connects, peers, publish};
use ron_testkit::{Node, command};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

/// A network namespace with one wire to this one; gone when dropped.
struct Wire {
    name: String,
    near: String,
    far: String,
}

fn run(args: &[&str]) -> bool {
    let output = Command::new(args[0]).args(&args[1..]).output();
    output.is_ok_and(|output| output.status.success())
}

#[expect(clippy::print_stdout, reason = "what was not tested is told")]
impl Wire {
    /// `None`, said aloud, where this user may not do so.
    fn lay() -> Option<Wire> {
        let number = std::process::id();
        let name = format!("ron{number}");
        let address = |host: u8| format!("10.209.{}.{host}", number % 250);
        let wire = Wire { name: name.clone(), near: address(1), far: address(2) };
        let (here, there) = (format!("{name}a"), format!("{name}b"));
        let (near, far) = (format!("{}/30", wire.near), format!("{}/30", wire.far));
        let laid = run(&["ip", "netns", "add", &name])
            && run(&["ip", "link", "add", &here, "type", "veth", "peer", "name", &there, "netns", &name])
            && run(&["ip", "addr", "add", &near, "dev", &here])
            && run(&["ip", "link", "set", &here, "up"])
            && run(&["ip", "-n", &name, "addr", "add", &far, "dev", &there])
            && run(&["ip", "-n", &name, "link", "set", &there, "up"])
            && run(&["ip", "-n", &name, "link", "set", "lo", "up"]);
        if !laid {
            println!("skipped: network namespaces are not allowed here");
        }
        laid.then_some(wire)
    }

    fn cut(&self, cut: bool) {
        assert!(run(&["ip", "link", "set", &format!("{}a", self.name), if cut { "down" } else { "up" }]));
    }

    /// Loses some of what passes, if the system can.
    fn loses(&self) {
        let device = format!("{}a", self.name);
        if !run(&["tc", "qdisc", "add", "dev", &device, "root", "netem", "loss", "3%", "delay", "2ms"]) {
            println!("without loss: this system has no netem");
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        run(&["ip", "netns", "del", &self.name]);
    }
}

#[test]
fn what_was_published_while_the_wire_was_cut_arrives_afterwards() {
    let Some(wire) = Wire::lay() else { return };
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("ron");
    let binary = command(&[], dir.path()).get_program().to_string_lossy().into_owned();
    let exec = format!("#!/bin/sh\nexec ip netns exec {} {binary} \"$@\"\n", wire.name);
    std::fs::write(&script, exec).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let config = |at: &str, keys: &str| {
        format!(
            "[node]\ndanger_ok = true\n[admin]\nlisten = \"{at}:0\"\n[overlay]\nlisten = \"{at}:0\"\nadmit = \"any\"\n{keys}\n\
             [overlay.peer]\nmax_rps = 0\n[overlay.timeouts]\nidle = \"2s\"\n"
        )
    };
    let a = Node::start(&["overlay"], &config(&wire.near, ""));
    let b = Node::start_binary(&script, &["overlay"], &config(&wire.far, &peers(&[&a])));
    connects(&a, 1);
    wire.loses();
    let publish_some = |from: usize| {
        (from..from + 20).for_each(|number| {
            publish(&a, "t", &number.to_string());
        })
    };
    publish_some(0);
    wire.cut(true);
    publish_some(20);
    a.eventually("it is noticed", |a| connected(a).is_empty());
    publish_some(40);
    wire.cut(false);
    let delivered = "gossip_messages_total{result=\"delivered\"}";
    // Redials are up to five seconds apart, and the last may have been sent into the void.
    let begun = std::time::Instant::now();
    while connected(&a).is_empty() && begun.elapsed().as_secs() < 60 {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    b.eventually("all of it arrives", |b| b.metric(delivered) == 60.0);
}
