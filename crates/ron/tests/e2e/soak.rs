//! The short edition of `cargo xtask soak gateway`, with the debug binary and bars for a busy machine.

use ron_testkit::{Plan, soak};
use std::path::Path;
use std::time::Duration;

#[test]
fn the_gateway_holds_under_overload_faults_kills_and_reloads() {
    let checks = soak(
        &Plan {
            binary: Path::new(env!("CARGO_BIN_EXE_ron")).to_owned(),
            length: Duration::from_secs(40),
            slots: 5,
            service: Duration::from_millis(50),
            multiple: 3.0,
            slack: Duration::from_secs(8),
            p95_max: Duration::from_millis(1800),
            seed: 7,
        },
        |_| {},
    );
    for check in &checks {
        assert!(check.good, "{}: {}", check.what, check.seen);
    }
}
