//! Keeps the issuer's keys warm: fetched ahead of need, the last good set kept when that fails.

use super::jwks::{KeySet, SET_BYTES_MAX};
use super::{Auth, Keys, Source};
use crate::config::GatewaySettings;
use crate::proxy::Proxy;
use http::StatusCode;
use ron_kernel::health::Severity;
use ron_kernel::http::Body;
use ron_kernel::http::client::{CallLimits, Get, Payload};
use ron_kernel::kernel::{Missing, Service};
use ron_kernel::metrics::Counter;
use ron_kernel::task::TaskResult;
use ron_kernel::tls::TlsClient;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// For one fetch as a whole.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Unknown keys lead to a fetch this often at most, since anybody can make up a key's name; a few may come closer
/// together, but none closer than the spacing: issuers that sign with a key they have just published do so now and then.
const MISS_GAP: Duration = Duration::from_secs(5);
const MISS_BURST: u32 = 5;
const MISS_SPACING: Duration = Duration::from_millis(200);
/// First and longest pause after a failed fetch.
const BACKOFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// What readiness calls keys that could not be fetched.
const CAUSE: &str = "jwks";

/// Runs until the drain.
pub(crate) async fn refresh(
    service: Service,
    proxy: Arc<Proxy>,
    mut config: watch::Receiver<Arc<GatewaySettings>>,
) -> TaskResult {
    let results = ["ok", "failed"].map(|result| {
        service.counter("jwks_refresh_total", "Fetches of the keys of JWTs.", "result", result)
    });
    let timeouts = service.io_timeout("rpc");
    let retries = service.counter("backoff_retries_total", "Calls tried again.", "op", "jwks");
    let mut missing = Missing::new(&service, CAUSE, Severity::Degraded);
    let mut following: Option<(Arc<Keys>, Schedule)> = None;
    let mut failed: Option<String> = None;
    loop {
        let current = issuer(&proxy);
        // Keys from elsewhere begin anew.
        following = current.as_ref().map(|(keys, ..)| match following.take() {
            Some((known, schedule)) if Arc::ptr_eq(&known, keys) => (known, schedule),
            _ => (keys.clone(), Schedule::new(Instant::now())),
        });
        let Some(((keys, tls, every), (_, schedule))) = current.zip(following.as_mut()) else {
            missing.note(false);
            tokio::select! {
                biased;
                () = service.shutdown().draining() => return Ok(()),
                changed = config.changed() => { changed?; continue; }
            }
        };
        match (schedule.is_short_of(&keys), &failed) {
            (true, Some(why)) => missing.because(why),
            (short, _) => missing.note(short),
        }
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            changed = config.changed() => { changed?; continue; }
            () = keys.missed.notified() => {
                if keys.is_wanted() {
                    schedule.hasten(Instant::now());
                }
                continue;
            }
            () = tokio::time::sleep_until(schedule.due.into()) => {}
        }
        let number = keys.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let fetched = tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            fetched = fetch(&keys, tls, &timeouts) => fetched,
        };
        failed = fetched.as_ref().err().cloned();
        let good = schedule.learn(&keys, fetched, every, Instant::now());
        keys.over.store(number, Ordering::SeqCst);
        keys.fetched.notify_waiters();
        results[usize::from(!good)].inc();
        if !good {
            retries.inc();
        }
    }
}

/// Where keys are to be fetched from now, how, and how often; `None` if they are in a file or not needed.
fn issuer(proxy: &Proxy) -> Option<(Arc<Keys>, Option<TlsClient>, Duration)> {
    let snapshot = proxy.snapshot();
    match snapshot.auth() {
        Auth::Jwt(jwt) if jwt.keys.source.is_some() => Some((jwt.keys.clone(), jwt.tls.clone(), jwt.refresh)),
        _ => None,
    }
}

/// When keys are fetched next. Pure.
#[derive(Debug)]
struct Schedule {
    due: Instant,
    last: Option<Instant>,
    failures: u32,
    /// Whether the next fetch is for a key that was missed.
    hastened: bool,
    /// Until when the fetches for missed keys have used up their share, at one each gap.
    used_until: Instant,
}

impl Schedule {
    fn new(now: Instant) -> Schedule {
        Schedule { due: now, last: None, failures: 0, hastened: false, used_until: now }
    }

    /// Takes over what a fetch brought. If it brought nothing, what is there stays.
    fn learn(&mut self, keys: &Keys, fetched: Result<KeySet, String>, every: Duration, now: Instant) -> bool {
        let good = fetched.is_ok();
        match fetched {
            Ok(set) => {
                tracing::debug!(keys = set.len(), "keys of JWTs fetched");
                // Nobody but the issuer can bring that about, as often as it likes.
                self.hastened &= keys.set.load().as_ref().is_some_and(|known| known.ids().eq(set.ids()));
                keys.set.store(Some(Arc::new(set)));
            }
            Err(error) => tracing::warn!(error, kept = keys.count(), "keys of JWTs could not be fetched"),
        }
        self.done(good, every, now);
        keys.fetches_from.store(Some(Arc::new(self.soonest(now))));
        good
    }

    /// Whether readiness is to say that keys are missing, or may be old.
    fn is_short_of(&self, keys: &Keys) -> bool {
        keys.count() == 0 || self.failures > 0
    }

    fn done(&mut self, good: bool, every: Duration, now: Instant) {
        if std::mem::take(&mut self.hastened) {
            self.used_until = self.used_until.max(now) + MISS_GAP;
        }
        self.last = Some(now);
        self.failures = if good { 0 } else { self.failures.saturating_add(1) };
        let pause = BACKOFF[0].saturating_mul(1 << self.failures.saturating_sub(1).min(10)).min(BACKOFF[1]);
        self.due = now + if good { every } else { pause.min(every) };
    }

    /// A key was missed: the next fetch comes as soon as it may.
    fn hasten(&mut self, now: Instant) {
        let soonest = self.soonest(now);
        if soonest < self.due {
            (self.due, self.hastened) = (soonest, true);
        }
    }

    /// When a fetch may be made for a key that is missed.
    fn soonest(&self, now: Instant) -> Instant {
        let spaced = self.last.map_or(now, |last| last + MISS_SPACING);
        let ahead = self.used_until.checked_sub(MISS_GAP * (MISS_BURST - 1)).unwrap_or(now);
        now.max(spaced).max(ahead)
    }
}

async fn fetch(keys: &Keys, tls: Option<TlsClient>, timeouts: &Counter) -> Result<KeySet, String> {
    let source = keys.source.as_ref().ok_or("there is nowhere to fetch from")?;
    source.remote.set_tls(tls);
    let fetched = tokio::time::timeout(FETCH_TIMEOUT, source.fetch()).await;
    fetched.unwrap_or_else(|_elapsed| {
        timeouts.inc();
        Err("there was no answer in time".to_owned())
    })
}

impl Source {
    async fn fetch(&self) -> Result<KeySet, String> {
        let head = Get { path: &self.path, host: self.remote.address.authority() };
        let limits = CallLimits { connect_timeout: FETCH_TIMEOUT, silence: FETCH_TIMEOUT };
        let answer = self.remote.call(&head, &mut None, limits).await.map_err(|error| error.to_string())?;
        if answer.status != StatusCode::OK {
            return Err(format!("the answer was {}", answer.status));
        }
        let bytes = match answer.payload {
            Payload::Whole(bytes) => bytes,
            Payload::Stream(body) => {
                Body::stream(body).collect(SET_BYTES_MAX).await.map_err(|error| error.to_string())?
            }
            Payload::Upgraded(_) => return Err("it changed the protocol".to_owned()),
        };
        KeySet::parse(&bytes).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::jwt::Rules;
    use crate::auth::{Jwt, WAITING_MAX};
    use crate::config::JwtAlgorithm;
    use arc_swap::ArcSwapOption;
    use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::json;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    #[tokio::test]
    async fn so_many_wait_for_a_fetch_that_begins_soon_and_others_do_not() {
        type Wait<'a> = Pin<Box<dyn Future<Output = bool> + 'a>>;
        let keys = Keys::new(None, ArcSwapOption::empty());
        let poll = |one: &mut Wait<'_>| one.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let wait = || -> Wait<'_> { Box::pin(keys.fetch_is_over()) };
        assert_eq!(poll(&mut wait()), Poll::Ready(false), "nothing was ever fetched");
        let (mut schedule, now) = (Schedule::new(Instant::now()), Instant::now());
        let begins = |number: u64| keys.begun.store(number, Ordering::SeqCst);
        let ends = |number: u64| {
            keys.over.store(number, Ordering::SeqCst);
            keys.fetched.notify_waiters();
        };
        begins(1);
        schedule.learn(&keys, Err("nobody answers".to_owned()), MISS_GAP, now);
        ends(1);
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| wait()).collect();
        assert!(waiting.iter_mut().all(|one| poll(one).is_pending()) && keys.is_wanted());
        assert_eq!(poll(&mut wait()), Poll::Ready(false), "no place is left");
        begins(2);
        assert!(waiting.iter_mut().all(|one| poll(one).is_pending()) && !keys.is_wanted());
        ends(2);
        assert!(waiting.iter_mut().all(|one| poll(one) == Poll::Ready(false)), "whatever it brought");
        drop(waiting);
        begins(3);
        let mut late = wait();
        assert!(poll(&mut late).is_pending(), "places are given back");
        assert!(!keys.is_wanted(), "one that is under way may do");
        ends(3);
        assert_eq!(poll(&mut late), Poll::Ready(true), "or not");
        for _ in 0..MISS_BURST {
            schedule.hastened = true;
            schedule.learn(&keys, Err("nobody answers".to_owned()), MISS_GAP, now);
        }
        assert_eq!(poll(&mut wait()), Poll::Ready(false), "the next is not made soon");
    }

    #[test]
    fn fetches_that_brought_a_new_key_are_not_held_against_anybody() {
        let set = |id: u8| {
            let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
            let pair = Ed25519KeyPair::from_seed_unchecked(&[id; 32]).unwrap();
            let point = encode(pair.public_key().as_ref());
            let key = json!({"kty": "OKP", "crv": "Ed25519", "kid": id.to_string(), "x": point});
            Ok(KeySet::parse(json!({"keys": [key]}).to_string().as_bytes()).unwrap())
        };
        let (keys, every) = (Keys::new(None, ArcSwapOption::empty()), Duration::from_secs(600));
        let mut schedule = Schedule::new(Instant::now());
        schedule.learn(&keys, set(0), every, schedule.due);
        let mut missed = |id: u8| {
            let now = schedule.last.unwrap() + MISS_SPACING;
            schedule.hasten(now);
            let waited = schedule.due - now;
            schedule.learn(&keys, set(id), every, schedule.due);
            waited
        };
        assert!((1..100).all(|id| missed(id).is_zero()));
        let waited: Vec<_> = (0..=MISS_BURST).map(|_| missed(99)).collect();
        assert!(waited.iter().take(MISS_BURST as usize).all(Duration::is_zero), "{waited:?}");
        assert!(waited[MISS_BURST as usize] > MISS_GAP / 2, "{waited:?}");
    }

    #[test]
    fn keys_are_fetched_at_once_then_now_and_then_and_sooner_when_one_is_missed() {
        let (start, every) = (Instant::now(), Duration::from_secs(600));
        let after = |millis: u64| start + Duration::from_millis(millis);
        let mut schedule = Schedule::new(start);
        assert_eq!(schedule.due, start);
        schedule.done(true, every, start);
        assert_eq!(schedule.due, after(600_000));
        for n in 1..=u64::from(MISS_BURST) {
            schedule.hasten(after(n * 200 - 150));
            schedule.hasten(after(n * 200 - 100));
            assert_eq!(schedule.due, after(n * 200), "one or two may come soon after another");
            schedule.done(true, every, after(n * 200));
        }
        schedule.hasten(after(1_500));
        assert_eq!(schedule.due, after(5_200), "however many keys are made up");
        schedule.done(true, every, after(5_200));
        schedule.hasten(after(6_000));
        assert_eq!(schedule.due, after(10_200));
        schedule.done(true, every, after(10_200));
        schedule.hasten(after(100_000));
        assert_eq!(schedule.due, after(100_000), "a new key is found at once after a quiet time");
    }

    /// Whenever keys are missed, over any stretch no more fetches are made for it than one each gap and the few.
    #[test]
    fn keys_that_are_made_up_all_the_time_lead_to_one_fetch_each_gap() {
        let (start, every) = (Instant::now(), Duration::from_secs(86_400));
        let (mut schedule, mut fetches) = (Schedule::new(start), 0_u32);
        schedule.done(true, every, start);
        loop {
            schedule.hasten(schedule.last.unwrap());
            let due = schedule.due;
            if due > start + Duration::from_secs(3600) {
                break;
            }
            schedule.done(true, every, due);
            fetches += 1;
        }
        assert!((720..=720 + MISS_BURST).contains(&fetches), "{fetches} in an hour");
    }

    #[test]
    fn an_issuer_that_is_down_for_an_hour_costs_no_caller_anything() {
        let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let pair = Ed25519KeyPair::from_seed_unchecked(&[1; 32]).unwrap();
        let set = || {
            let key = json!({"kty": "OKP", "crv": "Ed25519", "x": encode(pair.public_key().as_ref())});
            KeySet::parse(json!({"keys": [key]}).to_string().as_bytes()).unwrap()
        };
        let message = format!("{}.{}", encode(br#"{"alg":"EdDSA"}"#), encode(br#"{"sub":"joe","exp":9000}"#));
        let token = format!("{message}.{}", encode(pair.sign(message.as_bytes()).as_ref()));
        let keys = Arc::new(Keys::new(None, ArcSwapOption::empty()));
        let rules = Rules { algorithms: vec![JwtAlgorithm::EdDsa], ..Rules::default() };
        let every = Duration::from_secs(600);
        let jwt = Jwt { rules, revoked: Arc::default(), keys: keys.clone(), tls: None, refresh: every };
        let start = Instant::now();
        let passes = |now: Instant| jwt.check(token.as_bytes(), now.duration_since(start).as_secs()).is_ok();
        let mut schedule = Schedule::new(start);
        assert!(schedule.is_short_of(&keys) && !passes(start), "nothing is known yet");
        assert!(schedule.learn(&keys, Ok(set()), every, start));
        assert!(!schedule.is_short_of(&keys) && passes(start));
        let (down, mut tries) = (schedule.due, 0);
        while schedule.due < down + Duration::from_secs(3600) {
            let now = schedule.due;
            assert!(!schedule.learn(&keys, Err("nobody answers".to_owned()), every, now));
            assert!(schedule.is_short_of(&keys), "readiness says so");
            assert!(passes(now) && passes(schedule.due), "the last good keys serve");
            // A caller with a key that nobody knows does not make it worse.
            schedule.hasten(now);
            tries += 1;
        }
        // The first few pauses are shorter than the gap that made-up keys are held to, and some may come at once.
        assert!((60..=3600 / 5 + 3 + MISS_BURST).contains(&tries), "{tries} tries in an hour");
        let back = schedule.due;
        assert!(schedule.learn(&keys, Ok(set()), every, back));
        assert!(!schedule.is_short_of(&keys) && passes(back) && schedule.due == back + every);
    }

    #[test]
    fn failures_are_tried_again_less_and_less_often_up_to_a_bound() {
        let (start, every) = (Instant::now(), Duration::from_secs(600));
        let mut schedule = Schedule::new(start);
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            schedule.done(false, every, start);
            assert_eq!(schedule.due - start, Duration::from_secs(seconds));
        }
        schedule.done(true, every, start);
        assert_eq!((schedule.due - start, schedule.failures), (every, 0));
        for _ in 0..u8::MAX {
            schedule.done(false, Duration::from_secs(7), start);
        }
        assert_eq!(schedule.due - start, Duration::from_secs(7), "never less often than without a failure");
    }
}
