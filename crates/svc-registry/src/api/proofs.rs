//! Checkpoints, tiles, proofs, snapshots and manifests: what others check the log with.

use super::answer::{self, malformed, not_found};
use super::{Api, Asked, unreadable};
use crate::store::{Reader, StoreError};
use crate::verifier::is_signed;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::Response;
use http::header::{CACHE_CONTROL, HeaderValue};
use ron_kernel::http::Body;
use ron_kernel::problem::Rejection;
use ron_log::B3;
use ron_log::tile::{Tile, TilePath, push_record};
use ron_log::tree::{Hash, ProofError, consistency, inclusion};
use serde_json::{Value, json};

impl Api {
    pub(super) fn checkpoint(&self, asked: &Asked<'_>) -> Result<Response<Body>, Rejection> {
        let signed = self.shared.checkpoint.load();
        let signed = signed.as_ref().ok_or_else(|| not_found("there is no checkpoint yet"))?;
        let text = signed.note.to_string();
        let etag = crate::shared::etag(text.as_bytes());
        let mut response = answer::raw(200, text, answer::TEXT, asked.corr);
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        Ok(answer::tagged(response, &etag, asked.headers()))
    }

    pub(super) async fn tile(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let path = TilePath::parse(asked.part(0)).ok_or_else(|| not_found("this is no tile"))?;
        let size = self.shared.view.load().tree.size();
        let (TilePath::Hashes(tile) | TilePath::Entries(tile)) = path;
        let there = Tile::of(tile.level, tile.index, size).filter(|there| there.width >= tile.width);
        there.ok_or_else(|| not_found("the tree has no such tile yet"))?;
        let bytes = match path {
            TilePath::Hashes(tile) => self.read(&asked, "tile", move |reader| reader.tile(tile)).await,
            TilePath::Entries(tile) => {
                if tile.start() < self.shared.min_version() {
                    return self.pruned(tile.start(), &asked);
                }
                let bundle = self.read(&asked, "tile", move |reader| bundle(reader, tile)).await?;
                if bundle.is_none() {
                    // Let go of just now.
                    return self.pruned(tile.start(), &asked);
                }
                Ok(bundle)
            }
        };
        let missing = || unreadable(&self.shared, &StoreError::Damaged(format!("{path} is missing")));
        let bytes = bytes?.ok_or_else(missing)?;
        let etag = crate::shared::etag(&bytes);
        Ok(answer::immutable(answer::raw(200, bytes, answer::BYTES, asked.corr), &etag, asked.headers()))
    }

    pub(super) async fn inclusion(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let version = asked.query.number("version")?.ok_or_else(|| malformed("version is missing"))?;
        let now = self.shared.view.load().tree.size();
        let signed = self.shared.checkpoint.load().as_ref().map(|signed| signed.size);
        let size = asked.query.number("size")?.or(signed.filter(|size| *size > version)).unwrap_or(now);
        if version >= size || size > now {
            return Err(not_found("there is no such entry in that tree"));
        }
        let path = self.path(&asked, version, size).await?;
        let body = json!({"version": version, "size": size, "hashes": encoded(&path)});
        Ok(answer::value(200, &body, asked.format, asked.corr))
    }

    pub(super) async fn consistency(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let from = asked.query.number("from")?.ok_or_else(|| malformed("from is missing"))?;
        let now = self.shared.view.load().tree.size();
        let to = asked.query.number("to")?.unwrap_or(now);
        if from > to || to > now {
            return Err(not_found("there is no such tree"));
        }
        let path = self.read(&asked, "proof", move |reader| consistency_path(reader, from, to)).await?;
        let body = json!({"from": from, "to": to, "hashes": encoded(&path)});
        Ok(answer::value(200, &body, asked.format, asked.corr))
    }

    /// The proof of an entry under the newest checkpoint; null while none covers it.
    pub(super) async fn proof_under_checkpoint(
        &self,
        asked: &Asked<'_>,
        version: u64,
    ) -> Result<Value, Rejection> {
        let signed = self.shared.checkpoint.load_full();
        let Some(signed) = signed.filter(|signed| signed.size > version) else { return Ok(Value::Null) };
        let path = self.path(asked, version, signed.size).await?;
        Ok(
            json!({"index": version, "size": signed.size, "hashes": encoded(&path), "checkpoint": signed.note.to_string()}),
        )
    }

    async fn path(&self, asked: &Asked<'_>, version: u64, size: u64) -> Result<Vec<Hash>, Rejection> {
        let path = self.read(asked, "proof", move |reader| {
            inclusion(version, size, |tile| reader.sure_tile(tile)).map_err(of_proof)
        });
        path.await
    }

    pub(super) async fn retention(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let found = self.read(&asked, "manifests", |reader| Ok((reader.min_version()?, reader.manifests()?)));
        let (min_version, notes) = found.await?;
        let notes: Vec<String> =
            notes.iter().map(|note| String::from_utf8_lossy(note).into_owned()).collect();
        let policy = self.shared.settings.load().retention.policy.as_str();
        let body = json!({"min_version": min_version, "policy": policy, "manifests": notes});
        Ok(answer::value(200, &body, asked.format, asked.corr))
    }

    pub(super) async fn snapshot(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let shared = self.shared.clone();
        let found = self.read(&asked, "snapshot", move |reader| {
            let Some((version, note, state)) = reader.snapshot(u64::MAX)? else { return Ok(None) };
            let hash = Some(&state).filter(|state| !state.is_empty()).map(|state| B3::of(state));
            if is_signed(&shared, version, &note, hash)? {
                return Ok(Some((version, note, state)));
            }
            Err(StoreError::Damaged(format!("the snapshot of version {version} was let go of meanwhile")))
        });
        let (version, note, state) = found.await?.ok_or_else(|| not_found("there is no snapshot yet"))?;
        let note = Value::from(String::from_utf8_lossy(&note).into_owned());
        let text = format!(
            "{{\"version\":{version},\"note\":{note},\"state\":{}}}",
            String::from_utf8_lossy(&state)
        );
        let etag = crate::shared::etag(text.as_bytes());
        Ok(answer::tagged(answer::json(200, text, asked.format, asked.corr), &etag, asked.headers()))
    }
}

/// The records of a bundle; none if they were let go of.
fn bundle(reader: &Reader, tile: Tile) -> Result<Option<Vec<u8>>, StoreError> {
    let records = reader.sure_entries(tile.start(), usize::from(tile.width))?;
    let mut bytes = Vec::new();
    records.iter().for_each(|record| push_record(&mut bytes, record));
    Ok((!records.is_empty()).then_some(bytes))
}

pub(crate) fn consistency_path(reader: &Reader, from: u64, to: u64) -> Result<Vec<Hash>, StoreError> {
    consistency(from, to, |tile| reader.sure_tile(tile)).map_err(of_proof)
}

fn of_proof(error: ProofError<StoreError>) -> StoreError {
    match error {
        ProofError::Read(error) => error,
        other => StoreError::Damaged(other.to_string()),
    }
}

fn encoded(path: &[Hash]) -> Vec<String> {
    path.iter().map(|hash| BASE64_STANDARD.encode(hash)).collect()
}
