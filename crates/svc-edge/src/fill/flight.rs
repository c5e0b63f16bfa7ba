//! One object on its way from its origin to whoever waits for it.
//!
//! A flight belongs to nobody: a worker brings it in, requests look on. They learn first how the answer begins, then
//! read its bytes as they come, from memory while there are few and from the file that is being written beyond that.
//! The last byte is held back until the object is in the store, so that who has it all can ask again and find it.

use super::Failure;
use crate::address::Address;
use crate::board::Board;
use crate::cache::StoredHead;
use crate::cas::{Names, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body::{Body as HttpBody, Frame, SizeHint};
use ron_kernel::http::BodyError;
use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::Lock;
use ron_kernel::sync::Permit;
use std::collections::BTreeMap;
use std::fs::File;
use std::future::Future;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::Notify;

pub(crate) static FLIGHTS: LockSpec =
    LockSpec { service: "edge", name: "routing_table", rank: 25, guards: "which objects are being fetched" };

/// What is read from the file at a time.
const PIECE: u64 = 256 << 10;

/// For so long an answer that can leave at once waits for the store before it begins.
const MOMENT: Duration = Duration::from_millis(50);

/// How an answer begins.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// What is going to be stored; whoever it does not fit goes alone.
    pub(crate) head: Option<StoredHead>,
    /// The length of the content, where the origin says it.
    pub(crate) len: Option<u64>,
}

/// What is known of a flight.
#[derive(Clone, Debug)]
pub(crate) enum News {
    Begun(Arc<Begun>),
    /// What is stored has been confirmed or replaced: look again.
    Changed,
    /// The origin confirmed this stored response to the client that began the flight.
    Confirmed(Arc<Response>),
    /// The answer is for one client alone, who takes it with [`Flight::take_alone`].
    Alone,
    Failed(Failure),
}

/// What has arrived whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Landed {
    /// Not known where the store failed.
    pub(crate) digests: Option<Digests>,
    pub(crate) len: u64,
    pub(crate) stored: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Digests {
    pub(crate) address: Address,
    pub(crate) sha256: [u8; 32],
}

#[derive(Debug)]
struct State<P> {
    news: Option<News>,
    /// What becomes the news when it is announced, or at the end.
    held_back: Option<News>,
    alone: Option<P>,
    /// The client that such an answer would be for has gone, or there was none.
    unclaimed: bool,
    /// Bytes from `base` on.
    chunks: Vec<Bytes>,
    base: u64,
    len: u64,
    file: Option<Arc<File>>,
    /// So many bytes the file has.
    spilled: u64,
    /// Nothing is written any more: what stays in memory goes when its readers have read it.
    unstored: bool,
    /// Where those are who read along, by number.
    readers: BTreeMap<u64, u64>,
    numbered: u64,
    end: Option<Result<Landed, Failure>>,
}

/// See the module. `P` is the answer that only one client gets.
#[derive(Debug)]
pub(crate) struct Flight<P> {
    key: String,
    state: Mutex<State<P>>,
    changed: Notify,
}

/// Where the next bytes are.
enum Next {
    Here(Bytes),
    File(Arc<File>, Range<u64>),
    End(Landed),
}

impl<P: Send> Flight<P> {
    pub(crate) fn new(key: String) -> Arc<Flight<P>> {
        let state = State {
            news: None,
            held_back: None,
            alone: None,
            unclaimed: false,
            chunks: Vec::new(),
            base: 0,
            len: 0,
            file: None,
            spilled: 0,
            unstored: false,
            readers: BTreeMap::new(),
            numbered: 0,
            end: None,
        };
        Arc::new(Flight { key, state: Mutex::new(state), changed: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State<P>) -> T) -> T {
        let out = change(&mut self.state());
        self.changed.notify_waiters();
        out
    }

    /// Waits until `look` sees something.
    async fn wait<T>(&self, look: impl Fn(&State<P>) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on a change is not missed.
            changed.as_mut().enable();
            if let Some(seen) = look(&self.state()) {
                return seen;
            }
            changed.await;
        }
    }

    /// How it begins. Cancel-safe.
    pub(crate) async fn news(&self) -> News {
        self.wait(|state| state.news.clone()).await
    }

    /// Waits until it has all arrived, or is known to be longer than this; `None` for the latter. Cancel-safe.
    pub(crate) async fn landed(&self, len_max: u64) -> Option<Result<Landed, Failure>> {
        self.wait(|state| match &state.end {
            Some(end) => Some(Some(end.clone())),
            None if state.len > len_max => Some(None),
            None => None,
        })
        .await
    }

    /// All bytes of an object that has landed, if they are in memory.
    pub(crate) fn bytes(&self) -> Option<Bytes> {
        let mut state = self.state();
        if state.base > 0 || !matches!(state.end, Some(Ok(_))) {
            return None;
        }
        // They are put together once, however many want them.
        if state.chunks.len() != 1 {
            let whole = Bytes::from(state.chunks.concat());
            state.chunks = vec![whole];
        }
        state.chunks.first().cloned()
    }

    pub(crate) fn tell(&self, news: News) {
        self.change(|state| state.news = Some(news));
    }

    /// Has those who wait told only when something else happens: who can have all of an answer at once is woken once.
    pub(crate) fn hold_back(&self, news: News) {
        self.state().held_back = Some(news);
    }

    /// Tells what was held back, if anything was.
    pub(crate) fn announce(&self) {
        let held_back = self.state().held_back.take();
        if let Some(news) = held_back {
            self.tell(news);
        }
    }

    /// Waits for work on it. What is held back is told after a moment all the same: a slow disk keeps the last byte of an
    /// answer and not its beginning.
    pub(crate) async fn announced<T>(&self, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        match tokio::time::timeout(MOMENT, &mut work).await {
            Ok(done) => done,
            Err(_moment) => {
                self.announce();
                work.await
            }
        }
    }

    /// Leaves an answer for the one client that it is for.
    pub(crate) fn leave(&self, answer: P) {
        // One that nobody takes is dropped outside the lock, and its place at the origin with it.
        let _unclaimed = self.change(|state| {
            state.news = Some(News::Alone);
            if state.unclaimed { Some(answer) } else { state.alone.replace(answer) }
        });
    }

    /// The client that began it does not wait any more.
    pub(crate) fn disclaim(&self) {
        let _left = {
            let mut state = self.state();
            state.unclaimed = true;
            state.alone.take()
        };
    }

    /// That answer, for whoever comes first.
    pub(crate) fn take_alone(&self) -> Option<P> {
        self.state().alone.take()
    }

    pub(crate) fn push(&self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.change(|state| {
                state.len += bytes.len() as u64;
                state.chunks.push(bytes);
            });
        }
    }

    /// So many bytes are in the file; more than `keep` of them need not stay in memory.
    pub(crate) fn spill(&self, file: &Arc<File>, written: u64, keep: u64) {
        let mut state = self.state();
        if state.len <= keep {
            return;
        }
        state.file = Some(file.clone());
        while let Some(first) = state.chunks.first().map(|chunk| chunk.len() as u64)
            && state.base + first <= written
        {
            state.base += first;
            state.chunks.remove(0);
        }
        state.spilled = state.base;
    }

    /// Waits until little more than `keep` bytes are in memory that some reader has not read: nothing else takes them.
    /// Whoever comes too late for them is told so. Cancel-safe.
    pub(crate) async fn relieve(&self, keep: u64) {
        self.state().unstored = true;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let mut state = self.state();
                let read = state.readers.values().min().copied().unwrap_or(0);
                while state.len - state.base > keep
                    && let Some(first) = state.chunks.first().map(|chunk| chunk.len() as u64)
                    && state.base + first <= read
                {
                    state.base += first;
                    state.chunks.remove(0);
                }
                if state.chunks.len() <= 1 || state.len - state.base <= keep {
                    return;
                }
            }
            changed.await;
        }
    }

    /// Whether its beginning is neither in memory nor in a file any more.
    fn has_gone_by(&self) -> bool {
        let state = self.state();
        state.base > state.spilled
    }

    /// Somebody reads along from the beginning; the number is his.
    fn enter(&self) -> u64 {
        let mut state = self.state();
        let number = state.numbered;
        state.numbered += 1;
        state.readers.insert(number, 0);
        number
    }

    /// He has come so far, or has gone.
    fn moved(&self, number: u64, at: Option<u64>) {
        let mut state = self.state();
        match at {
            Some(at) => state.readers.insert(number, at),
            None => state.readers.remove(&number),
        };
        if state.unstored {
            drop(state);
            self.changed.notify_waiters();
        }
    }

    pub(crate) fn end(&self, end: Result<Landed, Failure>) {
        self.change(|state| {
            // Of what is lost nobody has seen anything, so that it can begin anew.
            let held_back = state.held_back.take().filter(|_| !matches!(end, Err(Failure::Lost)));
            state.news = state.news.take().or(held_back);
            if let (Err(failure), None) = (&end, &state.news) {
                state.news = Some(News::Failed(failure.clone()));
            }
            state.end.get_or_insert(end);
        });
    }

    /// What can be read at a place now. The last byte only when all is well.
    fn next(state: &State<P>, at: u64) -> Option<Result<Next, Failure>> {
        let until = match &state.end {
            Some(Err(failure)) => return Some(Err(failure.clone())),
            Some(Ok(landed)) if at >= state.len => return Some(Ok(Next::End(*landed))),
            Some(Ok(_)) => state.len,
            None => state.len.saturating_sub(1),
        };
        if at >= until {
            return None;
        }
        if at < state.spilled
            && let Some(file) = &state.file
        {
            return Some(Ok(Next::File(file.clone(), at..state.spilled.min(at + PIECE).min(until))));
        }
        if at < state.base {
            return Some(Err(Failure::Store("what was not stored has gone by".to_owned())));
        }
        let mut begin = state.base;
        for chunk in &state.chunks {
            let end = begin + chunk.len() as u64;
            if at < end {
                let index = |at: u64| usize::try_from(at - begin).unwrap_or(usize::MAX).min(chunk.len());
                return Some(Ok(Next::Here(chunk.slice(index(at)..index(until.min(end))))));
            }
            begin = end;
        }
        None
    }

    /// The next bytes from a place on; none at the end, which says what it all came to. Cancel-safe.
    async fn read(self: Arc<Self>, at: u64) -> Result<(Bytes, Option<Landed>), Failure> {
        match self.wait(|state| Flight::next(state, at)).await? {
            Next::Here(bytes) => Ok((bytes, None)),
            Next::End(landed) => Ok((Bytes::new(), Some(landed))),
            Next::File(file, range) => {
                let read = tokio::task::spawn_blocking(move || {
                    let len = usize::try_from(range.end - range.start).map_err(std::io::Error::other)?;
                    let mut buffer = vec![0; len];
                    file.read_exact_at(&mut buffer, range.start).map(|()| buffer)
                });
                match read.await {
                    Ok(Ok(buffer)) => Ok((buffer.into(), None)),
                    Ok(Err(error)) => Err(Failure::Store(error.to_string())),
                    Err(lost) => Err(Failure::Store(lost.to_string())),
                }
            }
        }
    }
}

/// The flights that others may join.
#[derive(Debug)]
pub(crate) struct Flights<P> {
    board: Lock<Board<Arc<Flight<P>>>>,
}

impl<P: Send> Flights<P> {
    pub(crate) fn new(inventory: &Inventory) -> Flights<P> {
        Flights { board: Lock::new(inventory, &FLIGHTS, Board::default()) }
    }

    /// The flight for a key, and whether the caller has to see to it that it takes off.
    pub(crate) fn join(&self, key: &str) -> (Arc<Flight<P>>, bool) {
        let mut board = self.board.lock();
        board.leave(key, |flight| flight.has_gone_by());
        board.join(key, || Flight::new(key.to_owned()))
    }

    /// Lets nobody join the flights of these names any more: what they bring is out of date.
    pub(crate) fn part(&self, which: &Names) {
        // A flight does not know the surrogate keys of what it brings.
        let all = matches!(which, Names::Key(_));
        self.board.lock().part(|key| all || which.cover(key, &[]));
    }

    fn leave(&self, flight: &Arc<Flight<P>>) {
        self.board.lock().leave(&flight.key, |known| Arc::ptr_eq(known, flight));
    }
}

/// The client that began a flight holds this while it waits: an answer for it alone is kept no longer than that.
#[derive(Debug)]
pub(crate) struct Claim<P: Send>(pub(crate) Arc<Flight<P>>);

impl<P: Send> Drop for Claim<P> {
    fn drop(&mut self) {
        self.0.disclaim();
    }
}

/// Whoever brings a flight in holds this: however its task ends, nobody waits for ever.
#[derive(Debug)]
pub(crate) struct Pilot<P: Send> {
    pub(crate) flight: Arc<Flight<P>>,
    flights: Option<Arc<Flights<P>>>,
}

impl<P: Send> Pilot<P> {
    pub(crate) fn new(flight: Arc<Flight<P>>, flights: Option<Arc<Flights<P>>>) -> Pilot<P> {
        Pilot { flight, flights }
    }

    /// From now on nobody joins.
    pub(super) fn leave(&self) {
        if let Some(flights) = &self.flights {
            flights.leave(&self.flight);
        }
    }
}

impl<P: Send> Drop for Pilot<P> {
    fn drop(&mut self) {
        self.leave();
        // Nothing of it if it has ended already.
        let open = {
            let state = self.flight.state();
            let told = |news: &News| !matches!(news, News::Begun(_));
            state.end.is_none() && !state.news.as_ref().is_some_and(told)
        };
        if open {
            self.flight.end(Err(Failure::Lost));
        }
    }
}

type Reading = Pin<Box<dyn Future<Output = Result<(Bytes, Option<Landed>), Failure>> + Send>>;
/// Fields to send behind a body.
type Trailers = fn(&Digests) -> HeaderMap;

/// A flight as the body of an answer.
pub(crate) struct FlightBody<P: Send> {
    flight: Arc<Flight<P>>,
    /// Among its readers.
    number: u64,
    at: u64,
    len: Option<u64>,
    reading: Option<Reading>,
    trailers: Option<Trailers>,
    ended: bool,
    _permit: Permit,
}

impl<P: Send + 'static> FlightBody<P> {
    pub(crate) fn new(
        flight: Arc<Flight<P>>,
        len: Option<u64>,
        trailers: Option<Trailers>,
        permit: Permit,
    ) -> FlightBody<P> {
        let number = flight.enter();
        FlightBody { flight, number, at: 0, len, reading: None, trailers, ended: false, _permit: permit }
    }
}

impl<P: Send> Drop for FlightBody<P> {
    fn drop(&mut self) {
        self.flight.moved(self.number, None);
    }
}

impl<P: Send + 'static> HttpBody for FlightBody<P> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        let (flight, at) = (&this.flight, this.at);
        let reading = this.reading.get_or_insert_with(|| Box::pin(flight.clone().read(at)));
        let read = ready!(reading.as_mut().poll(cx));
        this.reading = None;
        match read {
            Ok((bytes, None)) => {
                this.at += bytes.len() as u64;
                this.flight.moved(this.number, Some(this.at));
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Ok((_, Some(landed))) => {
                this.ended = true;
                let trailers = this.trailers.zip(landed.digests);
                Poll::Ready(trailers.map(|(trailers, digests)| Ok(Frame::trailers(trailers(&digests)))))
            }
            Err(failure) => {
                this.ended = true;
                // The stream is cut: a client must not take half an object for a whole one.
                Poll::Ready(Some(Err(BodyError::Upstream(failure.to_string()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        self.len.map_or_else(SizeHint::default, |len| SizeHint::with_exact(len.saturating_sub(self.at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::metrics::Metrics;
    use std::io::Write as _;

    fn landed(len: u64) -> Landed {
        Landed { digests: None, len, stored: true }
    }

    async fn all(flight: &Arc<Flight<()>>) -> Result<Vec<u8>, Failure> {
        let mut out = Vec::new();
        loop {
            match flight.clone().read(out.len() as u64).await? {
                (_, Some(_)) => return Ok(out),
                (bytes, None) => out.extend_from_slice(&bytes),
            }
        }
    }

    #[tokio::test]
    async fn the_last_byte_waits_for_the_store() {
        let flight = Flight::<()>::new("k".to_owned());
        flight.push(Bytes::from_static(b"abc"));
        assert_eq!(flight.clone().read(0).await.unwrap().0, "ab");
        let waiting = flight.clone().read(2);
        tokio::pin!(waiting);
        assert!(std::future::poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await);
        flight.end(Ok(landed(3)));
        assert_eq!(waiting.await.unwrap().0, "c");
        assert_eq!(all(&flight).await.unwrap(), b"abc");
        assert_eq!(flight.bytes().unwrap(), "abc");
    }

    #[tokio::test]
    async fn what_is_held_back_is_told_when_announced_or_at_the_end_unless_it_is_lost() {
        let begun = || {
            let (status, headers) = (StatusCode::OK, HeaderMap::new());
            News::Begun(Arc::new(Begun { status, headers, head: None, len: None }))
        };
        let flight = Flight::<()>::new("k".to_owned());
        flight.hold_back(begun());
        flight.push(Bytes::from_static(b"ab"));
        flight.push(Bytes::from_static(b"c"));
        assert!(flight.state().news.is_none() && flight.bytes().is_none());
        flight.end(Ok(landed(3)));
        assert!(matches!(flight.news().await, News::Begun(_)));
        assert_eq!(flight.bytes().unwrap(), "abc");
        assert_eq!(all(&flight).await.unwrap(), b"abc");
        let flight = Flight::<()>::new("k".to_owned());
        flight.hold_back(begun());
        flight.announce();
        flight.end(Err(Failure::Lost));
        assert!(matches!(flight.news().await, News::Begun(_)), "it was told before");
        let flight = Flight::<()>::new("k".to_owned());
        flight.hold_back(begun());
        drop(Pilot::new(flight.clone(), None));
        assert!(matches!(flight.news().await, News::Failed(Failure::Lost)), "it can begin anew");
    }

    #[tokio::test]
    async fn what_is_held_back_is_told_before_work_that_takes_long_is_done() {
        let flight = Flight::<()>::new("k".to_owned());
        flight.hold_back(News::Changed);
        let done = flight.announced(async {
            assert!(matches!(flight.news().await, News::Changed));
            7
        });
        assert_eq!(done.await, 7);
    }

    #[tokio::test]
    async fn what_is_long_is_read_from_its_file_by_any_number() {
        let whole: Vec<u8> = (0..700_000u32).flat_map(u32::to_le_bytes).collect();
        let flight = Flight::<()>::new("k".to_owned());
        let mut file = tempfile::tempfile().unwrap();
        let readers: Vec<_> = (0..3).map(|_| Box::pin(all(&flight))).collect();
        let writing = async {
            let shared = Arc::new(file.try_clone().unwrap());
            let mut written = 0;
            for chunk in whole.chunks(100_000) {
                flight.push(Bytes::copy_from_slice(chunk));
                file.write_all(chunk).unwrap();
                written += chunk.len() as u64;
                flight.spill(&shared, written, 150_000);
                assert!(flight.state().chunks.len() <= 1 || written < 300_000);
                tokio::task::yield_now().await;
            }
            flight.end(Ok(landed(written)));
        };
        let reading = async {
            for reader in readers {
                assert!(reader.await.unwrap() == whole);
            }
        };
        tokio::join!(writing, reading);
        assert!(all(&flight).await.unwrap() == whole, "also for who comes late");
        assert!(flight.bytes().is_none());
    }

    #[tokio::test]
    async fn what_is_not_written_goes_when_all_who_read_along_have_it() {
        let flight = Flight::<()>::new("k".to_owned());
        let (quick, slow) = (flight.enter(), flight.enter());
        let mut relieving = Box::pin(flight.relieve(10));
        let mut waits = async || {
            let looked =
                std::future::poll_fn(|cx| Poll::Ready(relieving.as_mut().poll(cx).is_pending())).await;
            if !looked {
                relieving = Box::pin(flight.relieve(10));
            }
            looked
        };
        for _ in 0..4 {
            flight.push(Bytes::from_static(b"12345678"));
        }
        assert!(waits().await);
        flight.moved(quick, Some(31));
        assert!(waits().await, "the other has read nothing");
        flight.moved(slow, Some(17));
        assert!(waits().await, "sixteen bytes are ten and more");
        flight.moved(slow, Some(24));
        assert!(!waits().await);
        assert_eq!(flight.clone().read(24).await.unwrap().0, "1234567");
        assert!(matches!(flight.clone().read(5).await, Err(Failure::Store(_))), "too late");
        flight.push(Bytes::from_static(b"12345678"));
        assert!(waits().await);
        flight.moved(slow, None);
        flight.moved(quick, Some(39));
        assert!(!waits().await, "who has gone holds nothing up");
    }

    #[tokio::test]
    async fn nobody_joins_what_has_gone_by() {
        let flights = Arc::new(Flights::<()>::new(&Inventory::new(Metrics::default())));
        let (flight, _) = flights.join("k");
        let reader = flight.enter();
        for _ in 0..3 {
            flight.push(Bytes::from_static(b"12345678"));
        }
        assert!(!flights.join("k").1);
        flight.moved(reader, Some(23));
        flight.relieve(8).await;
        let (next, leads) = flights.join("k");
        assert!(leads && !Arc::ptr_eq(&next, &flight));
        drop(Pilot::new(flight, Some(flights.clone())));
        assert!(!flights.join("k").1, "the end of one is not that of the other");
    }

    #[tokio::test]
    async fn one_brings_it_in_and_a_lost_one_is_told_to_all() {
        let flights = Arc::new(Flights::<()>::new(&Inventory::new(Metrics::default())));
        let (flight, first) = flights.join("k");
        let (same, second) = flights.join("k");
        assert!(first && !second && Arc::ptr_eq(&flight, &same));
        drop(Pilot::new(flight.clone(), Some(flights.clone())));
        assert!(matches!(same.news().await, News::Failed(Failure::Lost)));
        assert!(flights.join("k").1, "the next one takes off anew");
        flight.push(Bytes::from_static(b"x"));
        assert!(matches!(all(&flight).await, Err(Failure::Lost)), "cut, never taken for whole");
    }

    #[tokio::test]
    async fn a_private_answer_goes_to_one_only() {
        let flight = Flight::<u8>::new("k".to_owned());
        flight.leave(7);
        assert!(matches!(flight.news().await, News::Alone));
        assert_eq!((flight.take_alone(), flight.take_alone()), (Some(7), None));
        drop(Pilot::new(flight.clone(), None));
        assert!(matches!(flight.news().await, News::Alone));
    }

    #[tokio::test]
    async fn a_private_answer_goes_with_the_one_it_is_for() {
        let before = Arc::new(());
        let flight = Flight::<Arc<()>>::new("k".to_owned());
        let claim = Claim(flight.clone());
        flight.leave(before.clone());
        assert_eq!(Arc::strong_count(&before), 2);
        drop(claim);
        assert_eq!(Arc::strong_count(&before), 1, "nobody holds it any more");
        flight.leave(before.clone());
        assert_eq!(Arc::strong_count(&before), 1, "nor when it comes later");
        assert!(matches!(flight.news().await, News::Alone));
    }
}
