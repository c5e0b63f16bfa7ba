//! What can be typed.

use crate::client::Target;
use clap::{Args, Parser, Subcommand};
use ron_kernel::units::Span;
use std::path::PathBuf;

/// A self-hosted edge node: a fair, overload-safe HTTP gateway on one supervision kernel.
#[derive(Debug, Parser)]
#[command(name = "ron", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a whole node; on first start, make what it needs.
    Up {
        /// Folder for everything the node keeps.
        #[arg(long, value_name = "DIR")]
        data: Option<PathBuf>,
        #[command(flatten)]
        source: Source,
    },
    /// Start the named services only.
    Run {
        /// Which services: gateway, registry.
        #[arg(required = true, value_name = "SERVICE")]
        services: Vec<String>,
        #[command(flatten)]
        source: Source,
    },
    /// Make keys and a commented ron.toml, without starting.
    Init {
        /// Folder to make them in.
        dir: PathBuf,
        /// Make a development CA and a TLS listener too.
        #[arg(long)]
        tls: bool,
    },
    /// Ask the gateway of a running node.
    #[command(subcommand)]
    Gateway(GatewayCommand),
    /// Make trust roots, sign proposals and verify what a registry gave away; works on files alone.
    #[command(subcommand)]
    Registry(RegistryCommand),
    /// Look at the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Make and show Ed25519 keys.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Make, narrow and read capabilities.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Print a completion script for a shell.
    Completions { shell: clap_complete::Shell },
    /// Print the man page.
    Man,
}

/// Where the configuration comes from.
#[derive(Clone, Debug, Args)]
pub(crate) struct Source {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Set one key, over file and environment; may be given more than once.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GatewayCommand {
    /// Upstreams and their breakers, tenants and their shares, the queue.
    Status {
        #[command(flatten)]
        target: Target,
    },
    /// The routes, with what they inherit.
    Routes {
        #[command(flatten)]
        target: Target,
    },
    /// Read the configuration file again.
    Reload {
        #[command(flatten)]
        target: Target,
    },
    /// Say what would become of a request: route, upstream, class, tenant, quotas, deadline, or the refusal. Nothing is
    /// sent to the upstream and no quota is used.
    Explain {
        /// The method, such as GET.
        method: String,
        /// The URL, or only its path.
        #[arg(value_name = "URL")]
        asked: String,
        /// A header of the request; may be given more than once.
        #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
        headers: Vec<String>,
        /// The address that the request comes from; 127.0.0.1 by default.
        #[arg(long, value_name = "IP")]
        client: Option<std::net::IpAddr>,
        #[command(flatten)]
        target: Target,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum RegistryCommand {
    /// Make the trust roots: the first signer set, and the log's name. Prints the hash that pins them.
    Genesis {
        /// The log's name: a checkpoint's origin and its key's name.
        #[arg(long, value_name = "NAME", default_value = "ron.local/registry")]
        log: String,
        /// How many signers must approve a change.
        #[arg(long, value_name = "M")]
        threshold: u64,
        /// A signer and its key, NAME=ed25519:…; may be given more than once. Two keys with a comma are a hybrid signer.
        #[arg(long, required = true, value_name = "NAME=KEY")]
        signer: Vec<String>,
        /// The file to make.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Approve a proposal offline, and print the approval.
    Sign {
        /// The proposal's file, or its id (b3:…).
        #[arg(value_name = "ID|FILE")]
        proposal: String,
        /// The signer's private key.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
        /// The signer's name in the signer set.
        #[arg(long, value_name = "NAME")]
        signer: String,
        /// Where to write the approval instead.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Watch logs: cosign each checkpoint that continues the last one, as C2SP tlog-witness says.
    Witness(WitnessOptions),
    /// Check an export or a proof with nothing but files: 0 if it is good, else 1 and a line for each fault.
    Verify {
        /// An export.
        #[arg(long, value_name = "FILE", conflicts_with = "proof")]
        export: Option<PathBuf>,
        /// A .tlog-proof file.
        #[arg(long, value_name = "FILE")]
        proof: Option<PathBuf>,
        /// The trust roots.
        #[arg(long, value_name = "FILE", default_value = "trust-roots.json")]
        trust_roots: PathBuf,
        /// The log's key. Without it, an export's own is taken: then it is known to be whole, not whose it is.
        #[arg(long, value_name = "ed25519:…")]
        log_key: Option<String>,
    },
}

/// A witness, and whom it watches.
#[derive(Debug, Args)]
pub(crate) struct WitnessOptions {
    /// Where to listen, by plain HTTP.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: std::net::SocketAddr,
    /// The witness's private key.
    #[arg(long, value_name = "FILE")]
    pub(crate) key: PathBuf,
    /// The witness's name, under which logs know its key.
    #[arg(long, value_name = "NAME", default_value = "ron.local/witness")]
    pub(crate) name: String,
    /// A log to watch: its verifier line, NAME+ID+KEY, as GET /registry/log-key gives it; may be given more than once.
    #[arg(long = "log", value_name = "LINE")]
    pub(crate) log: Vec<String>,
    /// A file of such lines; it is read again when it changes.
    #[arg(long, value_name = "FILE")]
    pub(crate) logs: Option<PathBuf>,
    /// What the witness has cosigned. Whoever loses this file needs a new key.
    #[arg(long, value_name = "FILE", default_value = "witness.state")]
    pub(crate) state: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Report every problem of a file at once; binds no port.
    Check { file: PathBuf },
    /// Print every effective value and where it came from.
    Show {
        #[command(flatten)]
        source: Source,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print the JSON Schema of the file.
    Schema,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key, write it with mode 0600, print its public half.
    New {
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Print the public half of a key.
    Show { file: PathBuf },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Print a new capability.
    Mint {
        #[command(flatten)]
        limits: Limits,
        /// The signing key; the node's own by default.
        #[arg(long, value_name = "FILE", default_value = "ron-data/node.key")]
        key: PathBuf,
    },
    /// Print a narrower version of a capability; no key is needed.
    Attenuate {
        token: String,
        #[command(flatten)]
        limits: Limits,
    },
    /// Say what a capability holds and whether a trusted key signed it.
    Inspect {
        token: String,
        #[command(flatten)]
        source: Source,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// What a capability is limited to.
#[derive(Clone, Debug, Args)]
pub(crate) struct Limits {
    /// What it allows, such as edge:write; several with commas.
    #[arg(long, value_name = "S", value_delimiter = ',')]
    pub(crate) scope: Vec<String>,
    /// For which tenant.
    #[arg(long, value_name = "T")]
    pub(crate) tenant: Option<String>,
    /// For which service.
    #[arg(long, value_name = "A")]
    pub(crate) aud: Option<String>,
    /// For paths that begin so.
    #[arg(long, value_name = "PREFIX")]
    pub(crate) path: Option<String>,
    /// For one method.
    #[arg(long, value_name = "M")]
    pub(crate) method: Option<String>,
    /// For how long.
    #[arg(long, value_name = "TIME")]
    pub(crate) ttl: Option<Span>,
}
