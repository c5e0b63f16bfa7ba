//! The requests that read: HEAD, entries, items, proposals.

use super::answer::{self, malformed, not_found};
use super::{Api, Asked, in_time, unreadable};
use crate::pending::proposed;
use crate::shared::now_millis;
use crate::store::{Gone, RestoreError, changes_signers};
use http::Response;
use http::header::{CACHE_CONTROL, HeaderValue};
use ron_kernel::http::Body;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::units::Span;
use ron_log::entry::entry_hash;
use ron_log::{B3, Judgement, Key, Proposal, State};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use tokio::sync::broadcast::error::RecvError;

/// Entries of one page of the log, and their bytes.
const PAGE: u64 = 100;
const PAGE_MAX: u64 = 1000;
const PAGE_BYTES: usize = 8 << 20;

impl Api {
    pub(super) async fn head(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let after = asked.query.number("after")?;
        if let Some(wait) = asked.query.text("wait") {
            let wait: Span = wait.parse().map_err(malformed)?;
            let after = after.unwrap_or(self.shared.head().version);
            let longer = async {
                let mut committed = self.shared.committed.subscribe();
                while self.shared.head().version <= after {
                    if matches!(committed.recv().await, Err(RecvError::Closed)) {
                        return;
                    }
                }
            };
            let until = (std::time::Instant::now() + wait.0.min(super::WAIT_MAX)).min(asked.budget.until);
            tokio::select! {
                biased;
                () = self.shared.service.shutdown().draining() => {}
                _ = tokio::time::timeout_at(until.into(), longer) => {}
            }
        }
        let page = self.shared.head_page();
        if let Some(damage) = self.shared.damage() {
            // What was the last entry, if it lay behind the damage, nobody knows.
            let said = format!(
                "{},\"damaged\":{}}}",
                String::from_utf8_lossy(&page.json).trim_end_matches('}'),
                json!(*damage)
            );
            return Ok(answer::json(200, said, asked.format, asked.corr));
        }
        let mut response = answer::json(200, page.json.clone(), asked.format, asked.corr);
        // To be kept, but asked for again each time.
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        Ok(answer::tagged(response, &page.etag, asked.headers()))
    }

    pub(super) async fn entry(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let version = asked.part(0).parse().ok().ok_or_else(|| not_found("there is no such version"))?;
        if version > self.shared.head().version {
            return Err(self.not_yet());
        }
        let found = self.read(&asked, "entry", move |reader| reader.sure_pair(version)).await?;
        // What is about to be removed is gone already; changes of the signer set stay.
        let kept = |payload: &[u8]| version >= self.shared.min_version() || changes_signers(version, payload);
        let Some((record, payload)) = found.filter(|(_, payload)| kept(payload)) else {
            return self.pruned(version, &asked);
        };
        let text = entry_text(&record, &payload);
        let etag = format!("\"{}\"", entry_hash(&record));
        Ok(answer::immutable(answer::json(200, text, asked.format, asked.corr), &etag, asked.headers()))
    }

    pub(super) async fn log(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let from = asked.query.number("from")?.unwrap_or(self.shared.min_version());
        let limit = asked.query.number("limit")?.unwrap_or(PAGE).min(PAGE_MAX);
        if limit == 0 {
            return Err(malformed("limit must be at least 1"));
        }
        let head = self.shared.head().version;
        if from < self.shared.min_version() {
            return self.pruned(from, &asked);
        }
        let count = (head + 1).saturating_sub(from).min(limit) as usize;
        let found =
            self.read(&asked, "log", move |reader| reader.sure_pairs(from, count, PAGE_BYTES)).await?;
        if found.is_empty() && count > 0 {
            // Let go of just now.
            return self.pruned(from, &asked);
        }
        let next = found.last().map_or(from, |(version, _, _)| version + 1);
        let mut text = String::from("{\"entries\":[");
        for (index, (_, record, payload)) in found.iter().enumerate() {
            text.push_str(if index > 0 { "," } else { "" });
            text.push_str(&entry_text(record, payload));
        }
        let next = if next > head { "null".to_owned() } else { next.to_string() };
        let _ = write!(text, "],\"next\":{next}}}");
        let full = found.len() as u64 == limit;
        let etag = crate::shared::etag(text.as_bytes());
        let response = answer::json(200, text, asked.format, asked.corr);
        // A full page of the past is the same for ever; `next` of it is never null then. Without `from` it begins with
        // the first version kept, which moves.
        Ok(if full && asked.query.text("from").is_some() && next != "null" {
            answer::immutable(response, &etag, asked.headers())
        } else {
            answer::tagged(response, &etag, asked.headers())
        })
    }

    pub(super) async fn items(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let state = match self.state_at(&asked).await? {
            Ok(found) => found,
            Err(pruned) => return Ok(pruned),
        };
        let mut text = format!("{{\"version\":{},\"items\":[", state.head().version);
        for (index, (key, version, body)) in state.sorted(asked.query.text("kind")).into_iter().enumerate() {
            text.push_str(if index > 0 { "," } else { "" });
            item_text(&mut text, key, version, body);
            text.push('}');
        }
        text.push_str("]}");
        let etag = crate::shared::etag(text.as_bytes());
        Ok(answer::tagged(answer::json(200, text, asked.format, asked.corr), &etag, asked.headers()))
    }

    pub(super) async fn item(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let key = Key::new(asked.part(0), asked.part(1)).map_err(|bad| malformed(bad.to_string()))?;
        let state = match self.state_at(&asked).await? {
            Ok(state) => state,
            Err(pruned) => return Ok(pruned),
        };
        let Some((version, body)) = state.item(&key) else { return Err(not_found("there is no such item")) };
        let mut text = String::new();
        item_text(&mut text, &key, version, body);
        if asked.query.flag("proof")? {
            let entry = self.read(&asked, "entry", move |reader| reader.sure_pair(version)).await?;
            let entry = entry.map_or("null".to_owned(), |(record, payload)| entry_text(&record, &payload));
            let proof = self.proof_under_checkpoint(&asked, version).await?;
            let _ = write!(text, ",\"entry\":{entry},\"proof\":{proof}");
        }
        text.push('}');
        let etag = crate::shared::etag(text.as_bytes());
        Ok(answer::tagged(answer::json(200, text, asked.format, asked.corr), &etag, asked.headers()))
    }

    /// The state now, or after the version that was asked for; or that it is kept no more.
    async fn state_at(&self, asked: &Asked<'_>) -> Result<Result<State, Response<Body>>, Rejection> {
        let Some(at) = asked.query.number("at")? else {
            return Ok(Ok(self.shared.view.load().state.clone()));
        };
        if at > self.shared.head().version {
            return Err(self.not_yet());
        }
        let permit = self.take(&self.replays, "read", "too many states of the past are being worked out")?;
        let shared = self.shared.clone();
        let state = self.shared.reading(move || {
            let state = shared.store.state_at(at, &shared.roots, &shared.log_key);
            drop(permit);
            state
        });
        match in_time(asked, state).await? {
            Ok(Ok(state)) => Ok(Ok(state)),
            Ok(Err(RestoreError::Store(error))) => Err(unreadable(&self.shared, &error)),
            Ok(Err(RestoreError::Pruned { .. })) => Ok(Err(self.pruned(at, asked)?)),
            Ok(Err(RestoreError::Damaged { version, what })) => {
                self.shared.damaged(version, &what);
                Err(Rejection::new(Reason::Storage, "the storage cannot be read now"))
            }
            Err(_panic) => Err(Rejection::new(Reason::Storage, "the storage cannot be read now")),
        }
    }

    pub(super) async fn list_proposals(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let signers = self.shared.view.load().state.signers().clone();
        let quorum = json!({"m": signers.threshold(), "n": signers.approvers()});
        let list = self.read(&asked, "proposals", move |reader| {
            let mut list = Vec::new();
            for id in reader.proposals()? {
                let kept = match reader.proposal(id) {
                    Ok(Some(kept)) => kept,
                    Ok(None) => continue,
                    Err(error) if error.is_damage() => {
                        list.push(json!({"proposal_id": id.to_string(), "state": "damaged"}));
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let payload: Value = serde_json::from_slice(&kept.payload).unwrap_or_default();
                if kept.ends_at < now_millis() {
                    // Past its end, though nobody has noted that yet.
                    continue;
                }
                let by: Vec<&str> = kept.approvals.iter().map(|approval| approval.signer.as_str()).collect();
                list.push(json!({
                    "proposal_id": id.to_string(), "payload_b3": id.to_string(), "state": "pending",
                    "received_at": kept.received_at, "expires_at": kept.ends_at, "note": payload["note"],
                    "base_version": payload["base_version"], "signers_version": payload["signers_version"],
                    "approved_by": by, "quorum": quorum,
                }));
            }
            Ok(list)
        });
        let list = list.await?;
        Ok(answer::value(200, &json!({"proposals": list}), asked.format, asked.corr))
    }

    pub(super) async fn one_proposal(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let id = B3::parse(asked.part(0));
        let id = id.ok_or_else(|| malformed("an id is b3: and 64 lowercase hexadecimal digits"))?;
        let (signers, head) = (self.shared.view.load().state.signers().clone(), self.shared.head().version);
        let store = self.shared.store.clone();
        let found = self.read(&asked, "proposal", move |reader| {
            if let Some(version) = store.committed(id)? {
                // Written, and shown to nobody: its flush failed, or is not yet over; or it was not when this was asked.
                if version > head {
                    let body = json!({"proposal_id": id.to_string(), "payload_b3": id.to_string(), "state": "pending"});
                    return Ok(Some(body.to_string()));
                }
                let hash = reader.entry(version)?.map(|record| entry_hash(&record).to_string());
                let (id, hash) = (id.to_string(), hash.map_or(Value::Null, Value::from));
                let body = json!({"proposal_id": id, "payload_b3": id, "state": "committed", "version": version, "hash": hash});
                return Ok(Some(body.to_string()));
            }
            let ended = |(how, at): (Gone, u64)| {
                let state = if how == Gone::Expired { "expired" } else { "withdrawn" };
                json!({"proposal_id": id.to_string(), "payload_b3": id.to_string(), "state": state, "ended_at": at})
                    .to_string()
            };
            if let Some(kept) = reader.proposal(id)? {
                // Past its end it is over, though nobody has noted that yet.
                let is_over = kept.ends_at < now_millis();
                let over = (Gone::Expired, kept.ends_at);
                return Ok(Some(if is_over { ended(over) } else { pending_text(id, kept, &signers) }));
            }
            Ok(reader.gone(id)?.map(ended))
        });
        let open = || {
            let state = self.shared.open(id)?;
            let body = json!({"proposal_id": id.to_string(), "payload_b3": id.to_string(), "state": state});
            Some(body.to_string())
        };
        let found = match found.await {
            Ok(found) => found.or_else(open),
            Err(rejection) => Some(open().ok_or(rejection)?),
        };
        let body = found.ok_or_else(|| not_found("no such proposal is known"))?;
        Ok(answer::json(200, body, asked.format, asked.corr))
    }

    /// What is told of a version beyond HEAD. Over a damaged store nobody knows where HEAD was.
    fn not_yet(&self) -> Rejection {
        match self.shared.damage() {
            Some(damage) => Rejection::new(Reason::Storage, format!("{damage}: later ones cannot be read")),
            None => not_found("there is no such version yet"),
        }
    }

    /// Says that a version is kept no more, and which checkpoint covers it.
    pub(super) fn pruned(&self, version: u64, asked: &Asked<'_>) -> Result<Response<Body>, Rejection> {
        let min = self.shared.min_version.load(Ordering::Acquire);
        let refused =
            Rejection::new(Reason::Pruned, format!("version {version} is kept no more; the first is {min}"));
        self.rejections.count(Reason::Pruned);
        let checkpoint = self.shared.checkpoint.load().as_deref().map(crate::shared::Signed::json);
        Ok(answer::problem(refused, json!({"min_version": min, "checkpoint": checkpoint}), asked.corr))
    }
}

/// A pending proposal with what its approvals come to.
fn pending_text(id: B3, kept: crate::store::Kept, signers: &ron_log::SignerSet) -> String {
    let approvals: Vec<Value> = kept
        .approvals
        .iter()
        .filter_map(|approval| serde_json::from_str(&approval.canonical()).ok())
        .collect();
    let payload = kept.payload.clone();
    let set = Proposal::parse_canonical(kept.payload).ok().as_ref().and_then(proposed);
    let check = |approval: ron_log::Approval| approval.check(id, signers, set.as_ref()).ok();
    let checked: Vec<_> = kept.approvals.into_iter().filter_map(check).collect();
    let judged = Judgement::of(id, &checked, signers, set.as_ref(), now_millis());
    let met = judged.is_ok_and(|judged| judged.met());
    let rest = json!({
        "proposal_id": id.to_string(), "payload_b3": id.to_string(), "state": "pending",
        "received_at": kept.received_at, "expires_at": kept.ends_at, "approvals": approvals,
        "quorum": {"m": signers.threshold(), "n": signers.approvers()}, "met": met,
    });
    answer::with_payload(&rest, &payload)
}

/// A record with its hash and payload.
pub(super) fn entry_text(record: &[u8], payload: &[u8]) -> String {
    let mut text = String::from_utf8_lossy(record).into_owned();
    text.pop();
    let _ = write!(
        text,
        ",\"hash\":\"{}\",\"payload\":{}}}",
        entry_hash(record),
        String::from_utf8_lossy(payload)
    );
    text
}

/// An item without the closing brace.
fn item_text(out: &mut String, key: &Key, version: u64, body: &str) {
    let _ =
        write!(out, "{{\"kind\":{},\"id\":{}", Value::from(key.kind.as_str()), Value::from(key.id.as_str()));
    let _ = write!(out, ",\"version\":{version},\"body\":{body}");
}
