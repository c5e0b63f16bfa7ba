//! An entry of the log: the record of one committed payload, chained to the one before.

use crate::approval::Approval;
use crate::hash::B3;
use crate::json::{Cursor, Fields, Json, JsonError, Misfit};
use std::fmt::Write as _;

/// Largest record: entry bundles give a length 16 bits.
pub const RECORD_MAX: usize = 60 << 10;

const ENTRY_DOMAIN: &[u8] = b"ron:svc-registry:entry:v1\n";

/// What the log keeps of a commit; the payload lies beside it under its hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryRecord {
    pub version: u64,
    /// Hash of the entry before.
    pub prev: B3,
    pub payload_b3: B3,
    /// Length of the canonical payload.
    pub payload_bytes: u64,
    /// The version that had last changed the signer set it was judged by.
    pub signers_version: u64,
    /// In the order of their signers' names, none twice.
    pub approvals: Vec<Approval>,
    pub committed_at: u64,
}

/// A record with its canonical bytes, which are the tree's leaf, and their hash, which is the chain's link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    record: EntryRecord,
    bytes: Vec<u8>,
    hash: B3,
}

/// Why bytes are no record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("{0}")]
    Misfit(#[from] Misfit),
    #[error("larger than {RECORD_MAX} bytes")]
    TooLarge,
}

impl Entry {
    /// Reads stored bytes, which must be canonical.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, EntryError> {
        let record = EntryRecord::parse(&bytes)?;
        let hash = entry_hash(&bytes);
        Ok(Self { record, bytes, hash })
    }

    pub fn new(record: EntryRecord) -> Result<Self, EntryError> {
        Self::parse(record.canonical().into_bytes())
    }

    /// Of a record whose every part was read or made by what checks it, numbers too; none if it is too large.
    pub(crate) fn of_checked(record: EntryRecord) -> Option<Self> {
        let bytes = record.canonical().into_bytes();
        if bytes.len() > RECORD_MAX {
            return None;
        }
        debug_assert_eq!(EntryRecord::parse(&bytes).as_ref(), Ok(&record));
        let hash = entry_hash(&bytes);
        Some(Self { record, bytes, hash })
    }

    pub fn record(&self) -> &EntryRecord {
        &self.record
    }

    /// Its canonical bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn hash(&self) -> B3 {
        self.hash
    }
}

/// An entry as a registry shows it: the bytes that were hashed, made again from its members, payload and hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    pub version: u64,
    pub record: Vec<u8>,
    pub payload: Vec<u8>,
}

impl Served {
    pub fn of(entry: &Json<'_>) -> Result<Self, Misfit> {
        let (mut record, mut payload) = (Vec::new(), Vec::new());
        let members = entry.members().ok_or(Misfit { member: "entry", wants: "must be an object" })?;
        for (name, value) in members {
            match name.as_ref() {
                "payload" => payload = value.canonical().into_bytes(),
                "hash" => {}
                _ => record.push((name.clone(), value.clone())),
            }
        }
        let version = entry.member("version").and_then(Json::whole);
        let version = version.ok_or(Misfit { member: "version", wants: "is missing" })?;
        Ok(Self { version, record: Json::Object(record).canonical().into_bytes(), payload })
    }
}

/// The chain's hash of a record's canonical bytes.
pub fn entry_hash(bytes: &[u8]) -> B3 {
    B3::tagged(ENTRY_DOMAIN, bytes)
}

impl EntryRecord {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, EntryError> {
        if bytes.len() > RECORD_MAX {
            return Err(EntryError::TooLarge);
        }
        Self::quick(bytes).map_or_else(|| Self::general(bytes), Ok)
    }

    pub(crate) fn general(bytes: &[u8]) -> Result<Self, EntryError> {
        Ok(Self::from_json(&Json::parse_canonical(bytes)?)?)
    }

    /// Reads a record as nearly all are: approvals by Ed25519 keys alone.
    pub(crate) fn quick(bytes: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes)?;
        let mut approvals: Vec<Approval> = Vec::new();
        cursor.literal(r#"{"approvals":["#)?;
        while !cursor.eat("]") {
            if !approvals.is_empty() {
                cursor.literal(",")?;
            }
            let approval = Approval::quick(&mut cursor)?;
            if approvals.last().is_some_and(|last| last.signer >= approval.signer) {
                return None;
            }
            approvals.push(approval);
        }
        cursor.literal(r#","committed_at":"#)?;
        let committed_at = cursor.whole()?;
        cursor.literal(r#","payload_b3":"b3:"#)?;
        let payload_b3 = B3::digits(cursor.take(64)?)?;
        cursor.literal(r#"","payload_bytes":"#)?;
        let payload_bytes = cursor.whole()?;
        cursor.literal(r#","prev":"b3:"#)?;
        let prev = B3::digits(cursor.take(64)?)?;
        cursor.literal(r#"","signers_version":"#)?;
        let signers_version = cursor.whole()?;
        cursor.literal(r#","version":"#)?;
        let version = cursor.whole()?;
        cursor.literal("}")?;
        cursor.end()?;
        Some(Self { version, prev, payload_b3, payload_bytes, signers_version, approvals, committed_at })
    }

    fn from_json(json: &Json<'_>) -> Result<Self, Misfit> {
        let mut fields = Fields::of(json, "record")?;
        let mut hash = |member| {
            let text = fields.text(member)?;
            B3::parse(text)
                .ok_or(Misfit { member, wants: "must be `b3:` and 64 lowercase hexadecimal digits" })
        };
        let (payload_b3, prev) = (hash("payload_b3")?, hash("prev")?);
        let approvals =
            fields.list("approvals")?.iter().map(Approval::from_json).collect::<Result<Vec<_>, _>>()?;
        if approvals.windows(2).any(|pair| pair[0].signer >= pair[1].signer) {
            return Err(Misfit {
                member: "approvals",
                wants: "must be in the order of their signers, none twice",
            });
        }
        let record = Self {
            version: fields.whole("version")?,
            prev,
            payload_b3,
            payload_bytes: fields.whole("payload_bytes")?,
            signers_version: fields.whole("signers_version")?,
            approvals,
            committed_at: fields.whole("committed_at")?,
        };
        fields.end("record")?;
        Ok(record)
    }

    /// Its canonical form.
    pub fn canonical(&self) -> String {
        let mut out = String::with_capacity(320 + 192 * self.approvals.len());
        out.push_str(r#"{"approvals":["#);
        for (index, approval) in self.approvals.iter().enumerate() {
            if index > 0 {
                out.push(',');
            }
            approval.write(&mut out);
        }
        let Self { version, prev, payload_b3, payload_bytes, signers_version, committed_at, .. } = self;
        let _ = write!(
            out,
            r#"],"committed_at":{committed_at},"payload_b3":"{payload_b3}","payload_bytes":{payload_bytes},"#
        );
        let _ = write!(out, r#""prev":"{prev}","signers_version":{signers_version},"version":{version}}}"#);
        out
    }
}
