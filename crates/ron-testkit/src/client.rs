//! A blocking HTTP/1.1 client that hides nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// An answer as it came over the wire.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }

    pub fn reason(&self) -> &str {
        self.header("x-reason").unwrap_or("")
    }
}

/// One connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub fn connect(address: &str) -> std::io::Result<Client> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.set_write_timeout(Some(Duration::from_secs(20)))?;
        stream.set_nodelay(true)?;
        Ok(Client { stream, buffer: Vec::new() })
    }

    /// For what is sent while answers are read.
    pub fn sender(&self) -> std::io::Result<TcpStream> {
        self.stream.try_clone()
    }

    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a request with a body and reads its answer.
    pub fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<Answer> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if !body.is_empty() {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        head += "\r\n";
        self.send(head.as_bytes())?;
        // The server may answer and close before it has taken the body; its answer is what counts.
        let _ = self.send(body);
        // A 100 comes when the server began to read before the body was there.
        loop {
            let answer = self.read_answer(method)?;
            if answer.status != 100 {
                return Ok(answer);
            }
        }
    }

    /// Reads the head of an answer and leaves its body.
    pub fn read_head(&mut self) -> std::io::Result<String> {
        loop {
            if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                let head: Vec<u8> = self.buffer.drain(..at + 4).collect();
                return Ok(String::from_utf8_lossy(&head).into_owned());
            }
            self.fill()?;
        }
    }

    /// Reads one answer, by length, in chunks or to the end of the connection.
    pub fn read_answer(&mut self, method: &str) -> std::io::Result<Answer> {
        let end = loop {
            if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                break at;
            }
            self.fill()?;
        };
        let head = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
        self.buffer.drain(..end + 4);
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let status: u16 = status.ok_or_else(|| std::io::Error::other(format!("no status in {head:?}")))?;
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let mut answer = Answer { status, headers, body: Vec::new() };
        if method != "HEAD" && status >= 200 && status != 204 && status != 304 {
            answer.body = self.read_body(&answer)?;
        }
        Ok(answer)
    }

    fn read_body(&mut self, answer: &Answer) -> std::io::Result<Vec<u8>> {
        if answer.header("transfer-encoding") == Some("chunked") {
            return self.read_chunks();
        }
        let Some(length) = answer.header("content-length").and_then(|length| length.parse::<usize>().ok())
        else {
            return self.read_to_end();
        };
        while self.buffer.len() < length {
            self.fill()?;
        }
        Ok(self.buffer.drain(..length).collect())
    }

    fn read_chunks(&mut self) -> std::io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = loop {
                if let Some(at) = find(&self.buffer, b"\r\n") {
                    break at;
                }
                self.fill()?;
            };
            let size = std::str::from_utf8(&self.buffer[..line])
                .ok()
                .and_then(|hex| usize::from_str_radix(hex, 16).ok());
            let size = size.ok_or_else(|| std::io::Error::other("a bad chunk size"))?;
            while self.buffer.len() < line + 2 + size + 2 {
                self.fill()?;
            }
            body.extend_from_slice(&self.buffer[line + 2..line + 2 + size]);
            self.buffer.drain(..line + 2 + size + 2);
            if size == 0 {
                return Ok(body);
            }
        }
    }

    /// The next bytes, exactly so many.
    pub fn read_exact(&mut self, length: usize) -> std::io::Result<Vec<u8>> {
        while self.buffer.len() < length {
            self.fill()?;
        }
        Ok(self.buffer.drain(..length).collect())
    }

    /// Everything up to the end of the connection.
    pub fn read_to_end(&mut self) -> std::io::Result<Vec<u8>> {
        while self.fill().is_ok() {}
        Ok(std::mem::take(&mut self.buffer))
    }

    fn fill(&mut self) -> std::io::Result<()> {
        let mut piece = [0; 65536];
        let read = self.stream.read(&mut piece)?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.buffer.extend_from_slice(&piece[..read]);
        Ok(())
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// One request on a connection of its own.
pub fn request(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<Answer> {
    let mut all = headers.to_vec();
    all.push(("Connection", "close"));
    Client::connect(address)?.request(method, path, &all, body)
}

/// A plain GET that must be answered.
pub fn get(address: &str, path: &str) -> Answer {
    request(address, "GET", path, &[], b"").unwrap_or_else(|error| panic!("GET {path} on {address}: {error}"))
}
