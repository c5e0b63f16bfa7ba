//! What one session carries over loopback, plain and with TLS, and its round trips beside those of bare sockets:
//! `cargo run --release -p ron-transport --example session [--json] [--trips]`.
//!
//! Two threads, one to send and one to receive, each with what a node has there: state machine, writer, TLS.
#![expect(clippy::print_stdout, reason = "a command line tool prints")]

use bytes::Bytes;
use oap::control::Hello;
use oap::frame::{APP_SERVICES, Frame, HEADER, Kind};
use oap::session::{Event, Role, Session, SessionConfig};
use oap::{Encoded, NodeId};
use ron_kernel::http::Io;
use ron_kernel::key::PrivateKey;
use ron_transport::{Address, Dialer, PeerAddress, PeerTlsSettings, Tls, Writer, split};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, ReadHalf};
use tokio::net::TcpListener;

/// Whole frames on the wire.
const SMALL: usize = 64;
const LARGE: usize = 64 << 10;
/// A figure is the median of so many rounds of so long.
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(400);
/// Frames and bytes of one batch, as the overlay writes them.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 64 << 10;
const ROUND_TRIPS: usize = 5000;
const PATIENCE: Duration = Duration::from_secs(5);

fn main() {
    let given = |flag: &str| std::env::args().any(|arg| arg == flag);
    let (json, trips_only) = (given("--json"), given("--trips"));
    let mut figures = serde_json::Map::new();
    for (name, secure) in [("plain", false), ("tls", true)] {
        let mut figure = trips(round_trips(secure));
        if !trips_only {
            figure["small_frames_per_second"] = json!(median(|| stream(secure, SMALL)));
            figure["bytes_per_second"] = json!(median(|| stream(secure, LARGE)) * LARGE as f64);
        }
        figures.insert(name.to_owned(), figure);
    }
    // What the machine itself takes to wake one thread and then the other.
    figures.insert("bare TCP".to_owned(), trips(bare_round_trips()));
    if json {
        println!("{}", serde_json::Value::Object(figures));
        return;
    }
    println!("{:>8}  {:>14}  {:>14}  {:>10}  {:>10}", "", "64 B frames/s", "64 KiB GB/s", "p50 us", "p99 us");
    for (name, figure) in figures {
        let of = |name: &str, scale: f64| figure[name].as_f64().map_or(f64::NAN, |value| value / scale);
        let (small, large) = (of("small_frames_per_second", 1.0), of("bytes_per_second", 1e9));
        let (p50, p99) = (of("p50_us", 1.0), of("p99_us", 1.0));
        println!("{name:>8}  {small:>14.0}  {large:>14.2}  {p50:>10.1}  {p99:>10.1}");
    }
}

/// The median and the 99th percentile, in microseconds.
fn trips(mut times: Vec<Duration>) -> serde_json::Value {
    times.sort();
    let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    json!({"p50_us": at(50), "p99_us": at(99)})
}

/// One end of a session that is open.
struct End {
    io: ReadHalf<Io>,
    writer: Writer,
    session: Session,
    began: Instant,
}

/// Frames a second from one end to the other.
fn stream(secure: bool, size: usize) -> f64 {
    let pair = Pair::new(secure);
    let payload = Bytes::from(vec![7; size - HEADER]);
    let per_batch = BATCH.min(BATCH_BYTES.div_ceil(size));
    pair.run(
        |mut end: End| {
            Box::pin(async move {
                while end.began.elapsed() < ROUND {
                    for corr in 1..=per_batch as u64 {
                        let frame = Frame::event(APP_SERVICES, corr, payload.clone());
                        let sent = end.session.send(&frame).expect("the session is open");
                        end.writer.push(&sent.frame, sent.checked);
                    }
                    end.writer.flush(PATIENCE).await.expect("it reads");
                }
                end.writer.close(PATIENCE).await.expect("it reads");
            })
        },
        |mut end: End| {
            Box::pin(async move {
                let (mut frames, mut last) = (0u64, end.began);
                while let Some(event) = end.next().await {
                    if let Event::Frame(frame, _) = event {
                        frames += u64::from(frame.len() == size);
                        last = Instant::now();
                    }
                }
                frames as f64 / (last - end.began).as_secs_f64()
            })
        },
    )
}

/// Times from a request to its answer, one after the other.
fn round_trips(secure: bool) -> Vec<Duration> {
    let (times, ()) = Pair::new(secure).both(
        |mut end: End| {
            Box::pin(async move {
                let mut times = Vec::with_capacity(ROUND_TRIPS);
                for _ in 0..ROUND_TRIPS {
                    let asked = Instant::now();
                    let corr = end.session.next_corr();
                    end.say(&Frame::request(APP_SERVICES, corr, vec![7; SMALL - HEADER])).await;
                    while !matches!(end.next().await, Some(Event::Frame(frame, _)) if frame.corr == corr) {}
                    times.push(asked.elapsed());
                }
                times
            })
        },
        |mut end: End| {
            Box::pin(async move {
                while let Some(event) = end.next().await {
                    if let Event::Frame(frame, _) = event
                        && frame.flags.kind() == Some(Kind::Request)
                    {
                        end.say(&Frame::response(APP_SERVICES, frame.corr, 200, frame.payload)).await;
                    }
                }
            })
        },
    );
    times
}

/// The same over bare sockets, with as many bytes.
fn bare_round_trips() -> Vec<Duration> {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let to = socket.local_addr().expect("it is bound");
    let mut bytes = [7; SMALL];
    std::thread::scope(|threads| {
        threads.spawn(move || {
            let (mut stream, _) = socket.accept().expect("it dials");
            stream.set_nodelay(true).expect("a socket");
            while stream.read_exact(&mut bytes).is_ok() {
                stream.write_all(&bytes).expect("it reads");
            }
        });
        let mut stream = std::net::TcpStream::connect(to).expect("it listens");
        stream.set_nodelay(true).expect("a socket");
        let mut trip = || {
            let asked = Instant::now();
            stream.write_all(&bytes).expect("it reads");
            stream.read_exact(&mut bytes).expect("it answers");
            asked.elapsed()
        };
        (0..ROUND_TRIPS).map(|_| trip()).collect()
    })
}

type Job<T> = std::pin::Pin<Box<dyn Future<Output = T>>>;

/// Both sides' keys and configuration.
struct Pair {
    keys: [PrivateKey; 2],
    tls: [Option<Arc<Tls>>; 2],
}

impl Pair {
    fn new(secure: bool) -> Pair {
        let keys = [(); 2].map(|()| PrivateKey::generate().expect("there is randomness"));
        let tls = keys.each_ref().map(|key| {
            let load =
                || Tls::load(&PeerTlsSettings::default(), key, Path::new(".")).expect("keys alone will do");
            secure.then(|| Arc::new(load()))
        });
        Pair { keys, tls }
    }

    fn run<T: Send>(
        self,
        send: impl FnOnce(End) -> Job<()> + Send,
        receive: impl FnOnce(End) -> Job<T> + Send,
    ) -> T {
        self.both(send, receive).1
    }

    /// Runs the dialer's and the listener's side, each on a thread and a runtime of its own.
    fn both<A: Send, B: Send>(
        self,
        dialer: impl FnOnce(End) -> Job<A> + Send,
        listener: impl FnOnce(End) -> Job<B> + Send,
    ) -> (A, B) {
        let (port, ports) = std::sync::mpsc::sync_channel(1);
        let Pair { keys, tls: [dials, listens] } = self;
        let nodes = keys.each_ref().map(|key| NodeId(key.public().0));
        std::thread::scope(|threads| {
            let heard = threads.spawn(move || {
                runtime().block_on(async {
                    let socket = TcpListener::bind("127.0.0.1:0").await.expect("a port");
                    port.send(socket.local_addr().expect("it is bound").port()).expect("it waits");
                    let (stream, _) = socket.accept().await.expect("it dials");
                    stream.set_nodelay(true).expect("a socket");
                    let (io, proved) = match listens {
                        Some(tls) => {
                            let (io, proved) = tls.accept(stream.into()).await.expect("a handshake");
                            (io, Some(proved.node))
                        }
                        None => (stream.into(), None),
                    };
                    let end = End::open(io, Role::Listener, nodes[1], proved).await;
                    listener(end).await
                })
            });
            let port = ports.recv().expect("it listens");
            let said = runtime().block_on(async {
                let dialer_of = Dialer { tls: dials, connect_timeout: PATIENCE, handshake_timeout: PATIENCE };
                let at = Address::Tcp("127.0.0.1".to_owned(), port);
                let (io, proved) =
                    dialer_of.dial(&PeerAddress { node: nodes[1], at }).await.expect("it listens");
                let end = End::open(io, Role::Dialer, nodes[0], proved.map(|proved| proved.node)).await;
                dialer(end).await
            });
            (said, heard.join().expect("it does not panic"))
        })
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

impl End {
    async fn open(io: Io, role: Role, node: NodeId, proved: Option<NodeId>) -> End {
        let (io, writer) = split(io);
        let hello = Hello { node: Some(node), ..Hello::default() };
        let session = Session::new(
            SessionConfig {
                role,
                hello,
                proved,
                apps: vec![APP_SERVICES],
                handshake_timeout: PATIENCE,
                read_timeout: PATIENCE,
                idle_timeout: PATIENCE,
            },
            Duration::ZERO,
        );
        let mut end = End { io, writer, session, began: Instant::now() };
        while !matches!(end.next().await.expect("HELLO succeeds"), Event::Open(_)) {}
        end
    }

    /// What the session says next, of what is not its own affair; nothing once the peer has closed.
    async fn next(&mut self) -> Option<Event> {
        loop {
            while let Some(event) = self.session.poll(self.began.elapsed()) {
                match event {
                    Event::Send(answer) => self.write(&answer.frame, answer.checked).await,
                    event => return Some(event),
                }
            }
            if self.io.read_buf(self.session.space()).await.ok()? == 0 {
                return None;
            }
        }
    }

    async fn say(&mut self, frame: &Frame) {
        let sent = self.session.send(frame).expect("the session is open");
        self.write(&sent.frame, sent.checked).await;
    }

    async fn write(&mut self, frame: &Encoded, checked: bool) {
        self.writer.push(frame, checked);
        self.writer.flush(PATIENCE).await.expect("it reads");
    }
}

fn median(mut measure: impl FnMut() -> f64) -> f64 {
    let mut figures: Vec<f64> = (0..ROUNDS).map(|_| measure()).collect();
    figures.sort_by(f64::total_cmp);
    figures[ROUNDS / 2]
}
