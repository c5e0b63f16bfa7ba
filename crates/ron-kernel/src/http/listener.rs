//! Binding sockets, with errors that say what to do.

use super::io::Io;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use tokio::net::{TcpListener, UnixListener};

/// Connections the operating system may hold for us before they are accepted.
const BACKLOG: i32 = 4096;

/// A listening socket.
#[derive(Debug)]
pub struct Bound {
    socket: Arc<Socket>,
}

#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpListener),
    Unix {
        listener: UnixListener,
        path: PathBuf,
        /// Another process listens on it too, so its file stays.
        handed: AtomicBool,
    },
}

impl Socket {
    /// A second hold on it.
    pub(crate) fn fd(&self) -> std::io::Result<OwnedFd> {
        match self {
            Socket::Tcp(listener) => listener.as_fd().try_clone_to_owned(),
            Socket::Unix { listener, .. } => listener.as_fd().try_clone_to_owned(),
        }
    }

    pub(crate) fn hand_over(&self) {
        if let Socket::Unix { handed, .. } = self {
            handed.store(true, Ordering::SeqCst);
        }
    }
}

/// Who is on the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Tcp(SocketAddr),
    Unix { uid: u32 },
}

impl Peer {
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Peer::Tcp(address) => Some(address.ip().to_canonical()),
            Peer::Unix { .. } => None,
        }
    }
}

/// Why a socket could not be bound.
#[derive(Debug)]
pub struct BindError {
    what: String,
    error: std::io::Error,
}

impl BindError {
    /// What could not be bound, and why.
    pub fn new(what: String, error: std::io::Error) -> BindError {
        BindError { what, error }
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let advice = match self.error.kind() {
            std::io::ErrorKind::AddrInUse => {
                "it is in use: stop the program that has it, or configure another address (port 0 picks a free one)"
            }
            std::io::ErrorKind::PermissionDenied => {
                "not permitted: ports below 1024 need privileges; use a higher one"
            }
            std::io::ErrorKind::AddrNotAvailable => "this machine has no such address",
            _ => "the operating system refused",
        };
        write!(f, "cannot listen on {}: {advice} ({})", self.what, self.error)
    }
}

impl std::error::Error for BindError {}

/// Binds a TCP address. Must run inside the runtime.
pub fn bind_tcp(address: SocketAddr) -> Result<Bound, BindError> {
    let bind = || {
        let socket =
            socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    match bind() {
        Ok(listener) => Ok(Bound { socket: Arc::new(Socket::Tcp(listener)) }),
        Err(error) => Err(BindError { what: address.to_string(), error }),
    }
}

/// Binds a Unix socket, for this user only or for all; a stale file of a former process is replaced.
pub fn bind_unix(path: &Path, for_all: bool) -> Result<Bound, BindError> {
    let bind = || {
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
        if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
            std::fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(if for_all { 0o666 } else { 0o600 }))?;
        Ok(listener)
    };
    match bind() {
        Ok(listener) => Ok(Bound::unix(listener, path)),
        Err(error) => Err(BindError { what: format!("unix:{}", path.display()), error }),
    }
}

/// A socket that another process bound, if it has this address. Must run inside the runtime.
pub(crate) fn adopt_tcp(fd: OwnedFd, address: SocketAddr) -> Option<Bound> {
    let listener = std::net::TcpListener::from(fd);
    let local = listener.local_addr().ok()?;
    let same = local.ip() == address.ip() && [0, local.port()].contains(&address.port());
    listener.set_nonblocking(true).ok().filter(|()| same)?;
    Some(Bound { socket: Arc::new(Socket::Tcp(TcpListener::from_std(listener).ok()?)) })
}

/// The same with a Unix socket at this path.
pub(crate) fn adopt_unix(fd: OwnedFd, path: &Path) -> Option<Bound> {
    let listener = std::os::unix::net::UnixListener::from(fd);
    let local = listener.local_addr().ok()?;
    let same = |a: &Path, b: &Path| a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    local.as_pathname().filter(|local| same(local, path))?;
    listener.set_nonblocking(true).ok()?;
    Some(Bound::unix(UnixListener::from_std(listener).ok()?, path))
}

impl Bound {
    fn unix(listener: UnixListener, path: &Path) -> Bound {
        let (path, handed) = (path.to_owned(), AtomicBool::new(false));
        Bound { socket: Arc::new(Socket::Unix { listener, path, handed }) }
    }

    pub(crate) fn downgrade(&self) -> Weak<Socket> {
        Arc::downgrade(&self.socket)
    }

    /// The address as configured clients would write it, with the port that was really bound.
    pub fn address(&self) -> String {
        match &*self.socket {
            Socket::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| String::new(), |addr| addr.to_string())
            }
            Socket::Unix { path, .. } => format!("unix:{}", path.display()),
        }
    }

    /// Accepts the next connection. Cancel-safe.
    pub async fn accept(&self) -> std::io::Result<(Io, Peer)> {
        match &*self.socket {
            Socket::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Small answers must not wait for an acknowledgement; a failure only costs latency.
                let _ = stream.set_nodelay(true);
                Ok((Io::from(stream), Peer::Tcp(address)))
            }
            Socket::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                let uid = stream.peer_cred()?.uid();
                Ok((Io::from(stream), Peer::Unix { uid }))
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Socket::Unix { path, handed, .. } = self
            && !handed.load(Ordering::SeqCst)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}
