//! Strict boot: not ready until everything that requests depend on has been seen once.

use crate::auth::Auth;
use crate::proxy::Proxy;
use ron_kernel::health::Severity;
use ron_kernel::kernel::Service;
use ron_kernel::task::TaskResult;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What readiness calls it.
const CAUSE: &str = "strict_boot";
/// Pause before what was not there is looked for again.
const AGAIN: Duration = Duration::from_millis(250);

/// Makes the service unready until its upstreams have answered and the keys of JWTs are there.
pub(crate) fn begin(service: &Service, proxy: &Arc<Proxy>) {
    service.lose(CAUSE, Severity::Unready);
    let (own, proxy, waiting) = (service.clone(), proxy.clone(), Arc::new(AtomicBool::new(true)));
    service.permanent("strict_boot", 0, move || boot(own.clone(), proxy.clone(), waiting.clone()));
}

/// Looks until nothing is unmet; begun anew after a panic, it goes on where it was.
async fn boot(service: Service, proxy: Arc<Proxy>, waiting: Arc<AtomicBool>) -> TaskResult {
    let mut told = Vec::new();
    while waiting.load(Ordering::SeqCst) {
        let unmet = tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            unmet = unmet(&proxy) => unmet,
        };
        if unmet.is_empty() {
            tracing::info!("strict boot: everything has been seen");
            waiting.store(false, Ordering::SeqCst);
            service.restore(CAUSE);
            break;
        }
        if unmet != told {
            tracing::warn!(waiting_for = unmet.join(" "), "strict boot: not ready yet");
            service.explain(CAUSE, &format!("waits for {}", unmet.join(" ")));
            told = unmet;
        }
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            () = tokio::time::sleep(AGAIN) => {}
        }
    }
    service.shutdown().draining().await;
    Ok(())
}

/// The upstreams of which no server answers, and the keys if they are missing. A reload may have turned it off.
async fn unmet(proxy: &Proxy) -> Vec<String> {
    if !proxy.snapshot().is_strict() {
        return Vec::new();
    }
    let mut unmet = Vec::new();
    for (name, upstream) in proxy.upstreams() {
        if !upstream.is_bridge() && !upstream.answers().await {
            unmet.push(format!("upstream.{name}"));
        }
    }
    if matches!(proxy.snapshot().auth(), Auth::Jwt(jwt) if jwt.keys.count() == 0) {
        unmet.push("jwks".to_owned());
    }
    unmet
}
