//! Witnesses (C2SP tlog-witness): asked for cosignatures of each checkpoint, told the size they last saw.

use crate::api::consistency_path;
use crate::config::WitnessAddress;
use crate::shared::{Shared, Signed, Trouble};
use bytes::{BufMut as _, BytesMut};
use http::{Method, Request, StatusCode, Uri};
use ron_kernel::health::Severity;
use ron_kernel::http::Body;
use ron_kernel::http::client::{Answer, CallLimits, Outgoing, Payload, Remote};
use ron_kernel::inventory::LockSpec;
use ron_kernel::tls::ClientTlsSettings;
use ron_log::checkpoint::AddCheckpoint;
use ron_log::note::{NoteSignature, signature_lines};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// For one witness to answer.
const PATIENCE: Duration = Duration::from_secs(10);
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

/// Reads a witness's base address.
pub(crate) fn parse(text: &str) -> Result<WitnessAddress, String> {
    let (scheme, rest) =
        text.split_once("://").ok_or_else(|| format!("{text:?} is no http:// or https:// address"))?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let address = format!("{scheme}://{authority}").parse()?;
    let path = path.trim_end_matches('/');
    Ok((address, if path.is_empty() { String::new() } else { format!("/{path}") }))
}

/// The witnesses in force.
#[derive(Debug)]
pub(crate) struct Witnesses {
    urls: Vec<String>,
    known: Vec<Witness>,
    too_few: bool,
}

#[derive(Debug)]
struct Witness {
    remote: Arc<Remote>,
    path: String,
    /// The size it last cosigned, as far as we know.
    size: u64,
}

/// What came of asking.
enum Asked {
    Cosigned(Vec<NoteSignature>),
    /// It has seen another size.
    Saw(u64),
}

impl Witnesses {
    pub(crate) fn new(shared: &Shared) -> Witnesses {
        let mut witnesses = Witnesses { urls: Vec::new(), known: Vec::new(), too_few: false };
        witnesses.take_over(shared);
        witnesses
    }

    /// Takes the configured ones; those that stay are remembered.
    fn take_over(&mut self, shared: &Shared) {
        let urls = &shared.settings.load().witness.urls;
        if *urls == self.urls {
            return;
        }
        self.urls.clone_from(urls);
        self.known = urls
            .iter()
            .filter_map(|url| parse(url).ok())
            .map(|(address, path)| {
                let remote = Remote::new(&shared.service, &WITNESS_IDLE, address);
                if remote.address.is_https() {
                    let tls = ClientTlsSettings::default().load(Path::new("."));
                    remote
                        .set_tls(tls.inspect_err(|error| tracing::warn!(%error, "no TLS to witnesses")).ok());
                }
                Witness { remote, path, size: 0 }
            })
            .collect();
    }

    /// Has a checkpoint cosigned and serves it: at once, or when enough have cosigned.
    pub(crate) async fn publish(&mut self, shared: &Arc<Shared>, mut signed: Signed) {
        self.take_over(shared);
        let quorum = shared.settings.load().witness.quorum;
        if quorum == 0 {
            shared.publish_checkpoint(signed.clone());
        }
        if self.known.is_empty() {
            return;
        }
        for witness in &mut self.known {
            let asking = witness.cosign(shared, &signed);
            let asked = tokio::select! {
                biased;
                () = shared.service.shutdown().draining() => return,
                asked = tokio::time::timeout(PATIENCE, asking) => asked,
            };
            match asked {
                Ok(Ok(lines)) => {
                    let ours = signed.note.signatures.clone();
                    let new = lines.into_iter().filter(|line| !ours.contains(line));
                    signed.note.signatures.extend(new);
                }
                Ok(Err(error)) => tracing::warn!(witness = %witness.remote.address, error, "no cosignature"),
                Err(_elapsed) => tracing::warn!(witness = %witness.remote.address, "no cosignature in time"),
            }
        }
        let enough = signed.cosignatures() >= quorum;
        if enough == self.too_few {
            self.too_few = !enough;
            if enough {
                shared.service.restore(QUORUM)
            } else {
                shared.service.lose(QUORUM, Severity::Degraded)
            }
        }
        if signed.cosignatures() == 0 {
            return;
        }
        let (store, size, text) = (shared.store.clone(), signed.size, signed.note.to_string());
        let stored =
            tokio::task::spawn_blocking(move || store.note_writer().checkpoint(size, &text, None, |_| true));
        if !matches!(stored.await, Ok(Ok(()))) {
            tracing::warn!("cosignatures could not be stored");
        }
        if enough {
            shared.publish_checkpoint(signed);
        }
    }
}

impl Witness {
    async fn cosign(&mut self, shared: &Arc<Shared>, signed: &Signed) -> Result<Vec<NoteSignature>, String> {
        for _ in 0..TRIES {
            match self.ask(shared, signed).await? {
                Asked::Cosigned(lines) => {
                    self.size = signed.size;
                    shared.troubles.set(Trouble::Behind, false);
                    return Ok(lines);
                }
                Asked::Saw(size) if size > signed.size => {
                    // It has seen more of this log than we have: we were restored from something old.
                    shared.troubles.set(Trouble::Behind, true);
                    return Err(format!("it has seen size {size}, and the log has {}", signed.size));
                }
                Asked::Saw(size) => self.size = size,
            }
        }
        Err("it keeps naming another size".to_owned())
    }

    async fn ask(&self, shared: &Arc<Shared>, signed: &Signed) -> Result<Asked, String> {
        let (from, to) = (self.size.min(signed.size), signed.size);
        let proof = shared.read("proof", move |reader| consistency_path(reader, from, to)).await;
        let proof = proof.map_err(|error| error.to_string())?;
        // It takes the log's own signature; others' are not its business.
        let mut note = signed.note.clone();
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
                Ok(Asked::Cosigned(lines))
            }
            StatusCode::CONFLICT => {
                let size = text.trim().parse().map_err(|_bad| "409 without a size".to_owned())?;
                Ok(Asked::Saw(size))
            }
            status => Err(format!("it answered {status}")),
        }
    }
}

async fn read(answer: Answer) -> Result<(StatusCode, String), String> {
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
