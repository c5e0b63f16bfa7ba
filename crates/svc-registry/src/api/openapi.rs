//! `/registry/openapi.json`: the table of routes as OpenAPI 3.1, with the shapes of what is asked and answered.

use super::routes::{Endpoint, ROUTES, Route};
use ron_kernel::reason::Reason;
use serde_json::{Map, Value, json};

/// What every request may be refused for.
const COMMON: &[Reason] = &[
    Reason::Malformed,
    Reason::Uri,
    Reason::Headers,
    Reason::QuotaGlobal,
    Reason::Busy,
    Reason::Storage,
    Reason::Draining,
    Reason::Timeout,
    Reason::Internal,
];

pub(super) fn page() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let path = paths.entry(route.path.replace('*', "")).or_insert_with(|| json!({}));
        path[route.method.to_ascii_lowercase()] = operation(route);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "ron registry",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"capability": {"type": "http", "scheme": "bearer", "bearerFormat": "Biscuit"}},
        },
    })
}

fn operation(route: &Route) -> Value {
    let in_path = route.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let mut parameters: Vec<Value> =
        in_path.map(|name| parameter(route, name.trim_end_matches('*'), "path")).collect();
    parameters.extend(route.query.iter().map(|name| parameter(route, name, "query")));
    if matches!(route.endpoint, Endpoint::Stream | Endpoint::WebSocket) {
        parameters.push(parameter(route, "Last-Event-ID", "header"));
    }
    let mut operation = json!({
        "operationId": format!("{:?}", route.endpoint), "summary": route.summary,
        "parameters": parameters, "responses": responses(route),
    });
    if let Some((body, required)) = request_body(route.endpoint) {
        operation["requestBody"] = json!({"required": required, "content": either(&body)});
    }
    if let Some(scope) = route.scope {
        operation["security"] = json!([{"capability": [scope]}]);
    }
    operation
}

fn responses(route: &Route) -> Map<String, Value> {
    let mut responses = Map::new();
    let mut good = json!({"description": route.summary});
    if let Some(content) = content(route.endpoint) {
        good["content"] = content;
    }
    responses.insert(route.status.to_string(), good);
    if route.endpoint == Endpoint::Propose {
        let committed = either(&reference("Head"));
        responses.insert(
            "201".to_owned(),
            json!({"description": "Committed, with commit=true", "content": committed}),
        );
    }
    if has_tag(route.endpoint) {
        responses.insert("304".to_owned(), json!({"description": "It is what If-None-Match names"}));
    }
    for reason in route.refusals.iter().copied().flatten().chain(COMMON) {
        let status = reason.status().to_string();
        let known = responses.get(&status).and_then(|row| row["description"].as_str()).unwrap_or("");
        let comma = if known.is_empty() { "" } else { ", " };
        let description = format!("{known}{comma}{}", reason.code());
        let problem = json!({"application/problem+json": {"schema": reference("Problem")}});
        responses.insert(status, json!({"description": description, "content": problem}));
    }
    responses
}

fn parameter(route: &Route, name: &str, place: &str) -> Value {
    let required = place == "path"
        || matches!(
            (route.endpoint, name),
            (Endpoint::Inclusion, "version") | (Endpoint::Consistency, "from")
        );
    let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
    let schema = match name {
        "version" | "size" | "from" | "to" | "at" | "after" => reference("Whole"),
        "limit" => json!({"type": "integer", "minimum": 1}),
        "wait" if route.endpoint == Endpoint::Head => text("^[0-9]{1,9}(ms|s|m|h)$"),
        "wait" => text("^(durable|checkpointed|witnessed:[0-9]{1,9})$"),
        "commit" | "proof" => json!({"type": "boolean"}),
        "id" if route.endpoint != Endpoint::Item => reference("Hash"),
        "id" => reference("Id"),
        "kind" => reference("Kind"),
        "last_event_id" | "Last-Event-ID" => text("^[0-9]{1,15}-[0-9a-f]{8}$"),
        _ => json!({"type": "string"}),
    };
    json!({"name": name, "in": place, "required": required, "schema": schema})
}

/// Whether a client that has it already need not be sent it again.
fn has_tag(endpoint: Endpoint) -> bool {
    use Endpoint::{Checkpoint, Entry, Head, Item, Items, Log, Snapshot, Tile};
    matches!(endpoint, Head | Log | Entry | Items | Item | Snapshot | Checkpoint | Tile)
}

/// What is sent, and whether it must be.
fn request_body(endpoint: Endpoint) -> Option<(Value, bool)> {
    match endpoint {
        Endpoint::Propose => {
            Some((json!({"oneOf": [reference("Payload"), reference("PayloadWithApprovals")]}), true))
        }
        Endpoint::Approve => Some((reference("Approval"), true)),
        // Nothing is read of it; a length must be stated all the same.
        Endpoint::Commit | Endpoint::Supersede => Some((json!({}), false)),
        _ => None,
    }
}

fn content(endpoint: Endpoint) -> Option<Value> {
    let of = |kind: &str| Some(json!({kind: {}}));
    let schema = match endpoint {
        Endpoint::Head | Endpoint::Commit => "Head",
        Endpoint::Log => "Log",
        Endpoint::Entry => "Entry",
        Endpoint::Items => "Items",
        Endpoint::Item => "Item",
        Endpoint::Propose | Endpoint::Supersede => "Proposed",
        Endpoint::Proposals => "Proposals",
        Endpoint::Proposal | Endpoint::Withdraw => "Proposal",
        Endpoint::Approve => "Approved",
        Endpoint::Inclusion => "Inclusion",
        Endpoint::Consistency => "Consistency",
        Endpoint::Retention => "Retention",
        Endpoint::Snapshot => "Snapshot",
        Endpoint::OpenApi => return of("application/json"),
        Endpoint::LogKey | Endpoint::Checkpoint => return of("text/plain"),
        Endpoint::Export | Endpoint::Tile => return of("application/octet-stream"),
        Endpoint::Stream => return of("text/event-stream"),
        Endpoint::WebSocket => return None,
    };
    Some(either(&reference(schema)))
}

/// In JSON or CBOR.
fn either(schema: &Value) -> Value {
    json!({"application/json": {"schema": schema}, "application/cbor": {"schema": schema}})
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// An object of these members and no others, as what is sent must be.
fn closed(members: &[(&str, Value)]) -> Value {
    let mut object = object(members);
    object["additionalProperties"] = json!(false);
    object
}

/// An object of members; those with a `?` need not be there.
fn object(members: &[(&str, Value)]) -> Value {
    let name = |name: &str| name.trim_end_matches('?').to_owned();
    let properties: Map<String, Value> =
        members.iter().map(|(member, schema)| (name(member), schema.clone())).collect();
    let required: Vec<&str> =
        members.iter().map(|(member, _)| *member).filter(|member| !member.ends_with('?')).collect();
    json!({"type": "object", "properties": properties, "required": required})
}

fn list(schema: Value) -> Value {
    json!({"type": "array", "items": schema})
}

fn or_null(schema: Value) -> Value {
    json!({"oneOf": [schema, {"type": "null"}]})
}

fn schemas() -> Value {
    let mut all = Map::new();
    for some in [plain(), changes(), proposals(), proofs()] {
        all.extend(some.as_object().expect("an object").clone());
    }
    all.into()
}

fn plain() -> Value {
    json!({
        "Whole": {"type": "integer", "minimum": 0, "maximum": ron_log::json::NUMBER_MAX},
        "Text": {"type": "string"},
        "Flag": {"type": "boolean"},
        "Hash": {"type": "string", "pattern": "^b3:[0-9a-f]{64}$"},
        "Id": {"type": "string", "minLength": 1, "maxLength": 256, "pattern": r"^[^\x00-\x1f\x7f-\x9f]+$"},
        "Kind": {
            "type": "string", "maxLength": 256,
            "pattern": "^(signers|route|tenant|upstream|origin|pack|peer|x-[-a-z0-9_.]+)$",
        },
        "Quorum": object(&[("m", reference("Whole")), ("n", reference("Whole"))]),
        "Problem": object(&[
            ("type", reference("Text")),
            ("title", reference("Text")),
            ("status", reference("Whole")),
            ("detail", reference("Text")),
            ("code", reference("Text")),
            ("retryable", reference("Flag")),
            ("corr_id", reference("Text")),
            ("retry_after?", reference("Whole")),
            ("min_version?", reference("Whole")),
            ("checkpoint?", or_null(reference("Checkpoint"))),
        ]),
    })
}

/// What is changed, and the log of it.
fn changes() -> Value {
    let sig = json!({"oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
    ]});
    let ops = json!({
        "type": "array", "items": reference("Op"), "minItems": 1, "maxItems": ron_log::payload::OPS_MAX,
    });
    let head = [
        ("version", reference("Whole")),
        ("hash", reference("Hash")),
        ("payload_b3", reference("Hash")),
        ("signers_version", reference("Whole")),
        ("committed_at", reference("Whole")),
    ];
    let of_head = [("checkpoint", or_null(reference("Checkpoint"))), ("damaged?", reference("Text"))];
    let of_entry = [
        ("prev", reference("Hash")),
        ("payload_bytes", reference("Whole")),
        ("approvals", list(reference("Approval"))),
        ("payload", reference("Payload")),
    ];
    json!({
        "Approval": closed(&[
            ("signer", json!({"type": "string", "minLength": 1, "maxLength": 128})),
            ("alg", json!({"enum": ["ed25519", "ml-dsa-44", "ed25519+ml-dsa-44"]})),
            ("sig", sig),
            ("signed_at", reference("Whole")),
        ]),
        "Op": closed(&[
            ("op", json!({"enum": ["put", "delete"]})),
            ("kind", reference("Kind")),
            ("id", reference("Id")),
            ("body?", json!({})),
        ]),
        "Payload": closed(&[
            ("schema", json!({"const": ron_log::payload::SCHEMA})),
            ("base_version", reference("Whole")),
            ("signers_version", reference("Whole")),
            ("nonce", json!({"type": "string", "pattern": "^[0-9a-f]{32}$"})),
            ("ops", ops),
            ("note", reference("Text")),
            ("expires_at", reference("Whole")),
        ]),
        "PayloadWithApprovals": closed(&[
            ("payload", reference("Payload")),
            ("approvals?", list(reference("Approval"))),
        ]),
        "Head": object(&[&head[..], &of_head].concat()),
        "Entry": object(&[&head[..], &of_entry].concat()),
        "Log": object(&[("entries", list(reference("Entry"))), ("next", or_null(reference("Whole")))]),
    })
}

/// What becomes of proposals.
fn proposals() -> Value {
    let states = json!({"enum": ["pending", "committed", "expired", "withdrawn", "unknown", "damaged"]});
    json!({
        "Proposed": object(&[
            ("proposal_id", reference("Hash")),
            ("payload_b3", reference("Hash")),
            ("expires_at", reference("Whole")),
            ("payload?", reference("Payload")),
        ]),
        "Proposals": object(&[("proposals", list(reference("Proposal")))]),
        "Proposal": object(&[
            ("proposal_id", reference("Hash")),
            ("payload_b3?", reference("Hash")),
            ("state", states),
            ("version?", reference("Whole")),
            ("hash?", or_null(reference("Hash"))),
            ("received_at?", reference("Whole")),
            ("expires_at?", reference("Whole")),
            ("ended_at?", reference("Whole")),
            ("note?", reference("Text")),
            ("base_version?", reference("Whole")),
            ("signers_version?", reference("Whole")),
            ("approved_by?", list(reference("Text"))),
            ("payload?", reference("Payload")),
            ("approvals?", list(reference("Approval"))),
            ("quorum?", reference("Quorum")),
            ("met?", reference("Flag")),
        ]),
        "Approved": object(&[
            ("approvals", reference("Whole")),
            ("quorum", reference("Quorum")),
            ("met", reference("Flag")),
            ("committed?", object(&[("version", reference("Whole")), ("hash", reference("Hash"))])),
            ("not_committed?", object(&[("code", reference("Text")), ("detail", reference("Text"))])),
        ]),
    })
}

/// Items, and what all of it is proved with.
fn proofs() -> Value {
    let hashes = || ("hashes", list(reference("Text")));
    json!({
        "Checkpoint": object(&[
            ("size", reference("Whole")),
            ("root", reference("Text")),
            ("note", reference("Text")),
        ]),
        "Item": object(&[
            ("kind", reference("Kind")),
            ("id", reference("Id")),
            ("version", reference("Whole")),
            ("body", json!({})),
            ("entry?", or_null(reference("Entry"))),
            ("proof?", or_null(reference("ItemProof"))),
        ]),
        "ItemProof": object(&[
            ("index", reference("Whole")),
            ("size", reference("Whole")),
            hashes(),
            ("checkpoint", reference("Text")),
        ]),
        "Items": object(&[("version", reference("Whole")), ("items", list(reference("Item")))]),
        "Inclusion": object(&[("version", reference("Whole")), ("size", reference("Whole")), hashes()]),
        "Consistency": object(&[("from", reference("Whole")), ("to", reference("Whole")), hashes()]),
        "Retention": object(&[
            ("min_version", reference("Whole")),
            ("policy", json!({"enum": ["none", "age", "count", "size"]})),
            ("manifests", list(reference("Text"))),
        ]),
        "Snapshot": object(&[
            ("version", reference("Whole")),
            ("note", reference("Text")),
            ("state", json!({"type": "object"})),
        ]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_every_route_and_its_scope() {
        let page = page();
        for route in ROUTES {
            let operation = &page["paths"][route.path.replace('*', "")][route.method.to_ascii_lowercase()];
            assert_eq!(operation["summary"], route.summary, "{}", route.path);
            assert_eq!(operation["security"][0]["capability"][0].as_str(), route.scope);
        }
        assert!(
            page["paths"]["/registry/commit/{id}"]["post"]["responses"]["504"]["description"]
                .as_str()
                .unwrap()
                .contains("commit_unknown")
        );
        assert!(page["paths"]["/registry/proposals"]["post"]["responses"]["201"].is_object());
        let stream = &page["paths"]["/registry/stream"]["get"];
        assert_eq!(stream["parameters"][0]["name"], "Last-Event-ID");
        assert!(stream["responses"]["429"]["description"].as_str().unwrap().contains("busy"));
    }

    #[test]
    fn every_shape_that_is_named_is_there() {
        let page = page();
        let text = page.to_string();
        for name in text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(page["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
