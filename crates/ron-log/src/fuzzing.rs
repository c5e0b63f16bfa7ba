//! Doors for tests and fuzz targets: the quick and the general reader of the same bytes, side by side.

use crate::approval::Approval;
use crate::entry::{EntryError, EntryRecord};
use crate::json::Json;
use crate::payload::{Payload, PayloadError, Proposal};
use crate::signers::SIGNERS_MAX;

/// What the quick reader makes of a record, if it takes it, and what the general one says.
pub fn record(bytes: &[u8]) -> (Option<EntryRecord>, Result<EntryRecord, EntryError>) {
    (EntryRecord::quick(bytes), EntryRecord::general(bytes))
}

/// The same of a payload.
pub fn payload(bytes: &[u8]) -> (Option<Payload>, Result<Payload, PayloadError>) {
    (Payload::quick(bytes), Payload::general(bytes))
}

/// The same of a payload with approvals beside it.
pub fn with_approvals(bytes: &[u8]) -> (Option<Sent>, Option<Sent>) {
    let general = || {
        let json =
            Json::parse_around(bytes).ok().filter(|json| json.members().is_some_and(|all| all.len() == 2))?;
        let list = json.member("approvals")?.list().filter(|list| list.len() <= SIGNERS_MAX)?;
        let approvals = list.iter().map(Approval::from_json).collect::<Result<_, _>>().ok()?;
        Some((Proposal::from_json(json.member("payload")?).ok()?, approvals))
    };
    (Proposal::quick_with_approvals(bytes), general())
}

type Sent = (Proposal, Vec<Approval>);
