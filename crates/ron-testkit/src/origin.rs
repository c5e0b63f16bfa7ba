//! An upstream that does what its script says.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// A connection, plain or not.
pub trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

/// How to answer a request.
#[derive(Clone, Debug)]
pub enum Script {
    /// 200 with this body.
    Body(Vec<u8>),
    /// The request itself, head and body, as the body.
    Echo,
    /// Wait, then 200 `slow`.
    After(Duration),
    /// 200 with these bytes as a chunked body, a pause between them.
    Chunks(Vec<Vec<u8>>, Duration),
    /// These bytes, whatever they are, then close.
    Raw(Vec<u8>),
    /// A status and fields as one has them on the wire, and this body with its length.
    Answer(String, Vec<u8>),
    /// Wait, then that.
    Late(Duration, String, Vec<u8>),
    /// That, and then nothing more, without closing.
    Stall(Vec<u8>),
    /// Changes the protocol to `echo`, says `hello`, then sends back whatever comes.
    Upgrade,
    /// Never.
    Silence,
    /// Close as soon as the head is there, without reading the body.
    HangUp,
    /// What this makes of the request's head.
    ByHead(fn(&str) -> Script),
    /// The same, by something that knows more than the head.
    ByRequest(Choice),
}

/// Chooses a script by a request's head.
#[derive(Clone)]
pub struct Choice(Arc<dyn Fn(&str) -> Script + Send + Sync>);

impl Script {
    pub fn by_request(choose: impl Fn(&str) -> Script + Send + Sync + 'static) -> Script {
        Script::ByRequest(Choice(Arc::new(choose)))
    }
}

impl std::fmt::Debug for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Choice")
    }
}

/// Holds whoever comes, until it is opened.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().expect("no test panics while holding this") = true;
        self.0.1.notify_all();
    }

    /// Returns when it is open.
    pub fn pass(&self) {
        let mut open = self.0.0.lock().expect("no test panics while holding this");
        while !*open {
            open = self.0.1.wait(open).expect("no test panics while holding this");
        }
    }
}

/// A running origin on a port of its own.
#[derive(Debug)]
pub struct Origin {
    pub address: String,
    /// Heads of the requests seen.
    pub seen: Arc<Mutex<Vec<String>>>,
    /// Bodies of the requests seen.
    pub bodies: Arc<Mutex<Vec<Vec<u8>>>>,
    /// Lines behind the bodies of the requests seen.
    pub trailers: Arc<Mutex<Vec<String>>>,
    pub connections: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Origin {
    /// Serves every request by the script that `choose` picks for its path.
    pub fn start(choose: impl Fn(&str) -> Script + Send + Sync + 'static) -> Origin {
        Origin::start_over(choose, |stream| Box::new(stream))
    }

    /// The same over whatever `wrap` makes of a connection, such as TLS.
    pub fn start_over(
        choose: impl Fn(&str) -> Script + Send + Sync + 'static,
        wrap: impl Fn(TcpStream) -> Box<dyn Stream> + Send + Sync + 'static,
    ) -> Origin {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address").to_string();
        let origin = Origin {
            address,
            seen: Arc::default(),
            bodies: Arc::default(),
            trailers: Arc::default(),
            connections: Arc::default(),
            stop: Arc::default(),
        };
        let log = Log {
            seen: origin.seen.clone(),
            bodies: origin.bodies.clone(),
            trailers: origin.trailers.clone(),
        };
        let (connections, stop) = (origin.connections.clone(), origin.stop.clone());
        let (choose, wrap) = (Arc::new(choose), Arc::new(wrap));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                connections.fetch_add(1, Ordering::SeqCst);
                let (log, choose, wrap) = (log.clone(), choose.clone(), wrap.clone());
                std::thread::spawn(move || {
                    let _ = serve(wrap(stream), &log, &*choose);
                });
            }
        });
        origin
    }

    /// How many requests it has seen for a path.
    pub fn count(&self, path: &str) -> usize {
        let seen = self.seen.lock().expect("no test panics while holding this");
        seen.iter().filter(|head| head.split(' ').nth(1) == Some(path)).count()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The head of the last request.
    pub fn last(&self) -> String {
        self.seen.lock().expect("no test panics while holding this").last().cloned().unwrap_or_default()
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the accept so that the thread sees the flag.
        let _ = TcpStream::connect(&self.address);
    }
}

/// Where an origin notes what it sees.
#[derive(Clone)]
struct Log {
    seen: Arc<Mutex<Vec<String>>>,
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
    trailers: Arc<Mutex<Vec<String>>>,
}

fn serve(mut stream: impl Read + Write, log: &Log, choose: &dyn Fn(&str) -> Script) -> std::io::Result<()> {
    let mut buffer: Vec<u8> = Vec::new();
    loop {
        let end = loop {
            if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            fill(&mut stream, &mut buffer)?;
        };
        let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
        buffer.drain(..end);
        log.seen.lock().expect("no test panics while holding this").push(head.clone());
        let path = head.split(' ').nth(1).unwrap_or("/").to_owned();
        let mut script = choose(&path);
        script = loop {
            script = match script {
                Script::ByHead(choose) => choose(&head),
                Script::ByRequest(Choice(choose)) => choose(&head),
                done => break done,
            };
        };
        if matches!(script, Script::HangUp) {
            return Ok(());
        }
        let field = |name: &str| {
            let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(name))?;
            Some(line[name.len()..].trim().to_owned())
        };
        let body = if field("transfer-encoding:").is_some() {
            let (body, trailers) = take_chunks(&mut stream, &mut buffer)?;
            log.trailers.lock().expect("no test panics while holding this").extend(trailers);
            body
        } else {
            let length = field("content-length:").and_then(|length| length.parse().ok()).unwrap_or(0);
            while buffer.len() < length {
                fill(&mut stream, &mut buffer)?;
            }
            buffer.drain(..length).collect()
        };
        log.bodies.lock().expect("no test panics while holding this").push(body.clone());
        if !act(&mut stream, script, &head, &body, &mut buffer)? {
            return Ok(());
        }
    }
}

/// Does what a script says; whether another request may follow.
fn act(
    stream: &mut (impl Read + Write),
    script: Script,
    head: &str,
    body: &[u8],
    buffer: &mut Vec<u8>,
) -> std::io::Result<bool> {
    let bodiless = head.starts_with("HEAD");
    let plain = |stream: &mut _, body: &[u8]| answer(stream, "200 OK", body, bodiless);
    match script {
        Script::Body(body) => plain(stream, &body)?,
        Script::Echo => plain(stream, &[head.as_bytes(), body].concat())?,
        Script::After(pause) => {
            std::thread::sleep(pause);
            plain(stream, b"slow")?;
        }
        Script::Chunks(chunks, pause) => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
            for chunk in chunks {
                stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes())?;
                stream.write_all(&chunk)?;
                stream.write_all(b"\r\n")?;
                std::thread::sleep(pause);
            }
            stream.write_all(b"0\r\n\r\n")?;
        }
        Script::Answer(head, body) => answer(stream, &head, &body, bodiless)?,
        Script::Late(pause, head, body) => {
            std::thread::sleep(pause);
            answer(stream, &head, &body, bodiless)?;
        }
        Script::Raw(bytes) => {
            stream.write_all(&bytes)?;
            stream.flush()?;
            return Ok(false);
        }
        Script::HangUp | Script::ByHead(_) | Script::ByRequest(_) => return Ok(false),
        Script::Upgrade => {
            echo(stream, std::mem::take(buffer))?;
            return Ok(false);
        }
        Script::Stall(bytes) => {
            stream.write_all(&bytes)?;
            stream.flush()?;
            stream.read_to_end(&mut Vec::new())?;
            return Ok(false);
        }
        Script::Silence => {
            stream.read_to_end(&mut Vec::new())?;
            return Ok(false);
        }
    }
    Ok(true)
}

fn answer(stream: &mut impl Write, head: &str, body: &[u8], bodiless: bool) -> std::io::Result<()> {
    let length = if head.starts_with("304") || head.starts_with("204") {
        String::new()
    } else {
        format!("Content-Length: {}\r\n", body.len())
    };
    let mut out = format!("HTTP/1.1 {}\r\n{length}\r\n", head.trim_end()).into_bytes();
    out.extend_from_slice(if bodiless { b"" } else { body });
    stream.write_all(&out)?;
    stream.flush()
}

fn echo(stream: &mut (impl Read + Write), mut buffer: Vec<u8>) -> std::io::Result<()> {
    let head = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\nhello";
    stream.write_all(head.as_bytes())?;
    loop {
        stream.write_all(&buffer)?;
        buffer.clear();
        fill(stream, &mut buffer)?;
    }
}

/// A chunked body, and the lines behind it.
fn take_chunks(stream: &mut impl Read, buffer: &mut Vec<u8>) -> std::io::Result<(Vec<u8>, Vec<String>)> {
    let mut body = Vec::new();
    loop {
        let size = usize::from_str_radix(&take_line(stream, buffer)?, 16).map_err(std::io::Error::other)?;
        if size == 0 {
            let mut trailers = Vec::new();
            loop {
                match take_line(stream, buffer)? {
                    line if line.is_empty() => return Ok((body, trailers)),
                    line => trailers.push(line),
                }
            }
        }
        while buffer.len() < size + 2 {
            fill(stream, buffer)?;
        }
        body.extend(buffer.drain(..size + 2).take(size));
    }
}

fn take_line(stream: &mut impl Read, buffer: &mut Vec<u8>) -> std::io::Result<String> {
    loop {
        if let Some(at) = buffer.windows(2).position(|window| window == b"\r\n") {
            let line = String::from_utf8_lossy(&buffer[..at]).into_owned();
            buffer.drain(..at + 2);
            return Ok(line);
        }
        fill(stream, buffer)?;
    }
}

fn fill(stream: &mut impl Read, buffer: &mut Vec<u8>) -> std::io::Result<()> {
    let mut piece = [0; 65536];
    let read = stream.read(&mut piece)?;
    if read == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    buffer.extend_from_slice(&piece[..read]);
    Ok(())
}
