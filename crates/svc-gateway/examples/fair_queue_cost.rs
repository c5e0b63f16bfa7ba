//! What the fair queue costs: by number of tenants, and when several threads want it at once.
//!
//! `cargo run --release -p svc-gateway --example fair_queue_cost`
#![expect(clippy::print_stdout, reason = "its output is what it is for")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use svc_gateway::fair_queue::{Entry, FairQueue, Pushed, Shape, Tenant};

const TURNS: u32 = 200_000;

fn shape(capacity: usize) -> Shape {
    Shape { capacity, quantum_bytes: 64 << 10, weights: [1, 5, 10] }
}

fn entry(id: u32, now: Instant) -> Entry<()> {
    let deadline = now + Duration::from_secs(60);
    Entry { lane: 0, tenant: Tenant { class: 1, id }, quantum: 1, cost: 8 << 10, deadline, job: () }
}

/// A full queue in which every tenant has its share.
fn full(tenants: u32, now: Instant) -> FairQueue<()> {
    let mut queue = FairQueue::new(shape(tenants.max(512) as usize), 1);
    for turn in 0..tenants.max(512) {
        queue.push(entry(turn % tenants, now), now);
    }
    queue
}

fn main() {
    let now = Instant::now();
    println!("one thread, full queue: a job served and another let in; a job refused");
    for tenants in [1, 10, 100, 1000, 10_000] {
        let mut queue = full(tenants, now);
        let begun = Instant::now();
        for _ in 0..TURNS {
            if let Some(popped) = queue.pop(0, now) {
                queue.finish(0, popped.tenant, popped.cost, 12 << 10);
                queue.push(entry(popped.tenant.id, now), now);
            }
        }
        let served = begun.elapsed() / TURNS;
        let begun = Instant::now();
        let refused = (0..TURNS)
            .filter(|n| matches!(queue.push(entry(n % tenants, now), now), Pushed::Busy(..)))
            .count();
        println!("{tenants:>6} tenants: {served:>8.0?} {:>8.0?}, {refused} refused", begun.elapsed() / TURNS);
    }
    println!(
        "threads that refuse all day from a full queue of 100 tenants behind a mutex, and one that serves"
    );
    for threads in [1, 2, 4, 16] {
        let (queue, stop) = (Mutex::new(full(100, now)), AtomicBool::new(false));
        let asked = AtomicU64::new(0);
        let lock = || queue.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for id in (0..100).cycle() {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        let begun = Instant::now();
                        if matches!(lock().push(entry(id, now), now), Pushed::Busy(..)) {
                            asked.fetch_add(1, Ordering::Relaxed);
                        }
                        // What else a refusal takes, at the least.
                        while begun.elapsed() < Duration::from_micros(5) {
                            std::hint::spin_loop();
                        }
                    }
                });
            }
            let mut waits = Vec::new();
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(1) {
                std::thread::sleep(Duration::from_micros(50));
                let wanted = Instant::now();
                let mut queue = lock();
                waits.push(wanted.elapsed());
                if let Some(popped) = queue.pop(0, now) {
                    queue.finish(0, popped.tenant, popped.cost, 12 << 10);
                    queue.push(entry(popped.tenant.id, now), now);
                }
            }
            stop.store(true, Ordering::Relaxed);
            waits.sort_unstable();
            println!(
                "{threads:>6} threads: {} refused a second; the lock was had after {:.1?}, {:.1?} in the worst hundredth",
                asked.load(Ordering::Relaxed),
                waits[waits.len() / 2],
                waits[waits.len() * 99 / 100],
            );
        });
    }
}
