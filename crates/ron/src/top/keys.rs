//! From the bytes that a terminal sends to keys. Pure.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Char(char),
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    Tab,
    Enter,
    Escape,
    /// Ctrl-C, which a raw terminal sends as a key.
    Interrupt,
    /// Ctrl-Z, likewise.
    Suspend,
    /// Ctrl-L
    Redraw,
}

/// The longest sequence that is waited for.
const SEQUENCE_MAX: usize = 16;

/// Bytes come in any pieces; a sequence that is not complete waits for its rest.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    rest: Vec<u8>,
}

impl Keys {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.rest.extend_from_slice(bytes);
        let (mut keys, mut at) = (Vec::new(), 0);
        while at < self.rest.len() {
            let left = &self.rest[at..];
            let sequence = left.len() > 1 && left[0] == 0x1b && matches!(left[1], b'[' | b'O');
            if !sequence {
                keys.extend(single(left[0]));
                at += 1;
                continue;
            }
            // It ends with its first letter or tilde.
            let end = left[2..].iter().position(|byte| (0x40..=0x7e).contains(byte));
            match end {
                Some(end) => {
                    keys.extend(sequence_key(&left[2..end + 3]));
                    at += end + 3;
                }
                None if left.len() < SEQUENCE_MAX => break,
                // Nothing that a terminal sends.
                None => at = self.rest.len(),
            }
        }
        self.rest.drain(..at);
        keys
    }
}

fn single(byte: u8) -> Option<Key> {
    Some(match byte {
        0x03 => Key::Interrupt,
        0x0c => Key::Redraw,
        0x1a => Key::Suspend,
        b'\t' => Key::Tab,
        b'\r' | b'\n' => Key::Enter,
        0x1b | 0x7f | 0x08 => Key::Escape,
        0x20..=0x7e => Key::Char(char::from(byte)),
        _ => return None,
    })
}

fn sequence_key(sequence: &[u8]) -> Option<Key> {
    Some(match sequence {
        b"A" => Key::Up,
        b"B" => Key::Down,
        b"C" => Key::Right,
        b"D" => Key::Left,
        b"5~" => Key::PageUp,
        b"6~" => Key::PageDown,
        b"H" | b"1~" | b"7~" => Key::Home,
        b"F" | b"4~" | b"8~" => Key::End,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn arrows_and_letters_are_known_in_any_pieces() {
        let typed = b"q\x1b[A\x1bOB\x1b[5~\x1b[1;5C2\r\x03";
        let expected =
            [Key::Char('q'), Key::Up, Key::Down, Key::PageUp, Key::Char('2'), Key::Enter, Key::Interrupt];
        assert_eq!(Keys::default().push(typed), expected);
        let mut keys = Keys::default();
        // A lone escape is a key of its own, so no piece ends with one.
        let pieces: Vec<Key> =
            [&typed[..3], &typed[3..6], &typed[6..]].iter().flat_map(|piece| keys.push(piece)).collect();
        assert_eq!(pieces, expected);
        assert_eq!(Keys::default().push(b"\x1b"), [Key::Escape]);
    }

    proptest! {
        #[test]
        fn whatever_is_sent_little_of_it_is_kept(pieces in proptest::collection::vec(
            proptest::collection::vec(any::<u8>(), 0..64), 0..16)) {
            let mut keys = Keys::default();
            for piece in pieces {
                keys.push(&piece);
                prop_assert!(keys.rest.len() < SEQUENCE_MAX);
            }
        }
    }
}
