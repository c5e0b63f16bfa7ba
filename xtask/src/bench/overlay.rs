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

use super::{Bench, table};
use crate::run::example;
use serde_json::{Value, json};

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
    let mut rows = vec![table::row(&["", "64 B frames/s", "64 KiB GB/s", "idle p50 us", "p99 us"])];
    for name in ["plain", "tls"] {
        let of = |figure: &str| figures[name][figure].as_f64().unwrap_or(0.0);
        rows.push(vec![
            name.to_owned(),
            format!("{:.0}", of("small_frames_per_second")),
            format!("{:.2}", of("bytes_per_second") / 1e9),
            format!("{:.1}", of("p50_us")),
            format!("{:.1}", of("p99_us")),
        ]);
    }
    table::print("session: one, over loopback (goals: 1 M plain, 0.7 M TLS, 1 GB/s, 50 us)", &rows);
    Some(json!(figures))
}
