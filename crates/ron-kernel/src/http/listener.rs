//! Binding sockets, with errors that say what to do.

use super::io::Io;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tokio::net::{TcpListener, UnixListener};

/// Connections the operating system may hold for us before they are accepted.
const BACKLOG: i32 = 4096;

/// A listening socket.
#[derive(Debug)]
pub struct Bound {
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
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
        Ok(listener) => Ok(Bound { socket: Socket::Tcp(listener) }),
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
        Ok(listener) => Ok(Bound { socket: Socket::Unix(listener, path.to_owned()) }),
        Err(error) => Err(BindError { what: format!("unix:{}", path.display()), error }),
    }
}

impl Bound {
    /// The address as configured clients would write it, with the port that was really bound.
    pub fn address(&self) -> String {
        match &self.socket {
            Socket::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| String::new(), |addr| addr.to_string())
            }
            Socket::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }

    /// Accepts the next connection. Cancel-safe.
    pub async fn accept(&self) -> std::io::Result<(Io, Peer)> {
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Small answers must not wait for an acknowledgement; a failure only costs latency.
                let _ = stream.set_nodelay(true);
                Ok((Io::from(stream), Peer::Tcp(address)))
            }
            Socket::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                let uid = stream.peer_cred()?.uid();
                Ok((Io::from(stream), Peer::Unix { uid }))
            }
        }
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Socket::Unix(_, path) = &self.socket {
            let _ = std::fs::remove_file(path);
        }
    }
}
