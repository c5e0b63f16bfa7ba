//! What a configuration value can do: be read, shown, and documented.

use super::document::KeyDoc;
use super::tree::{Node, Origin, Problems, Value};
use crate::units::{Size, Span};
use serde_json::json;
use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::net::SocketAddr;

/// When a change of a key takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// On reload.
    Hot,
    /// Only when the process starts; a reload that changes it is refused.
    Restart,
    /// On reload; and the entry is invalid without it.
    Required,
    /// Only when the process starts; and the entry is invalid without it.
    RequiredRestart,
}

impl Flag {
    pub fn is_required(self) -> bool {
        matches!(self, Flag::Required | Flag::RequiredRestart)
    }

    pub fn needs_restart(self) -> bool {
        matches!(self, Flag::Restart | Flag::RequiredRestart)
    }
}

/// A type that can stand in the configuration.
pub trait Setting: Sized + Clone + PartialEq {
    /// Reads a value; on failure says why and returns `None`.
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self>;

    /// The value as TOML, or for a table one line per key.
    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>);

    /// What to call the type in the document.
    fn kind() -> String;

    /// Adds the documentation of this key, or of the keys below it. `default` is absent for list entries.
    fn describe(default: Option<&Self>, mut doc: KeyDoc, out: &mut Vec<KeyDoc>) {
        doc.kind = Self::kind();
        doc.default = default.map(|value| {
            let mut flat = Vec::new();
            value.flatten("", &mut flat);
            flat.pop().map_or(String::new(), |(_, text)| text)
        });
        out.push(doc);
    }

    fn schema() -> serde_json::Value;
}

/// A table being read key by key; what is left at the end is unknown.
#[derive(Debug)]
pub struct Table<'a> {
    entries: BTreeMap<&'a str, &'a Node>,
    path: &'a str,
    known: Vec<&'static str>,
}

impl<'a> Table<'a> {
    pub fn open(node: &'a Node, path: &'a str, problems: &mut Problems) -> Option<Table<'a>> {
        let Value::Table(entries) = &node.value else {
            problems.add(path, format!("expected a table, found {}", node.value.kind()));
            return None;
        };
        let entries = entries.iter().map(|(key, node)| (key.as_str(), node)).collect();
        Some(Table { entries, path, known: Vec::new() })
    }

    fn child(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a key, or its default when it is absent or wrong (and then a problem says so).
    pub fn take<T: Setting>(
        &mut self,
        key: &'static str,
        default: T,
        flag: Flag,
        problems: &mut Problems,
    ) -> T {
        self.known.push(key);
        let path = self.child(key);
        match self.entries.remove(key) {
            Some(node) => T::read(node, &path, problems).unwrap_or(default),
            None => {
                if flag.is_required() {
                    problems.add(path, "is required");
                }
                default
            }
        }
    }

    /// Reports every key that nobody asked for.
    pub fn finish(self, problems: &mut Problems) {
        for key in self.entries.keys() {
            // A former key below this one has been named already, with what it is called now.
            let below = format!("{}.", self.child(key));
            if problems.list.iter().any(|known| known.path.starts_with(&below)) {
                continue;
            }
            let advice = nearest(key, &self.known).map_or_else(
                || format!("known here: {}", self.known.join(", ")),
                |near| format!("did you mean `{near}`?"),
            );
            problems.add(self.child(key), format!("unknown key; {advice}"));
        }
    }
}

/// The known word that differs least, if it differs little.
fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let scored = known.iter().map(|other| (distance(word, other), *other));
    scored.min().filter(|(distance, _)| *distance <= 1 + word.len() / 4).map(|(_, other)| other)
}

/// Levenshtein distance of two short words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let next = (corner + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            corner = std::mem::replace(&mut row[j + 1], next);
        }
    }
    row[b.len()]
}

/// A string as a TOML literal.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Implements [`Setting`] for a type that is written as a string.
macro_rules! string_setting {
    ($type:ty, $kind:literal, $pattern:expr) => {
        impl Setting for $type {
            fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
                let Value::String(text) = &node.value else {
                    problems.add(path, format!(concat!("expected ", $kind, ", found {}"), node.value.kind()));
                    return None;
                };
                text.parse::<$type>().map_err(|error| problems.add(path, error.to_string())).ok()
            }

            fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
                out.push((path.to_owned(), quoted(&self.to_string())));
            }

            fn kind() -> String {
                $kind.to_owned()
            }

            fn schema() -> serde_json::Value {
                $pattern
            }
        }
    };
}

string_setting!(String, "a string", json!({"type": "string"}));
string_setting!(
    Span,
    "a duration such as \"5s\"",
    json!({"type": "string", "pattern": "^(0|[0-9]+(ms|s|m|h|d))$"})
);
string_setting!(
    Size,
    "a size such as \"64KiB\"",
    json!({"type": "string", "pattern": "^[0-9]+(B|KiB|MiB|GiB)$"})
);

/// A string that is shown neither in logs nor by `ron config show`, though one can see that it changed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Display for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Enough to tell two apart, and too little to find either.
        let mut hasher = crate::fnv::Fnv::default();
        hasher.write(self.0.as_bytes());
        write!(f, "secret {:08x}", hasher.finish() & 0xffff_ffff)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Setting for Secret {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        String::read(node, path, problems).map(Secret)
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        out.push((path.to_owned(), quoted(&self.to_string())));
    }

    fn kind() -> String {
        String::kind()
    }

    fn schema() -> serde_json::Value {
        String::schema()
    }
}

impl Setting for SocketAddr {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        let Value::String(text) = &node.value else {
            problems.add(
                path,
                format!("expected an address such as \"127.0.0.1:8080\", found {}", node.value.kind()),
            );
            return None;
        };
        let parsed = text.parse::<SocketAddr>();
        let advice =
            || format!("{text:?} is no address: write IP:PORT, such as \"127.0.0.1:8080\" or \"[::]:8080\"");
        parsed.map_err(|_not_an_address| problems.add(path, advice())).ok()
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        out.push((path.to_owned(), quoted(&self.to_string())));
    }

    fn kind() -> String {
        "an address such as \"127.0.0.1:8080\"".to_owned()
    }

    fn schema() -> serde_json::Value {
        json!({"type": "string"})
    }
}

impl Setting for bool {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        if let Value::Bool(value) = node.value {
            return Some(value);
        }
        problems.add(path, format!("expected true or false, found {}", node.value.kind()));
        None
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        out.push((path.to_owned(), self.to_string()));
    }

    fn kind() -> String {
        "true or false".to_owned()
    }

    fn schema() -> serde_json::Value {
        json!({"type": "boolean"})
    }
}

impl Setting for u64 {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        match &node.value {
            Value::Integer(value) if *value >= 0 => return Some(value.unsigned_abs()),
            Value::Integer(value) => problems.add(path, format!("{value} is negative; expected 0 or more")),
            other => problems.add(path, format!("expected a whole number, found {}", other.kind())),
        }
        None
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        out.push((path.to_owned(), self.to_string()));
    }

    fn kind() -> String {
        "a whole number".to_owned()
    }

    fn schema() -> serde_json::Value {
        json!({"type": "integer", "minimum": 0})
    }
}

impl Setting for usize {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        let wide = u64::read(node, path, problems)?;
        usize::try_from(wide).map_err(|error| problems.add(path, error.to_string())).ok()
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        out.push((path.to_owned(), self.to_string()));
    }

    fn kind() -> String {
        u64::kind()
    }

    fn schema() -> serde_json::Value {
        u64::schema()
    }
}

impl Setting for f64 {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        match node.value {
            Value::Float(value) if value.is_finite() => Some(value),
            #[expect(clippy::cast_precision_loss, reason = "ratios and factors are small")]
            Value::Integer(value) => Some(value as f64),
            Value::Float(value) => {
                problems.add(path, format!("{value} is no number that can be used here"));
                None
            }
            ref other => {
                problems.add(path, format!("expected a number, found {}", other.kind()));
                None
            }
        }
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        out.push((path.to_owned(), self.to_string()));
    }

    fn kind() -> String {
        "a number".to_owned()
    }

    fn schema() -> serde_json::Value {
        json!({"type": "number"})
    }
}

impl<T: Setting> Setting for Vec<T> {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        let Value::Array(items) = &node.value else {
            problems.add(path, format!("expected {}, found {}", Self::kind(), node.value.kind()));
            return None;
        };
        let read = |(index, item)| T::read(item, &format!("{path}[{index}]"), problems);
        let read: Vec<Option<T>> = items.iter().enumerate().map(read).collect();
        read.into_iter().collect()
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        let mut entries = Vec::new();
        for (index, item) in self.iter().enumerate() {
            item.flatten(&format!("{path}[{index}]"), &mut entries);
        }
        // A list of tables is shown key by key, a list of plain values in one line.
        if entries.iter().any(|(path, _)| !path.ends_with(']')) {
            out.append(&mut entries);
        } else {
            let items: Vec<String> = entries.into_iter().map(|(_, text)| text).collect();
            out.push((path.to_owned(), format!("[{}]", items.join(", "))));
        }
    }

    fn kind() -> String {
        format!("a list, each {}", T::kind())
    }

    fn describe(default: Option<&Self>, mut doc: KeyDoc, out: &mut Vec<KeyDoc>) {
        let mut below = Vec::new();
        T::describe(None, KeyDoc { path: format!("{}[]", doc.path), ..doc.clone() }, &mut below);
        if below.len() > 1 {
            out.append(&mut below);
            return;
        }
        doc.kind = Self::kind();
        doc.default = default.map(|value| {
            let mut flat = Vec::new();
            value.flatten("", &mut flat);
            flat.pop().map_or("[]".to_owned(), |(_, text)| text)
        });
        out.push(doc);
    }

    fn schema() -> serde_json::Value {
        json!({"type": "array", "items": T::schema()})
    }
}

impl<T: Setting> Setting for BTreeMap<String, T> {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        let Value::Table(entries) = &node.value else {
            problems.add(path, format!("expected a table, found {}", node.value.kind()));
            return None;
        };
        let read = |(key, item): (&String, &Node)| {
            T::read(item, &format!("{path}.{key}"), problems).map(|value| (key.clone(), value))
        };
        let read: Vec<Option<(String, T)>> = entries.iter().map(read).collect();
        read.into_iter().collect()
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        for (key, value) in self {
            value.flatten(&format!("{path}.{key}"), out);
        }
    }

    fn kind() -> String {
        format!("a table, each {}", T::kind())
    }

    fn schema() -> serde_json::Value {
        json!({"type": "object", "additionalProperties": T::schema()})
    }
}

/// A table or value that may be left out, and then is off.
impl<T: Setting> Setting for Option<T> {
    fn read(node: &Node, path: &str, problems: &mut Problems) -> Option<Self> {
        T::read(node, path, problems).map(Some)
    }

    fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
        if let Some(value) = self {
            value.flatten(path, out);
        }
    }

    fn kind() -> String {
        T::kind()
    }

    fn describe(_default: Option<&Self>, doc: KeyDoc, out: &mut Vec<KeyDoc>) {
        T::describe(None, doc, out);
    }

    fn schema() -> serde_json::Value {
        T::schema()
    }
}

/// Remembers where every key of a tree was set.
pub(super) fn origins(node: &Node, path: &str, out: &mut BTreeMap<String, Origin>) {
    out.insert(path.to_owned(), node.origin.clone());
    match &node.value {
        Value::Table(entries) => {
            for (key, child) in entries {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                origins(child, &path, out);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                origins(item, &format!("{path}[{index}]"), out);
            }
        }
        _ => {}
    }
}

/// The doc comment of a field, one line per line.
pub fn lines(parts: &[&str]) -> String {
    parts.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ").trim().to_owned()
}

/// Declares a table of settings: the struct, its defaults, and everything [`Setting`] wants.
///
/// Each field reads `/// doc`, `name: Type = default => Flag;` where the flag is a variant of [`Flag`].
#[macro_export]
macro_rules! settings {
    ($(#[doc = $doc:literal])+ pub struct $name:ident {
        $( $(#[doc = $fdoc:literal])+ $field:ident : $type:ty = $default:expr => $flag:ident; )*
    }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name { $( $(#[doc = $fdoc])+ pub $field: $type, )* }

        impl Default for $name {
            fn default() -> $name {
                $name { $( $field: $default, )* }
            }
        }

        impl $crate::config::Setting for $name {
            fn read(
                node: &$crate::config::Node,
                path: &str,
                problems: &mut $crate::config::Problems,
            ) -> Option<$name> {
                let mut table = $crate::config::Table::open(node, path, problems)?;
                let value = $name {
                    $( $field: table.take(
                        stringify!($field).trim_start_matches("r#"),
                        $default,
                        $crate::config::Flag::$flag,
                        problems,
                    ), )*
                };
                table.finish(problems);
                Some(value)
            }

            fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
                $(
                    let key = stringify!($field).trim_start_matches("r#");
                    let below = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
                    $crate::config::Setting::flatten(&self.$field, &below, out);
                )*
            }

            fn kind() -> String {
                "a table".to_owned()
            }

            fn describe(
                _default: Option<&$name>,
                doc: $crate::config::KeyDoc,
                out: &mut Vec<$crate::config::KeyDoc>,
            ) {
                let defaults = $name::default();
                $(
                    let key = stringify!($field).trim_start_matches("r#");
                    let path = if doc.path.is_empty() { key.to_owned() } else { format!("{}.{key}", doc.path) };
                    let below = $crate::config::KeyDoc::new(
                        path,
                        $crate::config::lines(&[$($fdoc),+]),
                        $crate::config::Flag::$flag,
                    );
                    <$type as $crate::config::Setting>::describe(Some(&defaults.$field), below, out);
                )*
            }

            fn schema() -> serde_json::Value {
                let mut properties = serde_json::Map::new();
                let mut required: Vec<String> = Vec::new();
                $(
                    let key = stringify!($field).trim_start_matches("r#").to_owned();
                    let mut schema = <$type as $crate::config::Setting>::schema();
                    schema["description"] = $crate::config::lines(&[$($fdoc),+]).into();
                    if $crate::config::Flag::$flag.is_required() {
                        required.push(key.clone());
                    }
                    properties.insert(key, schema);
                )*
                serde_json::json!({
                    "type": "object", "properties": properties, "required": required,
                    "additionalProperties": false,
                })
            }
        }
    };
}

/// Declares a setting that is one of a few words.
#[macro_export]
macro_rules! choice {
    ($(#[doc = $doc:literal])+ pub enum $name:ident { $( $(#[doc = $vdoc:literal])* $variant:ident = $word:literal, )+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $( $(#[doc = $vdoc])* $variant, )+ }

        impl $name {
            pub fn as_str(self) -> &'static str {
                match self { $( $name::$variant => $word, )+ }
            }
        }

        impl $crate::config::Setting for $name {
            fn read(
                node: &$crate::config::Node,
                path: &str,
                problems: &mut $crate::config::Problems,
            ) -> Option<$name> {
                if let $crate::config::Value::String(word) = &node.value {
                    $( if word == $word { return Some($name::$variant); } )+
                    problems.add(path, format!("{word:?} is not one of {}", [$($word),+].join(", ")));
                } else {
                    problems.add(path, format!("expected one of {}, found {}", [$($word),+].join(", "), node.value.kind()));
                }
                None
            }

            fn flatten(&self, path: &str, out: &mut Vec<(String, String)>) {
                out.push((path.to_owned(), format!("{:?}", self.as_str())));
            }

            fn kind() -> String {
                format!("one of {}", [$(concat!("\"", $word, "\"")),+].join(", "))
            }

            fn schema() -> serde_json::Value {
                serde_json::json!({"enum": [$($word),+]})
            }
        }
    };
}
