//! An upstream that does what its script says.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
    /// Never.
    Silence,
    /// Close as soon as the head is there, without reading the body.
    HangUp,
}

/// A running origin on a port of its own.
#[derive(Debug)]
pub struct Origin {
    pub address: String,
    /// Heads of the requests seen.
    pub seen: Arc<Mutex<Vec<String>>>,
    /// Bodies of the requests seen.
    pub bodies: Arc<Mutex<Vec<Vec<u8>>>>,
    pub connections: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Origin {
    /// Serves every request by the script that `choose` picks for its path.
    pub fn start(choose: impl Fn(&str) -> Script + Send + Sync + 'static) -> Origin {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address").to_string();
        let origin = Origin {
            address,
            seen: Arc::default(),
            bodies: Arc::default(),
            connections: Arc::default(),
            stop: Arc::default(),
        };
        let (seen, bodies) = (origin.seen.clone(), origin.bodies.clone());
        let (connections, stop) = (origin.connections.clone(), origin.stop.clone());
        let choose = Arc::new(choose);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                connections.fetch_add(1, Ordering::SeqCst);
                let (seen, bodies, choose) = (seen.clone(), bodies.clone(), choose.clone());
                std::thread::spawn(move || {
                    let _ = serve(stream, &seen, &bodies, &*choose);
                });
            }
        });
        origin
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

fn serve(
    mut stream: TcpStream,
    seen: &Mutex<Vec<String>>,
    bodies: &Mutex<Vec<Vec<u8>>>,
    choose: &dyn Fn(&str) -> Script,
) -> std::io::Result<()> {
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
        seen.lock().expect("no test panics while holding this").push(head.clone());
        let path = head.split(' ').nth(1).unwrap_or("/").to_owned();
        let script = choose(&path);
        if matches!(script, Script::HangUp) {
            return Ok(());
        }
        let field = |name: &str| {
            let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(name))?;
            Some(line[name.len()..].trim().to_owned())
        };
        let body = if field("transfer-encoding:").is_some() {
            take_chunks(&mut stream, &mut buffer)?
        } else {
            let length = field("content-length:").and_then(|length| length.parse().ok()).unwrap_or(0);
            while buffer.len() < length {
                fill(&mut stream, &mut buffer)?;
            }
            buffer.drain(..length).collect()
        };
        bodies.lock().expect("no test panics while holding this").push(body.clone());
        let bodiless = head.starts_with("HEAD");
        let with_length = |body: &[u8]| {
            let mut out = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
            out.extend_from_slice(if bodiless { b"" } else { body });
            out
        };
        match script {
            Script::Body(body) => stream.write_all(&with_length(&body))?,
            Script::Echo => stream.write_all(&with_length(&[head.as_bytes(), &body].concat()))?,
            Script::After(pause) => {
                std::thread::sleep(pause);
                stream.write_all(&with_length(b"slow"))?;
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
            Script::Raw(bytes) => return stream.write_all(&bytes),
            Script::HangUp => return Ok(()),
            Script::Silence => {
                let mut rest = Vec::new();
                stream.read_to_end(&mut rest)?;
                return Ok(());
            }
        }
    }
}

fn take_chunks(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = loop {
            if let Some(at) = buffer.windows(2).position(|window| window == b"\r\n") {
                break at;
            }
            fill(stream, buffer)?;
        };
        let size = usize::from_str_radix(&String::from_utf8_lossy(&buffer[..line]), 16)
            .map_err(std::io::Error::other)?;
        while buffer.len() < line + 4 + size {
            fill(stream, buffer)?;
        }
        body.extend_from_slice(&buffer[line + 2..line + 2 + size]);
        buffer.drain(..line + 4 + size);
        if size == 0 {
            return Ok(body);
        }
    }
}

fn fill(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<()> {
    let mut piece = [0; 65536];
    let read = stream.read(&mut piece)?;
    if read == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    buffer.extend_from_slice(&piece[..read]);
    Ok(())
}
