//! Accepting: a place first, then the connection, then the check of its address; handshakes are begun apart.

use crate::conn::{Accepted, Arrived, accept};
use crate::shared::Shared;
use ron_kernel::channel::{Receiver, Sender};
use ron_kernel::http::{Bound, Peer};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::task::TaskResult;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

/// Connections that wait for their turn to shake hands.
pub(crate) static INGRESS_WORK: ChannelSpec = ChannelSpec {
    service: "overlay",
    name: "ingress_work",
    kind: ChannelKind::Mpsc,
    capacity: 512,
    policy: Policy::RejectNew,
    producers: &["listener"],
    consumers: &["conn_supervisor"],
};

/// How long to wait when the system gives no connection.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);

/// Where connections come in.
#[derive(Debug)]
pub(crate) enum Door {
    Socket(Bound),
    #[cfg(feature = "quic")]
    Quic(ron_transport::quic::Quic),
}

impl Door {
    /// As others are told.
    pub(crate) fn address(&self) -> String {
        match self {
            Door::Socket(bound) => bound.address(),
            #[cfg(feature = "quic")]
            Door::Quic(quic) => {
                quic.address().map_or_else(|error| error.to_string(), |at| format!("quic:{at}"))
            }
        }
    }

    async fn accept(&self) -> std::io::Result<(Arrived, Peer)> {
        match self {
            Door::Socket(bound) => bound.accept().await.map(|(io, peer)| (Arrived::Stream(io), peer)),
            #[cfg(feature = "quic")]
            Door::Quic(quic) => match quic.accept().await {
                Some(arriving) => {
                    let peer = Peer::Tcp(arriving.from());
                    Ok((Arrived::Quic(Box::new(arriving)), peer))
                }
                None => Err(std::io::Error::other("the socket is closed")),
            },
        }
    }

    /// Takes further connections with these keys.
    pub(crate) fn renew(&self, tls: Option<&ron_transport::Tls>) -> std::io::Result<()> {
        match (self, tls) {
            #[cfg(feature = "quic")]
            (Door::Quic(quic), Some(tls)) => quic.renew(tls),
            // TCP's handshakes look for the keys themselves.
            _ => Ok(()),
        }
    }
}

pub(crate) async fn listen(shared: Arc<Shared>, bound: Arc<Door>, work: Arc<Sender<Accepted>>) -> TaskResult {
    let draining = shared.service.shutdown().clone();
    let mut failures = 0u32;
    loop {
        let place = match shared.conns.try_take() {
            Some(place) => place,
            None => {
                shared.numbers.closed_door.inc();
                tracing::warn!("overlay.max_conns connections are open: others wait until one ends");
                tokio::select! {
                    biased;
                    () = draining.draining() => break,
                    place = poll_fn(|cx| shared.conns.poll_take(cx)) => place,
                }
            }
        };
        let accepted = tokio::select! {
            biased;
            () = draining.draining() => break,
            accepted = bound.accept() => accepted,
        };
        match accepted {
            Ok((io, peer)) => {
                failures = 0;
                if peer.ip().is_some_and(|ip| !shared.may_shake(ip)) {
                    shared.numbers.failures.with(["rate"]).inc();
                    continue;
                }
                let accepted = Accepted { io, peer, at: shared.now(), place };
                if work.try_send(accepted).is_err() {
                    shared.busy(INGRESS_WORK.name, 1);
                    shared.numbers.failures.with(["busy"]).inc();
                }
            }
            Err(error) => {
                failures += 1;
                if failures.is_power_of_two() {
                    tracing::warn!(service = "overlay", %error, failures, "accept failed");
                }
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
    shared.service.kernel().health().listeners_closed(shared.service.name());
    Ok(())
}

/// Begins handshakes, as many at once as may be.
pub(crate) async fn supervise(shared: Arc<Shared>, work: Arc<Receiver<Accepted>>) -> TaskResult {
    let draining = shared.service.shutdown().clone();
    loop {
        let next = async {
            let shaking = poll_fn(|cx| shared.shaking.poll_take(cx)).await;
            (work.recv().await, shaking)
        };
        let (accepted, shaking) = tokio::select! {
            biased;
            () = draining.draining() => return Ok(()),
            next = next => next,
        };
        let Some(accepted) = accepted else { return Ok(()) };
        let (name, own) = (format!("{:?}", accepted.peer), shared.clone());
        shared.service.scoped("conn", move || name.clone(), Box::pin(accept(own, accepted, shaking)));
    }
}
