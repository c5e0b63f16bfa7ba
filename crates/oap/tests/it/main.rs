//! The crate from outside: its document, its codec and its sessions.

mod codec;
mod document;
mod session;
