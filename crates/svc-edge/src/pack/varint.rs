//! Numbers of one to ten bytes, low bits first.

/// Takes a number off the front; none if it is cut short or needs more than 64 bits.
pub fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for (place, byte) in bytes.iter().enumerate().take(10) {
        let bits = u64::from(byte & 0x7f);
        // The tenth byte holds one bit.
        if place == 9 && bits > 1 {
            return None;
        }
        number |= bits << (7 * place);
        if byte & 0x80 == 0 {
            *bytes = &bytes[place + 1..];
            return Some(number);
        }
    }
    None
}

pub fn push(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_that_are_cut_short_or_too_large_are_refused() {
        for bad in [
            &[][..],
            &[0x80],
            &[0xff; 9],
            &[0xff; 10],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
        ] {
            assert_eq!(take(&mut &*bad), None, "{bad:?}");
        }
        let mut all = Vec::new();
        push(&mut all, u64::MAX);
        assert_eq!((all.len(), take(&mut &*all)), (10, Some(u64::MAX)));
    }

    proptest! {
        #[test]
        fn a_number_reads_back_and_leaves_what_follows(bits in 0..64u32, number: u64, tail: Vec<u8>) {
            let mut bytes = Vec::new();
            push(&mut bytes, number >> bits);
            bytes.extend_from_slice(&tail);
            let mut rest = &*bytes;
            prop_assert_eq!(take(&mut rest), Some(number >> bits));
            prop_assert_eq!(rest, tail);
        }
    }
}
