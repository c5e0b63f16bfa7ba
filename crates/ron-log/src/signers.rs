//! The signer set: who may approve, and how many must.

use crate::json::{Fields, Json, JsonError, Misfit};
use crate::key::{Algorithm, PublicKey};
use std::borrow::Cow;
use std::sync::Arc;

/// Most signers of a set; more approvals would not fit a record.
pub const SIGNERS_MAX: usize = 128;

/// Bytes of one quorum's approvals, at most.
const QUORUM_MAX: u64 = 29 << 10;

/// The body of `signers/main`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignerSet {
    threshold: u64,
    allow_minority: bool,
    /// In the order of the document; ids and keys are unique.
    signers: Vec<Arc<Signer>>,
}

/// Someone whose signature counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signer {
    pub id: String,
    /// One, or one of each algorithm: a hybrid signer signs with both.
    pub keys: Vec<PublicKey>,
    pub roles: Vec<Role>,
    /// Unix milliseconds after which it counts no more.
    pub not_after: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Propose,
    Approve,
    Commit,
}

impl SignerSet {
    /// Reads a body in canonical form.
    pub fn parse(body: &str) -> Result<Self, SignersError> {
        Ok(Self::from_json(&Json::parse_canonical(body.as_bytes())?)?)
    }

    pub fn new(threshold: u64, allow_minority: bool, signers: Vec<Signer>) -> Result<Self, Misfit> {
        let set = Self { threshold, allow_minority, signers: signers.into_iter().map(Arc::new).collect() };
        Self::from_json(&Json::Object(set.members()))
    }

    pub(crate) fn from_json(json: &Json<'_>) -> Result<Self, Misfit> {
        let mut fields = Fields::of(json, "signers")?;
        let set = Self::from_fields(&mut fields)?;
        fields.end("signers")?;
        Ok(set)
    }

    /// Takes its members out of an object that has others besides, such as the trust roots.
    pub(crate) fn from_fields(fields: &mut Fields<'_, '_>) -> Result<Self, Misfit> {
        let allow_minority = match fields.optional("allow_minority") {
            None => false,
            Some(Json::Bool(true)) => true,
            Some(_) => return Err(Misfit { member: "allow_minority", wants: "must be true or left out" }),
        };
        let threshold = fields.whole("threshold")?;
        let list = fields.list("signers")?;
        if list.is_empty() || list.len() > SIGNERS_MAX {
            return Err(Misfit { member: "signers", wants: "must be 1 to 128 signers" });
        }
        let signers =
            list.iter().map(|json| Signer::from_json(json).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
        let set = Self { threshold, allow_minority, signers };
        set.check()?;
        Ok(set)
    }

    fn check(&self) -> Result<(), Misfit> {
        for (index, signer) in self.signers.iter().enumerate() {
            let others = &self.signers[..index];
            if others.iter().any(|other| other.id == signer.id) {
                return Err(Misfit { member: "signers", wants: "must name a signer once" });
            }
            // One key under two names would count twice.
            if signer.keys.iter().any(|key| others.iter().any(|other| other.keys.contains(key))) {
                return Err(Misfit { member: "keys", wants: "must not belong to two signers" });
            }
        }
        let approvers = self.approvers();
        if self.threshold == 0 || self.threshold > approvers {
            return Err(Misfit { member: "threshold", wants: "must be 1 to the number of approvers" });
        }
        // A change of the set is recorded with two quorums, and the record must hold them.
        let largest = self.signers.iter().map(|signer| signer.approval_max()).max().unwrap_or(0);
        if self.threshold * largest > QUORUM_MAX {
            return Err(Misfit {
                member: "threshold",
                wants: "must be low enough for a record to hold the quorum",
            });
        }
        if self.threshold * 2 <= approvers && !self.allow_minority {
            return Err(Misfit { member: "threshold", wants: "must be a majority of the approvers" });
        }
        Ok(())
    }

    pub fn threshold(&self) -> u64 {
        self.threshold
    }

    /// How many may approve.
    pub fn approvers(&self) -> u64 {
        self.signers.iter().filter(|signer| signer.roles.contains(&Role::Approve)).count() as u64
    }

    /// A signer that may not approve, if there is one. It is listed and has nothing to do: who may propose and commit
    /// is for capabilities to say.
    pub fn idle(&self) -> Option<&Arc<Signer>> {
        self.signers.iter().find(|signer| !signer.is_approver())
    }

    pub fn signers(&self) -> &[Arc<Signer>] {
        &self.signers
    }

    pub fn signer(&self, id: &str) -> Option<&Arc<Signer>> {
        self.signers.iter().find(|signer| signer.id == id)
    }

    /// Its body in canonical form.
    pub fn canonical(&self) -> String {
        Json::Object(self.members()).canonical()
    }

    pub(crate) fn members(&self) -> Vec<(Cow<'_, str>, Json<'_>)> {
        let mut members = Vec::with_capacity(3);
        if self.allow_minority {
            members.push(("allow_minority".into(), Json::Bool(true)));
        }
        members
            .push(("signers".into(), Json::List(self.signers.iter().map(|signer| signer.json()).collect())));
        members.push(("threshold".into(), Json::Int(self.threshold as i64)));
        members
    }
}

/// Why text is no signer set; all of it is `malformed`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignersError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("{0}")]
    Misfit(#[from] Misfit),
}

impl Signer {
    /// Bytes of its approval in a record, at most.
    fn approval_max(&self) -> u64 {
        let sig = |key: &PublicKey| match key.algorithm() {
            Algorithm::Ed25519 => 92,
            Algorithm::MlDsa44 => 3232,
        };
        96 + self.id.len() as u64 + self.keys.iter().map(sig).sum::<u64>()
    }

    pub fn is_approver(&self) -> bool {
        self.roles.contains(&Role::Approve)
    }

    pub(crate) fn from_json(json: &Json<'_>) -> Result<Self, Misfit> {
        let mut fields = Fields::of(json, "signer")?;
        let id = fields.text("id")?;
        if !is_signer_id(id) {
            return Err(Misfit {
                member: "id",
                wants: "must be 1 to 128 visible ASCII characters, not \" or \\",
            });
        }
        let bad_keys = Misfit { member: "keys", wants: "must be one key, or one of each algorithm" };
        let keys = fields
            .list("keys")?
            .iter()
            .map(|json| json.text().and_then(|text| PublicKey::parse(text).ok()).ok_or(bad_keys.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        match keys.as_slice() {
            [_] => {}
            [a, b] if a.algorithm() != b.algorithm() => {}
            _ => return Err(bad_keys),
        }
        let mut roles = Vec::new();
        for role in fields.list("roles")? {
            let role = match role.text() {
                Some("propose") => Role::Propose,
                Some("approve") => Role::Approve,
                Some("commit") => Role::Commit,
                _ => return Err(Misfit { member: "roles", wants: "must be of propose, approve, commit" }),
            };
            if roles.contains(&role) {
                return Err(Misfit { member: "roles", wants: "must name a role once" });
            }
            roles.push(role);
        }
        let not_after = match fields.optional("not_after") {
            None => None,
            Some(time) => Some(time.whole().ok_or(Misfit { member: "not_after", wants: "must be a time" })?),
        };
        fields.end("signer")?;
        Ok(Self { id: id.to_owned(), keys, roles, not_after })
    }

    fn json(&self) -> Json<'_> {
        let keys = self.keys.iter().map(|key| Json::Text(key.to_string().into())).collect();
        let roles = self.roles.iter().map(|role| {
            Json::Text(Cow::Borrowed(match role {
                Role::Propose => "propose",
                Role::Approve => "approve",
                Role::Commit => "commit",
            }))
        });
        let mut members = vec![
            ("id".into(), Json::Text(Cow::Borrowed(self.id.as_str()))),
            ("keys".into(), Json::List(keys)),
        ];
        if let Some(time) = self.not_after {
            members.push(("not_after".into(), Json::Int(time as i64)));
        }
        members.push(("roles".into(), Json::List(roles.collect())));
        Json::Object(members)
    }
}

/// Plain enough to need no escape in JSON and no quoting in a shell's output.
/// Whether a signer may be called so.
pub fn is_signer_id(id: &str) -> bool {
    (1..=128).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\')
}
