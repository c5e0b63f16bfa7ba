//! All four services in one process, and somebody who uses each.

use crate::edge_fill::{certificates, start_tls};
use ed25519_dalek::SigningKey;
use ron_kernel::key::PrivateKey;
use ron_log::{Approval, Proposal, Role, Signer, SignerSet, TrustRoots};
use ron_testkit::{Answer, Origin, Script, request, ron};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use tempfile::TempDir;

/// Lines for the tables of services, and tables behind all of them.
#[derive(Default)]
pub(crate) struct Keys<'a> {
    pub(crate) gateway: &'a str,
    pub(crate) overlay: &'a str,
    pub(crate) registry: &'a str,
    pub(crate) rest: &'a str,
}

/// What a whole node is configured with, and what its users need.
pub(crate) struct Whole {
    /// Of the gateway.
    _upstream: Origin,
    /// Of the edge, over TLS.
    _origin: Origin,
    signer: SigningKey,
    /// A capability for everything.
    token: String,
    _certs: TempDir,
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

impl Whole {
    /// Writes key, trust roots, a pack and `ron.toml` into a folder. Everything is patient, for the machine may be slow.
    pub(crate) fn make(dir: &Path, upstream: Origin, keys: &Keys<'_>) -> Whole {
        let Keys { gateway, overlay, registry, rest } = keys;
        let signer = SigningKey::from_bytes(&PrivateKey::generate().unwrap().seed());
        let roots = TrustRoots {
            log: "test.example/log".into(),
            signers: SignerSet::new(
                1,
                false,
                vec![Signer {
                    id: "one".into(),
                    keys: vec![ron_log::key::PublicKey::Ed25519(signer.verifying_key().into())],
                    roles: vec![Role::Propose, Role::Approve, Role::Commit],
                    not_after: None,
                }],
            )
            .unwrap(),
        };
        std::fs::write(dir.join("trust-roots.json"), roots.canonical()).unwrap();
        assert!(ron(&["key", "new", "--out", "node.key"], dir).status.success());
        let scopes = "edge:write,edge:purge,registry:propose,registry:approve,registry:commit";
        let minted = ron(&["token", "mint", "--scope", scopes, "--key", "node.key"], dir);
        let token = String::from_utf8(minted.stdout).unwrap().trim().to_owned();
        let (certs, folder) = certificates();
        let origin = start_tls(&folder, |path| match path {
            "/gone" => Script::Answer("503 Service Unavailable\r\n".to_owned(), Vec::new()),
            _ => Script::Answer("200 OK\r\nCache-Control: max-age=600\r\n".to_owned(), b"from afar".to_vec()),
        });
        let port = origin.address.rsplit(':').next().unwrap();
        crate::packs::write(dir, "sample.pmtiles", &svc_edge::pack::sample::Sample::default());
        let text = format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n\
             [gateway]\nlisten = \"127.0.0.1:0\"\n{gateway}\n\
             [[gateway.upstreams]]\nname = \"o\"\nservers = [\"{}\"]\n\
             [[gateway.routes]]\npath = \"/*\"\nupstream = \"o\"\n\
             [edge]\nlisten = \"127.0.0.1:0\"\n[edge.fill]\ndeadline = \"30s\"\n[edge.ingress]\nrps_limit = 0\ntimeout = \"30s\"\n\
             [[edge.origins]]\nprefix = \"/far/\"\nurl = \"https://localhost:{port}/\"\nca_file = {:?}\n\
             allow_private = true\n[[edge.packs]]\nname = \"sample\"\npath = \"sample.pmtiles\"\n\
             [overlay]\nlisten = \"127.0.0.1:0\"\n{overlay}\n\
             [registry]\nlisten = \"127.0.0.1:0\"\n{registry}\ntrust_roots = \"trust-roots.json\"\n\
             checkpoint = {{ interval = \"1s\" }}\n{rest}\n",
            upstream.url(),
            folder.join("ca.pem"),
        );
        std::fs::write(dir.join("ron.toml"), text).unwrap();
        Whole { _upstream: upstream, _origin: origin, signer, token, _certs: certs }
    }

    /// With the capability.
    pub(crate) fn send(&self, address: &str, method: &str, path: &str, body: &[u8]) -> Answer {
        let bearer = format!("Bearer {}", self.token);
        let fields = [("Authorization", bearer.as_str()), ("Content-Type", "application/json")];
        request(address, method, path, &fields, body).unwrap()
    }

    /// A change of one item as of this head, signed.
    pub(crate) fn approved(&self, head: &Value, id: &str, body: &Value) -> Value {
        let payload = json!({
            "schema": "ron.registry/1", "base_version": head["version"], "signers_version": head["signers_version"],
            "nonce": format!("{:032x}", u128::from(ron_kernel::random::u64())), "note": "",
            "ops": [{"op": "put", "kind": "x-demo", "id": id, "body": body}], "expires_at": now() + 3_600_000,
        });
        let b3 = Proposal::parse(payload.to_string().as_bytes()).unwrap().b3();
        let approval: Value =
            serde_json::from_str(&Approval::sign("one", &self.signer, b3, now()).canonical()).unwrap();
        json!({"payload": payload, "approvals": [approval]})
    }

    pub(crate) fn commit(&self, registry: &str, id: &str, body: &Value) -> Answer {
        let head = ron_testkit::get(registry, "/registry/head").json();
        let change = self.approved(&head, id, body).to_string();
        self.send(registry, "POST", "/registry/proposals?commit=true", change.as_bytes())
    }
}
