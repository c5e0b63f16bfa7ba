//! Streams of updates. The broadcast only wakes; each reader pulls from the log at its own pace.

use super::answer::malformed;
use super::routes::Endpoint;
use super::{Api, Asked};
use crate::shared::{Shared, Signed};
use crate::store::{Reader, StoreError};
use crate::view::HeadInfo;
use bytes::Bytes;
use http::Response;
use http::header::{HeaderName, HeaderValue};
use http_body::{Body as HttpBody, Frame};
use ron_kernel::http::{Body, BodyError, WritePatience};
use ron_kernel::problem::{Rejection, event_stream};
use ron_kernel::sync::Permit;
use ron_log::{B3, Entry, Head};
use serde_json::{Value, json};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::sync::broadcast;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Events handed over at a time: few, so that a slow client is seen to move.
const AT_ONCE: usize = 16;

impl Api {
    pub(super) fn stream(
        &self,
        endpoint: Endpoint,
        mut asked: Asked<'_>,
    ) -> Result<Response<Body>, Rejection> {
        // A browser's WebSocket cannot send headers.
        let last = asked.headers().get(LAST_EVENT_ID).map(HeaderValue::as_bytes);
        let last = last.or(asked.query.text("last_event_id").map(str::as_bytes));
        let after = match last {
            None => None,
            Some(id) => Some(parse_id(id).ok_or_else(|| malformed("Last-Event-ID is no id of ours"))?),
        };
        let cursor = Cursor::new(&self.shared, after, asked.budget.client, asked.place.take());
        if endpoint == Endpoint::WebSocket {
            return super::websocket::upgrade(&self.shared, &asked, cursor);
        }
        let state = (cursor, Instant::now());
        let body = unfold(state, |(mut cursor, handed)| async move {
            let events = cursor.next(handed.elapsed()).await?;
            let text: String = events.iter().map(Event::server_sent).collect();
            Some((Ok(Bytes::from(text)), (cursor, Instant::now())))
        });
        Ok(event_stream(body, patience(&self.shared), asked.corr))
    }
}

/// A client that has stalled is to be told so when it takes something again, and not cut off before.
pub(super) fn patience(shared: &Shared) -> WritePatience {
    let settings = shared.settings.load();
    WritePatience(settings.stream.stall.0 + settings.limits.write_timeout.0)
}

/// `<version>-<first 8 digits of the hash>`.
fn parse_id(id: &[u8]) -> Option<(u64, String)> {
    let (version, prefix) = std::str::from_utf8(id).ok()?.split_once('-')?;
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let plain =
        prefix.len() == 8 && prefix.bytes().all(hex) && version.bytes().all(|byte| byte.is_ascii_digit());
    Some((version.parse().ok()?, prefix.to_owned())).filter(|_| plain)
}

fn id_of(head: Head) -> String {
    format!("{}-{}", head.version, &head.hash.to_string()[3..11])
}

/// What a reader is told.
#[derive(Debug)]
pub(super) enum Event {
    Update(HeadInfo),
    /// First and last version that it did not get.
    Lagged {
        from: u64,
        to: u64,
    },
    Pruned {
        min_version: u64,
        checkpoint: Option<Value>,
    },
    /// What it has seen is not our history; this is.
    Forked(Head),
    Heartbeat,
}

impl Event {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Event::Update(_) => "registry.update",
            Event::Lagged { .. } => "registry.lagged",
            Event::Pruned { .. } => "registry.pruned",
            Event::Forked(_) => "registry.forked",
            Event::Heartbeat => "heartbeat",
        }
    }

    pub(super) fn id(&self) -> Option<String> {
        if let Event::Update(info) = self { Some(id_of(info.head())) } else { None }
    }

    pub(super) fn data(&self) -> Value {
        match self {
            Event::Update(info) => json!({
                "version": info.version, "hash": info.hash.to_string(),
                "payload_b3": info.payload_b3.to_string(), "committed_at": info.committed_at,
            }),
            Event::Lagged { from, to } => json!({"from": from, "to": to}),
            Event::Pruned { min_version, checkpoint } => {
                json!({"min_version": min_version, "checkpoint": checkpoint})
            }
            Event::Forked(head) => json!({"version": head.version, "hash": head.hash.to_string()}),
            Event::Heartbeat => Value::Null,
        }
    }

    fn server_sent(&self) -> String {
        if matches!(self, Event::Heartbeat) {
            return ":\n\n".to_owned();
        }
        let id = self.id().map_or(String::new(), |id| format!("id: {id}\n"));
        format!("event: {}\n{id}data: {}\n\n", self.name(), self.data())
    }
}

/// One reader's place in the log.
#[derive(Debug)]
pub(super) struct Cursor {
    shared: Arc<Shared>,
    committed: broadcast::Receiver<Head>,
    /// What it says it saw last, until that is checked.
    after: Option<(u64, String)>,
    next: u64,
    until: Option<Instant>,
    ended: bool,
    _place: Option<Permit>,
}

impl Cursor {
    fn new(
        shared: &Arc<Shared>,
        after: Option<(u64, String)>,
        until: Option<Instant>,
        place: Option<Permit>,
    ) -> Cursor {
        // Subscribed before HEAD is looked at, so that nothing falls between.
        let committed = shared.committed.subscribe();
        let next = shared.head().version + 1;
        Cursor { shared: shared.clone(), committed, after, next, until, ended: false, _place: place }
    }

    /// The next events, or none at the end. `stalled` is how long the last ones took to be accepted. Cancel-safe.
    pub(super) async fn next(&mut self, stalled: Duration) -> Option<Vec<Event>> {
        if self.ended {
            return None;
        }
        if let Some((version, prefix)) = self.after.clone() {
            let resumed = self.resume(version, &prefix).await;
            self.after = None;
            if let Err(refused) = resumed {
                self.ended = true;
                return refused.map(|refused| vec![refused]);
            }
        }
        let settings = self.shared.settings.load_full();
        loop {
            let head = self.shared.head().version;
            let waiting = (head + 1).saturating_sub(self.next);
            if stalled >= settings.stream.stall.0 && waiting > settings.stream.buffer.max(1) {
                let lagged = Event::Lagged { from: self.next, to: head - 1 };
                self.shared.numbers.lagged.inc();
                self.next = head;
                return Some(vec![lagged]);
            }
            if waiting > 0 {
                return self.pull().await;
            }
            let shutdown = self.shared.service.shutdown().clone();
            let until = self.until.unwrap_or_else(|| Instant::now() + Duration::from_secs(86_400));
            tokio::select! {
                biased;
                () = shutdown.draining() => return None,
                () = tokio::time::sleep_until(until.into()) => return None,
                // Lag does not matter: HEAD is looked at anew.
                _ = self.committed.recv() => {}
                () = tokio::time::sleep(settings.stream.heartbeat.0) => return Some(vec![Event::Heartbeat]),
            }
        }
    }

    /// Entries that are there already; the end if they cannot be read.
    async fn pull(&mut self) -> Option<Vec<Event>> {
        let recent = self.shared.recent(self.next, AT_ONCE);
        let found = if recent.is_empty() {
            let (from, head) = (self.next, self.shared.head().version);
            let count = usize::try_from(head + 1 - from).unwrap_or(AT_ONCE).min(AT_ONCE);
            let read = move |reader: &Reader| {
                let infos = reader.sure_entries(from, count)?.into_iter().map(|record| {
                    let entry = Entry::parse(record).map_err(|bad| StoreError::Damaged(bad.to_string()))?;
                    let record = entry.record();
                    Ok(HeadInfo {
                        version: record.version,
                        hash: entry.hash(),
                        payload_b3: record.payload_b3,
                        // An update does not tell it; the set in force then does.
                        signers_version: record.signers_version,
                        committed_at: record.committed_at,
                    })
                });
                infos.collect()
            };
            self.read(read).await?
        } else {
            recent
        };
        if found.is_empty() {
            // Pruned while it was on its way there: it must begin anew.
            self.ended = true;
            return (self.next < self.shared.min_version()).then(|| vec![self.pruned()]);
        }
        self.next += found.len() as u64;
        Some(found.into_iter().map(Event::Update).collect())
    }

    /// What is read of the log; none, and the end, if it cannot be. Whoever comes back then asks the same again: of a log that
    /// is not read nobody can say that it was pruned or forked.
    async fn read<T: Send + 'static>(
        &mut self,
        read: impl Fn(&Reader) -> Result<T, StoreError> + Send + Sync + 'static,
    ) -> Option<T> {
        match self.shared.read("stream", read).await {
            Ok(found) => Some(found),
            Err(error) => {
                super::unreadable(&self.shared, &error);
                self.ended = true;
                None
            }
        }
    }

    fn pruned(&self) -> Event {
        let checkpoint = self.shared.checkpoint.load().as_deref().map(Signed::json);
        Event::Pruned { min_version: self.shared.min_version(), checkpoint }
    }

    /// Goes on after what the reader saw; says why not if it cannot, and if that is known.
    async fn resume(&mut self, version: u64, prefix: &str) -> Result<(), Option<Event>> {
        let head = self.shared.head().head();
        if version > head.version {
            // Over a damaged store HEAD may have been further.
            return Err(self.shared.damage().is_none().then_some(Event::Forked(head)));
        }
        let min = self.shared.min_version();
        if version + 1 < min {
            return Err(Some(self.pruned()));
        }
        let read = move |reader: &Reader| {
            // The entry after names the hash of one that was just pruned.
            let (at, of_next) = if version < min { (version + 1, true) } else { (version, false) };
            let Some(record) = reader.sure_entries(at, 1)?.pop() else { return Ok(None) };
            let entry = Entry::parse(record).map_err(|bad| StoreError::Damaged(bad.to_string()))?;
            Ok(Some(if of_next { entry.record().prev } else { entry.hash() }))
        };
        match self.read(read).await.ok_or(None)? {
            Some(hash) if hash.to_string()[3..11] == *prefix => {
                self.next = version + 1;
                Ok(())
            }
            Some(hash) => Err(Some(Event::Forked(Head { version, hash: B3(hash.0) }))),
            None => Err((version < self.shared.min_version()).then(|| self.pruned())),
        }
    }
}

/// A body made step by step; each step gives a piece and what the next begins with.
pub(super) fn unfold<S, F, Fut>(state: S, step: F) -> impl HttpBody<Data = Bytes, Error = BodyError> + Send
where
    S: Send + Unpin,
    F: FnMut(S) -> Fut + Send + Unpin,
    Fut: Future<Output = Option<(Result<Bytes, BodyError>, S)>> + Send,
{
    Unfold { state: Some(state), step, running: None }
}

struct Unfold<S, F, Fut> {
    state: Option<S>,
    step: F,
    running: Option<Pin<Box<Fut>>>,
}

impl<S, F, Fut> HttpBody for Unfold<S, F, Fut>
where
    S: Unpin,
    F: FnMut(S) -> Fut + Unpin,
    Fut: Future<Output = Option<(Result<Bytes, BodyError>, S)>>,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if this.running.is_none() {
            let Some(state) = this.state.take() else { return Poll::Ready(None) };
            this.running = Some(Box::pin((this.step)(state)));
        }
        let running = this.running.as_mut().expect("begun above");
        let done = ready!(running.as_mut().poll(cx));
        this.running = None;
        Poll::Ready(done.map(|(piece, state)| {
            this.state = piece.is_ok().then_some(state);
            piece.map(Frame::data)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistrySettings;
    use crate::fixture::Fixture;

    fn cursor(registry: &Fixture, after: Option<(u64, String)>) -> Cursor {
        Cursor::new(&registry.shared, after, None, None)
    }

    fn versions(events: &[Event]) -> Vec<u64> {
        let version =
            |event: &Event| if let Event::Update(info) = event { info.version } else { panic!("{event:?}") };
        events.iter().map(version).collect()
    }

    #[tokio::test]
    async fn only_who_takes_nothing_while_much_waits_is_told_that_it_lags() {
        let mut registry = Fixture::new(RegistrySettings::default());
        let mut slow = cursor(&registry, None);
        registry.grow(2000);
        let mut seen = Vec::new();
        while seen.len() < 1900 {
            seen.extend(versions(&slow.next(Duration::from_secs(4)).await.unwrap()));
        }
        assert_eq!(seen, (1..=seen.len() as u64).collect::<Vec<_>>(), "however far behind, while it moves");
        let next = seen.len() as u64 + 1;
        let lagged = slow.next(Duration::from_secs(5)).await.unwrap();
        assert!(matches!(lagged[..], [Event::Lagged { from, to: 1999 }] if from == next), "{lagged:?}");
        assert_eq!(versions(&slow.next(Duration::ZERO).await.unwrap()), [2000], "it goes on with HEAD");
        registry.grow(64);
        assert_eq!(versions(&slow.next(Duration::from_secs(60)).await.unwrap())[0], 2001, "as many may wait");
        assert_eq!(registry.shared.numbers.lagged.value(), 1);
    }

    #[tokio::test]
    async fn over_a_damaged_store_nobody_is_told_that_the_log_was_forked_or_pruned() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(40);
        let seen = |version: u64| (version, "00000000".to_owned());
        let told = async |version| cursor(&registry, Some(seen(version))).next(Duration::ZERO).await;
        assert!(matches!(told(41).await.as_deref(), Some([Event::Forked(_)])));
        assert!(matches!(told(20).await.as_deref(), Some([Event::Forked(_)])));
        registry.shared.store.spoil(20);
        assert!(told(20).await.is_none());
        assert_eq!(registry.shared.damage().unwrap().as_str(), "version 20 is damaged");
        assert!(told(41).await.is_none());
        let mut behind = cursor(&registry, None);
        behind.next = 10;
        registry.shared.forget_recent();
        assert!(behind.next(Duration::ZERO).await.is_none(), "what it would read has the damage");
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(40);
        registry.shared.store.lose(40);
        registry.shared.forget_recent();
        let mut behind = cursor(&registry, None);
        behind.next = 40;
        assert!(behind.next(Duration::ZERO).await.is_none());
        assert_eq!(registry.shared.damage().unwrap().as_str(), "version 40 is damaged");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_broken_by_a_sign_of_life() {
        let registry = Fixture::new(RegistrySettings::default());
        let mut quiet = cursor(&registry, None);
        let begun = tokio::time::Instant::now();
        assert!(matches!(quiet.next(Duration::ZERO).await.unwrap()[..], [Event::Heartbeat]));
        assert_eq!(begun.elapsed(), Duration::from_secs(15));
    }
}
