//! The governed set: what the items of a registry add to the lists of the configuration.

use crate::config::Config;
use ron_kernel::config::{Node, Origin, Problems};
use ron_log::{B3, Follower};
use serde_json::{Value, json};
use std::path::{Component, Path};
use svc_overlay::PeerAddress;

/// The kinds that are followed, and the list that each goes into.
const LISTS: [(&str, &str); 6] = [
    ("route", "gateway.routes"),
    ("tenant", "gateway.tenants"),
    ("upstream", "gateway.upstreams"),
    ("origin", "edge.origins"),
    ("pack", "edge.packs"),
    ("peer", "overlay.peers"),
];

/// What a registry adds at a version.
#[derive(Clone, Debug, Default)]
pub struct Set {
    /// The version it was taken at; items may be older.
    pub version: u64,
    items: Vec<Item>,
}

/// One entry of a list.
#[derive(Clone, Debug, PartialEq)]
struct Item {
    kind: String,
    id: String,
    version: u64,
    approved: Option<Vec<String>>,
    body: Value,
}

/// Two are the same if they add the same, whatever else was committed meanwhile.
impl PartialEq for Set {
    fn eq(&self, other: &Set) -> bool {
        self.items == other.items
    }
}

impl Set {
    /// What a follower has found in force, by kind and id.
    pub fn of(follower: &Follower) -> Set {
        let followed = |kind: &str| LISTS.iter().any(|(known, _)| *known == kind);
        let items = follower.state().items().filter(|(key, ..)| followed(&key.kind));
        let item = |(key, version, body): (&ron_log::Key, u64, &std::sync::Arc<str>)| Item {
            kind: key.kind.clone(),
            id: key.id.clone(),
            version,
            approved: follower.approvers(version).map(<[String]>::to_vec),
            body: serde_json::from_str(body).unwrap_or_default(),
        };
        let mut items: Vec<Item> = items.map(item).collect();
        items.sort_unstable_by(|a, b| (&a.kind, &a.id).cmp(&(&b.kind, &b.id)));
        Set { version: follower.head().version, items }
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The entries, as a layer of the configuration.
    pub fn added(&self) -> Vec<(&'static str, Node)> {
        let mut added = Vec::new();
        for (kind, list) in LISTS {
            for item in self.items.iter().filter(|item| item.kind == kind) {
                let origin = Origin::Registry {
                    version: item.version,
                    item: format!("{kind} {}", item.id),
                    approved: item.approved.clone(),
                };
                added.push((list, Node::from_json(&item.entry(), &origin)));
            }
        }
        added
    }

    /// What must outlive the process; the hash in front finds whatever befalls it.
    pub(super) fn text(&self) -> String {
        let item = |item: &Item| {
            let Item { kind, id, version, approved, body } = item;
            json!({"kind": kind, "id": id, "version": version, "approved": approved, "body": body})
        };
        let items: Vec<Value> = self.items.iter().map(item).collect();
        let body = json!({"version": self.version, "items": items}).to_string();
        format!("{}\n{body}\n", B3::of(body.as_bytes()))
    }

    /// Reads what [`Set::text`] wrote; none if it is damaged.
    pub(super) fn parse(text: &str) -> Option<Set> {
        let (b3, body) = text.split_once('\n')?;
        let body = body.strip_suffix('\n').filter(|body| B3::parse(b3) == Some(B3::of(body.as_bytes())))?;
        let json: Value = serde_json::from_str(body).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let item = |item: &Value| {
            let approved = match &item["approved"] {
                Value::Array(names) => Some(names.iter().map(text).collect::<Option<Vec<_>>>()?),
                _ => None,
            };
            let (kind, id, version) = (text(&item["kind"])?, text(&item["id"])?, item["version"].as_u64()?);
            Some(Item { kind, id, version, approved, body: item["body"].clone() })
        };
        let items = json["items"].as_array()?.iter().map(item).collect::<Option<Vec<_>>>()?;
        Some(Set { version: json["version"].as_u64()?, items })
    }
}

impl Item {
    /// The body as the list's entry is written in a file.
    fn entry(&self) -> Value {
        let mut body = self.body.clone();
        if self.kind == "peer" {
            // The list is of addresses alone; what else is there would be lost in silence.
            return match body.as_object() {
                Some(members) if members.len() == 1 => body["address"].take(),
                _ => body,
            };
        }
        // A registry takes a size as a number of bytes too.
        if let Some(bytes) = body.get("max_body_bytes").and_then(Value::as_u64) {
            body["max_body_bytes"] = format!("{bytes}B").into();
        }
        body
    }
}

/// What a file may say and a registry may not, and what both may not say at once.
pub(crate) fn validate(config: &Config, problems: &mut Problems) {
    let lists = [
        ("gateway.routes", config.gateway.routes.len()),
        ("gateway.upstreams", config.gateway.upstreams.len()),
        ("edge.origins", config.edge.origins.len()),
        ("edge.packs", config.edge.packs.len()),
        ("overlay.peers", config.overlay.peers.len()),
    ];
    for (list, count) in lists {
        for index in 0..count {
            let at = format!("{list}[{index}]");
            if matches!(problems.origin(&at), Origin::Registry { .. }) {
                governed(config, list, index, &at, problems);
            }
        }
    }
}

fn governed(config: &Config, list: &str, index: usize, at: &str, problems: &mut Problems) {
    let mut only_file = |key: &str| {
        problems.add(format!("{at}.{key}"), "may be set in the node's own file only, not by a registry");
    };
    match list {
        "gateway.routes" => clash(config, index, at, problems),
        "gateway.upstreams" => {
            let upstream = &config.gateway.upstreams[index];
            let tls = &upstream.tls;
            for (key, file) in [("tls.ca", &tls.ca), ("tls.cert", &tls.cert), ("tls.key", &tls.key)] {
                if !file.is_empty() {
                    only_file(key);
                }
            }
            for (number, _) in
                upstream.servers.iter().enumerate().filter(|(_, server)| server.starts_with("unix:"))
            {
                only_file(&format!("servers[{number}]"));
            }
        }
        "edge.origins" | "edge.packs" => {
            let (private, ca, path) = match list {
                "edge.origins" => {
                    let origin = &config.edge.origins[index];
                    (origin.allow_private, &origin.ca_file, None)
                }
                _ => {
                    let pack = &config.edge.packs[index];
                    (pack.allow_private, &pack.ca_file, Some(Path::new(&pack.path)))
                }
            };
            if private {
                only_file("allow_private");
            }
            // It would be read with the node's own keys, whatever bucket of theirs it named.
            if list == "edge.packs" && config.edge.packs[index].is_object() {
                only_file("path");
            }
            if !ca.is_empty() {
                only_file("ca_file");
            }
            let inside = |part| matches!(part, Component::Normal(_) | Component::CurDir);
            if path.is_some_and(|path| !path.components().all(inside)) {
                problems.add(format!("{at}.path"), "leads out of the node's data folder: a registry may not");
            }
        }
        _ => {
            let peer = config.overlay.peers[index].parse::<PeerAddress>();
            if peer.is_ok_and(|peer| peer.to_string().contains("@unix:")) {
                problems.add(at, "is a local path, which may stand in the node's own file only");
            }
        }
    }
}

/// The same host and path in the file and in the registry: nobody could say which was meant, whatever the methods.
fn clash(config: &Config, index: usize, at: &str, problems: &mut Problems) {
    let routes = &config.gateway.routes;
    let hosts = |index: usize| -> Vec<String> {
        let hosts = &routes[index].hosts;
        if hosts.is_empty() {
            vec![String::new()]
        } else {
            hosts.iter().map(|host| host.to_ascii_lowercase()).collect()
        }
    };
    let own = hosts(index);
    for other in 0..routes.len() {
        let of_file =
            !matches!(problems.origin(&format!("gateway.routes[{other}]")), Origin::Registry { .. });
        let same = of_file
            && svc_gateway::routes::plain(&routes[other].path)
                == svc_gateway::routes::plain(&routes[index].path)
            && hosts(other).iter().any(|host| own.contains(host));
        if same {
            let message = format!("is taken by gateway.routes[{other}] of the node's own file, which wins");
            problems.add(format!("{at}.path"), message);
        }
    }
}
