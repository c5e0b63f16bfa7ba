//! The crate from outside: its document and its codec.

mod codec;
mod document;
