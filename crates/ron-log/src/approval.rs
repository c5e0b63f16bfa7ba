//! An approval: a signer's signature over a payload's hash.

use crate::hash::B3;
use crate::json::{Cursor, Fields, Json, JsonError, Misfit};
use crate::key::{Algorithm, ML_DSA_44_SIG, PublicKey, SigningKeys};
use crate::signers::{Signer, SignerSet, is_signer_id};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ed25519_dalek::{Signer as _, SigningKey};
use ron_ed25519::Signed;
use std::fmt::Write as _;
use std::sync::Arc;

/// What stands before the payload's hash in what a signer signs.
pub const APPROVAL_DOMAIN: &str = "ron:svc-registry:v1\n";

/// What a signer signs to approve a payload.
pub fn approval_message(payload_b3: B3) -> String {
    format!("{APPROVAL_DOMAIN}{payload_b3}")
}

/// A signature over [`approval_message`], not checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Approval {
    pub signer: String,
    pub sig: Sig,
    /// When the signer says it signed; informative, for it is not signed.
    pub signed_at: u64,
}

/// Its signature, by what made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sig {
    Ed25519([u8; 64]),
    MlDsa44(Box<[u8; ML_DSA_44_SIG]>),
    Hybrid([u8; 64], Box<[u8; ML_DSA_44_SIG]>),
}

/// Why an approval does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApprovalError {
    #[error("the signature is not the signer's over this payload")]
    InvalidSig,
    #[error("the signer is not in the set in force")]
    RevokedKey,
    #[error("the signer's key is past its end")]
    Expired,
    #[error("the signer may not approve")]
    RoleMissing,
}

impl Approval {
    /// Approves a payload with an Ed25519 key.
    pub fn sign(signer: &str, key: &SigningKey, payload_b3: B3, signed_at: u64) -> Self {
        let sig = key.sign(approval_message(payload_b3).as_bytes()).to_bytes();
        Self { signer: signer.to_owned(), sig: Sig::Ed25519(sig), signed_at }
    }

    /// Approves a payload with whatever keys the signer has.
    pub fn sign_with(signer: &str, keys: &SigningKeys, payload_b3: B3, signed_at: u64) -> Self {
        let message = approval_message(payload_b3);
        let message = message.as_bytes();
        let sig = match keys {
            SigningKeys::Ed25519(key) => Sig::Ed25519(key.sign(message).to_bytes()),
            SigningKeys::MlDsa44(key) => Sig::MlDsa44(key.sign(message)),
            SigningKeys::Hybrid(a, b) => Sig::Hybrid(a.sign(message).to_bytes(), b.sign(message)),
        };
        Self { signer: signer.to_owned(), sig, signed_at }
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, ApprovalFormatError> {
        Ok(Self::from_json(&Json::parse(bytes)?)?)
    }

    pub fn from_json(json: &Json<'_>) -> Result<Self, Misfit> {
        let mut fields = Fields::of(json, "approval")?;
        let signer = fields.text("signer")?;
        if !is_signer_id(signer) {
            return Err(Misfit { member: "signer", wants: "must be 1 to 128 visible ASCII characters" });
        }
        let bad =
            Misfit { member: "sig", wants: "must be of the algorithm's length, in base64 with padding" };
        let one = |json: &Json<'_>| json.text().and_then(|text| BASE64_STANDARD.decode(text).ok());
        let sig = fields.any("sig")?;
        let sig = match (fields.text("alg")?, sig) {
            ("ed25519", sig) => ed25519(sig).map(Sig::Ed25519),
            ("ml-dsa-44", sig) => one(sig).and_then(|bytes| bytes.try_into().ok()).map(Sig::MlDsa44),
            ("ed25519+ml-dsa-44", Json::List(both)) if both.len() == 2 => ed25519(&both[0])
                .zip(one(&both[1]).and_then(|bytes| bytes.try_into().ok()))
                .map(|(a, b)| Sig::Hybrid(a, b)),
            ("ed25519+ml-dsa-44", _) => None,
            _ => {
                let wants = "must be `ed25519`, `ml-dsa-44` or `ed25519+ml-dsa-44`";
                return Err(Misfit { member: "alg", wants });
            }
        };
        let approval =
            Self { signer: signer.to_owned(), sig: sig.ok_or(bad)?, signed_at: fields.whole("signed_at")? };
        fields.end("approval")?;
        Ok(approval)
    }

    /// An Ed25519 signer's approval within a record.
    pub(crate) fn quick(cursor: &mut Cursor<'_>) -> Option<Self> {
        cursor.literal(r#"{"alg":"ed25519","sig":""#)?;
        let sig = decode_ed25519(cursor.take(88)?)?;
        cursor.literal(r#"","signed_at":"#)?;
        let signed_at = cursor.whole()?;
        cursor.literal(r#","signer":"#)?;
        let signer = cursor.text().filter(|signer| is_signer_id(signer))?;
        cursor.literal("}")?;
        Some(Self { signer: signer.into_owned(), sig: Sig::Ed25519(sig), signed_at })
    }

    pub fn canonical(&self) -> String {
        let mut out = String::with_capacity(256);
        self.write(&mut out);
        out
    }

    pub(crate) fn write(&self, out: &mut String) {
        let (before, first, second, after) = match &self.sig {
            Sig::Ed25519(sig) => (r#"{"alg":"ed25519","sig":""#, &sig[..], None, "\""),
            Sig::MlDsa44(sig) => (r#"{"alg":"ml-dsa-44","sig":""#, &sig[..], None, "\""),
            Sig::Hybrid(a, b) => (r#"{"alg":"ed25519+ml-dsa-44","sig":[""#, &a[..], Some(&b[..]), "\"]"),
        };
        out.push_str(before);
        BASE64_STANDARD.encode_string(first, out);
        if let Some(second) = second {
            out.push_str("\",\"");
            BASE64_STANDARD.encode_string(second, out);
        }
        out.push_str(after);
        let _ = write!(out, r#","signed_at":{},"signer":"{}"}}"#, self.signed_at, self.signer);
    }

    /// Checks the signature against the signer's keys in the set in force or, where the payload changes the
    /// set, in the proposed one. Costly, and in need of no state but the sets: callers do it in parallel.
    pub fn check(
        self,
        payload_b3: B3,
        in_force: &SignerSet,
        proposed: Option<&SignerSet>,
    ) -> Result<CheckedApproval, ApprovalError> {
        let by = self.signed_by(payload_b3, in_force, proposed)?;
        Ok(CheckedApproval { by, approval: self, payload_b3 })
    }

    fn signed_by(
        &self,
        payload_b3: B3,
        in_force: &SignerSet,
        proposed: Option<&SignerSet>,
    ) -> Result<Arc<Signer>, ApprovalError> {
        let mut failed = ApprovalError::RevokedKey;
        let message = approval_message(payload_b3);
        for signer in self.named(in_force, proposed) {
            if self.sig.is_by(&signer.keys, message.as_bytes()) {
                return Ok(Arc::clone(signer));
            }
            failed = ApprovalError::InvalidSig;
        }
        Err(failed)
    }

    /// Whoever has the signer's name, in the set in force first.
    pub(crate) fn named<'a>(
        &'a self,
        in_force: &'a SignerSet,
        proposed: Option<&'a SignerSet>,
    ) -> impl Iterator<Item = &'a Arc<Signer>> {
        [Some(in_force), proposed].into_iter().flatten().filter_map(|set| set.signer(&self.signer))
    }
}

/// An approval to be checked.
#[derive(Clone, Copy, Debug)]
pub struct Unchecked<'a> {
    pub approval: &'a Approval,
    pub payload_b3: B3,
    /// The set that the payload proposes, if it does.
    pub proposed: Option<&'a SignerSet>,
}

/// What [`Approval::check`] says of each: Ed25519 signatures take less time together than one by one.
pub fn check_all(
    given: &[Unchecked<'_>],
    in_force: &SignerSet,
) -> Vec<Result<CheckedApproval, ApprovalError>> {
    let checked = |(it, by): (&Unchecked<'_>, Result<_, _>)| {
        Ok(CheckedApproval { by: by?, approval: it.approval.clone(), payload_b3: it.payload_b3 })
    };
    given.iter().zip(signed_by_all(given, in_force)).map(checked).collect()
}

pub(crate) fn signed_by_all(
    given: &[Unchecked<'_>],
    in_force: &SignerSet,
) -> Vec<Result<Arc<Signer>, ApprovalError>> {
    let messages: Vec<String> = given.iter().map(|it| approval_message(it.payload_b3)).collect();
    let plain = given.iter().zip(&messages).map(|(it, message)| {
        let signer = it.approval.named(in_force, it.proposed).next()?;
        let (key, signature) = it.approval.sig.ed25519(&signer.keys)?;
        Some((signer, Signed { key, message: message.as_bytes(), signature }))
    });
    let plain: Vec<Option<(&Arc<Signer>, Signed<'_>)>> = plain.collect();
    let signed: Vec<Signed<'_>> = plain.iter().flatten().map(|(_, signed)| *signed).collect();
    let mut good = ron_ed25519::verify_all(&signed).into_iter();
    let one = |(it, plain): (&Unchecked<'_>, Option<(&Arc<Signer>, _)>)| {
        let good = plain.and_then(|(signer, _)| good.next()?.then(|| Arc::clone(signer)));
        // What is of another kind, or not good, is looked at by itself.
        good.map_or_else(|| it.approval.signed_by(it.payload_b3, in_force, it.proposed), Ok)
    };
    given.iter().zip(plain).map(one).collect()
}

impl Sig {
    /// A hybrid signer needs both signatures, any other exactly its own.
    fn is_by(&self, keys: &[PublicKey], message: &[u8]) -> bool {
        let key = |algorithm| keys.iter().find(|key| key.algorithm() == algorithm);
        let (ed, ml) = (key(Algorithm::Ed25519), key(Algorithm::MlDsa44));
        match (self, ed, ml) {
            (Sig::Ed25519(sig), Some(ed), None) => ed.verify(message, sig.as_slice()),
            (Sig::MlDsa44(sig), None, Some(ml)) => ml.verify(message, sig.as_slice()),
            (Sig::Hybrid(a, b), Some(ed), Some(ml)) => {
                ed.verify(message, a.as_slice()) && ml.verify(message, b.as_slice())
            }
            _ => false,
        }
    }

    /// What there is to check if both are Ed25519 alone.
    fn ed25519<'a>(&'a self, keys: &'a [PublicKey]) -> Option<(&'a ron_ed25519::Key, &'a [u8; 64])> {
        match (self, keys) {
            (Sig::Ed25519(sig), [PublicKey::Ed25519(key)]) => Some((key, sig)),
            _ => None,
        }
    }
}

fn ed25519(json: &Json<'_>) -> Option<[u8; 64]> {
    decode_ed25519(json.text()?.as_bytes())
}

fn decode_ed25519(text: &[u8]) -> Option<[u8; 64]> {
    // Base64 is decoded in threes, and 66 is the next multiple.
    let mut bytes = [0; 66];
    let length = BASE64_STANDARD.decode_slice(text, &mut bytes).ok()?;
    bytes.first_chunk().copied().filter(|_| length == 64)
}

/// Why bytes are no approval; all of it is `malformed`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApprovalFormatError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("{0}")]
    Misfit(#[from] Misfit),
}

/// An approval whose signature is its signer's over this payload. Whether it counts is for the quorum to say,
/// again and again, for the set may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedApproval {
    pub(crate) approval: Approval,
    pub(crate) payload_b3: B3,
    /// As whom it was checked.
    pub(crate) by: Arc<Signer>,
}

impl CheckedApproval {
    pub fn approval(&self) -> &Approval {
        &self.approval
    }

    pub fn payload_b3(&self) -> B3 {
        self.payload_b3
    }

    /// Whether it counts in a set at a time: the same keys under the same name, not ended, with the role.
    pub(crate) fn counts_in(&self, set: &SignerSet, at: u64) -> Result<(), ApprovalError> {
        let signer = set.signer(&self.approval.signer).ok_or(ApprovalError::RevokedKey)?;
        if !Arc::ptr_eq(signer, &self.by) && signer.keys != self.by.keys {
            return Err(ApprovalError::RevokedKey);
        }
        if signer.not_after.is_some_and(|end| at > end) {
            return Err(ApprovalError::Expired);
        }
        if signer.is_approver() { Ok(()) } else { Err(ApprovalError::RoleMissing) }
    }
}
