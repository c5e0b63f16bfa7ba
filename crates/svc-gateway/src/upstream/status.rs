//! An upstream as its operator sees it.

use super::{Server, Upstream};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Upstream {
    /// Its part of `GET /gateway/status`. Takes no lock that a request takes.
    pub(crate) fn status(&self, name: &str) -> Value {
        json!({
            "name": name,
            "servers": self.servers.iter().map(|server| server.status()).collect::<Vec<_>>(),
            "breaker": self.breaker_state(),
            "inflight": self.permits.used(),
            "max_inflight": self.permits.limit(),
            "retries_left": self.record.retries.load(Ordering::Relaxed) / 1000,
        })
    }

    pub(crate) fn breaker_state(&self) -> &'static str {
        match self.breaker_level() {
            0 => "closed",
            1 => "half_open",
            _ => "open",
        }
    }
}

impl Server {
    /// What is known of one server. It is unhealthy if checks say so, or while it is left out for its failures.
    fn status(&self) -> Value {
        let ejected = self.is_ejected(Instant::now());
        json!({
            "address": self.remote.address.to_string(),
            "healthy": self.is_healthy() && !ejected,
            "ejected": ejected,
            "inflight": self.load(),
            "latency_ms": self.latency().as_secs_f64() * 1000.0,
        })
    }
}
