//! Answers as people read them: values without quotes, columns as wide as they must be.

use serde_json::Value;

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A value without the quotes of JSON, on one line.
pub(crate) fn text(value: &Value) -> String {
    visible(&value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// A text whose characters are all seen: what would steer a terminal, hide, or turn the direction of others is
/// shown by its number, so that nobody's words can look like other words.
pub(crate) fn visible(text: &str) -> String {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
    };
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if hidden(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

pub(crate) fn row<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).into()
}

pub(crate) fn pairs(rows: &[(&str, String)]) -> String {
    aligned(&rows.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]).collect::<Vec<_>>())
}

/// Columns as wide as their widest cell.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let mut out = String::new();
    for row in rows {
        let cells =
            row.iter().enumerate().map(|(column, cell)| format!("{cell:<0$}  ", width(column).unwrap_or(0)));
        out += cells.collect::<String>().trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_steers_a_terminal_or_turns_the_text_is_shown_by_its_number() {
        let note = json!("a\u{1b}[2Jb\u{202e}c\nd\u{9b}e\u{200b} \u{e9}\u{5d0}");
        assert_eq!(text(&note), "a\\u{1b}[2Jb\\u{202e}c\\u{a}d\\u{9b}e\\u{200b} \u{e9}\u{5d0}");
    }
}
