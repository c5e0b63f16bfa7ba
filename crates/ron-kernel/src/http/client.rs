//! The HTTP client: one remote server, the connections kept to it, and one call.
//!
//! Start from [`Remote`]. HTTP/1.1 is our own codec, HTTP/2 is hyper's; which of them is spoken follows from the
//! address and, under TLS, from what the server chooses. A body streams; what has not begun to stream is given back
//! when a call fails, so that the caller may try again.

mod address;
mod h1;
mod h2;

pub use address::{Address, Scheme};

use super::body::{Body, BodyError};
use super::fields::Fields;
use super::io::Io;
use crate::inventory::LockSpec;
use crate::kernel::Service;
use crate::lock::Lock;
use crate::tls::TlsClient;
use arc_swap::ArcSwapOption;
use bytes::{Bytes, BytesMut};
use h1::ClientConn;
use h2::Multiplexed;
use http::{HeaderMap, HeaderName, Method, Request, StatusCode, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::future::Future as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Sleep;

/// Idle HTTP/1.1 connections kept per server.
const IDLE_MAX: usize = 64;
/// Age at which an idle connection is not used again: most servers close theirs after a minute or more.
const IDLE_AGE: Duration = Duration::from_secs(30);
/// HTTP/2 connections kept per server, and streams begun on each before another is opened.
const MULTIPLEXED_MAX: usize = 8;
const STREAMS_MAX: usize = 100;
/// How long a looked-up name is believed.
const DNS_AGE: Duration = Duration::from_secs(10);

/// A request's head, in the form that the connection at hand wants.
pub trait Outgoing: Sync {
    fn method(&self) -> &Method;
    /// Appends request line and fields, down to the empty line.
    fn write_http1(&self, out: &mut BytesMut);
    /// The same for HTTP/2; the target is absolute, with `authority` if the request names no host.
    fn http2(&self, scheme: &str, authority: &str) -> Request<()>;
    /// It asks to change the protocol, so it must go over HTTP/1.1.
    fn upgrades(&self) -> bool {
        false
    }
    /// Its body goes in chunks over HTTP/1.1: the length is not known.
    fn chunked(&self) -> bool {
        false
    }
    /// The server says something before its answer.
    fn interim(&self, _status: StatusCode, _headers: HeaderMap) {}
    /// Which fields may be passed on behind a body.
    fn trailers(&self) -> fn(&HeaderName) -> bool {
        |_any| true
    }
}

/// A plain `GET` of JSON.
#[derive(Clone, Copy, Debug)]
pub struct Get<'a> {
    pub path: &'a str,
    pub host: &'a str,
}

impl Outgoing for Get<'_> {
    fn method(&self) -> &Method {
        &Method::GET
    }

    fn write_http1(&self, out: &mut BytesMut) {
        let Get { path, host } = self;
        let head = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\naccept: application/json\r\n\r\n");
        out.extend_from_slice(head.as_bytes());
    }

    fn http2(&self, scheme: &str, authority: &str) -> Request<()> {
        let request = Request::get(format!("{scheme}://{authority}{}", self.path));
        let request = request.header("accept", "application/json");
        request.body(()).expect("a URL that was read makes a request")
    }
}

/// Why a call did not yield an answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    #[error("the server could not be reached: {0}")]
    Connect(String),
    #[error("no connection was made in time")]
    ConnectTimeout,
    /// Its name leads to no address that it may have.
    #[error("the server's address is not allowed")]
    Refused,
    #[error("the server broke the connection: {0}")]
    Broken(String),
    #[error("the server's answer is malformed: {0}")]
    Malformed(String),
    #[error("the request body failed: {0}")]
    RequestBody(BodyError),
    /// A kept connection was closed without a word of an answer to an idempotent request: a new one may be tried.
    #[error("the connection had been closed")]
    Stale,
}

/// How a call is to be made.
#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    pub connect_timeout: Duration,
    /// Longest silence of the server within a body.
    pub silence: Duration,
}

/// An answer; its body may still be under way.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub version: Version,
    pub fields: Fields,
    pub payload: Payload,
}

#[derive(Debug)]
pub enum Payload {
    /// It came with its head.
    Whole(Bytes),
    Stream(ResponseBody),
    /// The protocol has changed: the connection is the caller's.
    Upgraded(Io),
}

/// Which addresses a server may have.
pub type MayConnect = fn(IpAddr) -> bool;

/// That a name leads to none of them.
#[derive(Debug, thiserror::Error)]
#[error("the address is not allowed")]
struct RefusedAddress;

/// The addresses a name had, and when.
type Resolved = Option<(Instant, Arc<[SocketAddr]>)>;

/// A server and the connections kept to it.
#[derive(Debug)]
pub struct Remote {
    pub address: Address,
    service: Service,
    may_connect: MayConnect,
    tls: ArcSwapOption<TlsClient>,
    /// How often the rules of TLS have changed: a connection made under former ones is not kept.
    tls_version: AtomicUsize,
    idle: Lock<Vec<(Instant, ClientConn)>>,
    multiplexed: Lock<Vec<Multiplexed>>,
    /// It has spoken HTTP/2 before.
    speaks_http2: AtomicBool,
    /// Held while a connection is made that many requests will share.
    dialing: tokio::sync::Mutex<()>,
    /// Held while the name is being looked up.
    resolved: Arc<tokio::sync::Mutex<Resolved>>,
}

impl Remote {
    /// `lock` declares the lock of the kept connections.
    pub fn new(service: &Service, lock: &'static LockSpec, address: Address) -> Arc<Remote> {
        Remote::guarded(service, lock, address, |_any| true)
    }

    /// A server that may have some addresses only. What its name leads to is looked at after each look-up, and the
    /// connection is made to an address that was looked at: a name that leads elsewhere a moment later gains nothing.
    pub fn guarded(
        service: &Service,
        lock: &'static LockSpec,
        address: Address,
        may_connect: MayConnect,
    ) -> Arc<Remote> {
        Arc::new(Remote {
            address,
            service: service.clone(),
            may_connect,
            tls: ArcSwapOption::empty(),
            tls_version: AtomicUsize::new(0),
            idle: Lock::new(service.inventory(), lock, Vec::new()),
            multiplexed: Lock::new(service.inventory(), lock, Vec::new()),
            speaks_http2: AtomicBool::new(false),
            dialing: tokio::sync::Mutex::default(),
            resolved: Arc::default(),
        })
    }

    /// How TLS is spoken to it from now on.
    pub fn set_tls(&self, tls: Option<TlsClient>) {
        let same = match (&tls, &*self.tls.load()) {
            (Some(new), Some(old)) => new.is_same(old),
            (new, old) => new.is_none() && old.is_none(),
        };
        if same {
            return;
        }
        self.tls.store(tls.map(Arc::new));
        // Connections made under the former rules take no further request, nor do those that are busy or being made.
        if self.address.is_https() {
            self.tls_version.fetch_add(1, Ordering::SeqCst);
            self.idle.lock().clear();
            self.forget_multiplexed();
        }
    }

    /// Sends a request and returns the answer once its head is there.
    ///
    /// `body` is left in place if nothing of it was taken.
    pub async fn call(
        self: &Arc<Self>,
        head: &dyn Outgoing,
        body: &mut Option<Body>,
        limits: CallLimits,
    ) -> Result<Answer, CallError> {
        if !head.upgrades() {
            while let Some(conn) = self.take_multiplexed() {
                let tried = conn.clone();
                match conn.exchange(self, head, body, limits).await {
                    // Closing, whether it knows already or not: nobody is to try it again.
                    Err(CallError::Stale) => self.forget(&tried),
                    outcome => return outcome,
                }
            }
        }
        if let Some(conn) = self.take_idle() {
            // A kept connection may be closed by the server at any time; then a new one is made, and no other is tried:
            // a server that takes a request and closes must not be given it again and again.
            match conn.exchange(head, body, limits, self).await {
                Err(CallError::Stale) => {}
                outcome => return outcome,
            }
        }
        let dialed = tokio::time::timeout(limits.connect_timeout, self.dial(head.upgrades())).await;
        match dialed {
            Ok(Ok(Dialed::Http1(conn))) => conn.exchange(head, body, limits, self).await,
            Ok(Ok(Dialed::Http2(conn))) => conn.exchange(self, head, body, limits).await,
            Ok(Err(error)) if error.get_ref().is_some_and(|inner| inner.is::<RefusedAddress>()) => {
                Err(CallError::Refused)
            }
            Ok(Err(error)) => Err(CallError::Connect(error.to_string())),
            Err(_elapsed) => Err(CallError::ConnectTimeout),
        }
    }

    /// Makes a connection and drops it: whether the server is there at all.
    pub async fn reach(self: &Arc<Self>) -> std::io::Result<()> {
        self.dial(true).await.map(drop)
    }

    async fn dial(self: &Arc<Self>, only_http1: bool) -> std::io::Result<Dialed> {
        // One dials, the others wait for what it brings.
        let _dialing = if self.speaks_http2.load(Ordering::Relaxed) && !only_http1 {
            Some(self.dialing.lock().await)
        } else {
            None
        };
        if !only_http1 && let Some(conn) = self.take_multiplexed() {
            return Ok(Dialed::Http2(conn));
        }
        let tls_version = self.tls_version.load(Ordering::SeqCst);
        let (io, is_http2) = self.connect(only_http1).await?;
        if !is_http2 {
            return Ok(Dialed::Http1(ClientConn::new(io, tls_version)));
        }
        self.speaks_http2.store(true, Ordering::Relaxed);
        let conn = Multiplexed::new(self, &self.service, io).await.map_err(std::io::Error::other)?;
        let mut kept = self.multiplexed.lock();
        kept.retain(|conn| !conn.is_closed());
        if kept.len() < MULTIPLEXED_MAX && self.tls_version.load(Ordering::SeqCst) == tls_version {
            kept.push(conn.clone());
        }
        Ok(Dialed::Http2(conn))
    }

    /// Opens a connection; says whether HTTP/2 is spoken on it.
    async fn connect(&self, only_http1: bool) -> std::io::Result<(Io, bool)> {
        let (scheme, authority, host) = match &self.address {
            Address::Unix(path) => return Ok((Io::from(UnixStream::connect(path).await?), false)),
            Address::Tcp { scheme, authority, host } => (*scheme, authority, host),
        };
        let resolved = self.resolve(authority).await?;
        let allowed: Vec<SocketAddr> =
            resolved.iter().copied().filter(|address| (self.may_connect)(address.ip())).collect();
        if allowed.is_empty() && !resolved.is_empty() {
            return Err(std::io::Error::other(RefusedAddress));
        }
        let stream = TcpStream::connect(&allowed[..]).await?;
        stream.set_nodelay(true)?;
        match scheme {
            Scheme::Http => Ok((Io::from(stream), false)),
            Scheme::H2c => Ok((Io::from(stream), true)),
            Scheme::Https => {
                let tls = self.tls.load_full();
                let tls = tls.ok_or_else(|| std::io::Error::other("no TLS is set up for this server"))?;
                tls.connect(Io::from(stream), host, only_http1).await
            }
        }
    }

    /// A connection with room for one more stream.
    fn take_multiplexed(&self) -> Option<Multiplexed> {
        if !self.speaks_http2.load(Ordering::Relaxed) {
            return None;
        }
        let kept = self.multiplexed.lock();
        kept.iter().find(|conn| !conn.is_closed() && conn.streams() < STREAMS_MAX).cloned()
    }

    /// No further request goes over this connection.
    fn forget(&self, conn: &Multiplexed) {
        self.multiplexed.lock().retain(|kept| !kept.is_same(conn));
    }

    /// No further request goes over the HTTP/2 connections that are open.
    fn forget_multiplexed(&self) {
        self.multiplexed.lock().clear();
    }

    /// The connection used last, if one is fresh and the server has not closed it.
    fn take_idle(&self) -> Option<ClientConn> {
        loop {
            let (since, mut conn) = self.idle.lock().pop()?;
            if since.elapsed() < IDLE_AGE && conn.is_quiet() {
                return Some(conn);
            }
        }
    }

    /// Closes the connections that have been idle for too long.
    pub fn tidy(&self, now: Instant) {
        let mut idle = self.idle.lock();
        // The longest idle are in front.
        let stale = idle.partition_point(|(since, _)| now.duration_since(*since) >= IDLE_AGE);
        let closed: Vec<_> = idle.drain(..stale).collect();
        drop(idle);
        drop(closed);
    }

    fn keep(&self, conn: ClientConn) {
        let mut idle = self.idle.lock();
        // Looked at under the lock: whoever changes the version empties the list behind it.
        if conn.tls_version != self.tls_version.load(Ordering::SeqCst) {
            return;
        }
        if idle.len() >= IDLE_MAX {
            idle.remove(0);
        }
        idle.push((Instant::now(), conn));
    }

    /// The addresses of a server's name, looked up at most once at a time and remembered for a while.
    ///
    /// A look-up that hangs holds one thread, however many requests give up waiting for it.
    async fn resolve(&self, name: &str) -> std::io::Result<Arc<[SocketAddr]>> {
        if let Ok(address) = name.parse() {
            return Ok(Arc::new([address]));
        }
        let resolving = self.resolved.clone().lock_owned().await;
        if let Some((at, addresses)) = &*resolving
            && at.elapsed() < DNS_AGE
        {
            return Ok(addresses.clone());
        }
        let name = name.to_owned();
        let looked_up = tokio::task::spawn_blocking(move || {
            let mut resolving = resolving;
            let addresses: Arc<[SocketAddr]> = name.to_socket_addrs()?.collect();
            *resolving = Some((Instant::now(), addresses.clone()));
            Ok(addresses)
        });
        looked_up.await.map_err(std::io::Error::other)?
    }
}

/// Takes out the fields that must not pass.
pub fn retain(headers: &mut HeaderMap, may_pass: impl Fn(&HeaderName) -> bool) {
    let barred: Vec<HeaderName> = headers.keys().filter(|name| !may_pass(name)).cloned().collect();
    for name in barred {
        headers.remove(name);
    }
}

enum Dialed {
    Http1(ClientConn),
    Http2(Multiplexed),
}

/// A response body as it streams from the server, which may not fall silent within it.
#[derive(Debug)]
pub struct ResponseBody {
    source: Source,
    silence: Duration,
    silent: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
enum Source {
    Http1(Box<h1::Download>),
    Http2(h2::Download),
}

impl ResponseBody {
    fn new(source: Source, silence: Duration) -> ResponseBody {
        ResponseBody { source, silence, silent: None }
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = match &mut self.source {
            Source::Http1(download) => download.poll_frame(cx),
            Source::Http2(download) => download.poll_frame(cx),
        };
        if polled.is_ready() {
            self.silent = None;
            return polled;
        }
        let silence = self.silence;
        let timer = self.silent.get_or_insert_with(|| Box::pin(tokio::time::sleep(silence)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Some(Err(BodyError::Upstream("it fell silent".to_owned()))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Http1(_) => false,
            Source::Http2(download) => download.is_end(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Http1(download) => download.size_hint(),
            Source::Http2(download) => download.size_hint(),
        }
    }
}
