//! Answers as people read them: values without quotes, columns as wide as they must be.

use serde_json::Value;

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A value without the quotes of JSON.
pub(crate) fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
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
