//! The gateway's soak with the release binary, and the overlay's in simulated networks.

use crate::run::{cargo, target};
use ron_testkit::{Plan, soak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) fn gateway(minutes: u64) -> bool {
    if !cargo(&["build", "--release", "-p", "ron"]) {
        return false;
    }
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let plan = Plan {
        binary: target().join("release/ron"),
        length: Duration::from_secs(minutes * 60),
        slots: 10,
        service: Duration::from_millis(20),
        multiple: 3.0,
        slack: Duration::from_secs(2),
        // With the faults about 360 answers a second are good, so a full queue of 125 takes 0.35 s to drain; the
        // tenant that asks for most waits about twice that.
        p95_max: Duration::from_secs(1),
        seed,
    };
    println!("\nsoak of {minutes} minutes at 3 times 500 requests/s, seed {seed}");
    let checks = soak(&plan, |line| println!("{line}"));
    for check in &checks {
        println!("{} {}: {}", if check.good { "held  " } else { "FAILED" }, check.what, check.seen);
    }
    checks.iter().all(|check| check.good)
}

/// Runs the simulator of `oap`, which says what its arguments mean.
pub(crate) fn simulate(args: &[&str]) -> bool {
    cargo(&[&["run", "--release", "-p", "oap", "--example", "sim", "--"], args].concat())
}
