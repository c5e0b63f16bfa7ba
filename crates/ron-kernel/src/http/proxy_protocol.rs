//! The PROXY protocol, versions 1 and 2: who is behind the proxy that speaks to us.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const V2_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// The longest version 1 line, CR LF included.
const V1_MAX: usize = 107;
/// The longest version 2 header taken; the rest of 64 KiB is for extensions nobody sends.
const V2_MAX: usize = 536;

/// The length of a complete header and the client it names (`None` for a health check of the proxy itself).
///
/// `Ok(None)`: more bytes are needed. `Err`: this is no header.
pub fn parse(bytes: &[u8]) -> Result<Option<(usize, Option<SocketAddr>)>, &'static str> {
    let signature = V2_SIGNATURE.len().min(bytes.len());
    if bytes[..signature] == V2_SIGNATURE[..signature] && !bytes.is_empty() {
        return parse_v2(bytes);
    }
    let prefix = 6.min(bytes.len());
    if bytes[..prefix] != b"PROXY "[..prefix] {
        return Err("a trusted proxy sent no PROXY header");
    }
    parse_v1(bytes)
}

fn parse_v1(bytes: &[u8]) -> Result<Option<(usize, Option<SocketAddr>)>, &'static str> {
    let window = &bytes[..bytes.len().min(V1_MAX)];
    let Some(end) = memchr::memchr(b'\n', window) else {
        return if bytes.len() >= V1_MAX { Err("the PROXY line is too long") } else { Ok(None) };
    };
    let line = std::str::from_utf8(&window[..end]).map_err(|_not_text| "the PROXY line is not text")?;
    let line = line.strip_suffix('\r').ok_or("the PROXY line does not end in CR LF")?;
    let words: Vec<&str> = line.split(' ').collect();
    let client = match words[..] {
        ["PROXY", "UNKNOWN", ..] => None,
        ["PROXY", family @ ("TCP4" | "TCP6"), source, _, port, _] => {
            let address: IpAddr = source.parse().map_err(|_bad| "the PROXY line names no address")?;
            if address.is_ipv4() != (family == "TCP4") {
                return Err("the PROXY line names an address of another family");
            }
            Some(SocketAddr::new(address, port.parse().map_err(|_bad| "the PROXY line names no port")?))
        }
        _ => return Err("the PROXY line is malformed"),
    };
    Ok(Some((end + 1, client)))
}

fn parse_v2(bytes: &[u8]) -> Result<Option<(usize, Option<SocketAddr>)>, &'static str> {
    let Some(fixed) = bytes.get(..16) else { return Ok(None) };
    if fixed[12] >> 4 != 2 {
        return Err("the PROXY header is of an unknown version");
    }
    let length = usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    if length > V2_MAX {
        return Err("the PROXY header is too long");
    }
    let Some(addresses) = bytes.get(16..16 + length) else { return Ok(None) };
    let port = |at: usize| u16::from_be_bytes([addresses[at], addresses[at + 1]]);
    let client = match (fixed[12] & 0xf, fixed[13] >> 4) {
        // LOCAL: the proxy speaks for itself.
        (0, _) => None,
        (1, 1) if length >= 12 => {
            let octets: [u8; 4] = addresses[..4].try_into().expect("four bytes");
            Some(SocketAddr::new(Ipv4Addr::from(octets).into(), port(8)))
        }
        (1, 2) if length >= 36 => {
            let octets: [u8; 16] = addresses[..16].try_into().expect("sixteen bytes");
            Some(SocketAddr::new(Ipv6Addr::from(octets).into(), port(32)))
        }
        (1, 0 | 3) => None,
        _ => return Err("the PROXY header is malformed"),
    };
    Ok(Some((16 + length, client)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn v2(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
        let mut out = V2_SIGNATURE.to_vec();
        out.extend_from_slice(&[command, family]);
        out.extend_from_slice(&u16::try_from(addresses.len()).unwrap().to_be_bytes());
        out.extend_from_slice(addresses);
        out
    }

    #[test]
    fn both_versions_name_the_client() {
        let line = b"PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\nGET";
        assert_eq!(parse(line), Ok(Some((line.len() - 3, Some("192.0.2.1:56324".parse().unwrap())))));
        assert_eq!(parse(b"PROXY UNKNOWN\r\n"), Ok(Some((15, None))));
        let header = v2(0x21, 0x11, &[192, 0, 2, 9, 1, 1, 1, 1, 0x10, 0, 0, 80]);
        assert_eq!(parse(&header), Ok(Some((28, Some("192.0.2.9:4096".parse().unwrap())))));
        assert_eq!(parse(&v2(0x20, 0, &[])), Ok(Some((16, None))));
    }

    #[test]
    fn anything_else_is_refused() {
        for bad in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"PROXY TCP4 ::1 ::1 1 1\r\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 x 1\r\n",
            b"PROXY TCP4 1.1.1.1 1.1.1.1 1 1\n",
            &[b"PROXY ", [b'a'; 120].as_slice()].concat(),
            &v2(0x31, 0x11, &[0; 12]),
            &v2(0x21, 0x11, &[0; 11]),
            &v2(0x21, 0x11, &[0; 600]),
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn a_header_cut_anywhere_asks_for_more(cut in 0usize..28) {
            let header = v2(0x21, 0x11, &[192, 0, 2, 9, 1, 1, 1, 1, 0x10, 0, 0, 80]);
            prop_assert_eq!(parse(&header[..cut]), Ok(None));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse(&bytes);
            let _ = parse(&[V2_SIGNATURE.as_slice(), &bytes].concat());
        }
    }
}
