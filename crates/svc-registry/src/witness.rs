//! Witnesses (C2SP tlog-witness): asked what they have seen of the log, and for cosignatures of each checkpoint.
//!
//! They are all asked about one checkpoint at a time, at once and each at its own pace: the next is taken up when
//! enough have cosigned and nobody who usually answers is waited for. Whoever failed is asked again, later and later.

use crate::api::consistency_path;
use crate::config::{WitnessAddress, WitnessSettings};
use crate::guard::{Hold, Seer};
use crate::shared::{Shared, Signed};
use crate::store::{Reader, StoreError};
use bytes::{BufMut as _, BytesMut};
use http::{Method, Request, StatusCode, Uri};
use ron_kernel::health::Severity;
use ron_kernel::http::Body;
use ron_kernel::http::client::{Answer, CallLimits, Outgoing, Payload, Remote};
use ron_kernel::inventory::LockSpec;
use ron_kernel::task::TaskResult;
use ron_kernel::tls::ClientTlsSettings;
use ron_log::checkpoint::{AddCheckpoint, cosignature};
use ron_log::note::{NoteKeyKind, NoteSignature, signature_lines};
use ron_log::tree::leaf_hash;
use ron_log::{Checkpoint, NoteKey, Tree};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Witnesses that are asked at one time.
pub(crate) const WITNESSES_MAX: usize = 32;
/// For one witness to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// For all of them at the start, while writes wait for what they have seen.
const START_PATIENCE: Duration = Duration::from_secs(3);
/// How long one that has not answered keeps the others from being asked about the next checkpoint.
const LINGER: Duration = Duration::from_secs(1);
/// Until a witness that failed is asked again: twice as long each time, and no sooner than the first if somebody waits.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_CAP: Duration = Duration::from_secs(60);
/// Longest answer that is read.
const ANSWER_MAX: usize = 64 << 10;
/// How often a witness is asked about one checkpoint: it may have to say first which size it saw.
const TRIES: u32 = 3;

pub(crate) static WITNESS_IDLE: LockSpec = LockSpec {
    service: "registry",
    name: "witness_idle",
    rank: 40,
    guards: "the connections kept to one witness; taken alone, for a push or a pop",
};

/// What readiness says while too few witnesses answer.
const QUORUM: &str = "witness_quorum";

/// Reads a witness's base address and key.
pub(crate) fn parse(text: &str) -> Result<WitnessAddress, String> {
    let (url, key) = text.split_once(' ').ok_or_else(|| {
        format!("{text:?} lacks the witness's key: expected \"https://host:port name+hash+base64\"")
    })?;
    let key = NoteKey::parse(key.trim()).filter(|key| key.kind == NoteKeyKind::Cosignature);
    let key = key.ok_or_else(|| format!("{text:?} does not end in the verifier key of a witness"))?;
    let (scheme, rest) =
        url.split_once("://").ok_or_else(|| format!("{url:?} is no http:// or https:// address"))?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let address = format!("{scheme}://{authority}").parse()?;
    let path = path.trim_end_matches('/');
    Ok((address, if path.is_empty() { String::new() } else { format!("/{path}") }, key))
}

/// The keys of the configured witnesses.
pub(crate) fn keys(settings: &WitnessSettings) -> Vec<NoteKey> {
    settings.urls.iter().filter_map(|url| Some(parse(url).ok()?.2)).collect()
}

/// The task: asks until the end.
pub(crate) async fn collect(shared: Arc<Shared>) -> TaskResult {
    let mut cosigner = Cosigner { witnesses: Vec::new(), target: None, passed: false, too_few: false };
    let (begun, mut starting) = (Instant::now(), true);
    loop {
        cosigner.take_over(&shared);
        if let Err(error) = cosigner.aim(&shared).await {
            tracing::warn!(%error, "no checkpoint to be cosigned can be read; once more later");
        }
        cosigner.begin(&shared);
        cosigner.tell(&shared);
        if starting && (cosigner.all_tried() || begun.elapsed() >= START_PATIENCE) {
            starting = false;
            shared.holds.set(&Seer::Witnesses, None);
            shared.checkpoint_wanted.notify_one();
        }
        let due = cosigner.due(starting.then_some(begun + START_PATIENCE));
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            (index, size, told) = answered(&mut cosigner.witnesses) => {
                cosigner.heard(&shared, index, size, told).await;
            }
            () = shared.cosignatures_wanted.notified() => cosigner.hurry(),
            () = tokio::time::sleep_until(due.into()) => {}
        }
    }
}

/// The witnesses in force, and what they are asked about.
struct Cosigner {
    witnesses: Vec<Witness>,
    target: Option<Arc<Signed>>,
    /// A witness has seen more than the target, and what it saw may be ours.
    passed: bool,
    too_few: bool,
}

struct Witness {
    url: String,
    at: Arc<Address>,
    /// The size it last saw, as far as we know.
    size: u64,
    fails: u32,
    tried: Option<Instant>,
    /// When it may be asked again.
    next: Instant,
    asking: Option<Asking>,
}

type Asking = Pin<Box<dyn Future<Output = (u64, Told)> + Send>>;

/// What came of asking.
#[derive(Debug)]
enum Told {
    Cosigned(NoteSignature),
    /// It has seen more than it was shown.
    Saw(u64),
    /// At this size it has seen another history.
    Fork(u64),
    Nothing(String),
}

/// The next answer of those who are being asked: whose, to the question about which size, and what. Nothing is lost
/// if it is dropped.
async fn answered(witnesses: &mut [Witness]) -> (usize, u64, Told) {
    std::future::poll_fn(|context| {
        for (index, witness) in witnesses.iter_mut().enumerate() {
            if let Some(asking) = &mut witness.asking
                && let Poll::Ready((size, told)) = asking.as_mut().poll(context)
            {
                witness.asking = None;
                return Poll::Ready((index, size, told));
            }
        }
        Poll::Pending
    })
    .await
}

impl Witness {
    /// Whether there is nothing to ask it. After a start even one whose cosignature is stored is asked: it may have
    /// seen more since.
    fn is_done(&self, target: &Signed) -> bool {
        self.size > 0 && target.is_cosigned_by(&self.at.key)
    }

    /// While it is being asked, until when the others wait for it.
    fn lingers_until(&self) -> Option<Instant> {
        self.asking.as_ref().and(self.tried).map(|tried| tried + LINGER)
    }
}

impl Cosigner {
    /// Takes the configured witnesses; those that stay are remembered.
    fn take_over(&mut self, shared: &Shared) {
        let settings = shared.settings.load();
        let urls = &settings.witness.urls;
        if self.witnesses.iter().map(|witness| &witness.url).eq(urls) {
            return;
        }
        let mut before = std::mem::take(&mut self.witnesses);
        for url in urls {
            if let Some(index) = before.iter().position(|witness| witness.url == *url) {
                self.witnesses.push(before.swap_remove(index));
            } else if let Ok((address, path, key)) = parse(url) {
                let remote = Remote::new(&shared.service, &WITNESS_IDLE, address);
                if remote.address.is_https() {
                    let tls = ClientTlsSettings::default().load(Path::new("."));
                    remote
                        .set_tls(tls.inspect_err(|error| tracing::warn!(%error, "no TLS to witnesses")).ok());
                }
                self.witnesses.push(Witness {
                    url: url.clone(),
                    at: Arc::new(Address { remote, path, key }),
                    size: 0,
                    fails: 0,
                    tried: None,
                    next: Instant::now(),
                    asking: None,
                });
            }
        }
        shared.holds.keep(&self.keys());
        // Whose cosignatures count has changed.
        self.target = None;
    }

    fn keys(&self) -> Vec<NoteKey> {
        self.witnesses.iter().map(|witness| witness.at.key.clone()).collect()
    }

    /// Takes up the newest checkpoint once the one before is done with.
    async fn aim(&mut self, shared: &Arc<Shared>) -> Result<(), StoreError> {
        let quorum = shared.settings.load().witness.quorum;
        if let Some(target) = &self.target {
            let settled = |witness: &Witness| {
                let slow = witness.lingers_until().is_some_and(|until| until <= Instant::now());
                slow || witness.fails > 0 || target.is_cosigned_by(&witness.at.key)
            };
            let done = target.cosignatures >= quorum && self.witnesses.iter().all(settled);
            if shared.signed_size.load(Ordering::Acquire) <= target.size || !(done || self.passed) {
                return Ok(());
            }
        }
        if self.witnesses.is_empty() {
            return Ok(());
        }
        let stored = shared.read("checkpoint", Reader::checkpoint).await?;
        // What was cosigned before counts. A log without a checkpoint shows its genesis, which the roots determine.
        let note = stored.map_or_else(|| genesis(shared), |(_, note)| note);
        self.target = Signed::of(&note, &shared.log_key, &self.keys()).map(Arc::new);
        self.passed = false;
        Ok(())
    }

    /// Asks whoever is not being asked, has not cosigned, and whose time has come.
    fn begin(&mut self, shared: &Arc<Shared>) {
        let Some(target) = &self.target else { return };
        let now = Instant::now();
        for witness in &mut self.witnesses {
            if witness.asking.is_none() && !witness.is_done(target) && witness.next <= now {
                if witness.fails > 0 {
                    shared.numbers.witness_retries.inc();
                }
                witness.tried = Some(now);
                let (at, shared, target) = (witness.at.clone(), shared.clone(), target.clone());
                let known = witness.size;
                witness.asking = Some(Box::pin(async move {
                    let told = tokio::time::timeout(PATIENCE, at.cosign(&shared, known, &target)).await;
                    let late = |_elapsed| Told::Nothing("it did not answer in time".to_owned());
                    (target.size, told.unwrap_or_else(late))
                }));
            }
        }
    }

    /// Whether every witness has answered or failed.
    fn all_tried(&self) -> bool {
        self.witnesses.iter().all(|witness| witness.fails > 0 || witness.size > 0)
    }

    /// When to look again if nothing happens.
    fn due(&self, start: Option<Instant>) -> Instant {
        let now = Instant::now();
        let Some(target) = self.target.as_ref() else {
            return now + if self.witnesses.is_empty() { PAUSE_CAP } else { PAUSE_MIN };
        };
        let open = |witness: &&Witness| witness.asking.is_none() && !witness.is_done(target);
        let waiting = self.witnesses.iter().filter(open).map(|witness| witness.next);
        let lingering = self.witnesses.iter().filter_map(Witness::lingers_until).filter(|until| *until > now);
        waiting.chain(lingering).chain(start).min().unwrap_or(now + PAUSE_CAP)
    }

    /// Somebody waits: those who failed are asked again soon.
    fn hurry(&mut self) {
        for witness in &mut self.witnesses {
            if let Some(tried) = witness.tried {
                witness.next = witness.next.min(tried + PAUSE_MIN);
            }
        }
    }

    async fn heard(&mut self, shared: &Arc<Shared>, index: usize, size: u64, told: Told) {
        let witness = &mut self.witnesses[index];
        let (who, has) = (Seer::witness(&witness.at.key), shared.view.load().tree.size());
        if let Told::Cosigned(_) = told {
            (witness.size, witness.fails, witness.next) = (size, 0, Instant::now());
        } else {
            witness.fails += 1;
            let pause = PAUSE_MIN * 2u32.saturating_pow(witness.fails - 1);
            witness.next =
                Instant::now() + pause.min(PAUSE_CAP).mul_f64(1.0 + ron_kernel::random::unit() / 4.0);
        }
        match told {
            Told::Cosigned(line) => {
                shared.holds.set(&who, None);
                self.merge(shared, index, size, line).await;
            }
            Told::Saw(seen) if seen > has => {
                shared.holds.set(&who, Some(Hold::Behind { who: who.clone(), seen, has }));
            }
            // More was committed than is signed: the next checkpoint will show whether what it saw is ours.
            Told::Saw(seen) => {
                (witness.size, self.passed) = (seen, true);
                shared.checkpoint_wanted.notify_one();
            }
            Told::Fork(seen) => shared.holds.set(&who, Some(Hold::Fork { who: who.clone(), seen, has })),
            Told::Nothing(error) => {
                tracing::warn!(witness = %witness.at.remote.address, error, "no cosignature");
            }
        }
    }

    /// Stores a cosignature beside those that are there.
    async fn merge(&mut self, shared: &Arc<Shared>, index: usize, size: u64, line: NoteSignature) {
        let key = &self.witnesses[index].at.key;
        let Some(target) = &mut self.target else { return };
        if target.size != size || target.is_cosigned_by(key) {
            return;
        }
        Arc::make_mut(target).add(line);
        let (store, text) = (shared.store.clone(), target.note.to_string());
        let stored =
            tokio::task::spawn_blocking(move || store.note_writer().checkpoint(size, &text, None, |_| true));
        if !matches!(stored.await, Ok(Ok(_))) {
            tracing::warn!("cosignatures could not be stored");
        }
    }

    /// Serves the checkpoint once enough have cosigned it, unless a newer one is served already, and says whether
    /// enough witnesses answer.
    fn tell(&mut self, shared: &Shared) {
        let quorum = shared.settings.load().witness.quorum;
        let enough = self.target.as_ref().map_or(quorum == 0, |target| target.cosignatures >= quorum);
        if enough && let Some(target) = &self.target {
            let served = shared.checkpoint.load().as_ref().map(|served| (served.size, served.cosignatures));
            let more = served.is_none_or(|served| served < (target.size, target.cosignatures));
            // One of the genesis may be shown to witnesses before it is made.
            if more && target.size <= shared.signed_size.load(Ordering::Acquire) {
                shared.publish_checkpoint(Signed::clone(target));
            }
        }
        let open = self.witnesses.iter().any(|witness| witness.asking.is_some());
        if enough && self.too_few {
            shared.service.restore(QUORUM);
        } else if !enough && !self.too_few && !open {
            shared.service.lose(QUORUM, Severity::Degraded);
        } else {
            return;
        }
        self.too_few = !enough;
    }
}

/// The checkpoint of the genesis alone.
fn genesis(shared: &Shared) -> Vec<u8> {
    let (entry, _) = shared.roots.genesis();
    let mut tree = Tree::default();
    tree.append(leaf_hash(entry.bytes()), |_, _, _| {});
    let checkpoint = Checkpoint { origin: shared.roots.log.clone(), size: tree.size(), root: tree.root() };
    checkpoint.sign(&shared.signing).to_string().into_bytes()
}

/// Where a witness is, and how it is known.
struct Address {
    remote: Arc<Remote>,
    path: String,
    key: NoteKey,
}

/// One answer.
enum Asked {
    Cosigned(NoteSignature),
    /// It refuses because of what it saw: this size, if it says which.
    Conflict(Option<u64>),
    /// It does not find that the checkpoint continues what it saw.
    Inconsistent,
}

impl Address {
    /// Shows it a checkpoint, as one that continues what it is believed to have seen, until that is right.
    async fn cosign(&self, shared: &Arc<Shared>, known: u64, target: &Signed) -> Told {
        let mut size = known.min(target.size);
        for _ in 0..TRIES {
            match self.ask(shared, size, target).await {
                Ok(Asked::Cosigned(line)) => return Told::Cosigned(line),
                Ok(Asked::Conflict(Some(seen))) if seen > target.size => return Told::Saw(seen),
                Ok(Asked::Conflict(Some(seen))) if seen != size => size = seen,
                // It was told its own size, or shown a proof from it: what it saw there is not ours.
                Ok(Asked::Conflict(_)) if size == target.size => return Told::Fork(size),
                Ok(Asked::Inconsistent) if size > 0 => return Told::Fork(size),
                Ok(Asked::Conflict(_) | Asked::Inconsistent) => {
                    return Told::Nothing(format!("it takes nothing that continues size {size}"));
                }
                Err(error) => return Told::Nothing(error),
            }
        }
        Told::Nothing("it keeps naming another size".to_owned())
    }

    async fn ask(&self, shared: &Arc<Shared>, from: u64, target: &Signed) -> Result<Asked, String> {
        let to = target.size;
        let proof = shared.read("proof", move |reader| consistency_path(reader, from, to)).await;
        let proof = proof.map_err(|error| error.to_string())?;
        // It takes the log's own signature; others' are not its business.
        let mut note = target.note.clone();
        note.signatures.truncate(1);
        let body = AddCheckpoint { old_size: from, proof, checkpoint: note }.body();
        let uri = format!("{}/add-checkpoint", self.path).parse().map_err(|_bad| "a bad path".to_owned())?;
        let post = Post { host: self.remote.address.authority().to_owned(), uri, length: body.len() };
        let limits = CallLimits { connect_timeout: Duration::from_secs(2), silence: Duration::from_secs(5) };
        let mut body = Some(Body::full(body));
        let answer = self.remote.call(&post, &mut body, limits).await.map_err(|error| error.to_string())?;
        let (status, text) = read(answer).await?;
        match status {
            StatusCode::OK => {
                let lines = signature_lines(&text).map_err(|bad| bad.to_string())?;
                let line = cosignature(&target.note.text, &lines, &self.key);
                line.map(Asked::Cosigned).ok_or_else(|| "no good cosignature by its key".to_owned())
            }
            StatusCode::CONFLICT => Ok(Asked::Conflict(text.trim().parse().ok())),
            StatusCode::UNPROCESSABLE_ENTITY => Ok(Asked::Inconsistent),
            status => Err(format!("it answered {status}")),
        }
    }
}

pub(crate) async fn read(answer: Answer) -> Result<(StatusCode, String), String> {
    let bytes = match answer.payload {
        Payload::Whole(bytes) => bytes,
        Payload::Stream(body) => {
            Body::stream(body).collect(ANSWER_MAX).await.map_err(|error| error.to_string())?
        }
        Payload::Upgraded(_) => return Err("it changed the protocol".to_owned()),
    };
    let text = String::from_utf8(bytes.to_vec()).map_err(|_bad| "its answer is no text".to_owned())?;
    Ok((answer.status, text))
}

/// `POST …/add-checkpoint`.
#[derive(Debug)]
struct Post {
    host: String,
    uri: Uri,
    length: usize,
}

impl Outgoing for Post {
    fn method(&self) -> &Method {
        &Method::POST
    }

    fn write_http1(&self, out: &mut BytesMut) {
        let Post { host, uri, length } = self;
        let head = format!(
            "POST {uri} HTTP/1.1\r\nhost: {host}\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\r\n"
        );
        out.put_slice(head.as_bytes());
    }

    fn http2(&self, scheme: &str, authority: &str) -> Request<()> {
        let request = Request::post(format!("{scheme}://{authority}{}", self.uri));
        let request = request.header("content-type", "text/plain").header("content-length", self.length);
        request.body(()).expect("an address that was read makes a request")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistrySettings;
    use crate::fixture::{key, log_key};
    use ron_kernel::config::Problems;

    #[test]
    fn a_witness_is_an_address_and_the_key_it_signs_with() {
        let witness = |name: &str, seed: u8| NoteKey::cosignature(name, key(seed).verifying_key());
        let (address, path, found) = parse(&format!("https://w.example/a/b/ {}", witness("w", 1))).unwrap();
        assert_eq!((address.authority(), path.as_str(), found), ("w.example:443", "/a/b", witness("w", 1)));
        let problems = |urls: Vec<String>| {
            let (mut settings, mut problems) = (RegistrySettings::default(), Problems::default());
            settings.witness.urls = urls;
            settings.validate(false, false, &mut problems);
            problems.to_string()
        };
        let url = |key: NoteKey| format!("http://127.0.0.1:1 {key}");
        assert_eq!(problems((1..=32).map(|seed| url(witness("w", seed))).collect()), "");
        for (urls, wrong) in [
            (vec!["http://127.0.0.1:1".to_owned()], "lacks the witness's key"),
            (vec![url(log_key())], "does not end in the verifier key of a witness"),
            (vec![format!("127.0.0.1:1 {}", witness("w", 1))], "is no http:// or https:// address"),
            (vec![url(witness("w", 1)), url(witness("w", 1))], "has the key of another witness"),
            ((1..=33).map(|seed| url(witness("w", seed))).collect(), "more than 32"),
        ] {
            let said = problems(urls);
            assert!(said.contains(wrong), "{said}");
        }
    }
}
