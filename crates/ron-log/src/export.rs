//! The export: a whole log in one file that can be written and checked as it streams.
//!
//! A header line, then frames (a kind, a length of 32 bits, bytes), in this order: the trust roots; the log's
//! key; of a pruned log its manifests, the pruned changes of the signer set, the hashes of the pruned leaves, and
//! the snapshot it begins with; each
//! entry's record and payload; a checkpoint wherever the tree has its size, and always after the last entry; at
//! last a BLAKE3 hash over every byte before it.

use crate::hash::B3;
use crate::note::NoteKey;
use crate::roots::TrustRoots;
use crate::tree::Hash;
use crate::verify::{Fault, FaultKind, Signatures, Verifier};

pub const EXPORT_HEADER: &[u8] = b"ron.registry.export/1\n";

/// Largest frame: a state with all its items.
pub const FRAME_MAX: u32 = 1 << 30;

/// What a frame holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    Roots,
    LogKey,
    PruneManifest,
    PrunedLeaves,
    SnapshotNote,
    SnapshotState,
    Record,
    Payload,
    Checkpoint,
    End,
}

const KINDS: [(FrameKind, u8); 10] = [
    (FrameKind::Roots, b'R'),
    (FrameKind::LogKey, b'K'),
    (FrameKind::PruneManifest, b'M'),
    (FrameKind::PrunedLeaves, b'H'),
    (FrameKind::SnapshotNote, b'N'),
    (FrameKind::SnapshotState, b'S'),
    (FrameKind::Record, b'E'),
    (FrameKind::Payload, b'P'),
    (FrameKind::Checkpoint, b'C'),
    (FrameKind::End, b'Z'),
];

/// Writes an export; each call gives the bytes to write next.
#[derive(Debug)]
pub struct ExportWriter {
    hasher: blake3::Hasher,
}

impl ExportWriter {
    /// Begins with the header, the roots and the log's key.
    pub fn begin(roots: &TrustRoots, log: &NoteKey) -> (Self, Vec<u8>) {
        let mut writer = Self { hasher: blake3::Hasher::new() };
        writer.hasher.update(EXPORT_HEADER);
        let mut bytes = EXPORT_HEADER.to_vec();
        bytes.extend(writer.frame(FrameKind::Roots, roots.canonical().as_bytes()));
        bytes.extend(writer.frame(FrameKind::LogKey, log.to_string().as_bytes()));
        (writer, bytes)
    }

    /// A frame, in the order the module's head gives.
    pub fn frame(&mut self, kind: FrameKind, content: &[u8]) -> Vec<u8> {
        let bytes = [frame_head(kind, content.len()).as_slice(), content].concat();
        self.hasher.update(&bytes);
        bytes
    }

    /// The last frame.
    pub fn end(mut self) -> Vec<u8> {
        let head = frame_head(FrameKind::End, 32);
        self.hasher.update(&head);
        [head.as_slice(), self.hasher.finalize().as_bytes()].concat()
    }
}

fn frame_head(kind: FrameKind, length: usize) -> [u8; 5] {
    let (_, byte) = KINDS.iter().find(|(known, _)| *known == kind).expect("every kind has a byte");
    let length = u32::try_from(length).ok().filter(|length| *length <= FRAME_MAX);
    let [a, b, c, d] = length.expect("a frame is smaller").to_be_bytes();
    [*byte, a, b, c, d]
}

/// Takes an export apart, however its bytes arrive.
#[derive(Debug, Default)]
pub struct ExportReader {
    buffer: Vec<u8>,
    /// Bytes of the buffer that are read already.
    read: usize,
    hasher: blake3::Hasher,
    begun: bool,
    ended: bool,
}

/// Bytes that are no export, or not all of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ExportError(pub &'static str);

impl ExportReader {
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.read);
        self.read = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next frame, if all of it has arrived. The end is given once its hash is good.
    pub fn next_frame(&mut self) -> Result<Option<(FrameKind, &[u8])>, ExportError> {
        if !self.begun {
            let Some(head) = self.buffer.get(..EXPORT_HEADER.len()) else { return Ok(None) };
            if head != EXPORT_HEADER {
                return Err(ExportError("it does not begin as an export"));
            }
            self.hasher.update(head);
            self.read += head.len();
            self.begun = true;
        }
        let rest = &self.buffer[self.read..];
        if self.ended {
            return if rest.is_empty() { Ok(None) } else { Err(ExportError("more follows its end")) };
        }
        let Some((head, rest)) = rest.split_first_chunk::<5>() else { return Ok(None) };
        let [byte, length @ ..] = *head;
        let known = KINDS.iter().find(|(_, known)| *known == byte);
        let (kind, _) = known.ok_or(ExportError("a frame of no known kind"))?;
        let length = u32::from_be_bytes(length);
        if length > FRAME_MAX || (*kind == FrameKind::End && length != 32) {
            return Err(ExportError("a frame of no possible length"));
        }
        let Some(content) = rest.get(..length as usize) else { return Ok(None) };
        self.hasher.update(head);
        if *kind == FrameKind::End {
            if self.hasher.finalize().as_bytes() != content {
                return Err(ExportError("its last hash is not that of its bytes"));
            }
            self.ended = true;
        } else {
            self.hasher.update(content);
        }
        self.read += 5 + content.len();
        Ok(Some((*kind, content)))
    }

    /// Whether the end was reached.
    pub fn ended(&self) -> bool {
        self.ended && self.read == self.buffer.len()
    }
}

/// Checks an export as it streams.
#[derive(Debug)]
pub struct ExportVerifier {
    reader: ExportReader,
    roots_b3: B3,
    given: Option<NoteKey>,
    witnesses: (Vec<NoteKey>, u64),
    signatures: Signatures,
    verifier: Option<Verifier>,
    roots: Option<TrustRoots>,
    min_version: u64,
    /// What must come second of two.
    held: Option<(FrameKind, Vec<u8>)>,
    broken: bool,
    faults: Vec<Fault>,
}

impl ExportVerifier {
    /// `roots_b3` pins the roots. Without a log key of the caller's own, the file's is taken: then signed notes
    /// show that the file is whole, not whose it is.
    pub fn new(roots_b3: B3, log: Option<NoteKey>, signatures: Signatures) -> Self {
        Self {
            reader: ExportReader::default(),
            roots_b3,
            given: log,
            witnesses: (Vec::new(), 0),
            signatures,
            verifier: None,
            roots: None,
            min_version: 0,
            held: None,
            broken: false,
            faults: Vec::new(),
        }
    }

    /// Also checks cosignatures, as [`Verifier::witnessed_by`] says.
    #[must_use]
    pub fn witnessed_by(mut self, witnesses: Vec<NoteKey>, quorum: u64) -> Self {
        self.witnesses = (witnesses, quorum);
        self
    }

    pub fn push(&mut self, bytes: &[u8]) {
        if self.broken {
            return;
        }
        let mut reader = std::mem::take(&mut self.reader);
        reader.push(bytes);
        loop {
            match reader.next_frame() {
                Ok(Some((kind, content))) => {
                    if let Err(ExportError(what)) = self.frame(kind, content) {
                        self.break_off(what);
                        break;
                    }
                }
                Ok(None) => break,
                Err(ExportError(what)) => {
                    self.break_off(what);
                    break;
                }
            }
        }
        self.reader = reader;
    }

    /// The check that the frames drive, once the roots and the key are known.
    pub fn verifier(&self) -> Option<&Verifier> {
        self.verifier.as_ref()
    }

    /// Every fault; none means that the file is whole and good.
    pub fn finish(mut self) -> Vec<Fault> {
        if !self.broken && !self.reader.ended() {
            self.break_off("it ends too early");
        }
        if let Some(verifier) = self.verifier.as_mut().filter(|_| !self.broken)
            && verifier.signed() < verifier.tree().size()
        {
            // Approvals are public: without the log's word, what was withdrawn could be shown as committed.
            verifier.fault(verifier.signed(), FaultKind::Unsigned);
        }
        let mut faults = self.verifier.take().map(Verifier::finish).unwrap_or_default();
        faults.append(&mut self.faults);
        faults
    }

    fn break_off(&mut self, what: &'static str) {
        let version = self.verifier.as_ref().map_or(0, Verifier::next_version);
        self.faults.push(Fault { version, kind: FaultKind::Export(what) });
        self.broken = true;
    }

    fn frame(&mut self, kind: FrameKind, content: &[u8]) -> Result<(), ExportError> {
        let Some(verifier) = &mut self.verifier else { return self.preamble(kind, content) };
        if let Some((first, before)) = self.held.take() {
            match (first, kind) {
                (FrameKind::Record, FrameKind::Payload)
                    if verifier.state().is_none() && self.min_version > 0 =>
                {
                    verifier.early_entry(&before, content);
                }
                (FrameKind::Record, FrameKind::Payload) => verifier.entry(&before, content),
                (FrameKind::SnapshotNote, FrameKind::SnapshotState) => {
                    if verifier.state().is_none() {
                        verifier.begin(&before, content);
                    } else {
                        verifier.snapshot(&before, content);
                    }
                }
                _ => return Err(ExportError("a frame stands where another must")),
            }
            return Ok(());
        }
        let empty = verifier.tree().size() == 0;
        match kind {
            FrameKind::PruneManifest if empty => {
                self.min_version = verifier.prune_manifest(content).unwrap_or(0).max(self.min_version);
            }
            FrameKind::PrunedLeaves if verifier.state().is_none() => {
                let (hashes, rest) = content.as_chunks::<32>();
                let fits = verifier.tree().size() + hashes.len() as u64 <= self.min_version;
                if !rest.is_empty() || !fits {
                    return Err(ExportError("pruned leaves that no manifest covers"));
                }
                hashes.iter().for_each(|leaf: &Hash| verifier.pruned_leaf(*leaf));
            }
            FrameKind::Record if verifier.state().is_some() || empty => {
                self.held = Some((kind, content.to_vec()));
            }
            FrameKind::SnapshotNote if verifier.tree().size() >= self.min_version && !empty => {
                self.held = Some((kind, content.to_vec()));
            }
            FrameKind::Checkpoint if !empty => verifier.checkpoint(content),
            FrameKind::End if !empty => {}
            _ => return Err(ExportError("a frame stands where another must")),
        }
        Ok(())
    }

    fn preamble(&mut self, kind: FrameKind, content: &[u8]) -> Result<(), ExportError> {
        match (kind, self.roots.take()) {
            (FrameKind::Roots, None) => {
                let roots = TrustRoots::parse(content).ok().filter(|_| B3::of(content) == self.roots_b3);
                self.roots = Some(roots.ok_or(ExportError("its trust roots are not the ones given"))?);
            }
            (FrameKind::LogKey, Some(roots)) => {
                let text = std::str::from_utf8(content).ok();
                let key = text.and_then(NoteKey::parse).ok_or(ExportError("its log key is none"))?;
                if self.given.as_ref().is_some_and(|given| *given != key) {
                    return Err(ExportError("its log key is not the one given"));
                }
                let (witnesses, quorum) = std::mem::take(&mut self.witnesses);
                let verifier = Verifier::new(roots, Some(key), self.signatures);
                self.verifier = Some(verifier.witnessed_by(witnesses, quorum));
            }
            _ => return Err(ExportError("a frame stands where another must")),
        }
        Ok(())
    }
}
