//! HTTP/1.1, strict where leniency lets requests be smuggled.
//!
//! [`head`], [`chunked`] and [`decoder`] are pure: bytes in, messages out. [`conn`] drives them over a socket. Both sides of
//! the gateway use the same codecs.

pub mod chunked;
pub(crate) mod conn;
pub mod decoder;
pub mod head;
