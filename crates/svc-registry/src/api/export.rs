//! The whole log in one file, made while it is sent; nothing is kept meanwhile but a piece.

use super::answer::BYTES;
use super::stream::unfold;
use super::{Api, Asked};
use crate::shared::Shared;
use crate::store::{Reader, StoreError};
use bytes::Bytes;
use http::Response;
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE, HeaderValue};
use ron_kernel::http::{Body, BodyError};
use ron_kernel::problem::{Rejection, X_CORR_ID};
use ron_kernel::reason::Reason;
use ron_kernel::sync::Permit;
use ron_log::export::{ExportWriter, FrameKind};
use ron_log::tile::{TILE_WIDTH, Tile};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an export waits for a checkpoint of HEAD.
const CHECKPOINT_PATIENCE: Duration = Duration::from_secs(3);
/// Entries and bytes of a piece.
const PIECE: usize = 256;
const PIECE_BYTES: usize = 1 << 20;

impl Api {
    /// Ends with a checkpoint, for what the log has not signed proves nothing to whoever gets the file.
    pub(super) async fn export(&self, mut asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let permit = self.take(&self.exports, "read", "too many exports are under way")?;
        let head = self.signed_head(&asked).await?;
        let permits = (permit, asked.inflight.take());
        let exporter = Exporter { shared: self.shared.clone(), head, part: Part::Begin, _permits: permits };
        let body = unfold(exporter, |exporter: Exporter| async move {
            if matches!(exporter.part, Part::Done) {
                return None;
            }
            let shared = exporter.shared.clone();
            let made = shared.reading(move || exporter.piece()).await;
            match made {
                Ok(Ok((piece, exporter))) => Some((Ok(Bytes::from(piece)), exporter)),
                Ok(Err((error, exporter))) => {
                    // Says why in the log.
                    super::unreadable(&shared, &error);
                    Some((Err(BodyError::Upstream("the log could not be read".to_owned())), exporter))
                }
                Err(_panic) => None,
            }
        });
        let mut response = Response::new(Body::stream(body));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(BYTES));
        let name = HeaderValue::from_static("attachment; filename=\"registry.export\"");
        headers.insert(CONTENT_DISPOSITION, name);
        headers.insert(X_CORR_ID, asked.corr.value().clone());
        Ok(response)
    }

    /// The last version under a checkpoint: HEAD's, if a checkpoint can be made in time.
    async fn signed_head(&self, asked: &Asked<'_>) -> Result<u64, Rejection> {
        let head = self.shared.head().version;
        let covered = || self.shared.checkpoint.load().as_ref().map_or(0, |signed| signed.size);
        let wait = async {
            loop {
                let told = self.shared.checkpointed.notified();
                if covered() > head {
                    return;
                }
                self.shared.checkpoint_wanted.notify_one();
                told.await;
            }
        };
        // Over a damaged store none is made; what was signed before is all there is.
        if self.shared.damage().is_none() {
            let until = (Instant::now() + CHECKPOINT_PATIENCE).min(asked.budget.until);
            let _ = tokio::time::timeout_at(until.into(), wait).await;
        }
        let nothing = || Rejection::new(Reason::NotReady, "the log has signed nothing yet").retry_after(1);
        covered().checked_sub(1).ok_or_else(nothing)
    }
}

struct Exporter {
    shared: Arc<Shared>,
    /// The last version that goes in.
    head: u64,
    part: Part,
    /// Until the last piece was sent it is one of the exports, and a request being answered.
    _permits: (Permit, Option<Permit>),
}

enum Part {
    Begin,
    /// The hashes of pruned leaves: next one, first version kept.
    Leaves(Box<ExportWriter>, u64, u64),
    Entries(Box<ExportWriter>, u64),
    Done,
}

type Made = Result<(Vec<u8>, Exporter), (StoreError, Exporter)>;

impl Exporter {
    fn piece(mut self) -> Made {
        let made = self.shared.store.good_reader().and_then(|reader| self.next(&reader));
        match made {
            Ok(bytes) => Ok((bytes, self)),
            Err(error) => Err((error, self)),
        }
    }

    fn next(&mut self, reader: &Reader) -> Result<Vec<u8>, StoreError> {
        match std::mem::replace(&mut self.part, Part::Done) {
            Part::Begin => {
                let (mut writer, mut bytes) = ExportWriter::begin(&self.shared.roots, &self.shared.log_key);
                let min = reader.min_version()?;
                for manifest in reader.manifests()? {
                    bytes.extend(writer.frame(FrameKind::PruneManifest, &manifest));
                }
                for (record, payload) in reader.former_signers()? {
                    bytes.extend(writer.frame(FrameKind::Record, &record));
                    bytes.extend(writer.frame(FrameKind::Payload, &payload));
                }
                let writer = Box::new(writer);
                self.part = if min > 0 { Part::Leaves(writer, 0, min) } else { Part::Entries(writer, 0) };
                Ok(bytes)
            }
            Part::Leaves(mut writer, from, min) => {
                let width = (min - from).min(TILE_WIDTH) as u16;
                let tile = reader.sure_tile(Tile { level: 0, index: from / TILE_WIDTH, width })?;
                let mut bytes = writer.frame(FrameKind::PrunedLeaves, &tile);
                let next = from + u64::from(width);
                if next < min {
                    self.part = Part::Leaves(writer, next, min);
                    return Ok(bytes);
                }
                checkpoints(&mut writer, reader, min, &mut bytes)?;
                let snapshot = reader.snapshot(min - 1)?.filter(|(version, _, _)| *version == min - 1);
                let missing =
                    || StoreError::Damaged(format!("the snapshot of version {} is missing", min - 1));
                let (_, note, state) = snapshot.ok_or_else(missing)?;
                bytes.extend(writer.frame(FrameKind::SnapshotNote, &note));
                bytes.extend(writer.frame(FrameKind::SnapshotState, &state));
                self.part = Part::Entries(writer, min);
                Ok(bytes)
            }
            Part::Entries(mut writer, from) => {
                let count = usize::try_from(self.head + 1 - from).unwrap_or(PIECE).min(PIECE);
                let pairs = reader.sure_pairs(from, count, PIECE_BYTES)?;
                if pairs.is_empty() {
                    return Err(StoreError::Damaged(format!("version {from} was let go of meanwhile")));
                }
                let mut bytes = Vec::new();
                let mut next = from;
                for (version, record, payload) in pairs {
                    bytes.extend(writer.frame(FrameKind::Record, &record));
                    bytes.extend(writer.frame(FrameKind::Payload, &payload));
                    checkpoints(&mut writer, reader, version + 1, &mut bytes)?;
                    next = version + 1;
                }
                if next > self.head {
                    bytes.extend(writer.end());
                } else {
                    self.part = Part::Entries(writer, next);
                }
                Ok(bytes)
            }
            Part::Done => Ok(Vec::new()),
        }
    }
}

/// The checkpoint of a size, if there is one.
fn checkpoints(
    writer: &mut ExportWriter,
    reader: &Reader,
    size: u64,
    bytes: &mut Vec<u8>,
) -> Result<(), StoreError> {
    for (_, note) in reader.checkpoints(size..=size)? {
        bytes.extend(writer.frame(FrameKind::Checkpoint, &note));
    }
    Ok(())
}
