//! Where a node is: `ed25519:…@host:port`, `quic:host:port` or a Unix socket in place of host and port.

use oap::NodeId;
use ron_kernel::config::{Node, Problems, Setting, Value};
use ron_kernel::key::PublicKey;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

const QUIC: &str = "quic:";
/// Whether this build has it.
const BUILT: bool = cfg!(feature = "quic");
const UNIX: &str = "unix:";

/// Where to dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A name or an IP address (IPv6 without its brackets), and a port.
    Tcp(String, u16),
    /// The same over QUIC; only in a build with the feature `quic`.
    Quic(String, u16),
    Unix(PathBuf),
}

impl Address {
    /// Whether what is sent there stays on this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Tcp(host, _) | Address::Quic(host, _) => {
                host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
            Address::Unix(_) => true,
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix(UNIX).filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(path.into()));
        }
        let (make, at): (fn(_, _) -> _, _) = match quic(text, BUILT)? {
            Some(at) => (Address::Quic, at),
            None => (Address::Tcp, text),
        };
        let read = || {
            let (host, port) = at.rsplit_once(':')?;
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            // A bare IPv6 address would leave open where its port begins.
            let host = bare.or((!host.contains(':')).then_some(host)).filter(|host| !host.is_empty())?;
            Some(make(host.to_owned(), port.parse().ok().filter(|port| *port > 0)?))
        };
        read().ok_or_else(|| {
            format!("{text:?} is no address: write host:port, such as 10.0.0.2:9500, or unix:PATH")
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp(host, port) => write!(f, "{host}:{port}"),
            Address::Quic(host, port) => write!(f, "{QUIC}{}", Address::Tcp(host.clone(), *port)),
            Address::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

/// What follows `quic:`, if the build has it.
fn quic(text: &str, built: bool) -> Result<Option<&str>, String> {
    let at = text.strip_prefix(QUIC);
    if at.is_some() && !built {
        return Err(format!(
            "{text:?}: QUIC is not part of this build: build with `--features quic`, write host:port for TCP, or unix:PATH"
        ));
    }
    Ok(at)
}

/// A peer as configured: who it is, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    pub node: NodeId,
    pub at: Address,
}

impl FromStr for PeerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<PeerAddress, String> {
        let parts = text.split_once('@');
        let (key, at) = parts.ok_or_else(|| format!("{text:?} is no peer: write ed25519:…@host:port"))?;
        Ok(PeerAddress { node: NodeId(key.parse::<PublicKey>()?.0), at: at.parse()? })
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.node, self.at)
    }
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    Tcp(SocketAddr),
    /// Only in a build with the feature `quic`.
    Quic(SocketAddr),
    /// Relative to the data folder.
    Unix(String),
}

impl Listen {
    pub fn is_local(&self) -> bool {
        match self {
            Listen::Tcp(address) | Listen::Quic(address) => address.ip().is_loopback(),
            Listen::Unix(_) => true,
        }
    }

    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Listen::Tcp(address) => Some(*address),
            Listen::Quic(_) | Listen::Unix(_) => None,
        }
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Listen, String> {
        if let Some(path) = text.strip_prefix(UNIX).filter(|path| !path.is_empty()) {
            return Ok(Listen::Unix(path.to_owned()));
        }
        let address = match quic(text, BUILT)? {
            Some(at) => at.parse().ok().map(Listen::Quic),
            None => text.parse().ok().map(Listen::Tcp),
        };
        address.ok_or_else(|| {
            format!("{text:?} is no address: write IP:PORT, such as \"127.0.0.1:9500\", or unix:PATH")
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Tcp(address) => write!(f, "{address}"),
            Listen::Quic(address) => write!(f, "{QUIC}{address}"),
            Listen::Unix(path) => write!(f, "{UNIX}{path}"),
        }
    }
}

impl Setting for Listen {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Listen> {
        let Value::String(text) = &node.value else {
            problems.add(path, format!("expected {}, found {}", Listen::kind(), node.value.kind()));
            return None;
        };
        text.parse().map_err(|error: String| problems.add(path, error)).ok()
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        out.push((path.to_owned(), serde_json::Value::from(self.to_string()).to_string()));
    }

    fn kind() -> String {
        "an address such as \"127.0.0.1:9500\", or \"unix:PATH\"".to_owned()
    }

    fn schema() -> serde_json::Value {
        serde_json::json!({"type": "string"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "ed25519:6kpsY-KcUgq-9VB7Ey7F-ZVHdq6-vnuSQh7qaRRG0iw";

    #[test]
    fn a_peer_is_read_as_it_is_written() {
        for at in ["10.0.0.2:9500", "node-1.example:1", "[::1]:9500", "unix:/run/ron/oap.sock"] {
            let text = format!("{KEY}@{at}");
            assert_eq!(text.parse::<PeerAddress>().unwrap().to_string(), text);
        }
        for listen in ["127.0.0.1:0", "[::]:9500", "unix:oap.sock"] {
            assert_eq!(listen.parse::<Listen>().unwrap().to_string(), listen);
        }
    }

    #[test]
    fn what_is_no_peer_is_refused_with_advice() {
        let check = |text: &str, says: &str| {
            let error = text.parse::<PeerAddress>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        };
        check("10.0.0.2:9500", "ed25519:…@host:port");
        check("ed25519:AAAA@10.0.0.2:9500", "ron key show");
        for at in ["", "host", "host:", ":9500", "host:0", "host:70000", "::1:9500", "unix:"] {
            check(&format!("{KEY}@{at}"), "write host:port");
        }
        let (peer, listen) = (format!("{KEY}@quic:host:1"), "quic:127.0.0.1:1");
        if BUILT {
            assert_eq!(peer.parse::<PeerAddress>().unwrap().to_string(), peer);
            assert_eq!(listen.parse::<Listen>().unwrap().to_string(), listen);
            check(&format!("{KEY}@quic:host"), "write host:port");
        } else {
            check(&peer, "QUIC is not part of this build: build with `--features quic`");
            assert!(listen.parse::<Listen>().unwrap_err().contains("QUIC is not part"));
        }
        assert!(quic(listen, false).unwrap_err().contains("build with `--features quic`"));
        assert_eq!((quic(listen, true), quic("host:1", false)), (Ok(Some("127.0.0.1:1")), Ok(None)));
    }

    #[test]
    fn what_stays_on_this_machine_is_known() {
        for (at, local) in [
            ("127.0.0.1:1", true),
            ("[::1]:1", true),
            ("localhost:1", true),
            ("unix:x", true),
            ("10.0.0.2:1", false),
            ("a:1", false),
        ] {
            assert_eq!(at.parse::<Address>().unwrap().is_local(), local, "{at}");
        }
    }
}
