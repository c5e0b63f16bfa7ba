//! The one table of what can be asked: requests are matched by it, and the OpenAPI page is made from it.

use ron_kernel::reason::Reason;

/// What answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Head,
    Log,
    Entry,
    Items,
    Item,
    Stream,
    WebSocket,
    Propose,
    Proposals,
    Proposal,
    Withdraw,
    Approve,
    Commit,
    Supersede,
    Inclusion,
    Consistency,
    Retention,
    Snapshot,
    LogKey,
    Export,
    OpenApi,
    Checkpoint,
    Tile,
}

pub(super) const PROPOSE: &str = "registry:propose";
pub(super) const APPROVE: &str = "registry:approve";
pub(super) const COMMIT: &str = "registry:commit";

/// One row.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) method: &'static str,
    /// A segment in braces takes any text; `{version}` digits only, and a last one with `*` everything.
    pub(super) path: &'static str,
    pub(super) endpoint: Endpoint,
    /// The scope that a capability must have.
    pub(super) scope: Option<&'static str>,
    pub(super) summary: &'static str,
    /// Names of the query's members.
    pub(super) query: &'static [&'static str],
    pub(super) status: u16,
    /// What it may be refused for beside what every request may.
    pub(super) refusals: &'static [&'static [Reason]],
}

const fn get(path: &'static str, endpoint: Endpoint, summary: &'static str) -> Route {
    Route { method: "GET", path, endpoint, scope: None, summary, query: &[], status: 200, refusals: &[] }
}

const fn write(
    method: &'static str,
    path: &'static str,
    endpoint: Endpoint,
    scope: &'static str,
    status: u16,
    summary: &'static str,
) -> Route {
    Route { method, path, endpoint, scope: Some(scope), summary, query: &[], status, refusals: &[] }
}

/// What is wrong with a capability.
const CAPABILITY: &[Reason] =
    &[Reason::Unauth, Reason::TokenInvalid, Reason::TokenExpired, Reason::TokenAudience, Reason::Forbidden];

/// What is wrong with a body.
const BODY: &[Reason] = &[
    Reason::LengthRequired,
    Reason::BodyCap,
    Reason::DecodedCap,
    Reason::DecodedRatio,
    Reason::UnsupportedEncoding,
    Reason::ReadTimeout,
];

/// What the Committer says of a proposal or an approval.
const APPROVED: &[Reason] = &[
    Reason::DuplicateApproval,
    Reason::Pruned,
    Reason::InvalidSig,
    Reason::RevokedKey,
    Reason::PolicyChanged,
    Reason::QuorumFailed,
    Reason::Expired,
    Reason::NotReady,
];

/// And of a commit.
const COMMITTED: &[Reason] = &[Reason::ChainMismatch, Reason::CommitUnknown];

const KEPT: &[Reason] = &[Reason::NotFound, Reason::Pruned];

const FOUND: &[Reason] = &[Reason::NotFound];

/// Names come before what takes any text.
pub(super) const ROUTES: &[Route] = &[
    Route {
        query: &["wait", "after"],
        ..get(
            "/registry/head",
            Endpoint::Head,
            "The last entry, and the newest checkpoint; long-poll with wait and after",
        )
    },
    Route {
        query: &["from", "limit"],
        refusals: &[&[Reason::Pruned]],
        ..get("/registry/log", Endpoint::Log, "Entries in order of version")
    },
    Route {
        query: &["kind", "at"],
        refusals: &[KEPT],
        ..get("/registry/items", Endpoint::Items, "The items in force, now or after a version")
    },
    Route {
        query: &["at", "proof"],
        refusals: &[KEPT],
        ..get(
            "/registry/items/{kind}/{id}",
            Endpoint::Item,
            "One item, with the entry that last changed it and its proof",
        )
    },
    get("/registry/stream", Endpoint::Stream, "Updates as server-sent events; Last-Event-ID resumes"),
    Route {
        query: &["last_event_id"],
        status: 101,
        refusals: &[&[Reason::Forbidden]],
        ..get("/registry/ws", Endpoint::WebSocket, "Updates over WebSocket; last_event_id resumes")
    },
    Route {
        query: &["commit", "wait"],
        refusals: &[CAPABILITY, BODY, APPROVED, COMMITTED],
        ..write(
            "POST",
            "/registry/proposals",
            Endpoint::Propose,
            PROPOSE,
            202,
            "Propose a change; commit=true commits it at once (201) and wants the scope registry:commit too",
        )
    },
    get("/registry/proposals", Endpoint::Proposals, "The proposals that are pending"),
    Route {
        refusals: &[FOUND],
        ..get("/registry/proposals/{id}", Endpoint::Proposal, "One proposal, and what became of it")
    },
    Route {
        refusals: &[CAPABILITY, KEPT, &[Reason::Expired, Reason::NotReady]],
        ..write("DELETE", "/registry/proposals/{id}", Endpoint::Withdraw, PROPOSE, 200, "Withdraw a proposal")
    },
    Route {
        refusals: &[CAPABILITY, BODY, FOUND, APPROVED],
        ..write("POST", "/registry/approvals/{id}", Endpoint::Approve, APPROVE, 200, "Approve a proposal")
    },
    Route {
        query: &["wait"],
        refusals: &[CAPABILITY, BODY, FOUND, APPROVED, COMMITTED],
        ..write(
            "POST",
            "/registry/commit/{id}",
            Endpoint::Commit,
            COMMIT,
            201,
            "Commit a proposal; wait is durable, checkpointed or witnessed:K",
        )
    },
    Route {
        refusals: &[CAPABILITY, BODY, FOUND, APPROVED],
        ..write(
            "POST",
            "/registry/supersede",
            Endpoint::Supersede,
            PROPOSE,
            202,
            "Propose to undo what HEAD changed",
        )
    },
    Route {
        query: &["version", "size"],
        refusals: &[FOUND],
        ..get("/registry/proof/inclusion", Endpoint::Inclusion, "The path from an entry to a root")
    },
    Route {
        query: &["from", "to"],
        refusals: &[FOUND],
        ..get("/registry/proof/consistency", Endpoint::Consistency, "That one tree continues another")
    },
    get("/registry/retention", Endpoint::Retention, "What was pruned, in signed manifests"),
    Route { refusals: &[FOUND], ..get("/registry/snapshot", Endpoint::Snapshot, "The newest signed state") },
    get("/registry/log-key", Endpoint::LogKey, "The verifier line of the log's key"),
    get("/registry/export", Endpoint::Export, "The whole log in one verifiable file"),
    get("/registry/openapi.json", Endpoint::OpenApi, "This page"),
    Route { refusals: &[KEPT], ..get("/registry/{version}", Endpoint::Entry, "One entry with its payload") },
    Route {
        refusals: &[FOUND],
        ..get("/checkpoint", Endpoint::Checkpoint, "The newest checkpoint, a signed note")
    },
    Route {
        refusals: &[KEPT],
        ..get("/tile/{path*}", Endpoint::Tile, "Hash tiles and entry bundles (C2SP tlog-tiles)")
    },
];

/// What a path leads to.
#[derive(Debug)]
pub(super) enum Found {
    Route(&'static Route, Vec<String>),
    /// The path is known with these methods.
    OtherMethod(String),
    Nothing,
}

pub(super) fn find(method: &str, path: &str) -> Found {
    let method = if method == "HEAD" { "GET" } else { method };
    let mut others: Vec<&str> = Vec::new();
    for route in ROUTES {
        let Some(parts) = parts(route.path, path) else { continue };
        if route.method == method {
            return Found::Route(route, parts);
        }
        others.push(route.method);
        if route.method == "GET" {
            others.push("HEAD");
        }
    }
    if others.is_empty() { Found::Nothing } else { Found::OtherMethod(others.join(", ")) }
}

fn parts(pattern: &str, path: &str) -> Option<Vec<String>> {
    let mut found = Vec::new();
    let (mut pattern, mut path) = (pattern.split('/'), path.split('/'));
    loop {
        match (pattern.next(), path.next()) {
            (None, None) => return Some(found),
            (Some(name), Some(first)) if name.ends_with("*}") => {
                let rest: Vec<&str> = std::iter::once(first).chain(path).collect();
                found.push(rest.join("/"));
                return Some(found);
            }
            (Some("{version}"), Some(digits)) => {
                let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
                // A version has one name.
                let plain = plain && (digits == "0" || !digits.starts_with('0'));
                found.push(Some(digits.to_owned()).filter(|_| plain)?);
            }
            (Some(name), Some(segment)) if name.starts_with('{') => found.push(unescape(segment)?),
            (Some(name), Some(segment)) if name == segment => {}
            _ => return None,
        }
    }
}

/// A segment without its percent escapes.
pub(super) fn unescape(segment: &str) -> Option<String> {
    let mut out = Vec::with_capacity(segment.len());
    let mut bytes = segment.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
        out.push((high * 16 + low) as u8);
    }
    String::from_utf8(out).ok().filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &str, path: &str, expected: Option<(Endpoint, &[&str])>) {
        match (find(method, path), expected) {
            (Found::Route(route, parts), Some((endpoint, expected))) => {
                assert_eq!(
                    (route.endpoint, parts.as_slice()),
                    (endpoint, &expected.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>()[..])
                );
            }
            (Found::Nothing | Found::OtherMethod(_), None) => {}
            (found, _) => panic!("{method} {path}: {found:?}"),
        }
    }

    #[test]
    fn names_win_and_versions_are_digits() {
        check("GET", "/registry/head", Some((Endpoint::Head, &[])));
        check("HEAD", "/registry/17", Some((Endpoint::Entry, &["17"])));
        check("GET", "/registry/x17", None);
        check("GET", "/registry/0", Some((Endpoint::Entry, &["0"])));
        check("GET", "/registry/00", None);
        check("GET", "/registry/items/x-a/b%2Fc%C3%A9", Some((Endpoint::Item, &["x-a", "b/cé"])));
        check("GET", "/registry/items/x-a/%zz", None);
        check("GET", "/tile/0/x001/234.p/5", Some((Endpoint::Tile, &["0/x001/234.p/5"])));
        check("DELETE", "/registry/proposals/b3:00", Some((Endpoint::Withdraw, &["b3:00"])));
        assert!(
            matches!(find("PUT", "/registry/proposals"), Found::OtherMethod(allow) if allow == "POST, GET, HEAD")
        );
        check("GET", "/", None);
    }
}
