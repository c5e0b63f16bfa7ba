//! The payload of a proposal: which items it changes, and under which state and policy it was written.

use crate::approval::Approval;
use crate::hash::{B3, hex, unhex};
use crate::item::{Key, check_body};
use crate::json::{Cursor, Fields, Json, JsonError, Misfit, write_text};
use crate::signers::SIGNERS_MAX;
use ron_blake3::{GAINS, Input, hash_all};
use std::fmt::{self, Write as _};
use std::sync::OnceLock;

pub const SCHEMA: &str = "ron.registry/1";

/// Largest canonical payload: what a body of 1 MiB leaves beside its approvals.
pub const PAYLOAD_MAX: usize = (1 << 20) - (64 << 10);

/// Most operations of one payload.
pub const OPS_MAX: usize = 1024;

/// What a proposal asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payload {
    /// The version its author saw; what it touches must not have changed since.
    pub base_version: u64,
    /// The version that last changed the signer set, so that no approval is replayed under another policy.
    pub signers_version: u64,
    pub nonce: [u8; 16],
    /// No key occurs twice.
    pub ops: Vec<Op>,
    pub note: String,
    /// Unix milliseconds after which it may not be committed.
    pub expires_at: u64,
}

/// One change of one item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    pub key: Key,
    /// The new body in canonical form; none deletes the item.
    pub body: Option<String>,
}

/// Why bytes are no payload; all of it is `malformed`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PayloadError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("{0}")]
    Misfit(#[from] Misfit),
    /// Of one of its operations, counted from zero.
    #[error("ops[{0}]: {1}")]
    Op(usize, Misfit),
    #[error("larger than {PAYLOAD_MAX} bytes in canonical form")]
    TooLarge,
}

/// A payload with its canonical bytes and their hash, which is its id.
#[derive(Clone)]
pub struct Proposal {
    payload: Payload,
    bytes: Vec<u8>,
    /// Made when somebody asks for it where several together take less time.
    b3: OnceLock<B3>,
}

impl PartialEq for Proposal {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Proposal {}

impl fmt::Debug for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Proposal").field(&self.b3()).finish()
    }
}

impl Proposal {
    /// Canonical bytes and what they say.
    fn of(payload: Payload, bytes: Vec<u8>) -> Self {
        let b3 = if GAINS.contains(&bytes.len()) { OnceLock::new() } else { B3::of(&bytes).into() };
        Self { payload, bytes, b3 }
    }

    /// Reads a payload as a client may write it; how much a client may send is the caller's to bound.
    pub fn parse(bytes: &[u8]) -> Result<Self, PayloadError> {
        Self::from_json(&Json::parse(bytes)?)
    }

    /// The same, where the payload is a part of something larger.
    pub fn from_json(json: &Json<'_>) -> Result<Self, PayloadError> {
        Self::new(Payload::from_json(json)?)
    }

    /// Reads stored bytes, which must be canonical.
    pub fn parse_canonical(bytes: Vec<u8>) -> Result<Self, PayloadError> {
        Ok(Self::of(Payload::parse_canonical(&bytes)?, bytes))
    }

    /// Reads `{"payload":…,"approvals":[…]}` where the payload is canonical and so are the approvals, all by Ed25519 keys, as
    /// nearly all are. Of anything else the general reader knows what it is.
    pub fn quick_with_approvals(bytes: &[u8]) -> Option<(Self, Vec<Approval>)> {
        let mut cursor = Cursor::new(bytes)?;
        cursor.literal(r#"{"payload":"#)?;
        let begin = cursor.at();
        let payload = Payload::read(&mut cursor)?;
        let canonical = &bytes[begin..cursor.at()];
        cursor.literal(r#","approvals":["#)?;
        let mut approvals = Vec::with_capacity(4);
        while !cursor.eat("]") {
            if !approvals.is_empty() {
                cursor.literal(",")?;
            }
            approvals.push(Approval::quick(&mut cursor)?);
        }
        cursor.literal("}")?;
        cursor.end()?;
        if canonical.len() > PAYLOAD_MAX || approvals.len() > SIGNERS_MAX {
            return None;
        }
        Some((Self::of(payload, canonical.to_vec()), approvals))
    }

    /// Checks a payload that was put together here as one that was read.
    pub fn new(payload: Payload) -> Result<Self, PayloadError> {
        Self::parse_canonical(payload.canonical().into_bytes())
    }

    pub fn payload(&self) -> &Payload {
        &self.payload
    }

    /// Its canonical bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn b3(&self) -> B3 {
        *self.b3.get_or_init(|| B3::of(&self.bytes))
    }

    /// Makes the hashes of those that have none yet, for [`Proposal::b3`] to give.
    pub fn hash_all<'a>(proposals: impl Iterator<Item = &'a Self>) {
        let without = proposals.filter(|proposal| proposal.b3.get().is_none());
        let (without, inputs): (Vec<_>, Vec<_>) =
            without.filter_map(|proposal| Some((proposal, Input::of(proposal.bytes())?))).unzip();
        for (proposal, hash) in without.into_iter().zip(hash_all(&inputs)) {
            // Who was first found the same.
            let _ = proposal.b3.set(B3(hash));
        }
    }
}

impl Payload {
    pub(crate) fn parse_canonical(bytes: &[u8]) -> Result<Self, PayloadError> {
        if bytes.len() > PAYLOAD_MAX {
            return Err(PayloadError::TooLarge);
        }
        Self::quick(bytes).map_or_else(|| Self::general(bytes), Ok)
    }

    pub(crate) fn general(bytes: &[u8]) -> Result<Self, PayloadError> {
        Self::from_json(&Json::parse_canonical(bytes)?)
    }

    /// Reads canonical bytes without making a tree of more than the bodies, which it need not write again.
    pub(crate) fn quick(bytes: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes)?;
        let payload = Self::read(&mut cursor)?;
        cursor.end()?;
        Some(payload)
    }

    /// The same where more may follow.
    fn read(cursor: &mut Cursor<'_>) -> Option<Self> {
        cursor.literal(r#"{"base_version":"#)?;
        let base_version = cursor.whole()?;
        cursor.literal(r#","expires_at":"#)?;
        let expires_at = cursor.whole()?;
        cursor.literal(r#","nonce":""#)?;
        let mut nonce = [0; 16];
        if !unhex(cursor.take(32)?, &mut nonce) {
            return None;
        }
        cursor.literal(r#"","note":"#)?;
        let note = cursor.text()?.into_owned();
        cursor.literal(r#","ops":["#)?;
        let mut ops = Vec::with_capacity(1);
        loop {
            ops.push(Op::quick(cursor)?);
            if !cursor.eat(",") {
                break;
            }
        }
        cursor.literal(r#"],"schema":"ron.registry/1","signers_version":"#)?;
        let signers_version = cursor.whole()?;
        cursor.literal("}")?;
        check_ops(&ops).ok()?;
        Some(Self { base_version, signers_version, nonce, ops, note, expires_at })
    }

    fn from_json(json: &Json<'_>) -> Result<Self, PayloadError> {
        let mut fields = Fields::of(json, "payload")?;
        if fields.text("schema")? != SCHEMA {
            return Err(Misfit { member: "schema", wants: "must be `ron.registry/1`" }.into());
        }
        let mut nonce = [0; 16];
        if !unhex(fields.text("nonce")?.as_bytes(), &mut nonce) {
            return Err(Misfit { member: "nonce", wants: "must be 32 lowercase hexadecimal digits" }.into());
        }
        let list = fields.list("ops")?;
        check_count(list.len())?;
        let op = |(at, json)| Op::from_json(json).map_err(|misfit| PayloadError::Op(at, misfit));
        let ops = list.iter().enumerate().map(op).collect::<Result<Vec<_>, _>>()?;
        check_ops(&ops)?;
        let payload = Self {
            base_version: fields.whole("base_version")?,
            signers_version: fields.whole("signers_version")?,
            nonce,
            ops,
            note: fields.text("note")?.to_owned(),
            expires_at: fields.whole("expires_at")?,
        };
        fields.end("payload")?;
        Ok(payload)
    }

    /// Its canonical form.
    pub fn canonical(&self) -> String {
        let mut out = String::with_capacity(256);
        let _ = write!(
            out,
            r#"{{"base_version":{},"expires_at":{},"nonce":""#,
            self.base_version, self.expires_at
        );
        let mut digits = [0; 32];
        hex(&self.nonce, &mut digits);
        out.push_str(std::str::from_utf8(&digits).expect("hexadecimal digits"));
        out.push_str(r#"","note":"#);
        write_text(&self.note, &mut out);
        out.push_str(r#","ops":["#);
        for (index, op) in self.ops.iter().enumerate() {
            out.push_str(if index > 0 { ",{" } else { "{" });
            if let Some(body) = &op.body {
                let _ = write!(out, r#""body":{body},"#);
            }
            out.push_str(r#""id":"#);
            write_text(&op.key.id, &mut out);
            out.push_str(r#","kind":"#);
            write_text(&op.key.kind, &mut out);
            out.push_str(if op.body.is_some() { r#","op":"put"}"# } else { r#","op":"delete"}"# });
        }
        let _ = write!(out, r#"],"schema":"{SCHEMA}","signers_version":{}}}"#, self.signers_version);
        out
    }

    /// The body it proposes for the signer set, if it changes that.
    pub(crate) fn signers_body(&self) -> Option<&str> {
        self.ops.iter().find(|op| op.key.is_signers())?.body.as_deref()
    }
}

fn check_count(ops: usize) -> Result<(), Misfit> {
    if (1..=OPS_MAX).contains(&ops) {
        Ok(())
    } else {
        Err(Misfit { member: "ops", wants: "must be 1 to 1024 operations" })
    }
}

fn check_ops(ops: &[Op]) -> Result<(), Misfit> {
    check_count(ops.len())?;
    let mut keys: Vec<&Key> = ops.iter().map(|op| &op.key).filter(|_| ops.len() > 1).collect();
    keys.sort();
    if keys.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Misfit { member: "ops", wants: "must name an item once" });
    }
    Ok(())
}

impl Op {
    /// As [`Op::from_json`], from canonical bytes.
    fn quick(cursor: &mut Cursor<'_>) -> Option<Self> {
        cursor.literal("{")?;
        let body = if cursor.eat(r#""body":"#) {
            // It stands in the operation, the list and the payload.
            let body = cursor.value(3)?;
            cursor.literal(",")?;
            Some(body)
        } else {
            None
        };
        cursor.literal(r#""id":"#)?;
        let id = cursor.text()?;
        cursor.literal(r#","kind":"#)?;
        let kind = cursor.text()?;
        let key = Key::new(&kind, &id).ok()?;
        cursor.literal(if body.is_some() { r#","op":"put"}"# } else { r#","op":"delete"}"# })?;
        match body {
            Some((body, text)) => {
                check_body(&key.kind, &body).ok()?;
                Some(Self { key, body: Some(text.to_owned()) })
            }
            None => (!key.is_signers()).then_some(Self { key, body: None }),
        }
    }

    fn from_json(json: &Json<'_>) -> Result<Self, Misfit> {
        let mut fields = Fields::of(json, "op")?;
        let key = Key::new(fields.text("kind")?, fields.text("id")?)?;
        let body = match fields.text("op")? {
            "put" => {
                let body = fields.any("body")?;
                check_body(&key.kind, body)?;
                Some(body.canonical())
            }
            "delete" if key.is_signers() => {
                return Err(Misfit { member: "op", wants: "must not delete the signer set" });
            }
            "delete" => None,
            _ => return Err(Misfit { member: "op", wants: "must be `put` or `delete`" }),
        };
        fields.end("op")?;
        Ok(Self { key, body })
    }
}
