//! How fast frames are read and written, for each second of one core: `cargo run --release -p oap --example codec [--json]`.
#![expect(clippy::print_stdout, reason = "a command line tool prints")]
#![expect(clippy::disallowed_methods, reason = "time is what it measures")]

use bytes::{BufMut as _, Bytes};
use oap::frame::{APP_GOSSIP, FRAME_MAX, HEADER};
use oap::{Decoded, Decoder, Frame};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Whole frames on the wire.
const SIZES: [usize; 5] = [64, 1 << 10, 16 << 10, 64 << 10, 1 << 20];
/// A figure is the median of so many rounds of so long.
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(100);
/// What is read over and over: as much as fits in no cache that a socket's bytes would come from.
const STREAM: usize = 4 << 20;

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let mut figures = serde_json::Map::new();
    if !json {
        println!(
            "{:>8}  {:>12}  {:>12}  {:>12}  {:>12}",
            "bytes", "read GB/s", "read M/s", "crc32c GB/s", "write M/s"
        );
    }
    for size in SIZES {
        let [plain, checked] = [false, true].map(|checksum| median(|| read(size, checksum)));
        let written = median(|| write(size));
        if json {
            let figure = serde_json::json!({
                "read_bytes_per_second": plain * size as f64,
                "read_frames_per_second": plain,
                "read_crc32c_bytes_per_second": checked * size as f64,
                "write_frames_per_second": written,
            });
            figures.insert(size.to_string(), figure);
        } else {
            let [bytes, checked] = [plain, checked].map(|rate| rate * size as f64 / 1e9);
            println!(
                "{size:>8}  {bytes:>12.2}  {:>12.3}  {checked:>12.2}  {:>12.3}",
                plain / 1e6,
                written / 1e6
            );
        }
    }
    if json {
        println!("{}", serde_json::Value::Object(figures));
    }
}

/// Frames read in a second: copied into the decoder's room as a socket would, then taken out as frames.
fn read(size: usize, checksum: bool) -> f64 {
    let frame = Frame::event(APP_GOSSIP, 1, vec![7; size - HEADER]).encode(FRAME_MAX).expect("a frame");
    let mut once = frame.to_vec();
    if checksum {
        once.extend(frame.checksum());
    }
    let stream = once.repeat(STREAM.div_ceil(once.len()));
    let mut decoder = Decoder::new(FRAME_MAX);
    decoder.agree(FRAME_MAX, checksum);
    let (clock, mut frames) = (Clock::start(), 0u64);
    while clock.spent() < ROUND {
        let mut rest = &stream[..];
        while !rest.is_empty() {
            let space = decoder.space();
            let room = (space.capacity() - space.len()).min(rest.len());
            let (now, later) = rest.split_at(room);
            space.put_slice(now);
            rest = later;
            while let Some(decoded) = decoder.next_frame().expect("good frames") {
                let Decoded::Frame(frame) = decoded else { panic!("good frames") };
                black_box(&frame.payload);
                frames += 1;
            }
        }
    }
    frames as f64 / clock.spent().as_secs_f64()
}

/// Frames made in a second for a payload that is there already, as a relay does.
fn write(size: usize) -> f64 {
    let payload = Bytes::from(vec![7; size - HEADER]);
    let (clock, mut frames) = (Clock::start(), 0u64);
    while clock.spent() < ROUND {
        for corr in 0..1000 {
            black_box(Frame::event(APP_GOSSIP, corr, payload.clone()).encode(FRAME_MAX).expect("a frame"));
        }
        frames += 1000;
    }
    frames as f64 / clock.spent().as_secs_f64()
}

fn median(mut measure: impl FnMut() -> f64) -> f64 {
    let mut figures: Vec<f64> = (0..ROUNDS).map(|_| measure()).collect();
    figures.sort_by(f64::total_cmp);
    figures[ROUNDS / 2]
}

/// The time this thread has had a core, where the system says so: on a busy machine it is not alone.
struct Clock {
    wall: Instant,
    core: Option<Duration>,
}

impl Clock {
    fn start() -> Clock {
        Clock { wall: Instant::now(), core: Clock::core() }
    }

    fn spent(&self) -> Duration {
        let core = self.core.zip(Clock::core()).map(|(before, now)| now.saturating_sub(before));
        core.unwrap_or_else(|| self.wall.elapsed())
    }

    fn core() -> Option<Duration> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split(' ').next()?.parse().ok().filter(|spent| *spent > 0).map(Duration::from_nanos)
    }
}
