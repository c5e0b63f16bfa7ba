//! Quotas in bytes: a request is let in while its tenant and its address owe nothing; what its body and its answer's
//! really came to is owed afterwards.

use crate::proxy::COUNTERS;
use crate::upstream::Progress;
use ron_kernel::admission::bucket::{Keyed, Rate, Verdict};
use ron_kernel::inventory::Inventory;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A limit on bytes for one key, if there is one.
pub(crate) type Limit<K> = Option<(K, Rate)>;

#[derive(Debug)]
pub(crate) struct ByteQuotas {
    per_tenant: Keyed<u32>,
    per_ip: Keyed<IpAddr>,
}

impl ByteQuotas {
    pub(crate) fn new(inventory: &Inventory, tenants_max: usize, addresses_max: usize) -> Arc<ByteQuotas> {
        Arc::new(ByteQuotas {
            per_tenant: Keyed::new(inventory, &COUNTERS, tenants_max),
            per_ip: Keyed::new(inventory, &COUNTERS, addresses_max),
        })
    }

    /// Whether an address may begin another request.
    pub(crate) fn owes_ip(&self, ip: IpAddr, rate: Rate, now: Instant) -> Verdict {
        self.per_ip.take(&ip, 0.0, rate, now)
    }

    /// Whether a tenant may.
    pub(crate) fn owes_tenant(&self, tenant: u32, rate: Rate, now: Instant) -> Verdict {
        self.per_tenant.take(&tenant, 0.0, rate, now)
    }

    /// Forgets the addresses that owe nothing.
    pub(crate) fn trim(&self, rate: Rate, now: Instant) {
        self.per_ip.trim(rate, now);
    }
}

/// What a request's real size changes once it has ended.
#[derive(Debug)]
pub(crate) struct Meter {
    pub(crate) quotas: Arc<ByteQuotas>,
    pub(crate) tenant: Limit<u32>,
    pub(crate) ip: Limit<IpAddr>,
    /// The route's factor, and the fixed part of a request's cost.
    pub(crate) factor: u64,
    pub(crate) fixed: u64,
    /// What the request's body was taken for, and how much of it came; none if it has none.
    pub(crate) body: Option<(u64, Arc<Progress>)>,
}

impl Meter {
    /// Charges the bytes of a request that came to `cost`, and returns that with what came in the place of what its body
    /// was taken for.
    pub(crate) fn settle(&self, cost: u64) -> u64 {
        let mut bytes = (cost / self.factor.max(1)).saturating_sub(self.fixed);
        if let Some((taken_for, upload)) = &self.body {
            bytes = bytes.saturating_sub(*taken_for).saturating_add(upload.came.load(Ordering::Relaxed));
        }
        let now = Instant::now();
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let owed = bytes as f64;
        if let Some((tenant, rate)) = self.tenant {
            self.quotas.per_tenant.owe(&tenant, owed, rate, now);
        }
        if let Some((ip, rate)) = self.ip {
            self.quotas.per_ip.owe(&ip, owed, rate, now);
        }
        self.factor.saturating_mul(self.fixed.saturating_add(bytes))
    }
}
