//! Dialling the peers that are listed and not connected.

use crate::conn::{Origin, serve};
use crate::link::End;
use crate::shared::Shared;
use oap::session::Role;
use ron_kernel::sync::Permit;
use ron_kernel::task::TaskResult;
use ron_transport::dial::DialError;
use ron_transport::{Dialer, PeerAddress};
use std::sync::Arc;
use std::time::Duration;

/// How often the list is looked through though nothing has happened.
const LOOK: Duration = Duration::from_secs(1);
/// How long a connection to a peer may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) async fn dial(shared: Arc<Shared>) -> TaskResult {
    // Tries of a dialer that is no more have ended or will; whom they reached is connected.
    shared.index.lock().dials.clear();
    loop {
        let (due, next) = look(&shared);
        for peer in due {
            let (name, own) = (peer.to_string(), shared.clone());
            let attempt = Box::pin(async move { attempt(&own, peer).await });
            shared.service.scoped("conn", move || name.clone(), attempt);
        }
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            () = shared.dial.notified() => {}
            () = tokio::time::sleep(next) => {}
        }
    }
}

/// Peers to dial now, and how long until the next may be.
fn look(shared: &Shared) -> (Vec<PeerAddress>, Duration) {
    let (now, settings) = (shared.now(), shared.settings.load());
    let listed: Vec<PeerAddress> = settings.listed().filter(|peer| peer.node != shared.node).collect();
    let (mut due, mut next) = (Vec::new(), LOOK);
    let mut index = shared.index.lock();
    index.dials.retain(|node, dial| dial.busy || listed.iter().any(|peer| peer.node == *node));
    for peer in listed {
        if index.nodes.contains_key(&peer.node) {
            continue;
        }
        let dial = index.dials.entry(peer.node).or_default();
        if dial.busy {
            continue;
        }
        if dial.due <= now {
            dial.busy = true;
            due.push(peer);
        } else {
            next = next.min(dial.due - now);
        }
    }
    (due, next)
}

async fn attempt(shared: &Arc<Shared>, peer: PeerAddress) {
    let mut attempt = Attempt::of(shared, peer);
    attempt.reached = match shared.conns.try_take() {
        None => Err("as many connections as max_conns are open".to_owned()),
        Some(place) => reach(shared, &attempt.peer, place).await,
    };
}

/// A peer that is being dialled. However the task ends, by a panic too, the peer's turn comes again.
struct Attempt {
    shared: Arc<Shared>,
    peer: PeerAddress,
    reached: Result<(), String>,
}

impl Attempt {
    fn of(shared: &Arc<Shared>, peer: PeerAddress) -> Attempt {
        let reached = Err("the task that dialled it did not come to its end".to_owned());
        Attempt { shared: shared.clone(), peer, reached }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let (shared, now) = (&self.shared, self.shared.now());
        let error = std::mem::replace(&mut self.reached, Ok(())).err();
        let mut index = shared.index.lock();
        let dial = index.dials.entry(self.peer.node).or_default();
        dial.busy = false;
        if error.is_none() {
            dial.backoff.succeed();
        }
        dial.due = now + dial.backoff.fail(ron_kernel::random::unit());
        let news = error.is_some() && dial.error != error;
        dial.error.clone_from(&error);
        drop(index);
        if error.is_some() {
            shared.numbers.redials.inc();
        }
        shared.dial.notify_one();
        if let Some(error) = error.filter(|_| news) {
            tracing::warn!(peer = self.peer.to_string(), error, "cannot reach a peer; it is tried again");
        }
    }
}

/// One try, and the session that came of it. An error says why there was none.
async fn reach(shared: &Arc<Shared>, peer: &PeerAddress, place: Permit) -> Result<(), String> {
    let dialer = Dialer {
        tls: shared.tls.load_full(),
        connect_timeout: CONNECT_TIMEOUT,
        handshake_timeout: shared.settings.load().handshake_timeout.0,
    };
    let dialled = tokio::select! {
        biased;
        () = shared.service.shutdown().draining() => return Ok(()),
        dialled = dialer.dial(peer) => dialled,
    };
    let (io, proved) = dialled.map_err(|error| {
        let reason = match &error {
            DialError::ConnectTimeout => {
                shared.numbers.connect_timeouts.inc();
                "connect"
            }
            DialError::HandshakeTimeout => {
                shared.numbers.handshake_timeouts.inc();
                shared.numbers.handshake_io_timeouts.inc();
                "handshake_timeout"
            }
            DialError::Handshake(error) => error.reason(),
            _ => "connect",
        };
        shared.numbers.failures.with([reason]).inc();
        error.to_string()
    })?;
    let (read, writer) = ron_transport::split(io);
    let (role, at, began) = (Role::Dialer, peer.at.to_string(), shared.now());
    let (end, open) = serve(shared, read, writer, Origin { role, at, proved, began }, None).await;
    drop(place);
    match end {
        // It seemed open until the peer had looked: that is no success, or it would be dialled again at once for ever.
        End::Unwelcome => {
            Err("the peer does not admit this node: put what `ron overlay peers` says of it into overlay.peers there, or, if it \
                 stands there, see in that node's log why it is greylisted"
                .to_owned())
        }
        End::Crowded => Err("the peer has no room for another session".to_owned()),
        // One of two sessions ends as it should.
        End::Duplicate => Ok(()),
        _ if open => Ok(()),
        _ => Err(format!("the session was refused: {}", end.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{eventually, overlay, shared};
    use ron_transport::Address;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_peer_whose_dial_panicked_is_dialled_again() {
        let (kernel, overlay) = overlay(|_| {});
        let shared = shared(&overlay).clone();
        let node = oap::NodeId([7; 32]);
        let peer = PeerAddress { node, at: Address::Tcp("127.0.0.1".to_owned(), 1) };
        shared.index.lock().dials.entry(node).or_default().busy = true;
        let (own, name) = (shared.clone(), peer.to_string());
        shared.service.scoped("conn", move || name.clone(), async move {
            let _attempt = Attempt::of(&own, peer);
            panic!("a dial that is killed");
        });
        for line in [
            "tasks_panicked_total{service=\"overlay\",kind=\"conn\"} 1",
            "backoff_retries_total{service=\"overlay\",op=\"connect\"} 1",
        ] {
            eventually(line, || kernel.metrics().scrape().contains(line)).await;
        }
        // The dialer forgets a peer that is not listed, unless somebody is at it.
        assert!(shared.index.lock().dials.get(&node).is_none_or(|dial| !dial.busy));
    }
}
