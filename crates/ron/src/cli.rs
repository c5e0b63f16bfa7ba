//! What can be typed.

use crate::client::Target;
use crate::packs::{self, PackCommand};
use crate::registry::{self, Proposing, VerifyOptions};
use crate::secret::Algorithm;
use clap::{Args, Parser, Subcommand};
use ron_kernel::units::Span;
use std::path::PathBuf;
use svc_overlay::PeerAddress;

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
        /// Which services: gateway, edge, overlay, registry.
        #[arg(required = true, value_name = "SERVICE")]
        services: Vec<String>,
        /// Take the place of the process that runs on the same data folder: its sockets are handed over, no connection
        /// is refused, and it ends with its last one. For the gateway alone.
        #[arg(long)]
        takeover: bool,
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
        /// A node to connect with, as its `ron overlay peers` prints it; may be given more than once.
        #[arg(long, value_name = "ed25519:…@HOST:PORT")]
        join: Vec<PeerAddress>,
    },
    /// Ask the gateway of a running node.
    #[command(subcommand)]
    Gateway(GatewayCommand),
    /// Put objects into the edge of a running node, get them out, forget and check them; packs of map tiles.
    #[command(subcommand)]
    Edge(EdgeCommand),
    /// Publish and follow messages over the overlay of a running node, and look at its peers.
    #[command(subcommand)]
    Overlay(OverlayCommand),
    /// Look at a registry, change it, sign, verify, prove.
    #[command(subcommand)]
    Registry(RegistryCommand),
    /// Watch a running node: queues, tenants, refusals, sessions, head, with rates; live on a terminal, once elsewhere.
    Top {
        /// How often to look, between 200ms and 1m.
        #[arg(long, value_name = "TIME", default_value = "1s")]
        interval: Span,
        /// Print everything once, with the rates of one interval, and end. So do --json and a stream that is no terminal.
        #[arg(long)]
        once: bool,
        #[command(flatten)]
        target: Target,
    },
    /// Look at the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Make and show keys: Ed25519, and ML-DSA-44 for signers of a registry.
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
    /// The configuration file. Otherwise ron.toml in the data folder, which is ./ron-data, if it is there.
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
pub(crate) enum EdgeCommand {
    /// Store a file, and print its address.
    Put {
        /// The file.
        file: PathBuf,
        /// The asset's path, such as img/a.png. Without it the file is stored by its address alone.
        #[arg(long, value_name = "PATH")]
        name: Option<String>,
        /// Its media type; by its extension if nothing is said.
        #[arg(long = "type", value_name = "TYPE", requires = "name")]
        content_type: Option<String>,
        /// A key by which it can be purged together with others; may be given more than once.
        #[arg(long = "key", value_name = "K", requires = "name")]
        keys: Vec<String>,
        #[command(flatten)]
        target: Target,
    },
    /// Get an object, checked against its address.
    Get {
        /// An address (b3:…) or an asset's path.
        #[arg(value_name = "b3:…|PATH")]
        what: String,
        /// The file to write; standard output if nothing is said.
        #[arg(short, value_name = "FILE")]
        out: Option<PathBuf>,
        #[command(flatten)]
        target: Target,
    },
    /// Say what is stored: address, size, type, and since when.
    Stat {
        /// An address (b3:…) or an asset's path.
        #[arg(value_name = "b3:…|PATH")]
        what: String,
        #[command(flatten)]
        target: Target,
    },
    /// Forget assets: one, all whose paths begin so, or all with a key.
    Purge {
        /// One path.
        #[arg(long, value_name = "P")]
        path: Option<String>,
        /// The beginning of paths.
        #[arg(long, value_name = "P")]
        prefix: Option<String>,
        /// A surrogate key.
        #[arg(long, value_name = "K")]
        key: Option<String>,
        #[command(flatten)]
        target: Target,
    },
    /// Read and check every object now: 0 if all are good, else 1. Asks the admin plane.
    Scrub {
        #[command(flatten)]
        target: Target,
    },
    /// The packs of a running edge, and what state they are in.
    Packs {
        #[command(flatten)]
        target: packs::Target,
    },
    /// Work on pack files, and make them.
    #[command(subcommand)]
    Pack(PackCommand),
}

#[derive(Debug, Subcommand)]
pub(crate) enum OverlayCommand {
    /// Publish a message, and say how many peers it was pushed to, announced to, or could not be given.
    Pub {
        /// The topic: 1 to 128 of a-z, 0-9, dot, underscore, slash and dash.
        topic: String,
        /// The message; - reads it from standard input.
        text: String,
        /// Each line is a message of its own.
        #[arg(long)]
        lines: bool,
        /// How long to wait for room, such as 2s, if no peer has any.
        #[arg(long, value_name = "TIME")]
        wait: Option<Span>,
        #[command(flatten)]
        target: Target,
    },
    /// Print each message of a topic as it comes: id, origin, topic, hops, payload.
    Sub {
        topic: String,
        #[command(flatten)]
        target: Target,
    },
    /// This node's key and address, its peers, and nodes that it does not talk to.
    Peers {
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
        /// A signer and its key, NAME=ed25519:… or NAME=ml-dsa-44:…; may be given more than once. One of each, with a
        /// comma, is a hybrid signer.
        #[arg(long, required = true, value_name = "NAME=KEY")]
        signer: Vec<String>,
        /// The file to make.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Approve a proposal offline: show what it changes, ask if somebody is there, and print the approval.
    Sign {
        /// The proposal's file, or its id (b3:…).
        #[arg(value_name = "ID|FILE")]
        proposal: String,
        /// The signer's private key; a hybrid signer gives two, one of each algorithm.
        #[arg(long, required = true, value_name = "FILE")]
        key: Vec<PathBuf>,
        /// The signer's name in the signer set.
        #[arg(long, value_name = "NAME")]
        signer: String,
        /// Do not ask whether to sign; it is asked on a terminal only.
        #[arg(long)]
        yes: bool,
        /// Where to write the approval instead.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Watch logs: cosign each checkpoint that continues the last one, as C2SP tlog-witness says.
    Witness(WitnessOptions),
    /// Check a live node, a folder, an export or a proof: 0 if it is good, else 1 and a line for each fault.
    Verify(Box<VerifyOptions>),
    /// The last entry.
    Head {
        #[command(flatten)]
        target: registry::Target,
    },
    /// The items in force, those of a kind, or one.
    Items {
        kind: Option<String>,
        id: Option<String>,
        /// As they were after this version.
        #[arg(long, value_name = "VERSION")]
        at: Option<u64>,
        #[command(flatten)]
        target: registry::Target,
    },
    /// One entry: what it changed, and who approved it.
    Get {
        #[arg(id = "entry", value_name = "VERSION")]
        version: u64,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Entries in order; the newest 20 if nothing else is said.
    Log {
        /// The first version.
        #[arg(long, value_name = "VERSION")]
        from: Option<u64>,
        /// How many.
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Print each update as it comes; a broken connection goes on where it was.
    Watch {
        /// The first version; without it only what comes.
        #[arg(long, value_name = "VERSION")]
        from: Option<u64>,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Propose the changes of a file: a payload, or only its `ops`. Shows what would change, asks, prints the id.
    Propose {
        file: PathBuf,
        #[command(flatten)]
        proposing: Proposing,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Propose a new body, that of a JSON file, for one item.
    Put {
        kind: String,
        id: String,
        file: PathBuf,
        #[command(flatten)]
        proposing: Proposing,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Propose to delete one item.
    Delete {
        kind: String,
        id: String,
        #[command(flatten)]
        proposing: Proposing,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Pending proposals, or what became of one.
    Proposals {
        id: Option<String>,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Approve a proposal: sign it here, having seen what it changes, or bring an approval signed elsewhere.
    Approve {
        id: String,
        /// The signer's private key; a hybrid signer gives two, one of each algorithm.
        #[arg(long, value_name = "FILE", requires = "signer", conflicts_with = "approval")]
        key: Vec<PathBuf>,
        /// The signer's name in the signer set.
        #[arg(long, value_name = "NAME", requires = "key")]
        signer: Option<String>,
        /// What `ron registry sign` printed.
        #[arg(long, value_name = "FILE")]
        approval: Option<PathBuf>,
        /// Do not ask whether to sign; it is asked on a terminal only.
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Withdraw a pending proposal.
    Withdraw {
        id: String,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Propose to undo what the last entry changed; shows it and prints the id.
    Supersede {
        #[command(flatten)]
        target: registry::Target,
    },
    /// Commit an approved proposal, and print the entry it became.
    Commit {
        id: String,
        /// Answer when it is durable, checkpointed, or witnessed:K.
        #[arg(long, value_name = "WHEN")]
        wait: Option<String>,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Write the file that proves one change to anybody, offline.
    Proof {
        #[arg(id = "entry", value_name = "VERSION")]
        version: u64,
        /// The file to write.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// The trust roots; with them the proof is checked before it is written.
        #[arg(long, value_name = "FILE")]
        trust_roots: Option<PathBuf>,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Hold the node's history against checkpoints kept from before; if it has two histories, both signed notes prove it.
    /// Without checkpoints: what the node found against the registry that it follows.
    Evidence {
        /// Checkpoints that were saved, such as by `curl URL/checkpoint`, or that another node or a witness saw.
        #[arg(value_name = "CHECKPOINT")]
        kept: Vec<PathBuf>,
        /// Write the notes that contradict each other to a file.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Fetch the whole registry as one verifiable file.
    Export {
        file: PathBuf,
        /// Overwrite the file if it is there.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        target: registry::Target,
    },
    /// Make a registry's folder of an export, once that is found good.
    Import {
        file: PathBuf,
        /// The folder to make, as `registry.dir` will name it.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// The trust roots.
        #[arg(long, value_name = "FILE", default_value = "trust-roots.json")]
        trust_roots: PathBuf,
        /// The log's key. Without it that of a node.key beside the folder, else the export's own.
        #[arg(long, value_name = "ed25519:…")]
        log_key: Option<String>,
        /// Take entries too that come after the last checkpoint: nothing shows that the log ever had them.
        #[arg(long)]
        unsigned: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
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
        /// What it signs with; a node, a witness and capabilities want Ed25519.
        #[arg(long, value_enum, value_name = "ALGORITHM", default_value = "ed25519")]
        alg: Algorithm,
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
        /// The capability.
        token: String,
        #[command(flatten)]
        limits: Limits,
    },
    /// Say what a capability holds and whether a trusted key signed it.
    Inspect {
        /// The capability.
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
    /// For this path and everything below it, such as /edge/assets/img.
    #[arg(long, value_name = "PREFIX")]
    pub(crate) path: Option<String>,
    /// For one method.
    #[arg(long, value_name = "M")]
    pub(crate) method: Option<String>,
    /// For how long, such as 8h. A new one: 1h if nothing is said; a narrower one: as long as before.
    #[arg(long, value_name = "TIME")]
    pub(crate) ttl: Option<Span>,
}
