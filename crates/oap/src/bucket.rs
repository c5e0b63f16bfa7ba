//! A token bucket whose clock is passed in.

use std::time::Duration;

/// Tokens in millionths, so that any rate adds up exactly.
const TOKEN: u64 = 1_000_000;

/// So many at once, and so many more each second; a rate of 0 is no limit.
#[derive(Clone, Debug)]
pub struct Bucket {
    rate: u32,
    burst: u32,
    tokens: u64,
    filled: Duration,
}

impl Bucket {
    pub fn new(rate: u32, burst: u32, now: Duration) -> Bucket {
        Bucket { rate, burst, tokens: u64::from(burst) * TOKEN, filled: now }
    }

    /// Whether there are more tokens than so many.
    pub fn has_more_than(&mut self, count: usize, now: Duration) -> bool {
        self.fill(now);
        self.rate == 0 || self.tokens / TOKEN > count as u64
    }

    fn fill(&mut self, now: Duration) {
        let micros = u64::try_from(now.saturating_sub(self.filled).as_micros()).unwrap_or(u64::MAX);
        let more = micros.saturating_mul(u64::from(self.rate));
        let most = u64::from(self.burst) * TOKEN;
        if self.tokens < most {
            self.tokens = self.tokens.saturating_add(more).min(most);
        }
        self.filled = self.filled.max(now);
    }

    /// Makes it so many tokens at least, be they more than it would gather.
    pub fn raise(&mut self, count: u64) {
        self.tokens = self.tokens.max(count.saturating_mul(TOKEN));
    }

    /// Takes a token if there is one.
    pub fn take(&mut self, now: Duration) -> bool {
        if self.rate == 0 {
            return true;
        }
        self.fill(now);
        let has = self.tokens >= TOKEN;
        if has {
            self.tokens -= TOKEN;
        }
        has
    }
}
