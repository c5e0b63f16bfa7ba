//! The gateway as its operator sees it: `GET /gateway/status` and `GET /gateway/routes`.

use super::{Proxy, Snapshot};
use crate::fair_queue::Tenant;
use crate::gate::Gate;
use crate::tenants::CLASS_NAMES;
use serde_json::{Value, json};

impl Proxy {
    pub(crate) fn status(&self) -> Value {
        let snapshot = self.snapshot.load();
        let upstreams: Vec<Value> =
            snapshot.named.iter().map(|(name, upstream)| upstream.status(name)).collect();
        json!({
            "upstreams": upstreams,
            "tenants": snapshot.tenant_rows(&self.gate),
            "queue": {"depth": self.gate.queued(), "capacity": snapshot.settings.fair_queue.work_capacity},
            "inflight": self.gate.inflight().used(),
            "max_inflight": self.gate.inflight().limit(),
            "degraded": self.is_degraded(),
        })
    }

    /// The routes with what they inherit filled in, in the order of the configuration.
    pub(crate) fn routes(&self) -> Value {
        let snapshot = self.snapshot.load();
        let settings = &snapshot.settings;
        let routes: Vec<Value> = settings
            .routes
            .iter()
            .map(|route| {
                json!({
                    "path": route.path,
                    "hosts": route.hosts,
                    "methods": route.methods,
                    "upstream": route.upstream,
                    "timeout": route.timeout.unwrap_or(settings.request_timeout).to_string(),
                    "strip_prefix": route.strip_prefix,
                    "max_body_bytes": route.max_body_bytes.unwrap_or(settings.limits.max_body_bytes).0,
                    "auth": route.auth.as_str(),
                    "cost": route.cost,
                    "class": route.class,
                    "decode": route.decode,
                })
            })
            .collect();
        json!({"routes": routes})
    }
}

impl Snapshot {
    /// Each configured tenant, then everybody else: what waits, and the places there are for it when the queue is full.
    fn tenant_rows(&self, gate: &Gate) -> Vec<Value> {
        let tenants = &self.settings.tenants;
        // A stranger's share is that of one who came now.
        let newcomer = (Tenant { class: 0, id: u32::MAX }, 1);
        let asked = (0..tenants.len()).map(|index| self.tenants.share_of(index)).chain([newcomer]);
        let rows = self.tenants.queued().zip(gate.shares(asked)).enumerate();
        rows.map(|(index, ((id, queued), share))| {
            let settings = tenants.get(index);
            let class = settings.map_or(CLASS_NAMES[0], |tenant| tenant.class.as_str());
            let quantum = settings.map_or(1, |tenant| tenant.quantum);
            json!({"id": id, "class": class, "quantum": quantum, "queued": queued, "share": share})
        })
        .collect()
    }
}
