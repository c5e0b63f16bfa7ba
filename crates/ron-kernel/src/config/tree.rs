//! The parsed file as a tree that remembers where each value came from, and the list of what is wrong with it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// A value and where it came from.
#[derive(Clone, Debug)]
pub struct Node {
    pub value: Value,
    pub origin: Origin,
}

#[derive(Clone, Debug)]
pub enum Value {
    String(String),
    Integer(i64),
    Float(f64),
    Bool(bool),
    Array(Vec<Node>),
    Table(BTreeMap<String, Node>),
    /// What it is; no key takes such a thing.
    Useless(&'static str),
}

/// Where a value came from; the later wins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    #[default]
    Default,
    File {
        line: usize,
    },
    Env(String),
    Flag(String),
    /// A registry that is followed, by its item and the version that last changed it.
    Registry {
        version: u64,
        item: String,
        /// Who approved that version; none if it is older than what is known here.
        approved: Option<Vec<String>>,
    },
}

impl Origin {
    pub fn describe(&self, file: Option<&PathBuf>) -> String {
        let file = file.map_or_else(|| "config".to_owned(), |path| path.display().to_string());
        match self {
            Origin::Default => "default".to_owned(),
            Origin::File { line } => format!("{file}:{line}"),
            Origin::Env(name) => format!("environment {name}"),
            Origin::Flag(name) => format!("flag {name}"),
            Origin::Registry { version, item, approved: Some(by) } => {
                format!("registry version {version} approved by [{}] ({item})", by.join(", "))
            }
            Origin::Registry { version, item, approved: None } => {
                format!("registry version {version}, before the approvals known here ({item})")
            }
        }
    }
}

impl Node {
    /// A JSON value, all of it from one place.
    pub fn from_json(json: &serde_json::Value, origin: &Origin) -> Node {
        let value = match json {
            serde_json::Value::Null => Value::Useless("null"),
            serde_json::Value::Bool(value) => Value::Bool(*value),
            serde_json::Value::String(text) => Value::String(text.clone()),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(whole), _) => Value::Integer(whole),
                (None, Some(float)) => Value::Float(float),
                (None, None) => Value::Useless("a number that is too large"),
            },
            serde_json::Value::Array(items) => {
                Value::Array(items.iter().map(|item| Node::from_json(item, origin)).collect())
            }
            serde_json::Value::Object(members) => {
                let member = |(key, value): (&String, _)| (key.clone(), Node::from_json(value, origin));
                Value::Table(members.iter().map(member).collect())
            }
        };
        Node { value, origin: origin.clone() }
    }
}

impl Value {
    /// What the value is, for "expected X, found Y".
    pub fn kind(&self) -> &'static str {
        match self {
            Value::String(_) => "a string",
            Value::Integer(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a boolean",
            Value::Array(_) => "a list",
            Value::Table(_) => "a table",
            Value::Useless(what) => what,
        }
    }
}

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the key, such as `gateway.routes[2].upstream`; empty for the file as a whole.
    pub path: String,
    pub origin: Origin,
    pub message: String,
}

/// Everything that is wrong, found in one go.
#[derive(Clone, Debug, Default)]
pub struct Problems {
    pub file: Option<PathBuf>,
    pub list: Vec<Problem>,
    /// Where each key was set, so that a later check can name the line.
    pub(super) origins: BTreeMap<String, Origin>,
}

impl Problems {
    /// Adds a problem with a key. The first one found with a key stands: later ones would follow from it.
    pub fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        let path = path.into();
        if self.list.iter().any(|known| known.path == path && !path.is_empty()) {
            return;
        }
        let origin = self.origin(&path);
        self.list.push(Problem { path, origin, message: message.into() });
    }

    /// Whether somebody set the key, be it to its default.
    pub fn is_set(&self, path: &str) -> bool {
        self.origins.contains_key(path)
    }

    /// Whether the key, or something around it, or the file as a whole, is wrong: then its value says nothing.
    pub(super) fn taints(&self, path: &str) -> bool {
        self.list.iter().any(|known| {
            let below = path.strip_prefix(known.path.as_str());
            below.is_some_and(|rest| known.path.is_empty() || rest.is_empty() || rest.starts_with(['.', '[']))
        })
    }

    /// Where the key, or the nearest table around it, was set.
    pub fn origin(&self, path: &str) -> Origin {
        let mut at = path;
        loop {
            if let Some(origin) = self.origins.get(at) {
                return origin.clone();
            }
            match at.rfind(['.', '[']) {
                Some(end) => at = &at[..end],
                None => return Origin::Default,
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// One line per problem: file, line, key, what is wrong.
    pub fn lines(&self) -> Vec<String> {
        let mut sorted: Vec<&Problem> = self.list.iter().collect();
        sorted.sort_by_key(|problem| match problem.origin {
            Origin::File { line } => line,
            _ => usize::MAX,
        });
        sorted
            .into_iter()
            .map(|problem| {
                let place = match &problem.origin {
                    Origin::Default => {
                        self.file.as_ref().map_or("config".to_owned(), |f| f.display().to_string())
                    }
                    origin => origin.describe(self.file.as_ref()),
                };
                let colon = if problem.path.is_empty() { "" } else { ": " };
                format!("{place}: {}{colon}{}", problem.path, problem.message)
            })
            .collect()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().join("\n"))
    }
}

impl std::error::Error for Problems {}
