//! Where a server is, and what is spoken to it.

use std::path::PathBuf;
use std::str::FromStr;

/// What is spoken over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP/1.1.
    Http,
    /// HTTP/2 or HTTP/1.1 over TLS, as the server chooses.
    Https,
    /// HTTP/2 without TLS, from the first byte on.
    H2c,
}

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp {
        scheme: Scheme,
        /// `host:port`
        authority: String,
        host: String,
    },
    Unix(PathBuf),
}

impl Address {
    /// What a request to it is for, if it names no other host.
    pub fn authority(&self) -> &str {
        match self {
            Address::Tcp { authority, .. } => authority,
            Address::Unix(_) => "localhost",
        }
    }

    pub fn is_https(&self) -> bool {
        matches!(self, Address::Tcp { scheme: Scheme::Https, .. })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp { scheme: Scheme::Http, authority, .. } => write!(f, "http://{authority}"),
            Address::Tcp { scheme: Scheme::Https, authority, .. } => write!(f, "https://{authority}"),
            Address::Tcp { scheme: Scheme::H2c, authority, .. } => write!(f, "h2c://{authority}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(PathBuf::from(path)));
        }
        let wrong = || {
            format!(
                "{text:?} is no server: write http://host:port, https://host:port, h2c://host:port or unix:path"
            )
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
        let (scheme, default_port) = match scheme {
            "http" => (Scheme::Http, 80),
            "https" => (Scheme::Https, 443),
            "h2c" => (Scheme::H2c, 80),
            _ => return Err(wrong()),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest).parse::<http::uri::Authority>().ok();
        let authority = authority.filter(|authority| !authority.as_str().contains('@')).ok_or_else(wrong)?;
        let host = authority.host();
        // Read from the text: the parsed authority forgets a port that is out of range.
        let port = match authority.as_str().strip_prefix(host).and_then(|rest| rest.strip_prefix(':')) {
            Some(port) => port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong)?,
            None => default_port,
        };
        if host.is_empty() {
            return Err(wrong());
        }
        Ok(Address::Tcp { scheme, authority: format!("{host}:{port}"), host: host.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_written_as_urls_or_socket_paths() {
        let check =
            |text: &str, expected: &str| assert_eq!(text.parse::<Address>().unwrap().to_string(), expected);
        check("http://a.org", "http://a.org:80");
        check("https://a.org/", "https://a.org:443");
        check("h2c://[::1]:90", "h2c://[::1]:90");
        check("unix:x.sock", "unix:x.sock");
        for bad in [
            "",
            "a.org:80",
            "ftp://a.org",
            "http://a.org/path",
            "http://u@a.org",
            "unix:",
            "http://a:99999",
            "http://a:0",
            "http://:80",
        ] {
            assert!(bad.parse::<Address>().unwrap_err().contains("http://host:port"), "{bad}");
        }
    }
}
