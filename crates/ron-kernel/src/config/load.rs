//! Layers: command line over environment over file over defaults.

use super::setting::{Setting, origins};
use super::tree::{Node, Origin, Problem, Problems, Value};
use super::{KeyDoc, Validate};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// Variables that begin with `RON_` and are no configuration keys.
const TOKEN: &str = "RON_TOKEN";
const ADMIN_TOKEN: &str = "RON_ADMIN__TOKEN";

/// What is shorter can be guessed.
const ADMIN_TOKEN_MIN: usize = 16;

/// Where values may come from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file's name, for messages, and its text.
    pub file: Option<(PathBuf, String)>,
    /// Environment variables; those that do not begin with `RON_` are ignored.
    pub env: Vec<(String, String)>,
    /// Key path, value as TOML or plain text, and the flag that said so.
    pub flags: Vec<(String, String, String)>,
    /// Former names of keys and what they are called now.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Entries that are added to lists, whatever the layers above say: the list's path, and the entry.
    pub added: Vec<(&'static str, Node)>,
}

impl Sources {
    /// Reads the file now, so that a problem with it is reported as such.
    pub fn read_file(&mut self, path: &Path) -> Result<(), Problems> {
        match std::fs::read_to_string(path) {
            Ok(text) => {
                self.file = Some((path.to_owned(), text));
                Ok(())
            }
            Err(error) => {
                let mut problems = Problems { file: Some(path.to_owned()), ..Problems::default() };
                problems
                    .add("", format!("cannot be read: {error}; `ron init DIR` writes a file to start from"));
                Err(problems)
            }
        }
    }
}

/// A configuration that is right, and where each value came from.
#[derive(Clone, Debug)]
pub struct Loaded<C> {
    pub value: C,
    pub origins: BTreeMap<String, Origin>,
    pub file: Option<PathBuf>,
}

impl<C> Loaded<C> {
    /// An empty list of problems that knows the lines of this configuration.
    pub fn problems(&self) -> Problems {
        Problems { file: self.file.clone(), list: Vec::new(), origins: self.origins.clone() }
    }
}

impl<C: Setting> Loaded<C> {
    /// Keys whose values differ, each with whether a restart is needed for it.
    pub fn changes(&self, newer: &C) -> Vec<Change> {
        let restart: Vec<String> = KeyDoc::all::<C>()
            .into_iter()
            .filter(|key| key.flag.needs_restart())
            .map(|key| key.path)
            .collect();
        let flat = |config: &C| {
            let mut out = Vec::new();
            config.flatten("", &mut out);
            out.into_iter().collect::<BTreeMap<String, String>>()
        };
        let (old, new) = (flat(&self.value), flat(newer));
        let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
        keys.sort();
        keys.dedup();
        let changed = keys.into_iter().filter(|key| old.get(*key) != new.get(*key));
        let change = |key: &String| Change {
            key: key.clone(),
            restart: restart.contains(&without_indices(key)),
            before: old.get(key).cloned(),
            after: new.get(key).cloned(),
        };
        changed.map(change).collect()
    }
}

/// A key whose value is another one now; secrets are not shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: String,
    /// It takes effect only at a restart.
    pub restart: bool,
    pub before: Option<String>,
    pub after: Option<String>,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
        write!(f, "{}: {} -> {}", self.key, shown(&self.before), shown(&self.after))
    }
}

/// `gateway.routes[3].path` as the document names it: `gateway.routes[].path`.
fn without_indices(path: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for c in path.chars() {
        match c {
            '[' => {
                inside = true;
                out.push('[');
            }
            ']' => {
                inside = false;
                out.push(']');
            }
            c if !inside => out.push(c),
            _ => {}
        }
    }
    out
}

/// Reads all layers and checks the result; on failure, every problem at once.
pub fn load<C: Setting + Validate + Default>(sources: &Sources) -> Result<Loaded<C>, Problems> {
    let (loaded, problems) = attempt(sources);
    if problems.is_empty() { Ok(loaded) } else { Err(problems) }
}

/// Reads all layers as far as they can be read, a wrong value being replaced by its default, and says what is wrong.
pub fn attempt<C: Setting + Validate + Default>(sources: &Sources) -> (Loaded<C>, Problems) {
    let mut problems =
        Problems { file: sources.file.as_ref().map(|(path, _)| path.clone()), ..Problems::default() };
    let mut root = match &sources.file {
        Some((_, text)) => parse(text, &mut problems),
        None => Node { value: Value::Table(BTreeMap::new()), origin: Origin::Default },
    };
    for (name, value) in &sources.env {
        insert_variable(&mut root, name, value, &mut problems);
    }
    for (path, value, flag) in &sources.flags {
        insert(&mut root, path, value, &Origin::Flag(flag.clone()), &mut problems);
    }
    for (list, entry) in &sources.added {
        append(&mut root, list, entry);
    }
    origins(&root, "", &mut problems.origins);
    for (old, new) in sources.renamed {
        if problems.origins.contains_key(*old) {
            problems.add(*old, format!("is now called `{new}`"));
        }
    }
    let value = C::read(&root, "", &mut problems).unwrap_or_default();
    value.validate(&mut problems);
    value.validate_files(sources.file.as_ref().map(|(path, _)| path.as_path()), &mut problems);
    (Loaded { value, origins: problems.origins.clone(), file: problems.file.clone() }, problems)
}

/// Takes up a variable if it is one of ours.
fn insert_variable(root: &mut Node, name: &str, value: &str, problems: &mut Problems) {
    let Some(key) = name.strip_prefix("RON_") else { return };
    let origin = Origin::Env(name.to_owned());
    let mut wrong = |message: String| {
        problems.list.push(Problem { path: String::new(), origin: origin.clone(), message });
    };
    if name == ADMIN_TOKEN && value.len() < ADMIN_TOKEN_MIN {
        // Never the value itself.
        wrong(format!("the admin token must have at least {ADMIN_TOKEN_MIN} characters"));
    }
    if [TOKEN, ADMIN_TOKEN].contains(&name) {
        return;
    }
    // Two spellings of one key would leave it to chance which of them counts.
    if key.chars().any(char::is_lowercase) {
        wrong(format!("is not in capitals: write RON_{}", key.to_uppercase()));
        return;
    }
    insert(root, &key.to_lowercase().replace("__", "."), value, &origin, problems);
}

/// Parses the file as far as it goes; every syntax error is a problem of its own.
fn parse(text: &str, problems: &mut Problems) -> Node {
    let (table, errors) = DeTable::parse_recoverable(text);
    let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line_of = |offset: usize| ends.partition_point(|end| *end < offset) + 1;
    for error in errors {
        let line = line_of(error.span().map_or(0, |span| span.start));
        let message = format!("is no valid TOML: {}", error.message());
        problems.list.push(Problem { path: String::new(), origin: Origin::File { line }, message });
    }
    let value = convert_table(table.into_inner(), &|offset| Origin::File { line: line_of(offset) });
    Node { value, origin: Origin::File { line: 1 } }
}

/// `place` says where the value at an offset came from.
fn convert_table(table: DeTable<'_>, place: &dyn Fn(usize) -> Origin) -> Value {
    let entry = |(key, value): (toml::Spanned<_>, toml::Spanned<DeValue<'_>>)| {
        let origin = place(key.span().start);
        let key: std::borrow::Cow<'_, str> = key.into_inner();
        (key.into_owned(), Node { value: convert(value.into_inner(), place), origin })
    };
    Value::Table(table.into_iter().map(entry).collect())
}

fn convert(value: DeValue<'_>, place: &dyn Fn(usize) -> Origin) -> Value {
    match value {
        DeValue::String(text) => Value::String(text.into_owned()),
        DeValue::Boolean(value) => Value::Bool(value),
        DeValue::Integer(number) => i64::from_str_radix(&number.as_str().replace('_', ""), number.radix())
            .map_or(Value::Useless("a number that is too large"), Value::Integer),
        DeValue::Float(number) => {
            let parsed = number.as_str().replace('_', "").parse();
            parsed.map_or(Value::Useless("a number that is too large"), Value::Float)
        }
        DeValue::Datetime(_) => Value::Useless("a date"),
        DeValue::Array(items) => {
            let convert_item = |item: toml::Spanned<DeValue<'_>>| {
                let origin = place(item.span().start);
                Node { value: convert(item.into_inner(), place), origin }
            };
            Value::Array(items.into_iter().map(convert_item).collect())
        }
        DeValue::Table(table) => convert_table(table, place),
    }
}

/// Puts a value into the tree by its dotted path; it is TOML if it parses, else a string. A table is merged into one
/// that is there, so that its other keys stay.
fn insert(root: &mut Node, path: &str, text: &str, origin: &Origin, problems: &mut Problems) {
    let value = match DeValue::parse(text) {
        Ok(value) => convert(value.into_inner(), &|_| origin.clone()),
        Err(_plain_text) => Value::String(text.to_owned()),
    };
    let mut at = root;
    let mut parts = path.split('.').peekable();
    while let Some(part) = parts.next() {
        let kind = at.value.kind();
        let Value::Table(entries) = &mut at.value else {
            let message = format!("names a key below one that is {kind}");
            problems.list.push(Problem { path: path.to_owned(), origin: origin.clone(), message });
            return;
        };
        if parts.peek().is_none() {
            merge(entries, part.to_owned(), Node { value, origin: origin.clone() });
            return;
        }
        at = entries
            .entry(part.to_owned())
            .or_insert_with(|| Node { value: Value::Table(BTreeMap::new()), origin: origin.clone() });
    }
}

/// Adds an entry to a list. Where there is something else than a list, reading it will say so.
fn append(root: &mut Node, list: &str, entry: &Node) {
    let mut at = root;
    for part in list.split('.') {
        // A table that turns out to be the list itself is made one below.
        let Value::Table(entries) = &mut at.value else { return };
        let empty = || Node { value: Value::Table(BTreeMap::new()), origin: entry.origin.clone() };
        at = entries.entry(part.to_owned()).or_insert_with(empty);
    }
    if matches!(&at.value, Value::Table(entries) if entries.is_empty()) {
        at.value = Value::Array(Vec::new());
    }
    if let Value::Array(items) = &mut at.value {
        items.push(entry.clone());
    }
}

fn merge(entries: &mut BTreeMap<String, Node>, key: String, newer: Node) {
    match (entries.get_mut(&key).map(|known| &mut known.value), newer.value) {
        (Some(Value::Table(known)), Value::Table(added)) => {
            for (key, node) in added {
                merge(known, key, node);
            }
        }
        (_, value) => {
            entries.insert(key, Node { value, origin: newer.origin });
        }
    }
}

#[cfg(test)]
mod tests;
