//! The accept loop: a place before the accept, caps, handshake, protocol, drain.

use super::body::Body;
use super::h1::conn::{Conn, End};
use super::h1::head::HeadLimits;
use super::interim::Interim;
use super::io::Io;
use super::listener::{Bound, Peer};
use super::table::{ConnTable, Entry, Order, Phase, PhaseLimits, Place};
use super::timer::Timer;
use super::{h2, proxy_protocol};
use crate::admission::client_ip::{TrustedProxies, network_of};
use crate::coarse;
use crate::date::http_date;
use crate::inventory::{TaskSort, TaskSpec};
use crate::kernel::Service;
use crate::metrics::{Counter, Family};
use crate::problem::{CorrId, Rejection};
use crate::reason::{Reason, Rejections};
use crate::shutdown;
use crate::task::TaskResult;
use crate::tls::{TlsServer, names_of};
use arc_swap::{ArcSwap, Guard};
use bytes::{Buf, BytesMut};
use http::{Method, Request, Response, Uri};
use std::cell::RefCell;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::AsyncReadExt;

/// The three kinds of task a server adds to its service.
const LISTENER_TASK: &str = "listener";
const SWEEPER_TASK: &str = "sweeper";
const CONN_TASK: &str = "conn";

/// The declarations of those tasks for a service's document.
pub const fn server_tasks(service: &'static str) -> [TaskSpec; 3] {
    [
        TaskSpec {
            service,
            kind: LISTENER_TASK,
            sort: TaskSort::Permanent,
            does: "takes a place, accepts, starts a connection",
        },
        TaskSpec {
            service,
            kind: SWEEPER_TASK,
            sort: TaskSort::Permanent,
            does: "closes idle and slow connections, passes shutdown on",
        },
        TaskSpec {
            service,
            kind: CONN_TASK,
            sort: TaskSort::Scoped,
            does: "serves one connection's requests",
        },
    ]
}

/// An extension of a response whose client may take nothing for longer than `write_timeout` allows.
#[derive(Clone, Copy, Debug)]
pub struct WritePatience(pub Duration);

/// What answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request. A panic is answered 500; a drop means that the client left.
    fn call(&self, request: Request<Body>, conn: &ConnInfo) -> impl Future<Output = Response<Body>> + Send;

    /// Told of each answer that was given without asking, for whoever keeps a record.
    fn refused(&self, _refused: &TurnedAway<'_>) {}
}

/// An answer to what did not become a request for the handler.
#[derive(Clone, Copy, Debug)]
pub struct TurnedAway<'a> {
    pub reason: Reason,
    pub corr: &'a CorrId,
    pub conn: &'a ConnInfo,
    /// What was asked for, if that could be read.
    pub request: Option<(&'a Method, &'a Uri)>,
}

impl<H: Handler> Handler for Arc<H> {
    fn call(&self, request: Request<Body>, conn: &ConnInfo) -> impl Future<Output = Response<Body>> + Send {
        H::call(self, request, conn)
    }

    fn refused(&self, refused: &TurnedAway<'_>) {
        H::refused(self, refused);
    }
}

/// Limits of a server; swapped as a whole on reload.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerLimits {
    pub conns_max: usize,
    pub conns_per_ip_max: usize,
    pub headers_max: usize,
    pub header_bytes_max: usize,
    /// For a handshake, for a head, and between two pieces of a body.
    pub read_timeout: Duration,
    /// Between two pieces of a response that the client takes.
    pub write_timeout: Duration,
    pub idle_timeout: Duration,
    pub trusted_proxies: TrustedProxies,
    /// Trusted proxies begin each connection with a PROXY header.
    pub proxy_protocol: bool,
}

impl ServerLimits {
    pub(crate) fn head(&self) -> HeadLimits {
        HeadLimits { headers_max: self.headers_max, bytes_max: self.header_bytes_max }
    }
}

/// What is known of a connection before its first request.
#[derive(Clone, Debug)]
pub struct ConnInfo {
    /// The client as the transport or the PROXY header names it.
    pub peer: Peer,
    /// The connection is encrypted.
    pub secure: bool,
    /// The peer's address as text, written once for all requests; empty over a Unix socket.
    pub address: Box<str>,
    /// The names in the certificate that the client proved to have: hosts and URIs.
    pub names: Box<[Box<str>]>,
    /// Where interim answers go; HTTP/1.1 only.
    pub interim: Option<Arc<Interim>>,
    /// For the deadline of the one request there is at a time; HTTP/1.1 only.
    pub timer: Option<Arc<Timer>>,
}

impl ConnInfo {
    pub fn new(peer: Peer, secure: bool) -> ConnInfo {
        let address = peer.ip().map_or_else(Box::default, |ip| ip.to_string().into_boxed_str());
        ConnInfo { peer, secure, address, names: Box::default(), interim: None, timer: None }
    }
}

#[derive(Debug)]
pub(crate) struct Timeouts {
    pub(crate) read: Counter,
    pub(crate) write: Counter,
    handshake: Counter,
}

/// A server: one handler behind any number of listeners.
pub struct Server<H> {
    pub(crate) service: Service,
    pub(crate) handler: H,
    limits: ArcSwap<ServerLimits>,
    table: Arc<ConnTable>,
    rejections: Rejections,
    pub(crate) timeouts: Timeouts,
    requests: Arc<Family<Counter, 4>>,
    listeners: AtomicUsize,
}

impl<H> std::fmt::Debug for Server<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({})", self.service.name())
    }
}

impl<H: Handler> Server<H> {
    pub fn new(service: &Service, handler: H, limits: ServerLimits) -> Arc<Server<H>> {
        let table = ConnTable::new(limits.conns_max);
        let open = table.clone();
        let name = service.name();
        service.metrics().computed("connections_open", "Open connections.", "gauge", move |rows| {
            rows.row(&[("service", name)], open.open());
        });
        let server = Arc::new(Server {
            service: service.clone(),
            handler,
            limits: ArcSwap::from_pointee(limits),
            table,
            rejections: Rejections::new(service),
            timeouts: Timeouts {
                read: service.io_timeout("read"),
                write: service.io_timeout("write"),
                handshake: service.io_timeout("handshake"),
            },
            requests: requests_family(service),
            listeners: AtomicUsize::new(0),
        });
        let sweeping = server.clone();
        service.permanent(SWEEPER_TASK, 0, move || sweep(sweeping.clone()));
        server
    }

    /// Starts to accept on a bound socket.
    pub fn listen(self: &Arc<Self>, bound: Bound, tls: Option<Arc<TlsServer>>) {
        let index = self.listeners.fetch_add(1, Ordering::SeqCst);
        let (server, bound) = (self.clone(), Arc::new(bound));
        self.service
            .permanent(LISTENER_TASK, index, move || accept(server.clone(), bound.clone(), tls.clone()));
    }

    pub fn handler(&self) -> &H {
        &self.handler
    }

    pub fn limits(&self) -> Guard<Arc<ServerLimits>> {
        self.limits.load()
    }

    /// Takes effect at once, for new and for open connections.
    pub fn set_limits(&self, limits: ServerLimits) {
        self.table.set_max(limits.conns_max);
        self.limits.store(Arc::new(limits));
    }

    /// The answer to a request that no handler answered, counted.
    pub(crate) fn refused(&self, rejection: Rejection, corr: &CorrId) -> Response<Body> {
        self.rejections.count(rejection.reason);
        let status = rejection.reason.status().to_string();
        self.requests.with([self.service.name(), "none", "none", &status]).inc();
        rejection.into_response(corr)
    }

    /// The same for what no handler was asked about; the handler is told of it.
    pub(crate) fn turned_away(
        &self,
        rejection: Rejection,
        corr: &CorrId,
        conn: &ConnInfo,
        request: Option<(&Method, &Uri)>,
    ) -> Response<Body> {
        self.handler.refused(&TurnedAway { reason: rejection.reason, corr, conn, request });
        self.refused(rejection, corr)
    }

    /// Counts a request whose client left before it was answered.
    pub(crate) fn count_left(&self) {
        self.requests.with([self.service.name(), "none", "none", "499"]).inc();
    }

    fn close_listener(&self) {
        if self.listeners.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.service.kernel().health().listeners_closed(self.service.name());
        }
    }
}

/// `http_requests_total`, shared by everything that answers requests.
pub fn requests_family(service: &Service) -> Arc<Family<Counter, 4>> {
    service.metrics().family(
        "http_requests_total",
        "Requests answered.",
        ["service", "route", "method", "status"],
    )
}

/// Passes time and shutdown on to the connections.
async fn sweep<H: Handler>(server: Arc<Server<H>>) -> TaskResult {
    let shutdown = server.service.shutdown().clone();
    loop {
        let limits = server.limits();
        let phases = PhaseLimits { head: limits.read_timeout, idle: limits.idle_timeout };
        drop(limits);
        let period =
            (phases.head.min(phases.idle) / 20).clamp(Duration::from_millis(5), Duration::from_millis(100));
        tokio::select! {
            biased;
            () = shutdown.draining() => break,
            () = tokio::time::sleep(period) => server.table.sweep(phases),
        }
    }
    // Connections accepted in the last moment are told as well, until none is left to tell.
    let mut order = Order::Drain;
    while server.listeners.load(Ordering::SeqCst) > 0 || server.service.tasks().live_of(CONN_TASK) > 0 {
        server.table.order_all(order);
        tokio::select! {
            biased;
            () = shutdown.reached(shutdown::Phase::Aborting), if order == Order::Drain => order = Order::Abort,
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
    }
    Ok(())
}

async fn accept<H: Handler>(
    server: Arc<Server<H>>,
    bound: Arc<Bound>,
    tls: Option<Arc<TlsServer>>,
) -> TaskResult {
    let shutdown = server.service.shutdown().clone();
    let mut failures = 0u32;
    loop {
        let place = tokio::select! {
            biased;
            () = shutdown.draining() => break,
            place = server.table.place() => place,
        };
        let accepted = tokio::select! {
            biased;
            () = shutdown.draining() => break,
            accepted = bound.accept() => accepted,
        };
        match accepted {
            Ok((io, peer)) => {
                failures = 0;
                start(&server, server.table.upgrade(place), io, peer, tls.clone());
            }
            Err(error) => {
                // Out of descriptors, or the client left already: wait a little, accept on.
                failures += 1;
                if failures.is_power_of_two() {
                    tracing::warn!(service = server.service.name(), %error, failures, "accept failed");
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    server.close_listener();
    Ok(())
}

/// Starts the task of an accepted connection.
fn start<H: Handler>(server: &Arc<Server<H>>, place: Place, io: Io, peer: Peer, tls: Option<Arc<TlsServer>>) {
    let limits = server.limits();
    let counted =
        peer.ip().filter(|ip| !place.reserve && !limits.trusted_proxies.trusts(*ip)).map(network_of);
    let entry = match counted {
        Some(ip) if !server.table.admit_ip(ip, limits.conns_per_ip_max) => {
            let Some(reserve) = server.table.reserve_place() else { return };
            drop(place);
            server.table.enter(reserve, None)
        }
        counted => server.table.enter(place, counted),
    };
    let state = entry.state.clone();
    let serving = server.clone();
    server.service.scoped(CONN_TASK, move || state.describe(), async move {
        connection(&serving, entry, io, peer, tls).await;
    });
}

async fn connection<H: Handler>(
    server: &Arc<Server<H>>,
    mut entry: Entry,
    mut io: Io,
    peer: Peer,
    tls: Option<Arc<TlsServer>>,
) {
    let mut info = ConnInfo::new(peer, tls.is_some());
    let state = entry.state.clone();
    let limits = server.limits().clone();
    let prepared = async {
        if limits.proxy_protocol
            && peer.ip().is_some_and(|ip| limits.trusted_proxies.trusts(ip))
            && let Some(client) = read_proxy_header(&mut io).await?
        {
            info = ConnInfo::new(Peer::Tcp(client), info.secure);
        }
        let Some(tls) = tls else { return Ok((io, false)) };
        let stream = tls.accept(io).await?;
        let (_, session) = stream.get_ref();
        let is_h2 = session.alpn_protocol() == Some(b"h2");
        info.names = session.peer_certificates().and_then(<[_]>::first).map_or_else(Box::default, names_of);
        Ok::<_, std::io::Error>((Io::from(tokio_rustls::TlsStream::from(stream)), is_h2))
    };
    let prepared = tokio::select! {
        biased;
        order = state.ordered(Order::Close) => {
            if order == Order::TimedOut {
                server.timeouts.handshake.inc();
            }
            return;
        }
        prepared = prepared => prepared,
    };
    if info.peer != peer
        && let Some(ip) = info.peer.ip()
        && !entry.count_ip(network_of(ip), limits.conns_per_ip_max)
    {
        entry.refuse();
    }
    let (io, is_h2) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            tracing::debug!(service = server.service.name(), %error, "handshake failed");
            return;
        }
    };
    state.set_phase(Phase::Head);
    if !entry.may_stay().await {
        if is_h2 {
            h2::turn_away(server, &info, io).await;
        } else {
            Conn::new(server, &mut entry, &info, io).turn_away().await;
        }
        return;
    }
    let io = if is_h2 {
        io
    } else {
        (info.interim, info.timer) = (Some(Arc::default()), Some(Arc::default()));
        // Boxed: the future of a connection holds that of its handler.
        match Box::pin(Conn::new(server, &mut entry, &info, io).run()).await {
            End::Http2(io) => io,
            End::Closed => return,
        }
    };
    (info.interim, info.timer) = (None, None);
    Box::pin(h2::serve(server, &mut entry, info, io)).await;
}

async fn read_proxy_header(io: &mut Io) -> std::io::Result<Option<SocketAddr>> {
    let mut buffer = BytesMut::new();
    loop {
        match proxy_protocol::parse(&buffer) {
            Ok(Some((length, client))) => {
                buffer.advance(length);
                io.unread(buffer.freeze());
                return Ok(client);
            }
            Ok(None) => {
                if io.read_buf(&mut buffer).await? == 0 {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
            }
            Err(reason) => return Err(std::io::Error::other(reason)),
        }
    }
}

/// The current date as HTTP writes it, made once a second and thread.
pub(crate) fn with_date<T>(then: impl FnOnce(&str) -> T) -> T {
    thread_local! {
        static DATE: RefCell<(u64, String)> = const { RefCell::new((0, String::new())) };
    }
    let now = coarse::unix_millis() / 1000;
    DATE.with_borrow_mut(|(second, text)| {
        if *second != now || text.is_empty() {
            *second = now;
            *text = http_date(now);
        }
        then(text)
    })
}

#[cfg(test)]
mod tests;
