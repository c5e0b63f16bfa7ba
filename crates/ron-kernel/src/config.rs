//! One TOML file, the environment and the command line, read into structs that cannot be wrong.
//!
//! A crate declares its keys with [`settings!`](crate::settings) and its words with [`choice!`](crate::choice);
//! reading, every problem at once, `config show`, the JSON Schema and `docs/config.md` all come from that one
//! declaration. What a single key cannot say (two routes that clash) goes into [`Validate`].

mod document;
mod load;
mod reload;
mod setting;
mod tree;

pub use document::{KeyDoc, markdown, schema, show};
pub use load::{Change, Loaded, Sources, attempt, load};
pub use reload::{Prepared, Store};
pub use setting::{Flag, Secret, Setting, Table, lines};
pub use tree::{Node, Origin, Problem, Problems, Value};

/// Checks that need more than one key.
pub trait Validate {
    fn validate(&self, problems: &mut Problems);

    /// Looks at the files that are named; `file` is the configuration's own.
    fn validate_files(&self, file: Option<&std::path::Path>, problems: &mut Problems);
}
