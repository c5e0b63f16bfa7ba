//! The crate from outside: its document, its codec, its sessions and its gossip.

mod codec;
mod document;
mod engine;
mod messages;
mod queues;
mod session;
