//! The built binary, from outside.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod access_log;
mod admin;
mod amnesia;
mod auth;
mod blame;
mod bridge;
mod browser;
mod commands;
mod documents;
mod edge;
mod edge_fill;
mod edge_site;
mod edge_store;
mod examples;
mod fairness;
mod follow;
mod front;
mod http2;
mod lifecycle;
mod limits;
mod metrics;
mod mixed;
mod operators;
mod overlay;
mod pack_grow;
mod pack_remote;
mod pack_s3;
mod packs;
mod proxy;
mod reasons;
mod registry;
mod registry_service;
mod registry_story;
mod registry_witness;
mod reload;
mod soak;
mod takeover;
mod top;
mod uploads;
mod upstreams;
mod views;
mod whole;

/// A configuration with every listener on a free port; `gateway` goes into its table, `rest` behind it.
fn config(origin: &str, gateway: &str, rest: &str) -> String {
    format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n{gateway}\n\
         [[gateway.upstreams]]\nname = \"o\"\nservers = [\"{origin}\"]\n\
         [[gateway.routes]]\npath = \"/*\"\nupstream = \"o\"\n{rest}\n"
    )
}
