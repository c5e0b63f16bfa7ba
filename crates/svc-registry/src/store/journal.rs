//! Batches on their way into the database: each is flushed here, in one piece, and is durable with that.
//!
//! The database then need not be written with every batch, which would cost it many pages for a little change. A batch
//! is a record of whole pages: magic, length, sequence number, hash, body. The database keeps the number of the last
//! batch that is in it. The journal has two halves: while the database is flushed up to the end of one, batches go into
//! the other, and once the database has everything, the journal begins again from its first page. A start reads the
//! records of both halves until the first that is none and does what is not in the database yet.

use super::write::Changes;
use super::{Gone, StoreError, head_bytes, head_of};
use redb::StorageBackend;
use ron_log::{Approval, B3, Entry, Head, Proposal};
use std::sync::Arc;

/// Bytes of a journal, all of them there from the beginning.
pub(super) const SIZE: u64 = 16 << 20;
pub(super) const PAGE: usize = 4096;
const CUT_OFF: &str = "a record before its last one is damaged";
const MAGIC: [u8; 8] = *b"ron-jrn2";
/// Magic, length, number, hash.
const HEADER: usize = 8 + 8 + 8 + 32;

/// Where the next batch goes.
#[derive(Debug)]
pub(super) struct Journal {
    medium: Arc<dyn StorageBackend>,
    /// Of which store it is: records of another are none.
    store: B3,
    /// The number of the next batch.
    next: u64,
    /// Bytes of a half.
    half: u64,
    /// Where the half begins that batches go into, and where the next one goes.
    from: u64,
    at: u64,
    /// The last batch of the other half.
    other: u64,
    pages: Pages,
}

impl Journal {
    /// Reads the journal of a store that has all batches up to a number, and gives each later one to `act`.
    pub(super) fn recover(
        medium: Arc<dyn StorageBackend>,
        store: B3,
        last: u64,
        mut act: impl FnMut(u64, Head, &Changes) -> Result<(), StoreError>,
    ) -> Result<Journal, StoreError> {
        let half = medium.len().map_err(StoreError::of_io)? / 2;
        let mut journal = Journal {
            medium,
            store,
            next: last + 1,
            half,
            from: 0,
            at: 0,
            other: 0,
            pages: Pages::default(),
        };
        let first = |at| Ok::<_, StoreError>(journal.record(at)?.map(|(number, ..)| (number, at)));
        let mut runs = [first(0)?, first(half)?];
        runs.sort();
        for (number, at) in runs.into_iter().flatten() {
            if number > journal.next {
                let begins = journal.next == last + 1;
                return Err(damaged(if begins {
                    "it begins after the database's last change"
                } else {
                    CUT_OFF
                }));
            }
            journal.run(at, &mut act)?;
        }
        journal.nothing_beyond()?;
        Ok(journal)
    }

    /// Gives what is new of the records from one on that follow each other.
    fn run(
        &mut self,
        mut at: u64,
        act: &mut impl FnMut(u64, Head, &Changes) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let mut before = None;
        while let Some((number, body, len)) = self.record(at)? {
            if before.is_some_and(|before| number != before + 1) {
                break;
            }
            if number == self.next {
                let (head, changes) = decode(&body).ok_or_else(|| damaged("a batch in it makes no sense"))?;
                act(number, head, &changes)?;
                self.next += 1;
            }
            before = Some(number);
            at += len;
        }
        if self.begun(at)? == Some(self.next) {
            tracing::warn!(
                batch = self.next,
                "the journal's last record is not whole: what it had was never acknowledged, or the disk has lost it"
            );
        }
        Ok(())
    }

    /// The number of the batch whose record a page begins, whatever is behind its header.
    fn begun(&self, at: u64) -> Result<Option<u64>, StoreError> {
        let mut header = [0; HEADER];
        if at + HEADER as u64 > self.medium.len().map_err(StoreError::of_io)? {
            return Ok(None);
        }
        self.medium.read(at, &mut header).map_err(StoreError::of_io)?;
        let mut fields = Fields(&header);
        let magic = fields.array::<8>().filter(|magic| *magic == MAGIC);
        Ok(magic.and_then(|_| fields.number()).and_then(|_len| fields.number()))
    }

    /// What is beside the records that were read was never flushed, or is older; a newer one would be cut off from the
    /// others.
    fn nothing_beyond(&self) -> Result<(), StoreError> {
        let mut at = 0;
        while at + PAGE as u64 <= 2 * self.half {
            at += match self.record(at)? {
                Some((number, ..)) if number >= self.next => {
                    return Err(damaged(CUT_OFF));
                }
                Some((_, _, len)) => len,
                None => PAGE as u64,
            };
        }
        Ok(())
    }

    /// The record at a page: number, body, bytes of its pages.
    fn record(&self, at: u64) -> Result<Option<(u64, Vec<u8>, u64)>, StoreError> {
        let end = self.medium.len().map_err(StoreError::of_io)?;
        let mut header = [0; HEADER];
        if at + HEADER as u64 > end {
            return Ok(None);
        }
        self.medium.read(at, &mut header).map_err(StoreError::of_io)?;
        let mut fields = Fields(&header);
        let (Some(magic), Some(len), Some(number), Some(hash)) =
            (fields.array::<8>(), fields.number(), fields.number(), fields.array::<32>())
        else {
            return Ok(None);
        };
        if magic != MAGIC || len > end || at + pages(len) > end {
            return Ok(None);
        }
        let mut body = vec![0; len as usize];
        self.medium.read(at + HEADER as u64, &mut body).map_err(StoreError::of_io)?;
        Ok((self.hash(number, &body) == B3(hash)).then_some((number, body, pages(len))))
    }

    fn hash(&self, number: u64, body: &[u8]) -> B3 {
        let mut hasher = blake3::Hasher::new_keyed(&self.store.0);
        // In this order: what is hashed from its beginning is hashed several pieces at a time.
        hasher.update(body).update(&number.to_be_bytes());
        B3(*hasher.finalize().as_bytes())
    }

    /// The number of the last batch.
    pub(super) fn last(&self) -> u64 {
        self.next - 1
    }

    /// Whether a half is large enough for a batch.
    pub(super) fn can_take(&self, body: &[u8]) -> bool {
        pages(body.len() as u64) <= self.half
    }

    /// Makes room for a batch that it can take, in this half or in the other, whose batches must be flushed in the database
    /// for that; `flushed` is the last one of which that is known. False if there is none.
    pub(super) fn make_room(&mut self, body: &[u8], flushed: u64) -> bool {
        if flushed >= self.last() {
            self.begin_again();
        } else if self.at + pages(body.len() as u64) <= self.from + self.half {
            return true;
        } else if flushed >= self.other {
            self.from = self.half - self.from;
            (self.at, self.other) = (self.from, self.last());
        } else {
            return false;
        }
        true
    }

    /// The last batch of the half that nothing goes into now.
    pub(super) fn other(&self) -> u64 {
        self.other
    }

    /// Writes a batch, for which there must be room, in one piece: by its hash a part of it is no record.
    pub(super) fn write(&mut self, body: &[u8]) -> std::io::Result<()> {
        let hash = self.hash(self.next, body);
        let record = self.pages.of(pages(body.len() as u64) as usize);
        let mut rest = &mut *record;
        let number = |number: u64| number.to_be_bytes();
        for part in [&MAGIC[..], &number(body.len() as u64), &number(self.next), &hash.0, body] {
            let (place, after) = rest.split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = after;
        }
        rest.fill(0);
        self.medium.write(self.at, record)
    }

    /// Makes the batch durable that was written, and gives its number.
    pub(super) fn flush(&mut self, body: &[u8]) -> std::io::Result<u64> {
        self.medium.sync_data()?;
        self.at += pages(body.len() as u64);
        self.next += 1;
        Ok(self.next - 1)
    }

    /// All that was written is in the database and flushed there.
    pub(super) fn begin_again(&mut self) {
        (self.from, self.at, self.other) = (0, 0, 0);
    }
}

pub(super) fn damaged(what: &str) -> StoreError {
    let advice = "make the folder anew from an export with `ron registry import`, or from a copy";
    StoreError::Damaged(format!("registry.journal is damaged ({what}): {advice}"))
}

/// Memory that begins where a page does, as a file that is written past the system's cache wants it.
#[derive(Debug, Default)]
pub(super) struct Pages(Vec<u8>);

impl Pages {
    /// What is kept for the next time, at most.
    const KEPT: usize = 1 << 20;

    /// So many bytes, of whatever was in them: if they were as many the last time, what was left there then.
    pub(super) fn of(&mut self, len: usize) -> &mut [u8] {
        let whole = len + PAGE;
        if whole > self.0.len() || self.0.len() > Self::KEPT.max(whole) {
            self.0 = vec![0; whole];
        }
        let from = self.0.as_ptr().align_offset(PAGE);
        &mut self.0[from..from + len]
    }
}

/// Bytes of the pages that a body of so many bytes needs.
fn pages(body: u64) -> u64 {
    (HEADER as u64 + body).next_multiple_of(PAGE as u64)
}

/// A batch as bytes: HEAD before it, then each list with its length before it.
pub(super) fn encode(expected: Head, changes: &Changes) -> Vec<u8> {
    let Changes { entries, hashes, proposals, approvals, ended, forgotten } = changes;
    let mut out = Vec::with_capacity(changes.bytes() as usize + 1024);
    out.extend(head_bytes(expected));
    number(&mut out, entries.len() as u64);
    for (entry, proposal) in entries {
        bytes(&mut out, entry.bytes());
        bytes(&mut out, proposal.bytes());
    }
    number(&mut out, hashes.len() as u64);
    for (level, place, hash) in hashes {
        out.push(*level);
        number(&mut out, *place);
        out.extend(hash);
    }
    number(&mut out, proposals.len() as u64);
    for (proposal, received_at, ends_at) in proposals {
        number(&mut out, *received_at);
        number(&mut out, *ends_at);
        bytes(&mut out, proposal.bytes());
    }
    number(&mut out, approvals.len() as u64);
    for (payload, approval) in approvals {
        out.extend(payload.0);
        bytes(&mut out, approval.canonical().as_bytes());
    }
    number(&mut out, ended.len() as u64);
    for (payload, how) in ended {
        out.extend(payload.0);
        let (how, at) = match how {
            None => (0, 0),
            Some((Gone::Expired, at)) => (1, *at),
            Some((Gone::Withdrawn, at)) => (2, *at),
        };
        out.push(how);
        number(&mut out, at);
    }
    number(&mut out, forgotten.len() as u64);
    for payload in forgotten {
        out.extend(payload.0);
    }
    out
}

fn number(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_be_bytes());
}

fn bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    number(out, bytes.len() as u64);
    out.extend(bytes);
}

/// A batch from its bytes; none if they are not one.
pub(super) fn decode(body: &[u8]) -> Option<(Head, Changes)> {
    let mut fields = Fields(body);
    let head = head_of(fields.take(40)?)?;
    let mut changes = Changes::default();
    for _ in 0..fields.number()? {
        let entry = Entry::parse(fields.bytes()?.to_vec()).ok()?;
        let proposal = Proposal::parse_canonical(fields.bytes()?.to_vec()).ok()?;
        changes.entries.push((entry, Arc::new(proposal)));
    }
    for _ in 0..fields.number()? {
        let [level] = fields.array()?;
        changes.hashes.push((level, fields.number()?, fields.array()?));
    }
    for _ in 0..fields.number()? {
        let (received_at, ends_at) = (fields.number()?, fields.number()?);
        let proposal = Proposal::parse_canonical(fields.bytes()?.to_vec()).ok()?;
        changes.proposals.push((Arc::new(proposal), received_at, ends_at));
    }
    for _ in 0..fields.number()? {
        let payload = B3(fields.array()?);
        changes.approvals.push((payload, Approval::parse(fields.bytes()?).ok()?));
    }
    for _ in 0..fields.number()? {
        let (payload, [how], at) = (B3(fields.array()?), fields.array()?, fields.number()?);
        let how = match how {
            0 => None,
            1 => Some((Gone::Expired, at)),
            2 => Some((Gone::Withdrawn, at)),
            _ => return None,
        };
        changes.ended.push((payload, how));
    }
    for _ in 0..fields.number()? {
        changes.forgotten.push(B3(fields.array()?));
    }
    fields.0.is_empty().then_some((head, changes))
}

/// What is left to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(self.array()?))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.number()?;
        self.take(usize::try_from(len).ok()?)
    }
}
