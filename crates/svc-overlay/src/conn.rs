//! One connection from its first byte to its last: the handshake, then a reader and a writer, then the account of it.

use crate::calls::Call;
use crate::link::{End, Link};
use crate::reader::{Reader, session_config};
use crate::shared::Shared;
use crate::writer::write;
use oap::control::Goaway;
use oap::session::{Role, Session};
use ron_kernel::http::{Io, Peer};
use ron_kernel::sync::Permit;
use ron_transport::{HandshakeError, Proved, Writer};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;

/// How long a peer may take to close a session that has drained.
const FAREWELL: Duration = Duration::from_secs(1);

/// A connection that was accepted and waits for its handshake.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) io: Arrived,
    pub(crate) peer: Peer,
    pub(crate) at: Duration,
    /// The place among `max_conns`.
    pub(crate) place: Permit,
}

/// A connection as it came.
#[derive(Debug)]
pub(crate) enum Arrived {
    Stream(Io),
    #[cfg(feature = "quic")]
    Quic(Box<ron_transport::quic::Arriving>),
}

/// Serves an accepted connection; `shaking` is given back when the handshake is over.
pub(crate) async fn accept(shared: Arc<Shared>, accepted: Accepted, shaking: Permit) {
    let Accepted { io, peer, at, place } = accepted;
    let address = match peer {
        Peer::Tcp(address) => address.to_string(),
        Peer::Unix { uid } => format!("unix (user {uid})"),
    };
    let tls = shared.tls.load_full().filter(|_| matches!(peer, Peer::Tcp(_)));
    let until = shared.instant(at + shared.settings.load().handshake_timeout.0);
    let shaken = async {
        // In a box of its own, which is gone with the handshake.
        let shaken = match (io, tls) {
            (Arrived::Stream(io), None) => return Ok((io, None)),
            (Arrived::Stream(io), Some(tls)) => Box::pin(async move { tls.accept(io).await }).await,
            #[cfg(feature = "quic")]
            (Arrived::Quic(_), None) => return Err(HandshakeError::Alpn),
            #[cfg(feature = "quic")]
            (Arrived::Quic(arriving), Some(tls)) => Box::pin(async move { arriving.shake(&tls).await }).await,
        };
        shaken.map(|(io, proved)| (io, Some(proved)))
    };
    let (io, proved) = tokio::select! {
        biased;
        () = shared.service.shutdown().draining() => return,
        shaken = tokio::time::timeout_at(until, shaken) => match shaken {
            Ok(Ok(secured)) => secured,
            Ok(Err(error)) => return failed(&shared, &address, &error),
            Err(_elapsed) => return count_end(&shared, End::HandshakeTimeout),
        },
    };
    let (read, writer) = ron_transport::split(io);
    serve(
        &shared,
        read,
        writer,
        Origin { role: Role::Listener, at: address, proved, began: at },
        Some(shaking),
    )
    .await;
    drop(place);
}

/// A handshake that failed, for the log and the metrics.
fn failed(shared: &Shared, peer: &str, error: &HandshakeError) {
    shared.numbers.failures.with([error.reason()]).inc();
    tracing::info!(peer, %error, "a handshake failed");
}

/// Where a connection comes from.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) role: Role,
    pub(crate) at: String,
    pub(crate) proved: Option<Proved>,
    pub(crate) began: Duration,
}

/// Runs the two halves of a connection until both have ended. Says why, and whether it became a session.
pub(crate) async fn serve<R, W>(
    shared: &Arc<Shared>,
    read: R,
    writer: Writer<W>,
    origin: Origin,
    shaking: Option<Permit>,
) -> (End, bool)
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let Origin { role, at, proved, began } = origin;
    let (link, replies) = Link::new(shared, role, at, proved);
    let link = Arc::new(link);
    let session = Session::new(session_config(shared, &link), began);
    let (shares, own, frames) = (shared.clone(), link.clone(), Vec::new());
    let (active, services) = (None, None);
    let reader = Reader { shared: shares, link: own, io: read, session, frames, shaking, active, services };
    let (done, mut read_done) = oneshot::channel();
    let named = link.clone();
    // The kernel keeps what it is given beside the box it runs it in: a pointer is the least.
    let read = Box::pin(reader.run());
    shared.service.scoped("reader", move || named.at.clone(), async move {
        let _ = done.send(read.await);
    });
    let (done, mut write_done) = oneshot::channel();
    let (named, own, shares) = (link.clone(), link.clone(), shared.clone());
    let written = Box::pin(async move { write(&shares, &own, replies, writer).await });
    shared.service.scoped("writer", move || named.at.clone(), async move {
        let _ = done.send(written.await);
    });
    tokio::select! {
        end = &mut read_done => {
            // A sender that is gone without a word has panicked.
            link.end(end.unwrap_or(End::Panic));
            link.finish();
            let _ = write_done.await;
        }
        end = &mut write_done => {
            // A writer that has drained leaves the rest to the peer, which closes when it has read it all.
            match end.map_or(Some(End::Panic), Result::err) {
                Some(end) => link.end(end),
                None => {
                    if tokio::time::timeout(FAREWELL, &mut read_done).await.is_ok() {
                        return account(shared, &link);
                    }
                    link.end(End::Draining);
                }
            }
            let _ = read_done.await;
        }
    }
    account(shared, &link)
}

/// Tells the engine and the metrics that a connection is over; says why, and whether it was a session.
fn account(shared: &Shared, link: &Link) -> (End, bool) {
    let (end, open) = (link.ended().unwrap_or(End::Peer), link.was_open());
    let end = match (end, link.told.get()) {
        (End::Peer | End::Io, Some(Goaway::Policy)) => End::Unwelcome,
        (End::Peer | End::Io, Some(Goaway::Limit)) => End::Crowded,
        _ => end,
    };
    if let Some(opened) = link.opened.get() {
        shared.call(Call::Close(opened.peer));
    }
    if open {
        shared.numbers.closed.with([end.name()]).inc();
        tracing::info!(peer = link.at, reason = end.name(), "session over");
    } else {
        count_end(shared, end);
    }
    (end, open)
}

/// A connection that did not become a session.
fn count_end(shared: &Shared, end: End) {
    shared.numbers.failures.with([end.name()]).inc();
    if end == End::HandshakeTimeout {
        shared.numbers.handshake_timeouts.inc();
        shared.numbers.handshake_io_timeouts.inc();
    }
}

/// One more session, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Active(Arc<Shared>);

impl Active {
    pub(crate) fn new(shared: &Arc<Shared>) -> Active {
        shared.sessions.fetch_add(1, Ordering::Relaxed);
        shared.numbers.opened.inc();
        Active(shared.clone())
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::Relaxed);
    }
}
