//! `ron edge …`: puts objects into a running edge, gets them out and checks them.

use crate::Usage;
use crate::cli::EdgeCommand;
use crate::client::{Admin, Answer, Target};
use crate::commands::print;
use crate::packs;
use anyhow::Context as _;
use ron_kernel::units::Size;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Read, Write};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For the next bytes, or for the store to have made an object durable.
const SILENCE: Duration = Duration::from_secs(60);
const PIECE: usize = 256 << 10;
/// The longest head or problem that is read.
const ANSWER_MAX: u64 = 1 << 20;
const LOOK: Duration = Duration::from_millis(200);

pub(crate) fn run(command: EdgeCommand) -> anyhow::Result<ExitCode> {
    match command {
        EdgeCommand::Put { file, name, content_type, keys, target } => {
            let peer = Peer::find(&target)?;
            if let Some(bad) = content_type.iter().chain(&keys).find(|text| text.contains(char::is_control)) {
                return Err(Usage(format!("{bad:?} has control characters, which no header may have")).into());
            }
            let fields = [
                content_type.map(|media| format!("Content-Type: {media}\r\n")),
                (!keys.is_empty()).then(|| format!("Surrogate-Key: {}\r\n", keys.join(" "))),
            ];
            let fields: String = fields.into_iter().flatten().collect();
            put(&peer, &file, name.as_deref(), &fields, target.json)
        }
        EdgeCommand::Get { what, out, target } => get(&Peer::find(&target)?, &what, out.as_deref()),
        EdgeCommand::Stat { what, target } => stat(&Peer::find(&target)?, &what, target.json),
        EdgeCommand::Purge { path, prefix, key, target } => {
            let body = match (path, prefix, key) {
                (Some(path), None, None) => json!({"path": path}),
                (None, Some(prefix), None) => json!({"prefix": prefix}),
                (None, None, Some(key)) => json!({"key": key}),
                _ => {
                    return Err(
                        Usage("say what to purge with one of --path, --prefix and --key".to_owned()).into()
                    );
                }
            };
            purge(&Peer::find(&target)?, &body, target.json)
        }
        EdgeCommand::Scrub { target } => scrub(&target),
        EdgeCommand::Packs { target } => packs::show(&target),
        EdgeCommand::Pack(command) => packs::run(command),
    }
}

/// The edge of a node.
struct Peer {
    /// `host:port`
    address: String,
    token: Option<String>,
}

/// The head of an answer, and the connection from which its body is read.
struct Reply {
    status: u16,
    head: String,
    body: BufReader<TcpStream>,
}

impl Peer {
    fn find(target: &Target) -> anyhow::Result<Peer> {
        let (address, token) = target.edge(&["edge:write", "edge:purge"])?;
        Ok(Peer { address, token })
    }

    fn connect(&self) -> anyhow::Result<TcpStream> {
        let silent = || {
            format!("no edge answers at {}: start it with `ron up`, or name another with --url", self.address)
        };
        let resolved = self.address.to_socket_addrs().with_context(silent)?.next().with_context(silent)?;
        let stream = TcpStream::connect_timeout(&resolved, CONNECT_TIMEOUT).with_context(silent)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(stream)
    }

    /// One request on a connection of its own; `send` writes its body.
    fn ask(
        &self,
        request: &str,
        fields: &str,
        send: impl FnOnce(&mut TcpStream) -> anyhow::Result<()>,
    ) -> anyhow::Result<Reply> {
        let mut stream = self.connect()?;
        let token = self
            .token
            .as_ref()
            .map_or_else(String::new, |token| format!("Authorization: Bearer {token}\r\n"));
        let head = format!(
            "{request} HTTP/1.1\r\nHost: {}\r\n{token}{fields}Connection: close\r\n\r\n",
            self.address
        );
        stream.write_all(head.as_bytes())?;
        // A refusal may come before the body is sent; what it says is worth more than that sending failed.
        let sent = send(&mut stream);
        let reply = Reply::read(stream);
        match (sent, reply) {
            (Err(error), Ok(reply)) if reply.status < 400 => Err(error),
            (Err(error), Err(_)) => Err(error),
            (_, reply) => reply,
        }
    }
}

impl Reply {
    fn read(stream: TcpStream) -> anyhow::Result<Reply> {
        let mut body = BufReader::with_capacity(PIECE, stream);
        let mut head = String::new();
        loop {
            let read =
                (&mut body).take(ANSWER_MAX).read_line(&mut head).context("the edge did not answer")?;
            anyhow::ensure!(read > 0 && (head.len() as u64) < ANSWER_MAX, "the edge did not answer properly");
            if head.ends_with("\r\n\r\n") {
                break;
            }
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok(Reply { status: status.context("the edge did not answer properly")?, head, body })
    }

    fn field(&self, name: &str) -> Option<&str> {
        let lines = self.head.split("\r\n").filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    fn len(&self) -> anyhow::Result<u64> {
        let stated = self.field("content-length").and_then(|length| length.parse().ok());
        stated.context("the edge did not say how long its answer is")
    }

    /// A short answer; one that refuses is an error.
    fn json(mut self) -> anyhow::Result<Value> {
        let mut text = Vec::new();
        let len = self.len()?.min(ANSWER_MAX);
        (&mut self.body).take(len).read_to_end(&mut text)?;
        let body: Value = serde_json::from_slice(&text).unwrap_or_default();
        if self.status >= 400 {
            let detail = body["detail"].as_str().unwrap_or("no reason given");
            let reason = self.field("x-reason").unwrap_or("-");
            anyhow::bail!("{} {reason}: {detail}", self.status);
        }
        Ok(body)
    }

    /// The address of what is sent.
    fn address(&self) -> Option<&str> {
        self.field("etag")?.strip_prefix('"')?.strip_suffix('"').filter(|tag| tag.starts_with("b3:"))
    }
}

/// The path of an object or of an asset.
fn path_of(what: &str) -> String {
    if what.starts_with("b3:") {
        return format!("/edge/cas/{what}");
    }
    let name = what.strip_prefix('/').unwrap_or(what);
    let mut path = "/edge/assets/".to_owned();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            path.push(char::from(byte));
        } else {
            path += &format!("%{byte:02X}");
        }
    }
    path
}

fn put(
    peer: &Peer,
    file: &Path,
    name: Option<&str>,
    fields: &str,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let cannot = || format!("{} cannot be read", file.display());
    let mut input = File::open(file).with_context(cannot)?;
    let about = input.metadata().with_context(cannot)?;
    anyhow::ensure!(!about.is_dir(), "{} is a folder: put its files one by one", file.display());
    let path = name.map_or_else(|| "/edge/cas".to_owned(), path_of);
    let mut hasher = blake3::Hasher::new();
    // How long a pipe is shows at its end; what /proc has says that it is empty, and is not.
    let len = Some(about.len()).filter(|len| about.is_file() && *len > 0);
    let framing =
        len.map_or_else(|| "Transfer-Encoding: chunked".to_owned(), |len| format!("Content-Length: {len}"));
    let reply = peer.ask(&format!("PUT {path}"), &format!("{fields}{framing}\r\n"), |stream| {
        let sent = match len {
            Some(len) => copy(&mut input, stream, len, &mut hasher, "sent"),
            None => copy_chunked(&mut input, stream, &mut hasher),
        };
        sent.with_context(cannot)
    })?;
    let body = reply.json()?;
    let address = body["b3"].as_str().unwrap_or_default();
    let own = format!("b3:{}", hasher.finalize().to_hex());
    anyhow::ensure!(
        address == own,
        "the edge stored {address}, but the file is {own}: it changed on its way"
    );
    print(&if as_json { body.to_string() } else { address.to_owned() })
}

fn get(peer: &Peer, what: &str, out: Option<&Path>) -> anyhow::Result<ExitCode> {
    let mut reply = peer.ask(&format!("GET {}", path_of(what)), "", |_| Ok(()))?;
    if reply.status != 200 {
        reply.json()?;
        anyhow::bail!("the edge did not answer properly");
    }
    let len = reply.len()?;
    let address = reply.address().context("the edge did not say what it sends")?.to_owned();
    let mut hasher = blake3::Hasher::new();
    let partial = out.map(|path| path.with_added_extension("part"));
    match &partial {
        Some(partial) => {
            let mut file =
                File::create(partial).with_context(|| format!("{} cannot be written", partial.display()))?;
            let came = copy(&mut reply.body, &mut file, len, &mut hasher, "received");
            came.and_then(|()| Ok(file.sync_all()?)).inspect_err(|_| drop(std::fs::remove_file(partial)))?;
        }
        None => copy(&mut reply.body, &mut io::stdout().lock(), len, &mut hasher, "received")?,
    }
    let came = format!("b3:{}", hasher.finalize().to_hex());
    if came != address {
        if let Some(partial) = &partial {
            let _ = std::fs::remove_file(partial);
        }
        anyhow::bail!("what came is {came}, not {address}: it was changed on its way");
    }
    if let (Some(partial), Some(out)) = (&partial, out) {
        std::fs::rename(partial, out).with_context(|| format!("{} cannot be written", out.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn stat(peer: &Peer, what: &str, as_json: bool) -> anyhow::Result<ExitCode> {
    let reply = peer.ask(&format!("HEAD {}", path_of(what)), "", |_| Ok(()))?;
    if reply.status != 200 {
        // The answer to a HEAD has no body that would say it.
        let reason = reply.field("x-reason").unwrap_or("-");
        let missing = matches!(reason, "not_allowed" | "not_found");
        let why = if missing { " is not stored, and no origin is named that has it" } else { "" };
        anyhow::bail!("{} {reason}: {what}{why}", reply.status);
    }
    let text = |name: &str| reply.field(name).unwrap_or_default().to_owned();
    let (address, size) = (reply.address().unwrap_or_default().to_owned(), reply.len()?);
    let (media, modified) = (text("content-type"), text("last-modified"));
    if as_json {
        return print(&json!({"b3": address, "size": size, "type": media, "modified": modified}).to_string());
    }
    print(&format!("{address}\nsize      {size}\ntype      {media}\nmodified  {modified}"))
}

fn purge(peer: &Peer, body: &Value, as_json: bool) -> anyhow::Result<ExitCode> {
    let body = body.to_string();
    let fields = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    let answer =
        peer.ask("POST /edge/purge", &fields, |stream| Ok(stream.write_all(body.as_bytes())?))?.json()?;
    print(&if as_json { answer.to_string() } else { format!("removed {}", answer["removed"]) })
}

/// Has everything read and checked, and waits for what comes of it.
fn scrub(target: &Target) -> anyhow::Result<ExitCode> {
    let admin = Admin::find(target)?;
    let ask = |method: &str, path: &str| -> anyhow::Result<Value> {
        let Answer { status, body } = admin.ask(method, path, "")?;
        anyhow::ensure!(status == 200, "{}", body["detail"].as_str().unwrap_or("the node refused"));
        Ok(body)
    };
    let begun = ask("POST", "/edge/scrub")?;
    // A pass that runs already has read some objects before this was asked.
    let enough = begun["passes"].as_u64().unwrap_or(0) + if begun["running"] == true { 2 } else { 1 };
    let mut progress = Progress::new("checked", 1000);
    let scrub = loop {
        let status = ask("GET", "/edge/status")?;
        let scrub = status["scrub"].clone();
        if scrub["passes"].as_u64().unwrap_or(0) >= enough {
            break scrub;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a ratio in thousandths"
        )]
        progress.show((scrub["ratio"].as_f64().unwrap_or(0.0) * 1000.0) as u64, None);
        std::thread::sleep(LOOK);
    };
    progress.end();
    let good = scrub["bad"] == 0;
    let text = format!("{} objects read, {} of them bad", scrub["objects"], scrub["bad"]);
    print(&if target.json { scrub.to_string() } else { text })?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Moves bytes, hashes them, and shows how far it is.
fn copy(
    from: &mut impl Read,
    to: &mut impl Write,
    len: u64,
    hasher: &mut blake3::Hasher,
    verb: &'static str,
) -> anyhow::Result<()> {
    let mut progress = Progress::new(verb, len);
    let (mut buffer, mut done) = (vec![0; PIECE], 0);
    while done < len {
        let room = buffer.len().min(usize::try_from(len - done).unwrap_or(usize::MAX));
        let read = from.read(&mut buffer[..room])?;
        anyhow::ensure!(read > 0, "it ended after {done} of {len} bytes");
        hasher.update(&buffer[..read]);
        to.write_all(&buffer[..read])?;
        done += read as u64;
        progress.show(done, Some(len));
    }
    to.flush()?;
    progress.end();
    Ok(())
}

/// Sends what there is until it ends.
fn copy_chunked(
    from: &mut impl Read,
    to: &mut impl Write,
    hasher: &mut blake3::Hasher,
) -> anyhow::Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        let read = from.read(&mut buffer)?;
        hasher.update(&buffer[..read]);
        write!(to, "{read:x}\r\n")?;
        to.write_all(&buffer[..read])?;
        to.write_all(b"\r\n")?;
        if read == 0 {
            return Ok(());
        }
    }
}

/// A bar on a terminal, a line now and then elsewhere, nothing for what is quick.
struct Progress {
    verb: &'static str,
    total: u64,
    last: Instant,
    shown: bool,
    terminal: bool,
}

impl Progress {
    fn new(verb: &'static str, total: u64) -> Progress {
        Progress { verb, total, last: Instant::now(), shown: false, terminal: io::stderr().is_terminal() }
    }

    fn show(&mut self, done: u64, bytes: Option<u64>) {
        let pause = Duration::from_millis(if self.terminal { 100 } else { 2000 });
        if self.last.elapsed() < pause {
            return;
        }
        (self.last, self.shown) = (Instant::now(), true);
        let percent = done.saturating_mul(100) / self.total.max(1);
        let of = bytes.map_or_else(String::new, |all| format!(" of {}", Size(all >> 20 << 20)));
        let (verb, mut err) = (self.verb, io::stderr());
        let _ = if self.terminal {
            let filled = "#".repeat(usize::try_from(percent / 4).unwrap_or(0));
            write!(err, "\r[{filled:<25}] {percent:>3} %{of} {verb}")
        } else {
            writeln!(err, "{percent} %{of} {verb}")
        };
    }

    /// Leaves the line of the bar.
    fn end(&self) {
        if self.shown && self.terminal {
            eprintln!();
        }
    }
}
