//! The registry that is followed, over HTTP: bounded answers under a deadline, nothing of them believed here.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ron_kernel::http::Body;
use ron_kernel::http::client::{CallLimits, Get, Payload, Remote};
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::metrics::Counter;
use ron_kernel::tls::ClientTlsSettings;
use ron_log::entry::Served;
use ron_log::json::Json;
use ron_log::tile::{TILE_WIDTH, Tile, TilePath};
use ron_log::tree::{Hash, ProofError};
use ron_log::{B3, Checkpoint, Head, Note, NoteKey, Tree};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long a registry may let us wait for its next version: not for long while no checkpoint covers the last, so that
/// its signature is seen soon after. And how much longer for an answer.
pub(super) const WAIT: Duration = Duration::from_secs(25);
pub(super) const WAIT_UNSIGNED: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer. A page of the log has at most 8 MiB and one entry; a state may be larger.
const ANSWER_MAX: usize = 16 << 20;
const STATE_MAX: usize = 64 << 20;
/// Entries that are asked for at once.
const PAGE: u64 = 256;

pub static FOLLOW_IDLE: LockSpec = LockSpec {
    service: "kernel",
    name: "follow_idle",
    rank: 40,
    guards: "the connections kept to the registry that is followed; taken alone, for a push or a pop",
};

/// Why there is no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// The entries asked for are kept no more.
    #[error("the entries are kept no more")]
    Pruned,
    #[error("{0}")]
    Failed(String),
}

fn failed(why: impl ToString) -> AskError {
    AskError::Failed(why.to_string())
}

/// The last entry, as a registry tells it, and its newest checkpoint.
#[derive(Debug)]
pub(super) struct HeadPage {
    pub(super) head: Head,
    pub(super) checkpoint: Option<Note>,
}

/// What stands for entries that are gone.
#[derive(Debug)]
pub(super) struct SnapshotPage {
    pub(super) checkpoint: Note,
    pub(super) snapshot: Note,
    pub(super) state: Vec<u8>,
    pub(super) tree: Tree,
    pub(super) from_own: Vec<Hash>,
    pub(super) from_snapshot: Vec<Hash>,
}

/// A registry that can be asked.
#[derive(Clone, Debug)]
pub(super) struct Source {
    remote: Arc<Remote>,
    /// What stands before every path.
    base: String,
    /// For an answer, beside what it was asked to wait; and for its bytes.
    patience: Duration,
    answer_max: usize,
    timeouts: Counter,
}

impl Source {
    /// `url` may have a path, such as that of a gateway in front.
    pub(super) fn new(service: &Service, url: &str) -> Result<Source, String> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| format!("{url:?} is no registry: write https://host:port or http://host:port"))?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let remote = Remote::new(service, &FOLLOW_IDLE, format!("{scheme}://{authority}").parse()?);
        if remote.address.is_https() {
            let tls = ClientTlsSettings::default().load(Path::new("."));
            remote.set_tls(Some(tls.map_err(|error| error.to_string())?));
        }
        let path = path.trim_end_matches('/');
        let base = if path.is_empty() { String::new() } else { format!("/{path}") };
        let timeouts = service.io_timeout("rpc");
        Ok(Source { remote, base, patience: PATIENCE, answer_max: ANSWER_MAX, timeouts })
    }

    /// The head now or, with a version and a time, as soon as there is a newer one.
    pub(super) async fn head(&self, after: Option<(u64, Duration)>) -> Result<HeadPage, AskError> {
        let (path, wait) = match after {
            None => ("/registry/head".to_owned(), Duration::ZERO),
            Some((after, wait)) => (format!("/registry/head?wait={}s&after={after}", wait.as_secs()), wait),
        };
        let bytes = self.get_within(&path, wait, self.answer_max).await?;
        let json = Json::parse(&bytes).map_err(failed)?;
        let hash = json.member("hash").and_then(Json::text).and_then(B3::parse);
        let version = json.member("version").and_then(Json::whole);
        let (version, hash) = version.zip(hash).ok_or_else(|| failed("its head has no version or hash"))?;
        let note = json.member("checkpoint").and_then(|checkpoint| checkpoint.member("note")?.text());
        let checkpoint = note.map(|note| Note::parse(note.as_bytes())).transpose().map_err(failed)?;
        Ok(HeadPage { head: Head { version, hash }, checkpoint })
    }

    /// Some entries from a version on: at least one, if there is any.
    pub(super) async fn entries(&self, from: u64) -> Result<Vec<(Vec<u8>, Vec<u8>)>, AskError> {
        let bytes = self.get(&format!("/registry/log?from={from}&limit={PAGE}")).await?;
        // Read by the registry's own reader: another may round a number, and the hash would differ.
        let json = Json::parse_around(&bytes).map_err(failed)?;
        let entries = json.member("entries").and_then(Json::list).ok_or_else(|| failed("no entries"))?;
        let pair = |entry: &Json<'_>| Served::of(entry).map(|served| (served.record, served.payload));
        entries.iter().take(PAGE as usize).map(pair).collect::<Result<_, _>>().map_err(failed)
    }

    pub(super) async fn log_key(&self) -> Result<NoteKey, AskError> {
        let bytes = self.get("/registry/log-key").await?;
        let key = std::str::from_utf8(&bytes).ok().and_then(|line| NoteKey::parse(line.trim()));
        key.ok_or_else(|| failed("it gives no log key"))
    }

    /// The proof that the tree of one size continues that of another.
    pub(super) async fn consistency(&self, from: u64, to: u64) -> Result<Vec<Hash>, AskError> {
        let path = format!("/registry/proof/consistency?from={from}&to={to}");
        let bytes = self.get(&path).await?;
        let json = Json::parse(&bytes).map_err(failed)?;
        let hashes = json.member("hashes").and_then(Json::list).ok_or_else(|| failed("no proof"))?;
        let hash =
            |json: &Json<'_>| -> Option<Hash> { BASE64_STANDARD.decode(json.text()?).ok()?.try_into().ok() };
        hashes.iter().map(hash).collect::<Option<_>>().ok_or_else(|| failed("a proof of other hashes"))
    }

    /// Everything that a follower at a size needs to go on from the newest state that was signed.
    pub(super) async fn snapshot(&self, own_size: u64) -> Result<SnapshotPage, AskError> {
        let bytes = self.get_within("/registry/snapshot", Duration::ZERO, STATE_MAX).await?;
        let json = Json::parse_around(&bytes).map_err(failed)?;
        let missing = || failed("its snapshot is incomplete");
        let version = json.member("version").and_then(Json::whole).ok_or_else(missing)?;
        let snapshot = json.member("note").and_then(Json::text).ok_or_else(missing)?;
        let snapshot = Note::parse(snapshot.as_bytes()).map_err(failed)?;
        let state = json.member("state").ok_or_else(missing)?.canonical().into_bytes();
        drop(json);
        // After the snapshot, so that it covers it.
        let checkpoint = Note::parse(&self.get("/checkpoint").await?).map_err(failed)?;
        let size = Checkpoint::parse(&checkpoint.text).ok_or_else(missing)?.size;
        let tree = self.tree(version + 1).await?;
        let from_own = self.consistency(own_size, size).await?;
        let from_snapshot = self.consistency(version + 1, size).await?;
        Ok(SnapshotPage { checkpoint, snapshot, state, tree, from_own, from_snapshot })
    }

    /// The tree of a size, of the few tiles that have its peaks.
    async fn tree(&self, size: u64) -> Result<Tree, AskError> {
        let mut tiles: Vec<(Tile, Vec<u8>)> = Vec::new();
        loop {
            let read = |tile: Tile| {
                let found = tiles.iter().find(|(known, _)| *known == tile);
                found.map(|(_, hashes)| hashes.clone()).ok_or(tile)
            };
            let tile = match Tree::from_tiles(size, read) {
                Ok(tree) => return Ok(tree),
                Err(ProofError::Read(tile)) => tile,
                Err(_) => return Err(failed("its tiles are too short")),
            };
            tiles.push((tile, self.tile(tile).await?));
        }
    }

    /// The hashes of a tile; one that has become full since stands for its partial self.
    async fn tile(&self, tile: Tile) -> Result<Vec<u8>, AskError> {
        let full = Tile { width: TILE_WIDTH as u16, ..tile };
        let path = |tile| format!("/tile/{}", TilePath::Hashes(tile));
        match self.get(&path(tile)).await {
            Ok(hashes) => Ok(hashes),
            Err(_) => {
                let mut hashes = self.get(&path(full)).await?;
                hashes.truncate(usize::from(tile.width) * 32);
                Ok(hashes)
            }
        }
    }

    async fn get(&self, path: &str) -> Result<Vec<u8>, AskError> {
        self.get_within(path, Duration::ZERO, self.answer_max).await
    }

    async fn get_within(&self, path: &str, wait: Duration, max: usize) -> Result<Vec<u8>, AskError> {
        let (path, patience) = (format!("{}{path}", self.base), wait + self.patience);
        match tokio::time::timeout(patience, self.ask(&path, patience, max)).await {
            Ok(answer) => answer,
            Err(_elapsed) => {
                self.timeouts.inc();
                Err(failed("there was no answer in time"))
            }
        }
    }

    async fn ask(&self, path: &str, silence: Duration, max: usize) -> Result<Vec<u8>, AskError> {
        let head = Get { path, host: self.remote.address.authority() };
        let limits = CallLimits { connect_timeout: CONNECT_TIMEOUT, silence };
        let answer = self.remote.call(&head, &mut None, limits).await.map_err(failed)?;
        if answer.status == 410 {
            return Err(AskError::Pruned);
        }
        if answer.status != 200 {
            return Err(failed(format!("it answered {} to {path}", answer.status)));
        }
        match answer.payload {
            Payload::Whole(bytes) if bytes.len() <= max => Ok(bytes.into()),
            Payload::Whole(_) => Err(failed("its answer is too long")),
            Payload::Stream(body) => Ok(Body::stream(body).collect(max).await.map_err(failed)?.into()),
            Payload::Upgraded(_) => Err(failed("it changed the protocol")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::kernel::Kernel;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    /// A registry that answers every request like this, or not at all.
    fn source(answer: Option<String>) -> (Service, Source) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/behind/", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let mut head = [0; 4096];
                let read = stream.read(&mut head).unwrap_or(0);
                assert!(head[..read].starts_with(b"GET /behind/"), "the base is kept");
                match &answer {
                    Some(answer) => drop(stream.write_all(answer.as_bytes())),
                    None => drop(stream.read(&mut head)),
                }
            }
        });
        let service = Kernel::new().service("kernel");
        let source = Source::new(&service, &url).unwrap();
        (service, source)
    }

    fn answer(status: &str, body: &str) -> Option<String> {
        Some(format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    }

    #[tokio::test]
    async fn a_registry_that_does_not_answer_in_time_is_given_up_and_counted() {
        let (service, mut source) = source(None);
        source.patience = Duration::from_millis(50);
        let error = source.head(None).await.unwrap_err();
        assert_eq!(error.to_string(), "there was no answer in time");
        let page = service.metrics().scrape();
        assert!(page.contains("io_timeouts_total{service=\"kernel\",op=\"rpc\"} 1"), "{page}");
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_or_no_answer_at_all_is_an_error() {
        let hash = format!("b3:{}", "0".repeat(64));
        let head = format!("{{\"version\":7,\"hash\":\"{hash}\",\"checkpoint\":null}}");
        let page = source(answer("200 OK", &head)).1.head(None).await.unwrap();
        assert_eq!((page.head.version, page.checkpoint), (7, None));
        let (_, mut long) = source(answer("200 OK", &format!("{head}{}", " ".repeat(100_000))));
        long.answer_max = 65_536;
        assert!(matches!(long.head(None).await, Err(AskError::Failed(_))));
        for body in ["", "{}", "[]", "{\"version\":-1}", "{\"entries\":[1]}", "{\"entries\":[{}]}"] {
            let (_, source) = source(answer("200 OK", body));
            assert!(source.head(None).await.is_err(), "{body}");
            assert!(source.entries(1).await.is_err(), "{body}");
            assert!(source.consistency(1, 2).await.is_err(), "{body}");
            assert!(source.log_key().await.is_err(), "{body}");
            assert!(source.snapshot(1).await.is_err(), "{body}");
        }
        let (_, gone) = source(answer("410 Gone", "{}"));
        assert!(matches!(gone.entries(1).await, Err(AskError::Pruned)));
        let (_, busy) = source(answer("503 Service Unavailable", "{}"));
        let error = busy.entries(1).await.unwrap_err().to_string();
        assert!(error.starts_with("it answered 503"), "{error}");
        assert!(Source::new(&Kernel::new().service("kernel"), "nowhere").is_err());
    }
}
