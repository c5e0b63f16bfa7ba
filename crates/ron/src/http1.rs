//! A blocking HTTP/1.1 client for the commands: one request on a connection of its own, the body as it comes.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Read, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest head of an answer.
const HEAD_MAX: u64 = 64 << 10;

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) headers: &'a [(&'a str, &'a str)],
    pub(crate) body: &'a [u8],
    /// How long the node may say nothing.
    pub(crate) silence_max: Duration,
}

/// An answer whose body is still to be read.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: BodyReader,
}

impl Response {
    /// A field by its name in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Sends a request to `host:port` and reads the head of the answer.
pub(crate) fn ask(address: &str, asked: &Asked<'_>) -> io::Result<Response> {
    let breaks_out = |text: &str| text.contains(|c: char| c.is_ascii_control());
    let fields = asked.headers.iter().map(|(_, value)| *value);
    if asked.path.contains(' ') || fields.chain([asked.path]).any(breaks_out) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it has a character that no request may have"));
    }
    let resolved = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
    let mut stream = TcpStream::connect_timeout(&resolved, CONNECT_TIMEOUT)?;
    stream.set_read_timeout(Some(asked.silence_max))?;
    stream.set_write_timeout(Some(asked.silence_max))?;
    let Asked { method, path, headers, body, .. } = asked;
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    for (name, value) in *headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() || *method != "GET" {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    stream.write_all((head + "\r\n").as_bytes())?;
    // Who refuses a request may stop reading it; the answer says why.
    let sent = stream.write_all(body);
    read_head(BufReader::new(stream)).or_else(|error| sent.and(Err(error)))
}

fn read_head(mut stream: BufReader<TcpStream>) -> io::Result<Response> {
    let bad = || io::Error::new(ErrorKind::InvalidData, "the answer is no HTTP");
    let mut lines = Vec::new();
    let mut limited = (&mut stream).take(HEAD_MAX);
    loop {
        let mut line = String::new();
        if limited.read_line(&mut line)? == 0 {
            return Err(if lines.is_empty() { ErrorKind::UnexpectedEof.into() } else { bad() });
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let status = lines.first().and_then(|line| line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok());
    let status: u16 = status.ok_or_else(bad)?;
    let headers: Vec<(String, String)> = lines[1..]
        .iter()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let mut response =
        Response { status, headers, body: BodyReader { stream, left: None, chunked: false, ended: false } };
    response.body.chunked = response.header("transfer-encoding").is_some();
    response.body.left = if response.body.chunked {
        Some(0)
    } else {
        response.header("content-length").and_then(|length| length.parse().ok())
    };
    Ok(response)
}

/// A body, by its length, in chunks, or to the end of the connection.
#[derive(Debug)]
pub(crate) struct BodyReader {
    stream: BufReader<TcpStream>,
    /// Of the body, or of the chunk under way; none if only the connection's end says.
    left: Option<u64>,
    chunked: bool,
    ended: bool,
}

impl BodyReader {
    fn next_chunk(&mut self) -> io::Result<u64> {
        let bad = || io::Error::new(ErrorKind::InvalidData, "a chunk of the answer is none");
        let mut line = String::new();
        (&mut self.stream).take(1024).read_line(&mut line)?;
        let size = line.trim_end().split(';').next().unwrap_or_default();
        u64::from_str_radix(size, 16).ok().ok_or_else(bad)
    }
}

impl Read for BodyReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.chunked && self.left == Some(0) && !self.ended {
            let size = self.next_chunk()?;
            self.ended = size == 0;
            self.left = Some(size);
        }
        let wanted = self
            .left
            .map_or(buffer.len(), |left| usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len()));
        if wanted == 0 {
            return Ok(0);
        }
        let read = self.stream.read(&mut buffer[..wanted])?;
        if let Some(left) = &mut self.left {
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            *left -= read as u64;
            if self.chunked && *left == 0 {
                self.stream.read_exact(&mut [0; 2])?;
            }
        }
        Ok(read)
    }
}
