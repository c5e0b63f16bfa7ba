//! Trust roots: the first signer set and the log's name, pinned by their hash; and the genesis they determine.

use crate::entry::{Entry, EntryRecord};
use crate::hash::B3;
use crate::item::Key;
use crate::json::{Fields, Json, JsonError, Misfit};
use crate::note::is_key_name;
use crate::payload::{Op, Payload, Proposal};
use crate::signers::SignerSet;

pub const ROOTS_SCHEMA: &str = "ron.registry.roots/1";

/// The trust-roots file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustRoots {
    /// The checkpoints' origin, and the name of the log's key.
    pub log: String,
    pub signers: SignerSet,
}

/// Why a file holds no trust roots.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RootsError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("{0}")]
    Misfit(#[from] Misfit),
}

impl TrustRoots {
    /// Reads a file as a person may have formatted it; its hash is that of the canonical form.
    pub fn parse(bytes: &[u8]) -> Result<Self, RootsError> {
        let json = Json::parse(bytes)?;
        let mut fields = Fields::of(&json, "trust roots")?;
        if fields.text("schema")? != ROOTS_SCHEMA {
            return Err(Misfit { member: "schema", wants: "must be `ron.registry.roots/1`" }.into());
        }
        let log = fields.text("log")?.to_owned();
        if !is_key_name(&log) {
            return Err(
                Misfit { member: "log", wants: "must be 1 to 255 bytes without spaces or `+`" }.into()
            );
        }
        let signers = SignerSet::from_fields(&mut fields)?;
        fields.end("trust roots")?;
        Ok(Self { log, signers })
    }

    pub fn canonical(&self) -> String {
        let mut members = self.signers.members();
        members.push(("log".into(), Json::Text(self.log.as_str().into())));
        members.push(("schema".into(), Json::Text(ROOTS_SCHEMA.into())));
        members.sort_by(|(a, _), (b, _)| a.cmp(b));
        Json::Object(members).canonical()
    }

    /// What pins them.
    pub fn b3(&self) -> B3 {
        B3::of(self.canonical().as_bytes())
    }

    /// Entry 0, the same bytes on every node.
    pub fn genesis(&self) -> (Entry, Proposal) {
        let payload = Payload {
            base_version: 0,
            signers_version: 0,
            nonce: [0; 16],
            ops: vec![Op { key: Key::signers(), body: Some(self.signers.canonical()) }],
            note: "genesis".into(),
            expires_at: 0,
        };
        let proposal = Proposal::new(payload).expect("a checked signer set makes a good payload");
        let record = EntryRecord {
            version: 0,
            prev: B3::ZERO,
            payload_b3: proposal.b3(),
            payload_bytes: proposal.bytes().len() as u64,
            signers_version: 0,
            approvals: Vec::new(),
            committed_at: 0,
        };
        (Entry::new(record).expect("a record without approvals is small"), proposal)
    }
}
