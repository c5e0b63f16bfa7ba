//! Which origins may be asked, without I/O: how their URLs are written, which addresses they may have, and where a
//! redirect may lead.
//!
//! A name is compared only in its one normal form, and what could be read as an address in some other way (octal,
//! hexadecimal, too few parts) is no name at all. Addresses are judged after the look-up, by [`is_public`].

use crate::cache::without_dots;
use ron_kernel::http::client::{Address, Scheme};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Redirects that are followed for one object.
pub const REDIRECTS_MAX: usize = 3;

/// Why a URL is none that is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUrl {
    #[error("it must begin with https://")]
    Scheme,
    #[error("it must not name a user")]
    User,
    #[error(
        "its host is no name in lower-case ASCII (write an international one as xn--…) and no plain address"
    )]
    Host,
    #[error("its port must be a number from 1 to 65535")]
    Port,
    #[error("its path must have no query, fragment, blank, backslash or dot segment")]
    Path,
}

/// Whom to ask: what is compared with the allow-list.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Authority {
    pub secure: bool,
    /// In its normal form; an IPv6 address in brackets.
    pub host: String,
    pub port: u16,
}

/// An origin's URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginUrl {
    pub authority: Authority,
    /// Begins with a slash.
    pub path: String,
}

impl Authority {
    /// As `Host` has it: without the port that goes without saying.
    pub fn host_field(&self) -> String {
        let usual = if self.secure { 443 } else { 80 };
        if self.port == usual { self.host.clone() } else { format!("{}:{}", self.host, self.port) }
    }

    pub fn address(&self) -> Address {
        let scheme = if self.secure { Scheme::Https } else { Scheme::Http };
        Address::Tcp { scheme, authority: format!("{}:{}", self.host, self.port), host: self.host.clone() }
    }

    fn of(text: &str, secure: bool) -> Result<Authority, BadUrl> {
        if text.contains('@') {
            return Err(BadUrl::User);
        }
        let end = match text.strip_prefix('[') {
            Some(rest) => rest.find(']').ok_or(BadUrl::Host)? + 2,
            None => text.find(':').unwrap_or(text.len()),
        };
        let (host, port) = text.split_at(end);
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => {
                if secure {
                    443
                } else {
                    80
                }
            }
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().ok().filter(|port| *port > 0).ok_or(BadUrl::Port)?
            }
            _ => return Err(BadUrl::Port),
        };
        Ok(Authority { secure, host: normal_host(host).ok_or(BadUrl::Host)?, port })
    }
}

impl OriginUrl {
    /// Reads a URL of the configuration.
    pub fn parse(text: &str, allow_http: bool) -> Result<OriginUrl, BadUrl> {
        let (secure, rest) =
            scheme(text).filter(|(secure, _)| *secure || allow_http).ok_or(BadUrl::Scheme)?;
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let path = if path.is_empty() { "/" } else { path };
        let good = path.bytes().all(|byte| matches!(byte, 0x21..=0x7e) && !b"?#\\".contains(&byte));
        if !good || without_dots(path) != path {
            return Err(BadUrl::Path);
        }
        Ok(OriginUrl { authority: Authority::of(authority, secure)?, path: path.to_owned() })
    }

    /// Where a redirect leads: whom to ask, and for which path and query. Everything but HTTPS is refused; whether the
    /// host may be asked is the caller's to say.
    pub fn redirect(from: &Authority, path: &str, location: &str) -> Result<(Authority, String), BadUrl> {
        let location = location.split('#').next().unwrap_or_default();
        if location.bytes().any(|byte| !matches!(byte, 0x21..=0x7e) || byte == b'\\') {
            return Err(BadUrl::Path);
        }
        let absolute = match location.strip_prefix("//") {
            Some(_) => Some(format!("https:{location}")),
            None => location
                .find([':', '/', '?'])
                .filter(|at| location[*at..].starts_with(':'))
                .map(|_| location.to_owned()),
        };
        if let Some(url) = absolute {
            let (secure, rest) = scheme(&url).ok_or(BadUrl::Scheme)?;
            // What began encrypted stays so.
            if !secure && from.secure {
                return Err(BadUrl::Scheme);
            }
            let (authority, target) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
            let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
            return Ok((Authority::of(authority, secure)?, normal_target(&target)));
        }
        if location.is_empty() {
            return Ok((from.clone(), normal_target(path)));
        }
        let path = path.split('?').next().unwrap_or_default();
        let target = match location.as_bytes().first() {
            Some(b'/') => location.to_owned(),
            Some(b'?') => format!("{path}{location}"),
            _ => format!("{}/{location}", path.rsplit_once('/').map_or("", |(folder, _)| folder)),
        };
        Ok((from.clone(), normal_target(&target)))
    }
}

/// Whether a URL is encrypted, and what follows its scheme.
fn scheme(text: &str) -> Option<(bool, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    match scheme {
        _ if scheme.eq_ignore_ascii_case("https") => Some((true, rest)),
        _ if scheme.eq_ignore_ascii_case("http") => Some((false, rest)),
        _ => None,
    }
}

/// A path without dot segments, and the query as it is.
fn normal_target(target: &str) -> String {
    let (path, query) = target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
    let path = without_dots(path);
    query.map_or(path.clone(), |query| format!("{path}?{query}"))
}

/// The one form in which a host is compared: lower case, no dot at the end, addresses as the standard library writes
/// them. `None` for what is neither a name nor an address written plainly.
pub fn normal_host(host: &str) -> Option<String> {
    if let Some(inner) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return inner.parse::<Ipv6Addr>().ok().map(|address| format!("[{address}]"));
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    if let Ok(address) = host.parse::<Ipv4Addr>() {
        return Some(address.to_string());
    }
    let host = host.to_ascii_lowercase();
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // A resolver reads a last part of digits as part of an address, however many parts there are.
    let last = host.rsplit('.').next().unwrap_or_default();
    let number = last.bytes().all(|byte| byte.is_ascii_digit())
        || last.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    (host.len() <= 253 && !number && host.split('.').all(label)).then_some(host)
}

/// Whether an address is one of the public network: not this machine, its networks, a group, or set apart.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// Networks of RFC 6890 and its successors that nobody outside can mean.
const V4: [(Ipv4Addr, u32); 16] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
    (Ipv4Addr::BROADCAST, 32),
];

fn is_public_v4(address: Ipv4Addr) -> bool {
    let within = |(network, bits): &(Ipv4Addr, u32)| {
        (address.to_bits() ^ network.to_bits()).checked_shr(32 - bits).unwrap_or(0) == 0
    };
    !V4.iter().any(within)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let parts = address.segments();
    let embedded = || Ipv4Addr::from_bits(u32::from(parts[6]) << 16 | u32::from(parts[7]));
    match parts {
        // An IPv4 address in another dress: mapped, or behind a translator (RFC 6052).
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => is_public_v4(embedded()),
        // Protocol assignments with Teredo and ORCHID, documentation, 6to4.
        [0x2001, 0..=0x01ff, ..] | [0x2001, 0x0db8, ..] | [0x2002, ..] | [0x3fff, 0..=0x0fff, ..] => false,
        // Of all the rest only this eighth has been given out.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn urls_have_one_normal_form() {
        let check = |text: &str, host: &str, port: u16, path: &str| {
            let url = OriginUrl::parse(text, false).unwrap();
            assert_eq!((&*url.authority.host, url.authority.port, &*url.path), (host, port, path), "{text}");
        };
        check("https://img.example.org/", "img.example.org", 443, "/");
        check("HTTPS://IMG.Example.org.:8443", "img.example.org", 8443, "/");
        check("https://xn--bcher-kva.example/a/b/", "xn--bcher-kva.example", 443, "/a/b/");
        check("https://93.184.216.34/", "93.184.216.34", 443, "/");
        check("https://[2606:4700:0:0::1111]:444/x", "[2606:4700::1111]", 444, "/x");
        let field = |text: &str| OriginUrl::parse(text, true).unwrap().authority.host_field();
        assert_eq!(
            (field("https://a.org:443/"), field("http://a.org:80/")),
            ("a.org".into(), "a.org".into())
        );
        assert_eq!(
            (field("https://a.org:80/"), field("http://[::1]:8080")),
            ("a.org:80".into(), "[::1]:8080".into())
        );
    }

    /// Spellings by which others were led astray.
    #[test]
    fn whatever_could_be_read_in_two_ways_is_refused() {
        let check =
            |text: &str, expected: BadUrl| assert_eq!(OriginUrl::parse(text, false), Err(expected), "{text}");
        for scheme in [
            "http://a.org/",
            "ftp://a.org/",
            "a.org",
            "//a.org",
            "https:/a.org",
            "https:a.org",
            "file:///etc/passwd",
            "gopher://a.org/",
        ] {
            check(scheme, BadUrl::Scheme);
        }
        for user in
            ["https://a.org@127.0.0.1/", "https://a@b.org/", "https://:x@b.org/", "https://a.org:443@b.org/"]
        {
            check(user, BadUrl::User);
        }
        for host in [
            "https:///x",
            "https://2130706433/",
            "https://0x7f000001/",
            "https://0x7f.1/",
            "https://017700000001/",
            "https://127.1/",
            "https://127.0.1/",
            "https://0177.0.0.1/",
            "https://1.2.3.4.5/",
            "https://256.1.1.1/",
            "https://a.org./../",
            "https://a..org/",
            "https://-a.org/",
            "https://a-.org/",
            "https://a org/",
            "https://a\u{3002}org/",
            "https://\u{2460}27.0.0.1/",
            "https://b\u{fc}cher.example/",
            "https://a.org%00.b.org/",
            "https://127.0.0.1%2f.org/",
            "https://[::1%25eth0]/",
            "https://[::ffff:127.0.0.1/",
            "https://[1.2.3.4]/",
            "https://[::1]x/",
            "https://a\\b.org/",
            "https://localhost\t/",
            "https://0x/",
            "https://a.0x7f/",
        ] {
            let found = OriginUrl::parse(host, false);
            assert!(matches!(found, Err(BadUrl::Host | BadUrl::Port | BadUrl::Path)), "{host}: {found:?}");
        }
    }

    #[test]
    fn ports_and_paths_are_plain() {
        let check =
            |text: &str, expected: BadUrl| assert_eq!(OriginUrl::parse(text, false), Err(expected), "{text}");
        for port in [
            "https://a.org:0/",
            "https://a.org:99999/",
            "https://a.org:/",
            "https://a.org:4x/",
            "https://a.org:+1/",
            "https://a.org:80:80/",
        ] {
            check(port, BadUrl::Port);
        }
        for path in [
            "https://a.org/?q",
            "https://a.org/#f",
            "https://a.org/../b",
            "https://a.org/./b",
            "https://a.org/a b",
            "https://a.org/a\\b",
        ] {
            check(path, BadUrl::Path);
        }
    }

    #[test]
    fn only_addresses_of_the_public_network_are_public() {
        let public = |text: &str| is_public(text.parse().unwrap());
        for good in [
            "1.1.1.1",
            "93.184.216.34",
            "172.15.0.1",
            "172.32.0.1",
            "100.63.0.1",
            "100.128.0.1",
            "192.0.1.1",
            "198.17.0.1",
            "198.20.0.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00::1",
            "2001:4860::8888",
            "::ffff:1.1.1.1",
            "64:ff9b::1.1.1.1",
        ] {
            assert!(public(good), "{good}");
        }
        for bad in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.255",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.9",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::a00:1",
            "64:ff9b:1::1",
            "100::1",
            "fe80::1",
            "fec0::1",
            "fc00::1",
            "fd00::1",
            "ff02::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff::1",
            "5f00::1",
            "4000::1",
        ] {
            assert!(!public(bad), "{bad}");
        }
    }

    #[test]
    fn a_redirect_stays_encrypted_and_is_read_like_any_url() {
        let from = OriginUrl::parse("https://a.org/", false).unwrap().authority;
        let check = |location: &str, host: &str, target: &str| {
            let (to, found) = OriginUrl::redirect(&from, "/x/y?q", location).unwrap();
            assert_eq!((&*to.host, &*found), (host, target), "{location}");
        };
        check("/z", "a.org", "/z");
        check("z?1", "a.org", "/x/z?1");
        check("../../../z", "a.org", "/z");
        check("?w", "a.org", "/x/y?w");
        check("", "a.org", "/x/y?q");
        check("#f", "a.org", "/x/y?q");
        check("https://b.org", "b.org", "/");
        check("https://B.org:444/c?d#e", "b.org", "/c?d");
        check("//c.org/d/../e", "c.org", "/e");
        check("https://127.0.0.1/", "127.0.0.1", "/");
        for bad in [
            "http://a.org/",
            "HTTP://a.org/",
            "ftp://a.org/",
            "javascript:alert(1)",
            "https://u@a.org/",
            "https://0x7f.1/",
            "https://a.org\\@b.org/",
            "/a b",
            "https://\u{e9}.org/",
            "https:///x",
        ] {
            assert!(OriginUrl::redirect(&from, "/", bad).is_err(), "{bad}");
        }
    }

    /// As `inet_aton` of the C libraries reads: one to four numbers, decimal, octal or hexadecimal, between dots, of
    /// which only the last may be larger than a byte.
    fn is_read_as_address(host: &str) -> bool {
        let number = |part: &str| match part.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok().or(digits.is_empty().then_some(0)),
            None if part.starts_with('0') => u64::from_str_radix(part, 8).ok(),
            None => part.parse().ok(),
        };
        let Some(numbers) = host.split('.').map(number).collect::<Option<Vec<u64>>>() else { return false };
        let (last, bytes) = numbers.split_last().unwrap();
        bytes.len() < 4 && bytes.iter().all(|byte| *byte < 256) && *last < 1 << (32 - 8 * bytes.len())
    }

    #[test]
    fn a_resolver_reads_more_than_dotted_quads() {
        for host in ["1", "0x7f.1", "127.1", "017700000001", "0x", "127.0.0.1", "0xffffffff"] {
            assert!(is_read_as_address(host), "{host}");
        }
        for host in ["0-0", "a", "1.a", "256.1", "1.2.3.4.5", "08", "4294967296"] {
            assert!(!is_read_as_address(host), "{host}");
        }
        assert_eq!(normal_host("0-0").as_deref(), Some("0-0"));
    }

    proptest! {
        /// Whatever a host is written like: if it passes, resolvers have one way to read it.
        #[test]
        fn a_normal_host_is_its_own_and_no_hidden_address(host in "[a-fxX0-9.\\-\\[\\]:]{1,18}") {
            if let Some(normal) = normal_host(&host) {
                prop_assert_eq!(normal_host(&normal), Some(normal.clone()));
                let address = normal.parse::<Ipv4Addr>().is_ok() || normal.starts_with('[');
                prop_assert!(address || !is_read_as_address(&normal), "{normal}");
            }
        }

        #[test]
        fn a_mapped_address_is_judged_like_itself(bits: u32) {
            let plain = Ipv4Addr::from_bits(bits);
            prop_assert_eq!(is_public(plain.into()), is_public(plain.to_ipv6_mapped().into()));
            prop_assert!(!is_public_v4(plain) || !plain.is_private() && !plain.is_loopback() && !plain.is_link_local());
        }
    }
}
