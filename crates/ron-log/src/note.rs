//! Signed notes (C2SP signed-note): text, and signatures under it by named keys.

/// Whether a note may call a key so.
pub fn is_key_name(name: &str) -> bool {
    (1..=255).contains(&name.len())
        && !name.contains('+')
        && !name.chars().any(|c| c.is_whitespace() || c.is_control())
}
