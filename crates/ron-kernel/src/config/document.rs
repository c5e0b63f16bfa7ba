//! What is printed about the configuration: `docs/config.md`, the JSON Schema, `ron config show`.

use super::load::Loaded;
use super::setting::{Flag, Setting};
use super::tree::Origin;
use std::fmt::Write as _;

/// One key as the document shows it.
#[derive(Clone, Debug)]
pub struct KeyDoc {
    pub path: String,
    pub kind: String,
    pub default: Option<String>,
    pub text: String,
    pub flag: Flag,
}

impl KeyDoc {
    pub fn new(path: String, text: String, flag: Flag) -> KeyDoc {
        KeyDoc { path, kind: String::new(), default: None, text, flag }
    }

    /// Every key of a configuration, in the order of declaration.
    pub fn all<C: Setting>() -> Vec<KeyDoc> {
        let mut out = Vec::new();
        C::describe(None, KeyDoc::new(String::new(), String::new(), Flag::Hot), &mut out);
        out
    }
}

/// The body of `docs/config.md`: a table of keys per table of the file.
pub fn markdown<C: Setting>() -> String {
    let mut out = String::new();
    let mut section = None;
    for key in KeyDoc::all::<C>() {
        let (table, name) = key.path.rsplit_once('.').unwrap_or(("", &key.path));
        if section.as_deref() != Some(table) {
            let heading = match table.strip_suffix("[]") {
                Some(list) => format!("[[{list}]]"),
                None => format!("[{table}]"),
            };
            let _ = write!(
                out,
                "\n## `{heading}`\n\n| key | value | default | change | meaning |\n|---|---|---|---|---|\n"
            );
            section = Some(table.to_owned());
        }
        let default = match (key.flag, &key.default) {
            (flag, _) if flag.is_required() => "required".to_owned(),
            (_, Some(text)) if !text.is_empty() => format!("`{text}`"),
            _ => "none".to_owned(),
        };
        let change = if key.flag.needs_restart() { "restart" } else { "reload" };
        let text = key.text.replace('|', "\\|");
        let _ = writeln!(out, "| `{name}` | {} | {default} | {change} | {text} |", key.kind);
    }
    out
}

/// The JSON Schema of the file.
pub fn schema<C: Setting>() -> serde_json::Value {
    let mut schema = C::schema();
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["title"] = "ron.toml".into();
    schema
}

/// Effective values as (path, TOML literal, where it came from).
pub fn show<C: Setting>(loaded: &Loaded<C>) -> Vec<(String, String, String)> {
    let mut flat = Vec::new();
    loaded.value.flatten("", &mut flat);
    flat.into_iter()
        .map(|(path, text)| {
            let origin = loaded.origins.get(&path).unwrap_or(&Origin::Default);
            let place = origin.describe(loaded.file.as_ref());
            (path, text, place)
        })
        .collect()
}
