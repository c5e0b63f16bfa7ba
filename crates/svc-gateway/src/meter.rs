//! The rates that requests count against: requests and bytes, for all, by address, by credentials and by tenant.
//!
//! A quota in bytes lets a request in while nothing is owed; what its body and its answer's really came to is owed
//! afterwards. Whatever number of addresses comes, only so many are remembered, and those that owe nothing are
//! forgotten by housekeeping.

use crate::config::QuotaSettings;
use crate::proxy::Quota;
use crate::upstream::Progress;
use ron_kernel::admission::bucket::{Keyed, Rate, Single, Verdict};
use ron_kernel::admission::client_ip::network_of;
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Tenants whose rate is remembered.
const TENANTS_MAX: usize = 16_384;
/// Credentials whose rate is remembered.
const CAPABILITIES_MAX: usize = 65_536;
/// Client addresses whose rate is remembered.
const ADDRESSES_MAX: usize = 65_536;

pub(crate) static COUNTERS: LockSpec = LockSpec {
    service: "gateway",
    name: "counters",
    rank: 30,
    guards: "the token buckets of the quotas: one for all, and a shard of those by address, credentials or tenant",
};

/// A limit on bytes for one key, if there is one.
pub(crate) type Limit<K> = Option<(K, Rate)>;

#[derive(Debug)]
pub(crate) struct Quotas {
    global: Single,
    per_ip: Keyed<IpAddr>,
    per_capability: Keyed<u64>,
    per_tenant: Keyed<u32>,
    ip_bytes: Keyed<IpAddr>,
    tenant_bytes: Keyed<u32>,
}

impl Quotas {
    pub(crate) fn new(service: &Service) -> Arc<Quotas> {
        let inventory = service.inventory();
        let quotas = Arc::new(Quotas {
            global: Single::new(inventory, &COUNTERS),
            per_ip: Keyed::new(inventory, &COUNTERS, ADDRESSES_MAX),
            per_capability: Keyed::new(inventory, &COUNTERS, CAPABILITIES_MAX),
            per_tenant: Keyed::new(inventory, &COUNTERS, TENANTS_MAX),
            ip_bytes: Keyed::new(inventory, &COUNTERS, ADDRESSES_MAX),
            tenant_bytes: Keyed::new(inventory, &COUNTERS, TENANTS_MAX),
        });
        let (seen, name) = (quotas.clone(), service.name());
        let help = "Addresses, credentials and tenants whose rate is remembered.";
        service.metrics().computed("quota_buckets", help, "gauge", move |rows| {
            for (quota, buckets, _) in seen.sizes() {
                rows.row(&[("service", name), ("quota", quota)], buckets);
            }
        });
        let seen = quotas.clone();
        let help = "Rates that were forgotten to make room for others.";
        service.metrics().computed("quota_evictions_total", help, "counter", move |rows| {
            for (quota, _, evicted) in seen.sizes() {
                rows.row(&[("service", name), ("quota", quota)], evicted);
            }
        });
        quotas
    }

    /// By quota: what is remembered, and what was forgotten to make room.
    fn sizes(&self) -> [(&'static str, usize, u64); 5] {
        [
            ("ip", self.per_ip.len(), self.per_ip.evicted()),
            ("capability", self.per_capability.len(), self.per_capability.evicted()),
            ("tenant", self.per_tenant.len(), self.per_tenant.evicted()),
            ("ip_bytes", self.ip_bytes.len(), self.ip_bytes.evicted()),
            ("tenant_bytes", self.tenant_bytes.len(), self.tenant_bytes.evicted()),
        ]
    }

    /// Takes a request's part; of bytes, only whether any are owed is looked at.
    pub(crate) fn take(&self, quota: Quota, rate: Rate, now: Instant) -> Verdict {
        match quota {
            Quota::Global => self.global.take(1.0, rate, now),
            Quota::Ip(ip) => self.per_ip.take(&network_of(ip), 1.0, rate, now),
            Quota::Capability(capability) => self.per_capability.take(&capability, 1.0, rate, now),
            Quota::Tenant(tenant) => self.per_tenant.take(&tenant, 1.0, rate, now),
            Quota::IpBytes(ip) => self.ip_bytes.take(&ip, 0.0, rate, now),
            Quota::TenantBytes(tenant) => self.tenant_bytes.take(&tenant, 0.0, rate, now),
        }
    }

    /// Forgets the addresses and credentials whose buckets are full again. Tenants are few, and each has its own rate.
    pub(crate) fn trim(&self, settings: &QuotaSettings, now: Instant) {
        // A quota that is off is full at once, so that nothing is left of what it was.
        let rate = |per_second| {
            Rate::new(per_second, settings.burst_factor).unwrap_or(Rate { per_second: 1.0, burst: f64::MIN })
        };
        self.per_ip.trim(rate(settings.per_ip_rps), now);
        self.per_capability.trim(rate(settings.per_capability_rps), now);
        self.ip_bytes.trim(rate(settings.per_ip_bps), now);
    }
}

/// What a request's real size changes once it has ended.
#[derive(Debug)]
pub(crate) struct Meter {
    pub(crate) quotas: Arc<Quotas>,
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
            self.quotas.tenant_bytes.owe(&tenant, owed, rate, now);
        }
        if let Some((ip, rate)) = self.ip {
            self.quotas.ip_bytes.owe(&ip, owed, rate, now);
        }
        self.factor.saturating_mul(self.fixed.saturating_add(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::kernel::Kernel;
    use std::time::Duration;

    #[test]
    fn housekeeping_leaves_nothing_of_a_flood_of_addresses() {
        let quotas = Quotas::new(&Kernel::new().service("gateway"));
        let settings = QuotaSettings { per_ip_rps: 10, per_ip_bps: 1000, ..QuotaSettings::default() };
        let [rate, bytes] =
            [settings.per_ip_rps, settings.per_ip_bps].map(|rate| Rate::new(rate, 2.0).unwrap());
        let start = Instant::now();
        let ip = |n: u32| IpAddr::from(n.to_be_bytes());
        for n in 0..200_000 {
            quotas.take(Quota::Ip(ip(n)), rate, start);
            quotas.ip_bytes.owe(&ip(n), 4000.0, bytes, start);
        }
        let sizes = |quotas: &Quotas| quotas.sizes().map(|(_, buckets, _)| buckets);
        let [ips, _, _, ip_bytes, _] = sizes(&quotas);
        assert!(ips <= ADDRESSES_MAX && ip_bytes <= ADDRESSES_MAX, "{ips} {ip_bytes}");
        assert!(quotas.sizes()[0].2 >= 200_000 - ADDRESSES_MAX as u64, "the rest was forgotten");
        let later = |seconds: f64| start + Duration::from_secs_f64(seconds);
        quotas.trim(&settings, later(0.05));
        assert_eq!(sizes(&quotas), [ips, 0, 0, ip_bytes, 0], "who has used something is remembered");
        quotas.trim(&settings, later(0.2));
        assert_eq!(sizes(&quotas), [0, 0, 0, ip_bytes, 0], "whoever owes bytes still does");
        quotas.trim(&QuotaSettings { per_ip_bps: 0, ..settings }, later(0.3));
        assert_eq!(sizes(&quotas), [0; 5], "a quota that was turned off leaves nothing behind");
    }
}
