//! What each command does.

use crate::Usage;
use crate::cli::{Cli, Command, ConfigCommand, KeyCommand, Limits, Source, TokenCommand};
use crate::secret::Secret;
use crate::{edge, gateway, overlay, registry, top};
use anyhow::Context as _;
use clap::CommandFactory as _;
use ron::config::{Config, sources};
use ron::front::Front;
use ron::{follow, init, node};
use ron_kernel::config::{Loaded, Problems, Sources, attempt, load, schema, show};
use ron_kernel::key::{PrivateKey, PublicKey};
use ron_kernel::node::DataDir;
use ron_kernel::token::{Block, Grant, TokenError, Verifier, inspect};
use ron_kernel::units::Span;
use serde_json::json;
use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// How long a capability lives if nothing else is said.
const TTL: Span = Span::secs(3600);

pub(crate) fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Up { data, source } => up(data, &source),
        Command::Run { services, takeover, source } => run_services(services, takeover, &source),
        Command::Init { dir, tls, join } => {
            init::init(&dir, tls, &join)?;
            let mut said = format!(
                "made {}; start it with: ron up --data {}",
                dir.join("ron.toml").display(),
                dir.display()
            );
            if !join.is_empty() {
                let node = PrivateKey::read(&dir.join("node.key"))?.public();
                said += &format!(
                    "\nthe nodes that it joins admit only whom they list: put \"{node}@HOST:PORT\", with its overlay's address, into overlay.peers there"
                );
            }
            print(&said)
        }
        Command::Gateway(command) => gateway::run(command),
        Command::Edge(command) => edge::run(command),
        Command::Overlay(command) => overlay::run(command),
        Command::Registry(command) => registry::run(command),
        Command::Top { interval, once, target } => top::run(&target, interval, once),
        Command::Config(command) => config(command),
        Command::Key(command) => key(command),
        Command::Token(command) => token(command),
        Command::Completions { shell } => {
            // Into memory first: what generates it panics when a pipe is closed.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "ron", &mut script);
            print(String::from_utf8_lossy(&script).trim_end())
        }
        Command::Man => print(String::from_utf8_lossy(&crate::man::page()?).trim_end()),
    }
}

/// Writes a line to standard output; a closed pipe is no error.
pub(crate) fn print(text: &str) -> anyhow::Result<ExitCode> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn up(data: Option<PathBuf>, source: &Source) -> anyhow::Result<ExitCode> {
    let mut all = sources(&source.set)?;
    let file = match (&source.config, &data) {
        (Some(file), _) => file.clone(),
        (None, Some(dir)) => dir.join("ron.toml"),
        (None, None) => PathBuf::from("ron-data/ron.toml"),
    };
    if source.config.is_none() && !file.exists() && !is_amnesiac(&all) {
        let dir = file.parent().unwrap_or(Path::new("."));
        init::init(dir, false, &[])?;
    }
    if file.exists() || source.config.is_some() {
        all.read_file(&file)?;
    }
    if let (Some(dir), Some(_)) = (&data, &source.config) {
        let dir = std::path::absolute(dir)?;
        all.flags.push(("node.data".to_owned(), json!(dir).to_string(), "--data".to_owned()));
    }
    node::run(all, &node::Which::Enabled, false)
}

/// Whether flags or environment say that nothing may be written.
fn is_amnesiac(sources: &Sources) -> bool {
    load::<Config>(sources).is_ok_and(|loaded| loaded.value.node.amnesia)
}

fn run_services(services: Vec<String>, takeover: bool, source: &Source) -> anyhow::Result<ExitCode> {
    let mut all = sources(&source.set)?;
    if let Some(unknown) = services.iter().find(|name| !node::SERVICES.contains(&name.as_str())) {
        let mut problems = Problems::default();
        problems.add("", format!("there is no service {unknown:?}; known: {}", node::SERVICES.join(", ")));
        return Err(problems.into());
    }
    match &source.config {
        Some(file) => all.read_file(file)?,
        // Without a file nothing says where to keep things; not in the middle of the working directory.
        None => {
            all.flags.insert(0, ("node.data".to_owned(), "ron-data".to_owned(), "the default".to_owned()))
        }
    }
    if takeover && services != ["gateway"] {
        return Err(
            Usage("--takeover is for the gateway alone: ron run gateway --takeover".to_owned()).into()
        );
    }
    node::run(all, &node::Which::Named(services), takeover)
}

fn config(command: ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Check { file } => {
            let mut all = sources(&[])?;
            all.read_file(&file)?;
            load::<Config>(&all)?;
            print(&format!("{}: good", file.display()))
        }
        ConfigCommand::Show { source, json } => {
            let sources = read_source(&source)?;
            let file = load::<Config>(&sources)?;
            let data = DataDir::of(&file.value.node, file.file.as_deref());
            let (loaded, remarks) = follow::effective(&sources, file, &data)?;
            for remark in remarks {
                eprintln!("{remark}");
            }
            let rows = show_up(loaded);
            if json {
                let rows: Vec<_> = rows
                    .iter()
                    .map(|(key, value, origin)| json!({"key": key, "value": value, "origin": origin}))
                    .collect();
                return print(&serde_json::to_string_pretty(&rows)?);
            }
            let lines: Vec<String> =
                rows.iter().map(|(key, value, origin)| format!("{key} = {value}  # {origin}")).collect();
            print(&lines.join("\n"))
        }
        ConfigCommand::Schema => print(&serde_json::to_string_pretty(&schema::<Config>())?),
    }
}

/// Every value and where it came from; also what `ron up` adds to it.
fn show_up(mut loaded: Loaded<Config>) -> Vec<(String, String, String)> {
    let told: HashMap<_, _> =
        show(&loaded).into_iter().map(|(key, value, origin)| (key, (value, origin))).collect();
    loaded.value = Front::planned(&loaded).applied(&loaded.value);
    let origin = |key: &String, value: &String| match told.get(key) {
        Some((known, origin)) if known == value => origin.clone(),
        _ => "added by `ron up`".to_owned(),
    };
    let rows = show(&loaded).into_iter();
    rows.map(|(key, value, _)| {
        let origin = origin(&key, &value);
        (key, value, origin)
    })
    .collect()
}

/// The configuration named, or that of `./ron-data`, or the defaults.
fn read_source(source: &Source) -> anyhow::Result<Sources> {
    let mut all = sources(&source.set)?;
    let beside = PathBuf::from("ron-data/ron.toml");
    match &source.config {
        Some(file) => all.read_file(file)?,
        None if beside.exists() => all.read_file(&beside)?,
        None => {}
    }
    Ok(all)
}

fn key(command: KeyCommand) -> anyhow::Result<ExitCode> {
    let key = match command {
        KeyCommand::New { out, alg } => {
            let key = Secret::generate(alg)?;
            key.write_new(&out).context("choose another name or remove the old key first")?;
            key
        }
        KeyCommand::Show { file } => Secret::read(&file)?,
    };
    print(&key.public())
}

fn token(command: TokenCommand) -> anyhow::Result<ExitCode> {
    let now = SystemTime::now();
    match command {
        TokenCommand::Mint { limits, key } => {
            if limits.scope.is_empty() {
                return Err(TokenError::NoScope.into());
            }
            let key = PrivateKey::read(&key).context("name the signing key with --key FILE")?;
            let grant = Grant { ttl: Some(limits.ttl.unwrap_or(TTL).0), ..grant(limits) };
            print(&grant.mint(&key, now)?)
        }
        TokenCommand::Attenuate { token, limits } => {
            if let Some(tenant) = &limits.tenant {
                let fact = format!("tenant(\"{tenant}\");");
                let minted =
                    inspect(&token)?.into_iter().next().map(|block| block.source).unwrap_or_default();
                if !minted.lines().any(|line| line == fact) {
                    let why =
                        "the token was not minted for it, and a narrower one would be refused everywhere";
                    return Err(Usage(format!("--tenant {tenant}: {why}")).into());
                }
            }
            print(&grant(limits).attenuate(&token, now)?)
        }
        TokenCommand::Inspect { token, source, json } => {
            let blocks = inspect(&token)?;
            // Whoever mends a list of revoked tokens needs their ids while the configuration is not good.
            let (loaded, _problems) = attempt::<Config>(&read_source(&source)?);
            let trusted = Verifier::new(&trusted_keys(&loaded)).is_signed(&token);
            let ends_at = blocks.iter().filter_map(Block::ends_at).min();
            let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let expired = ends_at.is_some_and(|ends_at| ends_at <= seconds);
            if json {
                let (sources, ids): (Vec<_>, Vec<_>) =
                    blocks.into_iter().map(|block| (block.source, block.id)).unzip();
                let seen = json!({"blocks": sources, "ids": ids, "trusted": trusted, "ends_at": ends_at, "expired": expired});
                return print(&seen.to_string());
            }
            let mut text = String::new();
            for (index, block) in blocks.iter().enumerate() {
                let name = if index == 0 { "minted".to_owned() } else { format!("narrowed {index}") };
                let source = block.source.trim().replace('\n', "\n  ");
                text += &format!("{name}:\n  {source}\n  id, to revoke it: {}\n", block.id);
            }
            let good = match ends_at {
                None => "without end".to_owned(),
                Some(ends_at) if expired => format!("no more, since {} s", seconds - ends_at),
                Some(ends_at) => format!("for another {} s", ends_at - seconds),
            };
            let trusted = if trusted { "yes" } else { "no" };
            print(&format!("{text}good by its time: {good}\nsigned by a trusted key: {trusted}"))
        }
    }
}

fn grant(limits: Limits) -> Grant {
    Grant {
        scopes: limits.scope,
        tenant: limits.tenant,
        audience: limits.aud,
        path_prefix: limits.path,
        method: limits.method,
        ttl: limits.ttl.map(|ttl| ttl.0),
    }
}

/// `node.token_keys`, or the node's own key if there is one.
fn trusted_keys(loaded: &Loaded<Config>) -> Vec<PublicKey> {
    let node = &loaded.value.node;
    if !node.token_keys.is_empty() {
        return node.token_keys.iter().filter_map(|key| key.parse().ok()).collect();
    }
    let own = DataDir::of(node, loaded.file.as_deref()).join(&node.key_file);
    PrivateKey::read(&own).map(|key| vec![key.public()]).unwrap_or_default()
}
