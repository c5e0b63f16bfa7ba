//! `cargo xtask bench overlay`: frames, one session and ten thousand, a star beside NATS and gossipsub, gossip of eight
//! processes and a frozen one among them beside gossipsub.
//!
//! Everything shares both cores, the load included: what counts is the work for each delivered message, in seconds of
//! processor time, which a busy machine disturbs least. Load is open: a message is due at its instant, whatever became
//! of those before, and its latency counts from there.

mod field;
mod frozen;
mod gossip;
mod gossipsub;
mod nats;
mod nodes;
mod sessions;
mod star;

pub(super) use frozen::run as frozen;
pub(super) use gossip::run as gossip;
pub(super) use sessions::run as sessions;
pub(super) use star::run as star;

use super::process::PROXY_CORE;
use super::{Bench, table};
use crate::run::{self, built_example, example};
use serde_json::{Value, json};
use std::process::Command;

pub(super) fn codec(_: &Bench) -> Option<Value> {
    let figures = example("oap", "codec", &["--json"])?;
    let mut rows = vec![table::row(&["frame bytes", "read GB/s", "with crc32c", "read M/s", "write M/s"])];
    let mut sizes: Vec<(u64, &Value)> =
        figures.as_object()?.iter().filter_map(|(size, of)| Some((size.parse().ok()?, of))).collect();
    sizes.sort_by_key(|(size, _)| *size);
    for (size, of) in sizes {
        let scaled = |name: &str, by: f64| of[name].as_f64().unwrap_or(0.0) / by;
        rows.push(vec![
            size.to_string(),
            format!("{:.2}", scaled("read_bytes_per_second", 1e9)),
            format!("{:.2}", scaled("read_crc32c_bytes_per_second", 1e9)),
            format!("{:.3}", scaled("read_frames_per_second", 1e6)),
            format!("{:.3}", scaled("write_frames_per_second", 1e6)),
        ]);
    }
    table::print("codec: frames of one size for each second of one core (goal: 2 GB/s at 65536)", &rows);
    Some(figures)
}

pub(super) fn session(_: &Bench) -> Option<Value> {
    let figures = example("ron-transport", "session", &["--json"])?;
    // Between cores a machine may take longer to wake a thread than all else takes.
    let mut on_one_core = Command::new("taskset");
    on_one_core.args(["-c", PROXY_CORE]).arg(built_example("session")).args(["--json", "--trips"]);
    let alone = run::figures(&mut on_one_core)?;
    let mut rows = vec![table::row(&[
        "",
        "64 B frames/s",
        "64 KiB GB/s",
        "idle p50 us",
        "p99 us",
        "one core p50 us",
        "p99 us",
    ])];
    for name in ["plain", "tls", "bare TCP"] {
        let of = |figures: &Value, figure: &str, scale: f64, digits: usize| {
            let shown = |value| format!("{:.digits$}", value / scale);
            figures[name][figure].as_f64().map_or_else(|| "-".to_owned(), shown)
        };
        rows.push(vec![
            name.to_owned(),
            of(&figures, "small_frames_per_second", 1.0, 0),
            of(&figures, "bytes_per_second", 1e9, 2),
            of(&figures, "p50_us", 1.0, 1),
            of(&figures, "p99_us", 1.0, 1),
            of(&alone, "p50_us", 1.0, 1),
            of(&alone, "p99_us", 1.0, 1),
        ]);
    }
    table::print("session: one, over loopback (goals: 1 M plain, 0.7 M TLS, 1 GB/s, 50 us)", &rows);
    Some(json!({"free": figures, "one_core": alone}))
}
