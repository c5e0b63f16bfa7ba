//! Signed notes (C2SP signed-note): text, and signatures under it by named keys.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use sha2::{Digest as _, Sha256};

/// Largest note that is read, and most signatures on it.
pub const NOTE_MAX: usize = 256 << 10;
pub const SIGNATURES_MAX: usize = 64;

/// A note as it stands: nothing about it is checked but its form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// What is signed, with its last newline.
    pub text: String,
    pub signatures: Vec<NoteSignature>,
}

/// One signature line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoteSignature {
    pub name: String,
    /// Says which of the name's keys signed.
    pub id: [u8; 4],
    pub bytes: Vec<u8>,
}

/// A key that notes are checked with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoteKey {
    pub name: String,
    pub kind: NoteKeyKind,
    pub key: VerifyingKey,
}

/// What a key's signatures say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoteKeyKind {
    /// The text, as it is.
    Ed25519,
    /// That a witness saw the checkpoint at a time.
    Cosignature,
}

/// Why a note is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoteError {
    #[error("not a signed note")]
    Malformed,
    #[error("the signature by {0} is wrong")]
    WrongSignature(String),
    #[error("{0} has not signed it")]
    Unsigned(String),
}

/// Whether a note may call a key so.
pub fn is_key_name(name: &str) -> bool {
    (1..=255).contains(&name.len())
        && !name.contains('+')
        && !name.chars().any(|c| c.is_whitespace() || c.is_control())
}

impl Note {
    pub fn parse(bytes: &[u8]) -> Result<Self, NoteError> {
        let text = std::str::from_utf8(bytes).ok().ok_or(NoteError::Malformed)?;
        if text.len() > NOTE_MAX || text.bytes().any(|byte| byte < 0x20 && byte != b'\n') {
            return Err(NoteError::Malformed);
        }
        // The last empty line parts text and signatures; the text keeps its own newline.
        let end = text.rfind("\n\n").ok_or(NoteError::Malformed)?;
        let signatures = signature_lines(&text[end + 2..])?;
        Ok(Self { text: text[..=end].to_owned(), signatures })
    }

    /// A note with one signature by a plain key.
    pub fn sign(text: &str, name: &str, key: &SigningKey) -> Self {
        let public = NoteKey::ed25519(name, key.verifying_key());
        let bytes = key.sign(text.as_bytes()).to_bytes().to_vec();
        let signature = NoteSignature { name: name.to_owned(), id: public.id(), bytes };
        Self { text: text.to_owned(), signatures: vec![signature] }
    }

    /// Checks that a key signed; with what a cosignature's time is. Every signature by the key must be good.
    pub fn verify(&self, key: &NoteKey) -> Result<Option<u64>, NoteError> {
        let id = key.id();
        let mut by = self.signatures.iter().filter(|line| line.name == key.name && line.id == id).peekable();
        if by.peek().is_none() {
            return Err(NoteError::Unsigned(key.name.clone()));
        }
        let mut time = None;
        for line in by {
            time = key.check(&self.text, &line.bytes).ok_or(NoteError::WrongSignature(key.name.clone()))?;
        }
        Ok(time)
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.text)?;
        self.signatures.iter().try_for_each(|line| write!(f, "{line}"))
    }
}

impl std::fmt::Display for NoteSignature {
    /// The line, with its newline.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = [&self.id, self.bytes.as_slice()].concat();
        writeln!(f, "\u{2014} {} {}", self.name, BASE64_STANDARD.encode(bytes))
    }
}

/// Reads signature lines, such as a witness answers.
pub fn signature_lines(text: &str) -> Result<Vec<NoteSignature>, NoteError> {
    let line = |line: &str| {
        let (name, encoded) = line.strip_prefix("\u{2014} ")?.split_once(' ')?;
        let bytes = BASE64_STANDARD.decode(encoded).ok()?;
        let (id, bytes) = bytes.split_first_chunk::<4>()?;
        (is_key_name(name) && !bytes.is_empty()).then(|| NoteSignature {
            name: name.to_owned(),
            id: *id,
            bytes: bytes.to_vec(),
        })
    };
    let lines = text.strip_suffix('\n').ok_or(NoteError::Malformed)?;
    let found = lines.split('\n').take(SIGNATURES_MAX + 1).map(line).collect::<Option<Vec<_>>>();
    found.filter(|found| found.len() <= SIGNATURES_MAX).ok_or(NoteError::Malformed)
}

impl NoteKey {
    pub fn ed25519(name: &str, key: VerifyingKey) -> Self {
        Self { name: name.to_owned(), kind: NoteKeyKind::Ed25519, key }
    }

    pub fn cosignature(name: &str, key: VerifyingKey) -> Self {
        Self { name: name.to_owned(), kind: NoteKeyKind::Cosignature, key }
    }

    fn type_and_key(&self) -> [u8; 33] {
        let mut bytes = [0; 33];
        bytes[0] = match self.kind {
            NoteKeyKind::Ed25519 => 1,
            NoteKeyKind::Cosignature => 4,
        };
        bytes[1..].copy_from_slice(self.key.as_bytes());
        bytes
    }

    pub fn id(&self) -> [u8; 4] {
        let mut hasher = Sha256::new();
        hasher.update(self.name.as_bytes());
        hasher.update(b"\n");
        hasher.update(self.type_and_key());
        *hasher.finalize().first_chunk().expect("a hash is longer")
    }

    /// Reads a verifier-key line: name, id and key, joined by `+`.
    pub fn parse(line: &str) -> Option<Self> {
        let (name, rest) = line.split_once('+')?;
        let (id, encoded) = rest.split_once('+')?;
        let bytes = BASE64_STANDARD.decode(encoded).ok()?;
        let (kind, bytes) = bytes.split_first()?;
        let kind = match kind {
            1 => NoteKeyKind::Ed25519,
            4 => NoteKeyKind::Cosignature,
            _ => return None,
        };
        let crate::key::PublicKey::Ed25519(key) = crate::key::PublicKey::ed25519(bytes).ok()? else {
            return None;
        };
        let found = Self { name: name.to_owned(), kind, key: *key.verifying_key() };
        let mut written = [0; 8];
        crate::hash::hex(&found.id(), &mut written);
        (is_key_name(name) && id.as_bytes() == written).then_some(found)
    }

    /// The time of a cosignature, nothing of a plain one, or none if it is wrong.
    fn check(&self, text: &str, signature: &[u8]) -> Option<Option<u64>> {
        let verify = |message: &[u8], signature: &[u8]| {
            let signature = ed25519_dalek::Signature::from_slice(signature).ok()?;
            self.key.verify_strict(message, &signature).ok()
        };
        match self.kind {
            NoteKeyKind::Ed25519 => verify(text.as_bytes(), signature).map(|()| None),
            NoteKeyKind::Cosignature => {
                let (time, signature) = signature.split_first_chunk::<8>()?;
                let time = u64::from_be_bytes(*time);
                verify(crate::checkpoint::cosigned(text, time).as_bytes(), signature).map(|()| Some(time))
            }
        }
    }
}

impl std::fmt::Display for NoteKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut id = [0; 8];
        crate::hash::hex(&self.id(), &mut id);
        let id = std::str::from_utf8(&id).expect("hexadecimal digits");
        write!(f, "{}+{id}+{}", self.name, BASE64_STANDARD.encode(self.type_and_key()))
    }
}
