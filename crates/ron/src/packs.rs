//! `ron edge packs` and `ron edge pack …`: the packs of a running edge, and pack files by themselves.

use crate::Usage;
use crate::client::{self, Found, address, address_of, no_answer};
use crate::commands::print;
use crate::http1::{self, Asked};
use crate::progress::Progress;
use crate::table::{aligned, list, row, text};
use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::{Args, Subcommand};
use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use ron_kernel::units::Size;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use svc_edge::address::Address;
use svc_edge::pack::convert::{Converted, to_mbtiles, to_pmtiles};
use svc_edge::pack::grow::{Grower, Grown};
use svc_edge::pack::verify::{Progress as Step, Report};
use svc_edge::pack::{DirectoryCache, Limits, Pack};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
const ANSWER_MAX: u64 = 64 << 20;
/// Leaf directories in memory while a file is worked on.
const DIRECTORY_BYTES: usize = 16 << 20;

/// Which edge.
#[derive(Clone, Debug, Args)]
pub(crate) struct Target {
    /// Base URL of the edge, such as http://127.0.0.1:8081.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The node's configuration file, which leads to its address. Without this and --url: ./ron-data.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PackCommand {
    /// Check a whole pack file, its structure and every tile: 0 if it is good, else 1 and a line for each fault.
    Verify {
        /// A PMTiles or MBTiles file.
        file: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make a PMTiles archive of an MBTiles file, or the other way round.
    Convert {
        /// The file there is.
        from: PathBuf,
        /// The file to make.
        to: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make a PMTiles archive of the tiles that a running edge has stored so far: assets whose path ends in Z/X/Y, with
    /// or without an extension, wherever they came from.
    Grow {
        /// The beginning of the assets' paths, such as /tiles/.
        #[arg(long, value_name = "P")]
        prefix: String,
        /// The file to make.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// What the archive calls itself; otherwise the prefix.
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        #[command(flatten)]
        target: client::Target,
    },
}

pub(crate) fn run(command: PackCommand) -> anyhow::Result<ExitCode> {
    match command {
        PackCommand::Verify { file, json } => verify(&file, json),
        PackCommand::Convert { from, to, json } => convert(&from, &to, json),
        PackCommand::Grow { prefix, out, name, target } => {
            grow(&prefix, &out, name.as_deref().unwrap_or(&prefix), &target)
        }
    }
}

/// `ron edge packs`.
pub(crate) fn show(target: &Target) -> anyhow::Result<ExitCode> {
    let catalogue = catalogue(target)?;
    if target.json {
        return print(&catalogue.to_string());
    }
    let mut rows = vec![row(["PACK", "STATE", "FORMAT", "TILES", "ZOOMS", "SIZE", "CHECKED", "GENERATION"])];
    let mut refused = String::new();
    for pack in list(&catalogue["packs"]) {
        let cell = |name: &str| if pack[name].is_null() { "-".to_owned() } else { text(&pack[name]) };
        let size = pack["size"].as_u64().map_or_else(|| "-".to_owned(), |size| Size(size).to_string());
        let zooms = format!("{}-{}", cell("minzoom"), cell("maxzoom"));
        let checked = match (&pack["verified"], pack["check"].as_str()) {
            (Value::Bool(true), _) => "yes",
            (_, Some("structure")) => "structure",
            _ => "no",
        };
        let checked = checked.to_owned();
        rows.push(vec![
            cell("name"),
            cell("state"),
            cell("format"),
            cell("tiles"),
            zooms,
            size,
            checked,
            cell("generation"),
        ]);
        if let Some(why) = pack["refused"].as_str() {
            refused += &format!("{}: {}\n", cell("name"), text(&why.into()));
        }
    }
    print(format!("{}{refused}", aligned(&rows)).trim_end())
}

fn catalogue(target: &Target) -> anyhow::Result<Value> {
    let (address, known_from) = match &target.url {
        Some(url) => {
            (address_of(url, "the edge's base URL, such as http://127.0.0.1:8081")?, "--url".to_owned())
        }
        None => {
            let Found { config, data, problems } = Found::read(target.config.as_deref())?;
            let written = |addresses: &Value| addresses["edge"]["http"].as_str().map(str::to_owned);
            match address(&data, "edge", written, ("edge.listen", config.edge.listen)) {
                Err(_unknown) if !problems.is_empty() => return Err(problems.into()),
                found => found?,
            }
        }
    };
    let asked =
        Asked { method: "GET", path: "/edge/packs", headers: &[], body: b"", silence_max: ANSWER_TIMEOUT };
    let response = http1::ask(&address, &asked).with_context(|| no_answer(&address, &known_from))?;
    let mut body = Vec::new();
    let status = response.status;
    response.body.take(ANSWER_MAX).read_to_end(&mut body).context("the edge broke off its answer")?;
    let answer: Option<Value> = serde_json::from_slice(&body).ok();
    answer
        .filter(|answer| status == 200 && answer["packs"].is_array())
        .with_context(|| format!("what answers at {address} is no edge, or of another version"))
}

fn open(file: &Path) -> anyhow::Result<Pack> {
    let cache = Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), DIRECTORY_BYTES));
    Pack::open(file, Limits::default(), cache, 1).with_context(|| file.display().to_string())
}

/// Shows how far the work is; its total is known with the first step.
fn shown(of: &'static str) -> impl FnMut(Step) -> ControlFlow<()> {
    let mut progress: Option<Progress> = None;
    move |step: Step| {
        progress.get_or_insert_with(|| Progress::new(step.total, of)).at(step.done);
        ControlFlow::Continue(())
    }
}

fn verify(file: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let pack = open(file)?;
    let of = match &pack {
        Pack::Pmtiles(_) => "bytes",
        Pack::MbTiles(_) => "tiles",
    };
    let report = pack.verify(&mut shown(of));
    if json {
        let findings: Vec<Value> = report
            .findings
            .iter()
            .map(|finding| {
                let tile = finding.tile.map(|tile| tile.to_string());
                json!({"fault": finding.fault.to_string(), "tile": tile})
            })
            .collect();
        print(
            &json!({"good": report.is_good(), "complete": report.complete, "tiles": report.tiles,
                "contents": report.contents, "found": report.found, "findings": findings})
            .to_string(),
        )?;
    } else {
        print(&told(file, &report))?;
    }
    Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn told(file: &Path, report: &Report) -> String {
    let mut out = String::new();
    for finding in &report.findings {
        let tile = finding.tile.map_or_else(String::new, |tile| format!("tile {tile}: "));
        out += &format!("{tile}{}\n", finding.fault);
    }
    let more = report.found.saturating_sub(report.findings.len() as u64);
    if more > 0 {
        out += &format!("and {more} more\n");
    }
    let verdict = match (report.is_good(), report.complete) {
        (true, _) => "good".to_owned(),
        (false, true) => format!("bad, {} faults", report.found),
        (false, false) => format!("bad, {} faults before it was given up", report.found),
    };
    out + &format!("{}: {verdict}; {} tiles, {} contents", file.display(), report.tiles, report.contents)
}

fn convert(from: &Path, to: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let pack = open(from)?;
    let (is, becomes) = match &pack {
        Pack::Pmtiles(_) => ("PMTiles", "mbtiles"),
        Pack::MbTiles(_) => ("MBTiles", "pmtiles"),
    };
    let extension = to.extension().and_then(|extension| extension.to_str()).unwrap_or("");
    if matches!(extension, "pmtiles" | "mbtiles") && extension != becomes {
        let message = format!("{} is {is} already: name the new file .{becomes}", from.display());
        return Err(Usage(message).into());
    }
    must_be_new(to)?;
    // Nobody sees half of it under its name.
    let partial = Partial(to.with_extension(format!("{becomes}.part")));
    let converted = match &pack {
        Pack::Pmtiles(pack) => to_mbtiles(pack, &partial.0, &mut shown("tiles")),
        Pack::MbTiles(pack) => {
            let spill = [spill(to, "contents")?, spill(to, "records")?];
            let mut out =
                BufWriter::new(File::create_new(&partial.0).with_context(|| to.display().to_string())?);
            let converted = to_pmtiles(pack, spill, &mut out, &mut shown("tiles"));
            out.flush().and_then(|()| out.get_ref().sync_all()).with_context(|| to.display().to_string())?;
            converted
        }
    };
    let Converted { tiles, skipped } = converted.with_context(|| from.display().to_string())?;
    std::fs::rename(&partial.0, to).with_context(|| to.display().to_string())?;
    if json {
        return print(&json!({"tiles": tiles, "skipped": skipped}).to_string());
    }
    let left =
        if skipped > 0 { format!(", {skipped} rows left out that are no tile") } else { String::new() };
    print(&format!("{}: {tiles} tiles{left}", to.display()))
}

fn must_be_new(to: &Path) -> anyhow::Result<()> {
    if to.exists() {
        return Err(Usage(format!("{} exists: remove it, or choose another name", to.display())).into());
    }
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir());
    if let Some(folder) = folder {
        let message = format!("{}: there is no folder {}: make it first", to.display(), folder.display());
        return Err(Usage(message).into());
    }
    Ok(())
}

fn grow(prefix: &str, to: &Path, name: &str, target: &client::Target) -> anyhow::Result<ExitCode> {
    must_be_new(to)?;
    let (address, token) = target.edge(&["edge:write"])?;
    let listing = Listing { address, token, prefix: prefix.trim_start_matches('/') };
    let partial = Partial(to.with_extension("pmtiles.part"));
    let mut grower = Grower::new(spill(to, "fetched")?);
    let (mut skipped, mut next) = (0u64, None);
    let mut progress = Progress::new(0, "tiles");
    loop {
        let page = listing.page(next.as_deref())?;
        for asset in list(&page["assets"]) {
            let body = asset["body"].as_str().and_then(|body| STANDARD.decode(body).ok());
            let added = match body {
                Some(body) => {
                    let bytes = checked(asset, body)?;
                    grower.add(&text(&asset["name"]), &text(&asset["type"]), bytes)
                }
                None => Ok(false),
            };
            let hint = || format!("{prefix}: name a longer --prefix if several kinds of tiles lie under it");
            skipped += u64::from(!added.with_context(hint)?);
        }
        progress.at(grower.tiles() as u64);
        match page["next"].as_str() {
            Some(more) => next = Some(more.to_owned()),
            None => break,
        }
    }
    drop(progress);
    if grower.tiles() == 0 {
        anyhow::bail!(
            "no tile is stored under {prefix} ({skipped} other assets are): the paths of tiles end in Z/X/Y, with or \
             without an extension, and are stored once they have been asked for through the edge"
        );
    }
    let spills = [spill(to, "contents")?, spill(to, "records")?];
    let mut file = BufWriter::new(File::create_new(&partial.0).with_context(|| to.display().to_string())?);
    let grown = grower.finish(name, spills, &mut file, &mut shown("tiles"));
    let grown =
        grown.with_context(|| format!("{prefix}: name a longer --prefix if it is several sets of tiles"))?;
    file.flush().and_then(|()| file.get_ref().sync_all()).with_context(|| to.display().to_string())?;
    std::fs::rename(&partial.0, to).with_context(|| to.display().to_string())?;
    let Grown { tiles, contents, kind, min_zoom, max_zoom } = grown;
    let kind = kind.extensions()[0];
    if target.json {
        let page = json!({"tiles": tiles, "contents": contents, "type": kind, "minzoom": min_zoom,
            "maxzoom": max_zoom, "skipped": skipped});
        return print(&page.to_string());
    }
    let left =
        if skipped > 0 { format!(", {skipped} assets left out that are no tile") } else { String::new() };
    print(&format!(
        "{}: {tiles} tiles ({kind}, zoom {min_zoom} to {max_zoom}), {contents} contents{left}",
        to.display()
    ))
}

/// The bytes of an asset, which must be those of its address.
fn checked(asset: &Value, body: Vec<u8>) -> anyhow::Result<Bytes> {
    let address = Address::from(blake3::hash(&body)).to_string();
    anyhow::ensure!(
        asset["b3"] == address,
        "{}: what came is not what its address says",
        text(&asset["name"])
    );
    Ok(body.into())
}

/// What an edge has stored under a prefix.
struct Listing<'a> {
    address: String,
    token: Option<String>,
    prefix: &'a str,
}

impl Listing<'_> {
    fn page(&self, after: Option<&str>) -> anyhow::Result<Value> {
        let after = after.map_or_else(String::new, |after| format!("&after={after}"));
        let path = format!("/edge/assets?prefix={}{after}", escaped(self.prefix));
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let headers: Vec<(&str, &str)> =
            bearer.iter().map(|bearer| ("Authorization", bearer.as_str())).collect();
        let asked =
            Asked { method: "GET", path: &path, headers: &headers, body: b"", silence_max: ANSWER_TIMEOUT };
        loop {
            let response = http1::ask(&self.address, &asked)
                .with_context(|| no_answer(&self.address, "--url, --config or ./ron-data"))?;
            let status = response.status;
            let wait = response.header("retry-after").and_then(|wait| wait.parse().ok()).unwrap_or(1);
            let mut body = Vec::new();
            response.body.take(ANSWER_MAX).read_to_end(&mut body).context("the edge broke off its answer")?;
            if status == 429 {
                // The edge is busy with its clients, who come first.
                std::thread::sleep(Duration::from_secs(wait));
                continue;
            }
            let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
            if status == 200 && answer["assets"].is_array() {
                return Ok(answer);
            }
            let detail = answer["detail"]
                .as_str()
                .map_or_else(String::new, |detail| format!(": {}", text(&detail.into())));
            let hint =
                if matches!(status, 401 | 403) { "; --token takes a capability for edge:write" } else { "" };
            anyhow::bail!("the edge answered {status}{detail}{hint}");
        }
    }
}

/// A text as a query can have it.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// A file that goes, unless it got its name.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A temporary file beside the one that is made, which has no name once it is open.
fn spill(to: &Path, what: &str) -> anyhow::Result<File> {
    let path = to.with_extension(format!("{what}.part"));
    let open = || -> io::Result<File> {
        let file = File::options().read(true).write(true).create_new(true).open(&path)?;
        std::fs::remove_file(&path)?;
        Ok(file)
    };
    open().with_context(|| path.display().to_string())
}
