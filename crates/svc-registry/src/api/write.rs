//! The requests that change something; each becomes a job of the Committer.

use super::answer::{self, malformed};
use super::routes::COMMIT;
use super::{Api, Asked};
use crate::checks::Given;
use crate::claim::Claim;
use crate::job::{Ask, Commits, Done, Job, Refusal};
use crate::view::HeadInfo;
use bytes::Bytes;
use http::Response;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION};
use ron_kernel::admission::decode::{DecodeError, DecodeGuard, DecodeLimits, codings};
use ron_kernel::channel::Sender;
use ron_kernel::http::{Body, BodyError};
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::shutdown::Phase;
use ron_kernel::sync::PushError;
use ron_log::json::Json;
use ron_log::{Approval, B3, Proposal};
use serde_json::json;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// What is larger is taken apart on a thread that may block.
const INLINE_MAX: usize = 64 << 10;

/// How often whoever waits has those asked again who did not answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The members of a payload.
const PAYLOAD: &[&str] = &["schema", "base_version", "signers_version", "nonce", "ops", "note", "expires_at"];

/// How far a commit must have come before it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Durable,
    Checkpointed,
    Witnessed(u64),
}

impl Api {
    pub(super) async fn propose(
        &self,
        mut asked: Asked<'_>,
        body: Body,
    ) -> Result<Response<Body>, Rejection> {
        let commit = asked.query.flag("commit")?;
        let level = self.level(&asked)?;
        if commit {
            self.authorize(&asked, COMMIT, &self.shared.settings.load())?;
        }
        let body = self.body(&asked, body).await?;
        let is_cbor = is_cbor(asked.headers())?;
        let (proposal, approvals) = heavy(body.len(), move || parse_proposal(&body, is_cbor)).await?;
        let proposal = Arc::new(proposal);
        let approvals = Given::new(&proposal, approvals);
        let ask = Ask::Propose { proposal, approvals, commit };
        match self.submit(&self.proposals, ask, &asked, "propose").await? {
            Done::Committed(info) => self.committed(&mut asked, info, level).await,
            Done::Proposed { proposal, ends_at } => {
                let id = proposal.b3().to_string();
                let body = json!({"proposal_id": id, "payload_b3": id, "expires_at": ends_at});
                Ok(answer::value(202, &body, asked.format, asked.corr))
            }
            Done::Approved { .. } | Done::Withdrawn => Err(other_answer()),
        }
    }

    pub(super) async fn approve(&self, asked: Asked<'_>, body: Body) -> Result<Response<Body>, Rejection> {
        let id = id(&asked)?;
        let body = self.body(&asked, body).await?;
        let text = as_json(&body, is_cbor(asked.headers())?)?;
        let approval = Approval::parse(&text).map_err(|bad| malformed(bad.to_string()))?;
        let ask = Ask::Approve { id, approval };
        match self.submit(&self.approvals, ask, &asked, "approve").await? {
            Done::Approved { have, need, of, met, committed, not_committed } => {
                let mut body = json!({"approvals": have, "quorum": {"m": need, "n": of}, "met": met});
                if let Some(info) = committed {
                    body["committed"] = json!({"version": info.version, "hash": info.hash.to_string()});
                }
                if let Some(Refusal { reason, detail }) = not_committed {
                    body["not_committed"] = json!({"code": reason.code(), "detail": detail});
                }
                Ok(answer::value(200, &body, asked.format, asked.corr))
            }
            Done::Proposed { .. } | Done::Committed(_) | Done::Withdrawn => Err(other_answer()),
        }
    }

    pub(super) async fn commit(&self, mut asked: Asked<'_>, body: Body) -> Result<Response<Body>, Rejection> {
        let (id, level) = (id(&asked)?, self.level(&asked)?);
        self.nothing(&asked, body).await?;
        match self.submit(&self.proposals, Ask::Commit { id }, &asked, "commit").await? {
            Done::Committed(info) => self.committed(&mut asked, info, level).await,
            Done::Proposed { .. } | Done::Approved { .. } | Done::Withdrawn => Err(other_answer()),
        }
    }

    pub(super) async fn withdraw(&self, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        let id = id(&asked)?;
        self.submit(&self.proposals, Ask::Withdraw { id }, &asked, "propose").await?;
        let body = json!({"proposal_id": id.to_string(), "state": "withdrawn"});
        Ok(answer::value(200, &body, asked.format, asked.corr))
    }

    pub(super) async fn supersede(&self, asked: Asked<'_>, body: Body) -> Result<Response<Body>, Rejection> {
        self.nothing(&asked, body).await?;
        match self.submit(&self.proposals, Ask::Supersede, &asked, "propose").await? {
            Done::Proposed { proposal, ends_at } => {
                let id = proposal.b3().to_string();
                let rest = json!({"proposal_id": id, "payload_b3": id, "expires_at": ends_at});
                let body = answer::with_payload(&rest, proposal.bytes());
                Ok(answer::json(202, body, asked.format, asked.corr))
            }
            Done::Approved { .. } | Done::Committed(_) | Done::Withdrawn => Err(other_answer()),
        }
    }

    /// How far the client wants to wait, if it can come so far.
    fn level(&self, asked: &Asked<'_>) -> Result<Level, Rejection> {
        let count = match asked.query.text("wait") {
            None | Some("durable") => return Ok(Level::Durable),
            Some("checkpointed") => return Ok(Level::Checkpointed),
            Some(text) => text.strip_prefix("witnessed:").and_then(|count| count.parse().ok()),
        };
        let count: u64 =
            count.ok_or_else(|| malformed("wait must be durable, checkpointed or witnessed:K"))?;
        let witnesses = self.shared.settings.load().witness.urls.len();
        if count > witnesses as u64 {
            return Err(malformed(format!("wait: there are {witnesses} witnesses")));
        }
        Ok(Level::Witnessed(count))
    }

    /// Hands a job to the Committer and waits for its answer as long as the client does.
    async fn submit(
        &self,
        queue: &Sender<Job>,
        ask: Ask,
        asked: &Asked<'_>,
        endpoint: &'static str,
    ) -> Result<Done, Rejection> {
        let commits = ask.commits();
        let bytes = if let Ask::Propose { proposal, .. } = &ask { proposal.bytes().len() } else { 0 };
        // Whoever would wait idly for the batch before this one is checked meanwhile.
        let writing = self.shared.writing.load(Ordering::Relaxed);
        let ahead = match &ask {
            Ask::Propose { approvals, .. } if writing > 0 => Some(approvals.clone()),
            _ => None,
        };
        let (reply, mut answer) = oneshot::channel();
        let claim = Arc::new(Claim::default());
        let deadline = asked.budget.until;
        let job = Job { ask, asked: Instant::now(), deadline, claim: claim.clone(), reply };
        match queue.try_send_sized(job, bytes) {
            Ok(_displaced) => ahead.iter().for_each(|given| self.ahead.check(given, writing)),
            Err(PushError::Busy(_)) => {
                let queue = if endpoint == "approve" { "approvals" } else { "proposals" };
                self.busy.with(["registry", endpoint, queue]).inc();
                return Err(Rejection::new(Reason::Busy, "the queue is full").retry_after(1));
            }
            Err(PushError::Closed(_)) => return Err(Rejection::new(Reason::NotReady, "nobody takes it now")),
        }
        let unknown = |detail: &'static str| match commits.as_ref().map(Commits::id) {
            Some(id) => {
                self.shared.note_open(id);
                located(Rejection::new(Reason::CommitUnknown, detail), id)
            }
            None => Rejection::new(Reason::Timeout, detail),
        };
        tokio::select! {
            biased;
            answered = &mut answer => match answered {
                Ok(Ok(done)) => Ok(done),
                Ok(Err(refusal)) => Err(self.refused(refusal, commits.as_ref(), endpoint)),
                Err(_dropped) => Err(unknown("whoever did it is gone")),
            },
            () = self.stopped() => {
                if claim.give_up() {
                    return Err(Rejection::new(Reason::Draining, "the node stops; nothing was done"));
                }
                Err(unknown("the node stopped while it was written"))
            }
            () = tokio::time::sleep_until(deadline.into()) => {
                self.shared.numbers.commit_timeouts.inc();
                if claim.give_up() {
                    let late = "the deadline passed in the queue; nothing was done";
                    return Err(Rejection::new(Reason::Timeout, late));
                }
                let open = unknown("the deadline passed while it was written");
                // From here on the Committer sees that nobody listens; what it said just before counts.
                answer.close();
                match (answer.try_recv(), commits.as_ref()) {
                    (Ok(reply), Some(commits)) => {
                        self.shared.forget_open(commits.id());
                        reply.map_err(|refusal| self.refused(refusal, Some(commits), endpoint))
                    }
                    _ => Err(open),
                }
            }
        }
    }

    /// The drain is over. Looked at when something wakes the request, as its connection does then.
    async fn stopped(&self) {
        let shutdown = self.shared.service.shutdown();
        let over = |_: &mut Context<'_>| {
            if shutdown.phase() >= Phase::Aborting { Poll::Ready(()) } else { Poll::Pending }
        };
        std::future::poll_fn(over).await;
    }

    fn refused(&self, refusal: Refusal, commits: Option<&Commits>, endpoint: &'static str) -> Rejection {
        let Refusal { reason, detail } = refusal;
        if reason == Reason::Busy {
            self.busy.with(["registry", endpoint, ""]).inc();
        }
        let rejection = Rejection::new(reason, detail);
        match commits {
            Some(commits) if reason == Reason::CommitUnknown => located(rejection, commits.id()),
            _ => rejection,
        }
    }

    /// Answers a commit once it has come as far as was asked.
    async fn committed(
        &self,
        asked: &mut Asked<'_>,
        info: HeadInfo,
        level: Level,
    ) -> Result<Response<Body>, Rejection> {
        let far_enough = |cosignatures: u64| match level {
            Level::Durable | Level::Checkpointed => true,
            Level::Witnessed(wanted) => cosignatures >= wanted,
        };
        let wait = async {
            loop {
                let told = self.shared.checkpointed.notified();
                let checkpoint = self.shared.checkpoint.load();
                let covered = checkpoint
                    .as_ref()
                    .is_some_and(|signed| signed.size > info.version && far_enough(signed.cosignatures));
                if level == Level::Durable || covered {
                    return;
                }
                drop(checkpoint);
                self.shared.checkpoint_wanted.notify_one();
                self.shared.cosignatures_wanted.notify_one();
                // Once more each moment: a witness may be back.
                let _ = tokio::time::timeout(ASK_AGAIN, told).await;
            }
        };
        if level != Level::Durable {
            // Its place among those that wait was taken before anything was done.
            asked.inflight = None;
        }
        // The tasks that sign and collect end when the drain begins.
        let shutdown = self.shared.service.shutdown();
        let late = tokio::select! {
            biased;
            waited = tokio::time::timeout_at(asked.budget.until.into(), wait) => waited.is_err().then_some("takes longer"),
            () = shutdown.draining(), if level != Level::Durable => Some("does not come before the node stops"),
        };
        if let Some(late) = late {
            let detail = format!("it is committed as version {}; the rest {late}", info.version);
            return Err(located(Rejection::new(Reason::Timeout, detail), info.payload_b3));
        }
        Ok(answer::json(201, self.shared.committed_page(&info), asked.format, asked.corr))
    }

    /// A body that says nothing; if there is one all the same, it is of a type that is taken.
    async fn nothing(&self, asked: &Asked<'_>, body: Body) -> Result<(), Rejection> {
        if !self.body(asked, body).await?.is_empty() {
            is_cbor(asked.headers())?;
        }
        Ok(())
    }

    /// The request's body, decoded if it is compressed.
    async fn body(&self, asked: &Asked<'_>, mut body: Body) -> Result<Bytes, Rejection> {
        let limits = self.shared.settings.load().limits.clone();
        let cap = limits.max_body_bytes.usize();
        let stated = asked.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let stated: u64 = stated
            .ok_or_else(|| Rejection::new(Reason::LengthRequired, "a write must state its Content-Length"))?;
        let too_large = || Rejection::new(Reason::BodyCap, format!("a body may have {cap} bytes"));
        if stated > cap as u64 {
            return Err(too_large());
        }
        let codings = codings(asked.headers()).ok_or_else(|| {
            Rejection::new(Reason::UnsupportedEncoding, "gzip, deflate, br and zstd can be sent")
        })?;
        let reading = body.collect(cap);
        let read = tokio::time::timeout_at(asked.budget.until.into(), reading).await;
        let bytes = match read {
            Err(_elapsed) => {
                return Err(Rejection::new(Reason::Timeout, "the deadline passed before the body came"));
            }
            Ok(Err(BodyError::TooLarge)) => return Err(too_large()),
            Ok(Err(BodyError::ReadTimeout)) => {
                return Err(Rejection::new(Reason::ReadTimeout, "the body did not arrive in time"));
            }
            Ok(Err(_broken)) => return Err(malformed("the body is not as long as its Content-Length")),
            Ok(Ok(bytes)) if bytes.len() as u64 != stated => {
                return Err(malformed("the body is not as long as its Content-Length"));
            }
            Ok(Ok(bytes)) => bytes,
        };
        if codings.is_empty() {
            return Ok(bytes);
        }
        let limits = DecodeLimits { ratio_max: limits.decompress_ratio_cap, bytes_max: cap as u64 };
        heavy(INLINE_MAX + 1, move || {
            let (mut guard, mut out) = (DecodeGuard::new(&codings, limits), Vec::new());
            let done =
                guard.push(&bytes, &mut |piece| out.extend_from_slice(piece)).and_then(|()| guard.finish());
            match done {
                Ok(()) => Ok(Bytes::from(out)),
                Err(DecodeError::Cap) => {
                    Err(Rejection::new(Reason::DecodedCap, "the decoded body is too large"))
                }
                Err(DecodeError::Ratio) => {
                    Err(Rejection::new(Reason::DecodedRatio, "it is compressed too well"))
                }
                Err(bad) => Err(malformed(bad.to_string())),
            }
        })
        .await
    }
}

/// Runs what may take long for large input where it may block.
async fn heavy<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> Result<T, Rejection> + Send + 'static,
) -> Result<T, Rejection> {
    if bytes <= INLINE_MAX {
        return work();
    }
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_panic| Err(Rejection::new(Reason::Internal, "the request could not be answered")))
}

/// A payload, or one with approvals beside it.
fn parse_proposal(body: &[u8], is_cbor: bool) -> Result<(Proposal, Vec<Approval>), Rejection> {
    if !is_cbor && let Some(read) = Proposal::quick_with_approvals(body) {
        return Ok(read);
    }
    let text = as_json(body, is_cbor)?;
    let json = Json::parse_around(&text).map_err(|bad| malformed(bad.to_string()))?;
    let bad = |error: ron_log::payload::PayloadError| malformed(error.to_string());
    let Some(payload) = json.member("payload") else {
        known("the payload", &json, PAYLOAD)?;
        return Ok((Proposal::from_json(&json).map_err(bad)?, Vec::new()));
    };
    known("the body", &json, &["payload", "approvals"])?;
    known("the payload", payload, PAYLOAD)?;
    let list = json.member("approvals").map_or(Some(&[][..]), |list| list.list());
    let list = list.ok_or_else(|| malformed("approvals: must be a list"))?;
    if list.len() > ron_log::signers::SIGNERS_MAX {
        return Err(malformed("approvals: there are more than a set has signers"));
    }
    let approvals = list.iter().map(Approval::from_json).collect::<Result<Vec<_>, _>>();
    Ok((Proposal::from_json(payload).map_err(bad)?, approvals.map_err(|bad| malformed(bad.to_string()))?))
}

/// Names a member that is not known, which the reader of payloads would only say is there.
fn known(what: &str, json: &Json<'_>, names: &[&str]) -> Result<(), Rejection> {
    let mut members = json.members().unwrap_or_default().iter();
    match members.find(|(name, _)| !names.contains(&name.as_ref())) {
        Some((name, _)) => {
            Err(malformed(format!("{what} has the unknown member {name:?}; known are {}", names.join(", "))))
        }
        None => Ok(()),
    }
}

fn is_cbor(headers: &HeaderMap) -> Result<bool, Rejection> {
    // No other type is taken: a browser sends these two for a page of another site only after asking us.
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    match kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase().as_str() {
        answer::CBOR => Ok(true),
        answer::JSON => Ok(false),
        _ => Err(malformed("Content-Type must be application/json or application/cbor")),
    }
}

fn as_json(body: &[u8], is_cbor: bool) -> Result<Cow<'_, [u8]>, Rejection> {
    if !is_cbor {
        return Ok(body.into());
    }
    let value = crate::cbor::decode(body).map_err(|bad| malformed(bad.to_string()))?;
    Ok(value.to_string().into_bytes().into())
}

fn id(asked: &Asked<'_>) -> Result<B3, Rejection> {
    B3::parse(asked.part(0)).ok_or_else(|| malformed("an id is b3: and 64 lowercase hexadecimal digits"))
}

/// Where to look for what became of it.
fn located(rejection: Rejection, id: B3) -> Rejection {
    let location = HeaderValue::from_str(&format!("/registry/proposals/{id}"));
    rejection.header(LOCATION, location.expect("a hash is plain text"))
}

fn other_answer() -> Rejection {
    Rejection::new(Reason::Internal, "the request could not be answered")
}
