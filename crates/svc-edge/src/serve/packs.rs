//! Answers from packs: tiles, what is known of them, and the archives themselves.

use super::read::{FOREVER, SHORT, once, refusal};
use super::{Edge, Snapshot, Source, preview, unix_millis, value};
use crate::address::Address;
use crate::body::{ObjectBody, Pieces};
use crate::cache::CACHE_STATUS;
use crate::cas::ReadError;
use crate::pack::{Fault, Limits, Pack, PackError, ReadAt as _, TileCoord, TileKind};
use crate::packs::{Content, Damage, Mounted, Row};
use crate::semantics::{Available, Coding, Decision, Piece, REPR_DIGEST, Variant, decide};
use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT_RANGES, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HOST,
    HeaderMap, HeaderValue, VARY,
};
use http::request::Parts;
use http::{Method, Response, StatusCode, Version};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::Body;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::sync::Permit;
use serde_json::{Value, json};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// What another generation may change: it is asked for each time, and then mostly not sent.
const ASK: &str = "no-cache";
const JSON: &str = "application/json";
/// What is read of an archive at a time.
const PIECE: u64 = 256 << 10;

/// What of packs a path means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    Catalogue,
    TileJson(String),
    Archive(String),
    Tile {
        pack: String,
        coord: TileCoord,
        extension: Option<String>,
    },
    Preview(String),
    /// A part of the preview page, by its file name.
    Part(String),
}

impl Target {
    /// The path behind `/edge/`, decoded.
    pub(super) fn of(path: &str) -> Option<Target> {
        let mut segments = path.split('/');
        let kind = segments.next()?;
        let mut rest: [Option<&str>; 4] = Default::default();
        for segment in segments {
            *rest.iter_mut().find(|free| free.is_none())? = Some(segment);
        }
        match (kind, rest) {
            ("packs", [None, ..]) => Some(Target::Catalogue),
            ("packs", [Some(file), None, ..]) => match file.rsplit_once('.')? {
                (pack, "json") => Some(Target::TileJson(pack.to_owned())),
                (pack, "pmtiles") => Some(Target::Archive(pack.to_owned())),
                _ => None,
            },
            ("packs", [Some(pack), Some(z), Some(x), Some(y)]) => {
                let (y, extension) = match y.split_once('.') {
                    Some((y, extension)) => (y, Some(extension.to_owned())),
                    None => (y, None),
                };
                let coord = TileCoord::new(number(z)?.try_into().ok()?, number(x)?, number(y)?)?;
                Some(Target::Tile { pack: pack.to_owned(), coord, extension })
            }
            ("preview", [Some(pack), None, ..]) => Some(Target::Preview(pack.to_owned())),
            ("preview", [Some("lib"), Some(file), None, ..]) => Some(Target::Part(file.to_owned())),
            _ => None,
        }
    }

    /// As metrics call it.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Target::Preview(_) | Target::Part(_) => "/edge/preview",
            _ => "/edge/packs",
        }
    }
}

/// A number in its one spelling, so that a tile has one path.
fn number(text: &str) -> Option<u32> {
    let plain = text == "0" || !text.starts_with('0');
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    if plain && digits { text.parse().ok() } else { None }
}

/// A request, and what it is answered under.
pub(super) struct Asked<'a> {
    pub(super) request: &'a Parts,
    pub(super) secure: bool,
    pub(super) snapshot: &'a Snapshot,
    pub(super) budget: Budget,
}

/// A resource that is all in memory.
struct Resource<'a> {
    content: &'a Arc<Content>,
    content_type: &'static str,
    cache_control: &'static str,
}

impl Edge {
    pub(super) async fn read_pack(
        &self,
        asked: &Asked<'_>,
        target: Target,
        permit: Permit,
    ) -> Result<Response<Body>, Rejection> {
        match target {
            Target::Tile { pack, coord, extension } => {
                let mounted = self.mounted(&pack)?;
                let read = self.read_tile(asked, &mounted, coord, extension.as_deref()).await;
                match read {
                    Err(rejection) if rejection.reason == Reason::NotReady => {
                        // It was replaced on its server: its new version is what the client wants.
                        let newer = self.packs.newer(&pack, &mounted);
                        let newer = tokio::time::timeout_at(asked.budget.until.into(), newer).await;
                        let newer = newer.ok().flatten().ok_or(rejection)?;
                        self.read_tile(asked, &newer, coord, extension.as_deref()).await
                    }
                    read => read,
                }
            }
            Target::Archive(pack) => self.read_archive(asked, self.mounted(&pack)?, permit).await,
            Target::TileJson(pack) => {
                let text = tile_json(&pack, &*self.mounted(&pack)?, asked);
                self.document(asked, text, JSON).await
            }
            Target::Catalogue => {
                let packs: Vec<Value> =
                    self.packs.table().iter().map(|(name, row)| entry(name, row)).collect();
                self.document(asked, json!({"packs": packs}).to_string(), JSON).await
            }
            Target::Preview(pack) => {
                self.mounted(&pack)?;
                let mut response = self.document(asked, preview::page(&pack), preview::HTML).await?;
                preview::protect(response.headers_mut());
                Ok(response)
            }
            Target::Part(file) => {
                let part = tokio::task::spawn_blocking(move || preview::part(&file)).await;
                let (content, content_type) = part.ok().flatten().ok_or_else(nothing)?;
                let resource = Resource { content: &content, content_type, cache_control: ASK };
                self.send(asked, &resource, Limits::default()).await
            }
        }
    }

    /// The generation of a pack that is served now.
    fn mounted(&self, name: &str) -> Result<Arc<Mounted>, Rejection> {
        let table = self.packs.table();
        let row = table.get(name).ok_or_else(nothing)?;
        match (&row.serving, &row.candidate) {
            (Some(mounted), _) => Ok(mounted.clone()),
            (None, Some(_)) => {
                let rejection = Rejection::new(Reason::NotReady, "the pack is being checked");
                Err(rejection.retry_after(1))
            }
            (None, None) if self.packs.is_remote(name) => {
                Err(Rejection::new(Reason::Upstream, "the pack could not be had from its server yet"))
            }
            (None, None) => {
                Err(Rejection::new(Reason::PackInvalid, "the pack was refused when it was mounted"))
            }
        }
    }

    async fn read_tile(
        &self,
        asked: &Asked<'_>,
        mounted: &Arc<Mounted>,
        coord: TileCoord,
        extension: Option<&str>,
    ) -> Result<Response<Body>, Rejection> {
        let set = mounted.pack.tile_set();
        if extension.is_some_and(|extension| !set.kind.extensions().contains(&extension)) {
            return Err(nothing());
        }
        if set.min_zoom.is_some_and(|zoom| coord.z() < zoom)
            || set.max_zoom.is_some_and(|zoom| coord.z() > zoom)
        {
            return Err(Rejection::new(Reason::NotFound, "the pack has no tiles of this zoom"));
        }
        let found = match mounted.held(coord) {
            Some(found) => found,
            None => {
                let (reading, place) = (mounted.clone(), self.place_at(mounted)?);
                self.reading(asked.budget, move || {
                    let _place = place;
                    reading.read(coord)
                })
                .await?
            }
        };
        let found = found.map_err(|error| self.unusable(mounted, &error))?;
        let asked_for = asked.request.uri.query().and_then(|query| query.strip_prefix("v="));
        let current = asked_for == Some(&mounted.generation);
        let cache_control = if current { FOREVER } else { ASK };
        let Some(content) = found else {
            self.count_cache(Source::Hit);
            let mut response = Response::new(Body::default());
            *response.status_mut() = StatusCode::NO_CONTENT;
            response.headers_mut().insert(CACHE_STATUS, Source::Hit.status().value());
            response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static(cache_control));
            return Ok(response);
        };
        let resource = Resource { content: &content, content_type: set.kind.content_type(), cache_control };
        self.send(asked, &resource, mounted.limits()).await
    }

    /// Something made for the request.
    async fn document(
        &self,
        asked: &Asked<'_>,
        text: String,
        content_type: &'static str,
    ) -> Result<Response<Body>, Rejection> {
        let content = Arc::new(Content::new(text.into(), Coding::Identity));
        let resource = Resource { content: &content, content_type, cache_control: ASK };
        self.send(asked, &resource, Limits::default()).await
    }

    /// Sends what is in memory: as it is stored, or decoded for a client that cannot do that.
    async fn send(
        &self,
        asked: &Asked<'_>,
        resource: &Resource<'_>,
        limits: Limits,
    ) -> Result<Response<Body>, Rejection> {
        let decision = decided(asked, resource.content, resource.content_type);
        if decision.variant.is_some() || resource.content.coding == Coding::Identity {
            self.count_cache(Source::Hit);
            return answer(asked, resource, resource.content, &decision);
        }
        let stored = resource.content.clone();
        let decoded = self.reading(asked.budget, move || stored.decoded(limits)).await?;
        let decoded = decoded.map_err(|fault| invalid(&fault))?;
        self.count_cache(Source::Hit);
        let decision = decided(asked, &decoded, resource.content_type);
        answer(asked, resource, &decoded, &decision)
    }

    async fn read_archive(
        &self,
        asked: &Asked<'_>,
        mounted: Arc<Mounted>,
        permit: Permit,
    ) -> Result<Response<Body>, Rejection> {
        if !matches!(mounted.pack, Pack::Pmtiles(_)) {
            return Err(Rejection::new(Reason::NotFound, "the pack is no PMTiles archive"));
        }
        let known = mounted.file.address();
        // Only for the boundary between parts, and for nobody to guess.
        let address = known.unwrap_or_else(|| blake3::hash(mounted.generation.as_bytes()).into());
        let variant = Variant { coding: Coding::Identity, address, len: mounted.file.size() };
        let decision = decide_one(asked, variant, "application/vnd.pmtiles");
        self.count_cache(Source::Hit);
        let mut headers = fields(&decision, known);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static(ASK));
        let mut response = refused(&decision, headers)?;
        if response.status() == StatusCode::NOT_MODIFIED || asked.request.method == Method::HEAD {
            return Ok(response);
        }
        let first = decision.pieces.iter().find_map(|piece| match piece {
            Piece::Bytes(range) => Some(range.clone()),
            Piece::Text(_) => None,
        });
        let Some(first) = first else { return Ok(response) };
        let mut reader = Archive { mounted: mounted.clone(), _place: self.place_at(&mounted)? };
        let (reader, read) = self
            .reading(asked.budget, move || {
                let read = reader.piece(&first);
                (reader, read)
            })
            .await?;
        let bytes = read.map_err(|error| self.unusable(&mounted, &PackError::Read(error)))?;
        let body = ObjectBody::new(reader, bytes, decision.pieces, decision.content_length, permit);
        *response.body_mut() = Body::stream(body).ending_by(until(asked.budget, decision.content_length));
        Ok(response)
    }

    /// Runs what blocks, as long as the request may take.
    pub(super) async fn reading<T: Send + 'static>(
        &self,
        budget: Budget,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Rejection> {
        let running = tokio::task::spawn_blocking(run);
        let Ok(done) = tokio::time::timeout_at(budget.until.into(), running).await else {
            self.read_timeouts.inc();
            return Err(Rejection::new(Reason::Timeout, "it could not be read in time"));
        };
        done.map_err(|lost| {
            tracing::error!(error = %lost, "a read was lost");
            Rejection::new(Reason::Internal, "it could not be read")
        })
    }

    /// A place among those who wait for a pack's server, if it has one: each holds a thread.
    fn place_at(&self, mounted: &Mounted) -> Result<Option<Permit>, Rejection> {
        let Some(remote) = mounted.file.remote() else { return Ok(None) };
        remote.place().map(Some).ok_or_else(|| {
            self.busy.with(["edge", "/edge/packs", ""]).inc();
            Rejection::new(Reason::Busy, "too many requests wait for the pack's server").retry_after(1)
        })
    }

    fn unusable(&self, mounted: &Mounted, error: &PackError) -> Rejection {
        match error {
            PackError::Invalid(fault) => invalid(fault),
            PackError::Read(error) => match (Damage::of(error), error.kind()) {
                (Some(Damage::Mismatch), _) => {
                    self.packs.note_damage(mounted);
                    Rejection::new(Reason::DigestStored, "the bytes of the pack are not those of its address")
                }
                (Some(Damage::Changed), _) if mounted.file.remote().is_some() => {
                    self.packs.look_again();
                    let detail = "the pack was replaced on its server; the new one is being mounted";
                    Rejection::new(Reason::NotReady, detail).retry_after(1)
                }
                (Some(Damage::Changed), _) => {
                    Rejection::new(Reason::PackInvalid, "the pack was changed since it was mounted")
                }
                (None, io::ErrorKind::TimedOut) => {
                    Rejection::new(Reason::Timeout, "the pack's server did not answer in time")
                }
                (None, io::ErrorKind::ConnectionAborted) => {
                    tracing::warn!(generation = mounted.generation, %error, "a pack's server failed");
                    Rejection::new(Reason::Upstream, "the pack's server failed")
                }
                (None, io::ErrorKind::UnexpectedEof) => {
                    Rejection::new(Reason::PackInvalid, "the pack is cut short")
                }
                _ => {
                    tracing::error!(generation = mounted.generation, %error, "a pack cannot be read");
                    Rejection::new(Reason::Internal, "it could not be read")
                }
            },
        }
    }
}

/// An archive on its way out.
#[derive(Debug)]
struct Archive {
    mounted: Arc<Mounted>,
    /// Among those who wait for its server.
    _place: Option<Permit>,
}

impl Archive {
    fn piece(&mut self, range: &Range<u64>) -> io::Result<Bytes> {
        let until = range.end.min((range.start / PIECE + 1) * PIECE);
        self.mounted.file.read_at(range.start, usize::try_from(until - range.start).unwrap_or(0))
    }
}

impl Pieces for Archive {
    fn read(&mut self, range: &Range<u64>) -> Result<Bytes, ReadError> {
        self.piece(range).map_err(|error| match Damage::of(&error) {
            Some(_) => ReadError::Corrupt,
            None => error.into(),
        })
    }
}

fn nothing() -> Rejection {
    Rejection::new(Reason::NotFound, "there is no such pack or tile")
}

fn invalid(fault: &Fault) -> Rejection {
    Rejection::new(Reason::PackInvalid, format!("the pack is invalid: {fault}"))
}

/// By when a body must be taken.
fn until(budget: Budget, length: u64) -> Option<std::time::Instant> {
    if length <= SHORT { Some(budget.until) } else { budget.client }
}

fn decided(asked: &Asked<'_>, content: &Content, content_type: &str) -> Decision {
    let variant =
        Variant { coding: content.coding, address: content.address, len: content.bytes.len() as u64 };
    decide_one(asked, variant, content_type)
}

fn decide_one(asked: &Asked<'_>, variant: Variant, content_type: &str) -> Decision {
    // No date: another generation may be older.
    let available = Available { variants: &[variant], content_type, modified: None };
    let several = asked.snapshot.settings.http.multi_range;
    decide(&asked.request.method, &asked.request.headers, available, several, unix_millis() / 1000)
}

/// Sends content as it is: that of the resource, or the same without its coding.
fn answer(
    asked: &Asked<'_>,
    resource: &Resource<'_>,
    content: &Content,
    decision: &Decision,
) -> Result<Response<Body>, Rejection> {
    let whole = || Body::full(assembled(&content.bytes, &decision.pieces));
    let until = until(asked.budget, decision.content_length);
    let request = asked.request;
    if request.version < Version::HTTP_2
        && request.method == Method::GET
        && decision.status == StatusCode::OK
        && std::ptr::eq(content, &**resource.content)
    {
        let make = || once(&described(resource, content, decision));
        let written = content.written(resource.cache_control == FOREVER, make);
        return Ok(Response::new(whole().ending_by(until).behind(written)));
    }
    let mut response = refused(decision, described(resource, content, decision))?;
    if response.status() != StatusCode::NOT_MODIFIED && request.method != Method::HEAD {
        *response.body_mut() = whole().ending_by(until);
    }
    Ok(response)
}

fn described(resource: &Resource<'_>, content: &Content, decision: &Decision) -> HeaderMap {
    let mut headers = fields(decision, Some(content.address));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static(resource.cache_control));
    if resource.content.coding != Coding::Identity {
        headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    }
    if matches!(decision.status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
        headers.insert(REPR_DIGEST, content.repr_digest.clone());
        if content.coding != Coding::Identity {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(content.coding.name()));
        }
    }
    headers
}

/// The fields that all answers from packs have.
fn fields(decision: &Decision, address: Option<Address>) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(16);
    headers.insert(CACHE_STATUS, Source::Hit.field(Source::Hit.status()));
    if let Some(range) = &decision.content_range {
        headers.insert(CONTENT_RANGE, value(range.as_str()));
    }
    if let Some(address) = address {
        headers.insert(ETAG, value(address.etag()));
    }
    if matches!(decision.status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
        headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers.insert(CONTENT_TYPE, value(decision.content_type.as_str()));
        headers.insert(CONTENT_LENGTH, decision.content_length.into());
    }
    headers
}

/// The answer without its body, unless the decision was to refuse.
fn refused(decision: &Decision, headers: HeaderMap) -> Result<Response<Body>, Rejection> {
    match decision.status {
        StatusCode::NOT_ACCEPTABLE => {
            Err(refusal(Reason::NotAcceptable, "no encoding that there is is acceptable", headers))
        }
        StatusCode::PRECONDITION_FAILED => {
            Err(refusal(Reason::Precondition, "a condition of the request is not met", headers))
        }
        StatusCode::RANGE_NOT_SATISFIABLE => {
            Err(refusal(Reason::InvalidRange, "the range cannot be satisfied", headers))
        }
        status => {
            let mut response = Response::new(Body::default());
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            Ok(response)
        }
    }
}

/// A body of something that is all there.
fn assembled(bytes: &Bytes, pieces: &[Piece]) -> Bytes {
    let slice = |range: &Range<u64>| {
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        bytes.slice(index(range.start)..index(range.end))
    };
    if let [Piece::Bytes(range)] = pieces {
        return slice(range);
    }
    let mut out = BytesMut::new();
    for piece in pieces {
        match piece {
            Piece::Text(text) => out.extend_from_slice(text),
            Piece::Bytes(range) => out.extend_from_slice(&slice(range)),
        }
    }
    out.freeze()
}

/// The TileJSON document. Its URLs are of the host that was asked, for clients want them whole.
fn tile_json(name: &str, mounted: &Mounted, asked: &Asked<'_>) -> String {
    let request = asked.request;
    let named = request.uri.authority().map(|authority| authority.as_str());
    let host = named.or_else(|| request.headers.get(HOST)?.to_str().ok()).unwrap_or("localhost");
    let scheme = if asked.secure { "https" } else { "http" };
    let set = mounted.pack.tile_set();
    let extension = set.kind.extensions()[0];
    let url =
        format!("{scheme}://{host}/edge/packs/{name}/{{z}}/{{x}}/{{y}}.{extension}?v={}", mounted.generation);
    set.tile_json(&[url], &mounted.generation)
}

/// What the catalogue says of a pack.
fn entry(name: &str, row: &Row) -> Value {
    let mut entry = json!({"name": name, "state": row.state()});
    if let Some(why) = &row.refused {
        entry["refused"] = why.as_str().into();
    }
    let Some(mounted) = row.serving.as_ref().or(row.candidate.as_ref()) else { return entry };
    let set = mounted.pack.tile_set();
    let archive = matches!(mounted.pack, Pack::Pmtiles(_));
    entry["format"] = if archive { "pmtiles" } else { "mbtiles" }.into();
    entry["tiles"] = kind(set.kind).into();
    entry["minzoom"] = set.min_zoom.into();
    entry["maxzoom"] = set.max_zoom.into();
    entry["size"] = mounted.file.size().into();
    entry["generation"] = mounted.generation.as_str().into();
    let address = mounted.file.address();
    entry["verified"] = address.is_some().into();
    // What comes from a server is checked for its structure alone.
    entry["check"] = if mounted.file.remote().is_some() { "structure" } else { "bytes" }.into();
    entry["b3"] = address.map(|address| address.to_string()).into();
    entry["tilejson"] = format!("/edge/packs/{name}.json").into();
    if archive {
        entry["archive"] = format!("/edge/packs/{name}.pmtiles").into();
    }
    entry
}

fn kind(kind: TileKind) -> &'static str {
    kind.extensions()[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_tile_in_one_way() {
        let tile = |z, x, y, extension: Option<&str>| {
            let coord = TileCoord::new(z, x, y).unwrap();
            Some(Target::Tile { pack: "a".to_owned(), coord, extension: extension.map(str::to_owned) })
        };
        assert_eq!(Target::of("packs/a/3/1/2"), tile(3, 1, 2, None));
        assert_eq!(Target::of("packs/a/0/0/0.mvt"), tile(0, 0, 0, Some("mvt")));
        assert_eq!(Target::of("packs"), Some(Target::Catalogue));
        assert_eq!(Target::of("packs/a.json"), Some(Target::TileJson("a".to_owned())));
        assert_eq!(Target::of("packs/a.pmtiles"), Some(Target::Archive("a".to_owned())));
        assert_eq!(Target::of("preview/a"), Some(Target::Preview("a".to_owned())));
        assert_eq!(Target::of("preview/lib/a.js"), Some(Target::Part("a.js".to_owned())));
        for nothing in [
            "packs/a",
            "packs/a.png",
            "packs/a/3/1",
            "packs/a/3/1/2/4",
            "packs/a/3/01/2",
            "packs/a/+3/1/2",
            "packs/a/3/8/2",
            "packs/a/32/0/0",
            "packs/a/99/0/0",
            "packs/a/3/1/",
            "packs/a/3/1/2 ",
            "packs/a/3/1/99999999999",
            "preview",
            "preview/a/b",
            "other",
        ] {
            assert_eq!(Target::of(nothing), None, "{nothing}");
        }
    }
}
