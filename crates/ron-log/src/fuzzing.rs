//! Doors for tests and fuzz targets: the quick and the general reader of the same bytes, side by side.

use crate::entry::{EntryError, EntryRecord};
use crate::payload::{Payload, PayloadError};

/// What the quick reader makes of a record, if it takes it, and what the general one says.
pub fn record(bytes: &[u8]) -> (Option<EntryRecord>, Result<EntryRecord, EntryError>) {
    (EntryRecord::quick(bytes), EntryRecord::general(bytes))
}

/// The same of a payload.
pub fn payload(bytes: &[u8]) -> (Option<Payload>, Result<Payload, PayloadError>) {
    (Payload::quick(bytes), Payload::general(bytes))
}
