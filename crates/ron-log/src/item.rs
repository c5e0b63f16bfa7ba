//! What the registry governs: items, named by kind and id, with a body of a known shape.

use crate::json::{Json, Misfit};
use crate::signers::SignerSet;

/// Longest kind and id, in bytes.
pub const NAME_MAX: usize = 256;

/// Names an item.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub kind: String,
    pub id: String,
}

impl Key {
    /// The item that says who may approve.
    pub fn signers() -> Self {
        Self { kind: "signers".into(), id: "main".into() }
    }

    pub fn is_signers(&self) -> bool {
        self.kind == "signers"
    }

    pub fn new(kind: &str, id: &str) -> Result<Self, Misfit> {
        let free = kind.strip_prefix("x-").is_some_and(|rest| !rest.is_empty());
        if !(free || KINDS.iter().any(|(known, _)| *known == kind) || kind == "signers") {
            return Err(Misfit { member: "kind", wants: "must be a known kind or begin with `x-`" });
        }
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
        if kind.len() > NAME_MAX || !kind.bytes().all(plain) {
            return Err(Misfit { member: "kind", wants: "must be at most 256 of a-z 0-9 - _ ." });
        }
        if id.is_empty() || id.len() > NAME_MAX || id.chars().any(char::is_control) {
            return Err(Misfit { member: "id", wants: "must be 1 to 256 bytes without control characters" });
        }
        if kind == "signers" && id != "main" {
            return Err(Misfit { member: "id", wants: "must be `main` for the signer set" });
        }
        Ok(Self { kind: kind.into(), id: id.into() })
    }
}

/// Checks a body's required members and plain types; what the values mean is the services' to judge.
pub(crate) fn check_body(kind: &str, body: &Json<'_>) -> Result<(), Misfit> {
    if kind == "signers" {
        return SignerSet::from_json(body).map(|_| ());
    }
    match KINDS.iter().find(|(known, _)| *known == kind) {
        Some((_, members)) => check_table(members, body),
        None => Ok(()),
    }
}

#[derive(Debug, Clone, Copy)]
enum Plain {
    Text,
    Whole,
    Number,
    Flag,
    Texts,
    Table(&'static [Member]),
    /// A size: a number of bytes, or text such as "64KiB".
    Size,
}

type Member = (&'static str, Plain, bool);

const REQUIRED: bool = true;
const OPTIONAL: bool = false;

/// The members of the configuration tables. One that is not named here is left to the services, so that a
/// verifier does not call a log faulty because it is older than the log.
const KINDS: &[(&str, &[Member])] = &[
    (
        "route",
        &[
            ("path", Plain::Text, REQUIRED),
            ("upstream", Plain::Text, REQUIRED),
            ("hosts", Plain::Texts, OPTIONAL),
            ("methods", Plain::Texts, OPTIONAL),
            ("timeout", Plain::Text, OPTIONAL),
            ("strip_prefix", Plain::Text, OPTIONAL),
            ("max_body_bytes", Plain::Size, OPTIONAL),
            ("auth", Plain::Text, OPTIONAL),
            ("scopes", Plain::Texts, OPTIONAL),
            ("cost", Plain::Whole, OPTIONAL),
            ("class", Plain::Text, OPTIONAL),
            ("decode", Plain::Flag, OPTIONAL),
        ],
    ),
    (
        "tenant",
        &[
            ("id", Plain::Text, REQUIRED),
            ("class", Plain::Text, OPTIONAL),
            ("quantum", Plain::Whole, OPTIONAL),
            ("rps", Plain::Whole, OPTIONAL),
            ("bps", Plain::Whole, OPTIONAL),
            ("keys", Plain::Texts, OPTIONAL),
            ("match", Plain::Table(&[]), OPTIONAL),
        ],
    ),
    (
        "upstream",
        &[
            ("name", Plain::Text, REQUIRED),
            ("servers", Plain::Texts, REQUIRED),
            ("balance", Plain::Text, OPTIONAL),
            (
                "health",
                Plain::Table(&[("path", Plain::Text, REQUIRED), ("interval", Plain::Text, OPTIONAL)]),
                OPTIONAL,
            ),
            ("max_inflight", Plain::Whole, OPTIONAL),
            (
                "retry",
                Plain::Table(&[
                    ("tries", Plain::Whole, OPTIONAL),
                    ("base", Plain::Text, OPTIONAL),
                    ("cap", Plain::Text, OPTIONAL),
                    ("budget", Plain::Number, OPTIONAL),
                ]),
                OPTIONAL,
            ),
            ("connect_timeout", Plain::Text, OPTIONAL),
        ],
    ),
    (
        "origin",
        &[
            ("prefix", Plain::Text, REQUIRED),
            ("url", Plain::Text, REQUIRED),
            ("ttl", Plain::Text, OPTIONAL),
            ("max_inflight", Plain::Whole, OPTIONAL),
            ("rps", Plain::Whole, OPTIONAL),
        ],
    ),
    (
        "pack",
        &[("name", Plain::Text, REQUIRED), ("path", Plain::Text, REQUIRED), ("b3", Plain::Text, OPTIONAL)],
    ),
    ("peer", &[("address", Plain::Text, REQUIRED)]),
];

fn check_table(members: &'static [Member], body: &Json<'_>) -> Result<(), Misfit> {
    if body.members().is_none() {
        return Err(Misfit { member: "body", wants: "must be an object" });
    }
    for (member, plain, required) in members {
        let Some(value) = body.member(member) else {
            if *required {
                return Err(Misfit { member, wants: "is missing" });
            }
            continue;
        };
        let texts = |list: &[Json<'_>]| list.iter().all(|item| item.text().is_some());
        let (fits, wants) = match plain {
            Plain::Text => (value.text().is_some(), "must be a string"),
            Plain::Whole => (value.whole().is_some(), "must be a whole number"),
            Plain::Number => (matches!(value, Json::Int(_) | Json::Float(_)), "must be a number"),
            Plain::Flag => (matches!(value, Json::Bool(_)), "must be true or false"),
            Plain::Texts => (value.list().is_some_and(texts), "must be a list of strings"),
            Plain::Size => (value.text().is_some() || value.whole().is_some(), "must be a size"),
            Plain::Table(inner) => {
                check_table(inner, value)?;
                (true, "")
            }
        };
        if !fits {
            return Err(Misfit { member, wants });
        }
    }
    Ok(())
}
