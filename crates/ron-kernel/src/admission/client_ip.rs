//! Who the client is, when proxies stand in between: only those we trust are believed.

use crate::config::Problems;
use http::header::{FORWARDED, HeaderMap, HeaderName};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Proxies named in one chain that are looked at; a longer chain ends there.
const HOPS_MAX: usize = 32;

/// A block of addresses: `10.0.0.0/8`, `::1`, `192.0.2.7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    address: IpAddr,
    bits: u8,
}

impl Cidr {
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(block), IpAddr::V4(address)) => {
                let shift = 32 - u32::from(self.bits);
                (u64::from(u32::from(block) ^ u32::from(address)) >> shift) == 0
            }
            (IpAddr::V6(block), IpAddr::V6(address)) => {
                let difference = u128::from(block) ^ u128::from(address);
                self.bits == 0 || difference >> (128 - u32::from(self.bits)) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Cidr, String> {
        let wrong =
            || format!("{text:?} is no address block: write an address or a prefix such as \"10.0.0.0/8\"");
        let (address, bits) =
            text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_not_an_address| wrong())?;
        let bits_max = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(bits_max), |bits| bits.parse::<u8>().map_err(|_not_a_number| wrong()))?;
        if bits > bits_max { Err(wrong()) } else { Ok(Cidr { address, bits }) }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// The proxies whose word counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(pub Vec<Cidr>);

impl TrustedProxies {
    /// Those of a configured list; what cannot be read is nobody.
    pub fn read(list: &[String]) -> TrustedProxies {
        TrustedProxies(list.iter().filter_map(|text| text.parse().ok()).collect())
    }

    /// Every entry of such a list that is no address block.
    pub fn check(list: &[String], key: &str, problems: &mut Problems) {
        for (index, text) in list.iter().enumerate() {
            if let Err(error) = text.parse::<Cidr>() {
                problems.add(format!("{key}[{index}]"), error);
            }
        }
    }

    pub fn trusts(&self, address: IpAddr) -> bool {
        self.0.iter().any(|block| block.contains(address))
    }

    /// The nearest address that is not a trusted proxy, read from the peer outwards.
    ///
    /// An entry that is no address ends the chain; `Forwarded` and `X-Forwarded-For` that disagree end it at the peer.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if !self.trusts(peer) {
            return peer.to_canonical();
        }
        let outermost = |hops: Vec<IpAddr>| {
            let mut client = peer;
            for hop in hops {
                client = hop;
                if !self.trusts(hop) {
                    break;
                }
            }
            client.to_canonical()
        };
        let forwarded = outermost(chain(headers, &FORWARDED, forwarded_for));
        let x_forwarded = outermost(chain(headers, &X_FORWARDED_FOR, |hop| address_of(hop.trim())));
        match (headers.contains_key(FORWARDED), headers.contains_key(X_FORWARDED_FOR)) {
            (true, false) => forwarded,
            (false, true) => x_forwarded,
            (true, true) if forwarded == x_forwarded => forwarded,
            // A proxy writes one of the two and passes the other on as the client forged it.
            _ => peer.to_canonical(),
        }
    }
}

/// What a client is counted by: an IPv4 address, or the /64 of an IPv6 one, since one household has that many.
pub fn network_of(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) >> 64 << 64).into()),
        v4 => v4,
    }
}

/// The addresses of a list header, last first, up to the first that is none.
fn chain(headers: &HeaderMap, name: &HeaderName, read: impl Fn(&str) -> Option<IpAddr>) -> Vec<IpAddr> {
    let values: Vec<&str> = headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
    let hops = values.iter().rev().flat_map(|value| value.rsplit(','));
    hops.take(HOPS_MAX).map_while(read).collect()
}

/// The `for=` of one element of `Forwarded` (RFC 7239).
fn forwarded_for(element: &str) -> Option<IpAddr> {
    let pair = element.split(';').find_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        name.eq_ignore_ascii_case("for").then_some(value)
    })?;
    address_of(pair.trim_matches('"'))
}

/// An address with or without a port, IPv6 in brackets or bare.
fn address_of(text: &str) -> Option<IpAddr> {
    if let Some(inside) = text.strip_prefix('[') {
        return inside.split_once(']')?.0.parse().ok();
    }
    text.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;

    fn client(peer: &str, headers: &[(&'static str, &'static str)]) -> String {
        let trusted = TrustedProxies(vec!["10.0.0.0/8".parse().unwrap(), "::1".parse().unwrap()]);
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_static(value));
        }
        trusted.client(peer.parse().unwrap(), &map).to_string()
    }

    #[test]
    fn only_trusted_proxies_are_believed() {
        assert_eq!(client("192.0.2.1", &[("x-forwarded-for", "1.1.1.1")]), "192.0.2.1");
        assert_eq!(client("10.0.0.1", &[("x-forwarded-for", "1.1.1.1")]), "1.1.1.1");
        assert_eq!(client("10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(client("::ffff:10.0.0.1", &[("x-forwarded-for", "1.1.1.1")]), "1.1.1.1");
    }

    #[test]
    fn the_chain_is_read_from_the_near_end_so_a_client_cannot_prepend() {
        let forged = [("x-forwarded-for", "6.6.6.6, 1.1.1.1, 10.0.0.2")];
        assert_eq!(client("10.0.0.1", &forged), "1.1.1.1");
        let lines = [("x-forwarded-for", "6.6.6.6"), ("x-forwarded-for", "1.1.1.1, 10.0.0.2")];
        assert_eq!(client("10.0.0.1", &lines), "1.1.1.1");
        assert_eq!(client("10.0.0.1", &[("x-forwarded-for", "1.1.1.1, unknown, 10.0.0.2")]), "10.0.0.2");
    }

    #[test]
    fn forwarded_is_read_with_ports_quotes_and_brackets() {
        let value = [("forwarded", "for=1.1.1.1:443;proto=https, For=\"[2001:db8::7]:99\"")];
        assert_eq!(client("10.0.0.1", &value), "2001:db8::7");
        assert_eq!(client("::1", &[("forwarded", "proto=http;for=9.9.9.9")]), "9.9.9.9");
        assert_eq!(client("::1", &[("forwarded", "for=_hidden")]), "::1");
        let both = [("forwarded", "for=6.6.6.6"), ("x-forwarded-for", "1.1.1.1")];
        assert_eq!(client("10.0.0.1", &both), "10.0.0.1", "one of them is the client's own invention");
        assert_eq!(network_of("2001:db8::1:2:3:4".parse().unwrap()).to_string(), "2001:db8::");
    }

    #[test]
    fn blocks_are_read_and_wrong_ones_named() {
        for good in ["0.0.0.0/0", "10.1.2.3", "::/0", "2001:db8::/32"] {
            good.parse::<Cidr>().unwrap();
        }
        assert!("0.0.0.0/0".parse::<Cidr>().unwrap().contains("1.2.3.4".parse().unwrap()));
        for bad in ["10.0.0.0/33", "ten", "::/129", "1.2.3.4/x"] {
            assert!(bad.parse::<Cidr>().unwrap_err().contains(bad));
        }
    }

    proptest! {
        #[test]
        fn no_header_makes_an_untrusted_peer_someone_else(value in "[ -~]{0,80}") {
            let mut headers = HeaderMap::new();
            headers.insert(X_FORWARDED_FOR, HeaderValue::from_str(&value).unwrap());
            headers.insert(FORWARDED, HeaderValue::from_str(&value).unwrap());
            let peer: IpAddr = "192.0.2.9".parse().unwrap();
            prop_assert_eq!(TrustedProxies::default().client(peer, &headers), peer);
        }
    }
}
