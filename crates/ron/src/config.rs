//! The whole file: `[node] [log] [admin] [gateway] [edge] [overlay] [registry]`.

use ron_kernel::config::{Problems, Sources, Validate};
use ron_kernel::node::{AdminSettings, DataDir, NodeSettings};
use ron_kernel::observe::LogSettings;
use ron_kernel::settings;
use std::path::Path;
use svc_edge::config::EdgeSettings;
use svc_gateway::config::GatewaySettings;
use svc_overlay::config::OverlaySettings;
use svc_registry::config::RegistrySettings;

settings! {
    /// Everything.
    pub struct Config {
        /// The node as a whole.
        node: NodeSettings = NodeSettings::default() => Hot;
        /// Logs.
        log: LogSettings = LogSettings::default() => Hot;
        /// The admin plane.
        admin: AdminSettings = AdminSettings::default() => Hot;
        /// The gateway.
        gateway: GatewaySettings = GatewaySettings::default() => Hot;
        /// The asset edge.
        edge: EdgeSettings = EdgeSettings::default() => Hot;
        /// The overlay.
        overlay: OverlaySettings = OverlaySettings::default() => Hot;
        /// The registry.
        registry: RegistrySettings = RegistrySettings::default() => Hot;
    }
}

impl Validate for Config {
    fn validate_files(&self, file: Option<&Path>, problems: &mut Problems) {
        let data = DataDir::of(&self.node, file);
        if let Some(tls) = &self.gateway.tls {
            tls.check(data.path(), "gateway.tls", problems);
        }
        if let Some(tls) = &self.registry.tls {
            tls.check(data.path(), "registry.tls", problems);
        }
        self.gateway.validate_files(data.path(), problems);
        if let Some(tls) = &self.edge.tls {
            tls.check(data.path(), "edge.tls", problems);
        }
        self.edge.validate_files(data.path(), problems);
        let log = &self.gateway.access_log;
        let folder = data.join(&log.file).parent().map(Path::to_owned).unwrap_or_default();
        if log.enabled && !log.file.is_empty() && file.is_some() && !folder.is_dir() {
            let message = format!("there is no folder {}: make it first", folder.display());
            problems.add("gateway.access_log.file", message);
        }
    }

    fn validate(&self, problems: &mut Problems) {
        self.node.validate(problems);
        self.log.validate(problems);
        self.admin.validate(&self.node, problems);
        self.gateway.validate(problems);
        self.registry.validate(self.node.danger_ok, self.node.amnesia, problems);
        self.edge.validate(self.node.amnesia, problems);
        self.overlay.validate(self.node.danger_ok, problems);
        crate::front::check(self, problems);
        let mut listeners = vec![
            ("admin.listen", self.admin.listen),
            ("gateway.listen", self.gateway.listen),
            ("edge.listen", self.edge.listen),
            ("registry.listen", self.registry.listen),
        ];
        listeners.extend(self.overlay.listen.tcp().map(|listen| ("overlay.listen", listen)));
        for (index, (key, address)) in listeners.iter().enumerate() {
            let mut others = listeners[index + 1..].iter();
            if let Some((other, _)) = others.find(|(_, other)| other == address && address.port() != 0) {
                problems.add(*key, format!("is the address of {other} too: each needs its own"));
            }
        }
        if self.node.key_file == self.admin.token_file {
            problems.add("admin.token_file", "is the node's key file too: each needs its own");
        }
        if self.node.amnesia && self.gateway.access_log.enabled && !self.gateway.access_log.file.is_empty() {
            problems.add("gateway.access_log.file", "is set, but node.amnesia is on: no file may be written");
        }
        for (key, value) in
            [("node.key_file", &self.node.key_file), ("admin.token_file", &self.admin.token_file)]
        {
            if value.is_empty() {
                problems.add(key, "must name a file");
            }
        }
    }
}

/// What keys were called in the design documents, and what they are called here.
const RENAMED: &[(&str, &str)] = &[
    ("edge.drain_deadline", "node.drain_deadline"),
    ("edge.ingress.timeout_secs", "edge.ingress.timeout"),
    ("gateway.drain_deadline", "node.drain_deadline"),
    ("overlay.drain_deadline", "node.drain_deadline"),
    ("overlay.transport.max_conns", "overlay.max_conns"),
    ("registry.drain_deadline", "node.drain_deadline"),
    ("registry.storage.checkpoint_interval", "registry.checkpoint.interval"),
    ("registry.bus.channel_bound", "registry.channels.events"),
    ("registry.read_timeout", "registry.limits.read_timeout"),
    ("registry.write_timeout", "registry.limits.write_timeout"),
    ("registry.idle_timeout", "registry.limits.idle_timeout"),
    ("gateway.drr.rate_limit_rps", "gateway.quotas.global_rps"),
    ("gateway.read_timeout_secs", "gateway.read_timeout"),
    ("gateway.read_timeout_ms", "gateway.read_timeout"),
    ("gateway.write_timeout_secs", "gateway.write_timeout"),
    ("gateway.write_timeout_ms", "gateway.write_timeout"),
    ("gateway.idle_timeout_secs", "gateway.idle_timeout"),
    ("gateway.idle_timeout_ms", "gateway.idle_timeout"),
    ("gateway.max_body_bytes", "gateway.limits.max_body_bytes"),
    ("gateway.transport.max_conns", "gateway.max_conns"),
];

/// The environment and `--set KEY=VALUE` flags, to which a file can be added.
pub fn sources(set: &[String]) -> Result<Sources, Problems> {
    let mut problems = Problems::default();
    let mut flags = Vec::new();
    for text in set {
        match text.split_once('=') {
            Some((key, value)) => {
                flags.push((key.trim().to_owned(), value.trim().to_owned(), format!("--set {key}")))
            }
            None => {
                problems.add("", format!("--set {text}: expected KEY=VALUE, such as --set log.level=debug"))
            }
        }
    }
    let mut env = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with("RON_")) else { continue };
        match value.to_str() {
            Some(value) => env.push((name.to_owned(), value.to_owned())),
            None => problems.add("", format!("environment {name}: the value is not UTF-8")),
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok(Sources { file: None, env, flags, renamed: RENAMED })
}
