//! The server over real sockets: every bound is tripped and its metric read.

use super::*;
use crate::http::{FileBody, bind_tcp, bind_unix};
use crate::kernel::Kernel;
use crate::tls::{PostQuantum, TlsSettings, write_dev_ca};
use bytes::Bytes;
use http::StatusCode;
use http_body::Frame;
use std::io::Write as _;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UnixStream};

/// A handler whose paths misbehave on request.
struct Paths;

impl Handler for Paths {
    async fn call(&self, mut request: Request<Body>, conn: &ConnInfo) -> Response<Body> {
        match request.uri().path() {
            "/echo" => match request.body_mut().collect(1 << 20).await {
                Ok(bytes) => Response::new(Body::full(bytes)),
                Err(error) => {
                    let mut response = Response::new(Body::full(error.to_string()));
                    *response.status_mut() = StatusCode::BAD_REQUEST;
                    response
                }
            },
            "/peer" => Response::new(Body::full(format!("{:?} {}", conn.peer, conn.secure))),
            "/panic" => panic!("asked to"),
            "/stuck" => std::future::pending().await,
            "/slow" => {
                tokio::time::sleep(Duration::from_millis(300)).await;
                Response::new(Body::full("slow"))
            }
            "/endless" => Response::new(Body::stream(Endless)),
            "/patient" => {
                let mut response = Response::new(Body::stream(Endless));
                response.extensions_mut().insert(WritePatience(Duration::from_millis(600)));
                response
            }
            "/stream" => Response::new(Body::stream(Few(3))),
            "/file" => Response::new(Body::file(stretch(3..700_003))),
            "/both" => Response::new(Body::file(stretch(3..40_003).with_bytes(vec![b'!'; 40_000].into()))),
            "/short" => Response::new(Body::file(stretch(600_000..900_000))),
            "/large" => Response::new(Body::file(stretch(0..64 << 20))),
            _ => Response::new(Body::full("hello")),
        }
    }
}

/// What a file of 700,010 bytes has at a place.
fn content(at: usize) -> u8 {
    b'a' + u8::try_from(at % 23).unwrap()
}

/// A part of such a file, or of one that is only holes if it is asked for more.
fn stretch(range: Range<u64>) -> FileBody {
    let file = tempfile::tempfile().unwrap();
    if range.end <= 1 << 20 {
        (&file).write_all(&(0..700_010).map(content).collect::<Vec<u8>>()).unwrap();
    } else {
        file.set_len(range.end).unwrap();
    }
    FileBody::new(Arc::new(file.into()), range, None)
}

struct Endless;

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = crate::http::BodyError;
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 65536])))))
    }
}

struct Few(u8);

impl http_body::Body for Few {
    type Data = Bytes;
    type Error = crate::http::BodyError;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0 = self.0.saturating_sub(1);
        Poll::Ready((self.0 > 0).then(|| Ok(Frame::data(Bytes::from_static(b"abc")))))
    }
}

fn limits() -> ServerLimits {
    ServerLimits {
        conns_max: 64,
        conns_per_ip_max: 64,
        headers_max: 100,
        header_bytes_max: 32 << 10,
        read_timeout: Duration::from_secs(5),
        write_timeout: Duration::from_secs(5),
        idle_timeout: Duration::from_secs(60),
        trusted_proxies: TrustedProxies::default(),
        proxy_protocol: false,
    }
}

struct Fixture {
    kernel: Kernel,
    server: Arc<Server<Paths>>,
    address: String,
}

impl Fixture {
    fn start(limits: ServerLimits) -> Fixture {
        Fixture::start_tls(limits, None)
    }

    fn start_tls(limits: ServerLimits, tls: Option<Arc<TlsServer>>) -> Fixture {
        let kernel = Kernel::new();
        let service = kernel.service("t");
        let server = Server::new(&service, Paths, limits);
        let bound = bind_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = bound.address();
        server.listen(bound, tls);
        service.ready();
        Fixture { kernel, server, address }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).await.unwrap()
    }

    /// Sends bytes and reads until the server closes.
    async fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        read_all(&mut stream).await
    }

    fn metric(&self, line: &str) -> u64 {
        let page = self.kernel.metrics().scrape();
        let found = page.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("no {line} in\n{page}"))
    }

    async fn eventually(&self, line: &str, value: u64) {
        for _ in 0..500 {
            if self.kernel.metrics().scrape().contains(&format!("{line} {value}\n")) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{line} never became {value}:\n{}", self.kernel.metrics().scrape());
    }
}

async fn read_all(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut out = Vec::new();
    // A reset after the answer is as good as an end.
    let _ = stream.read_to_end(&mut out).await;
    String::from_utf8(out).unwrap()
}

/// Reads one response with a stated length.
async fn read_one(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut out = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&out).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok())
                .unwrap_or(0);
            if body.len() >= length {
                return text;
            }
        }
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece).await.unwrap();
        assert!(read > 0, "closed after {text:?}");
        out.extend_from_slice(&piece[..read]);
    }
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

#[tokio::test]
async fn a_connection_serves_many_requests_pipelined_or_not() {
    let fixture = Fixture::start(limits());
    let mut stream = fixture.connect().await;
    for _ in 0..3 {
        stream.write_all(GET).await.unwrap();
        let answer = read_one(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nhello"), "{answer}");
        assert!(answer.contains("\r\ndate: ") && !answer.contains("connection:"), "{answer}");
    }
    let both = fixture
        .exchange(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await;
    assert_eq!(both.matches("HTTP/1.1 200 OK").count(), 2, "{both}");
    assert!(both.contains("connection: close"), "{both}");
}

#[tokio::test]
async fn a_file_goes_out_as_it_is_over_every_kind_of_connection() {
    let fixture = Fixture::start(limits());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    fixture.server.listen(bind_unix(&path, false).unwrap(), None);
    let expected: String = (3..700_003).map(|at| char::from(content(at))).collect();
    let mut stream = fixture.connect().await;
    for _ in 0..2 {
        stream.write_all(b"GET /file HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let answer = read_one(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("content-length: 700000\r\n"));
        assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, expected);
    }
    let mut local = UnixStream::connect(&path).await.unwrap();
    local.write_all(b"GET /file HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let answer = read_all(&mut local).await;
    assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, expected, "read here, and sent on");
    // Where the bytes are at hand, the file is for sockets that take it from there.
    let both = b"GET /both HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert!(fixture.exchange(both).await.ends_with(&expected[..40_000]));
    let mut local = UnixStream::connect(&path).await.unwrap();
    local.write_all(both).await.unwrap();
    assert!(read_all(&mut local).await.ends_with(&format!("\r\n\r\n{}", "!".repeat(40_000))));
    let head = fixture.exchange(b"HEAD /file HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(head.ends_with("\r\n\r\n") && head.contains("content-length: 700000"), "{head}");
}

#[tokio::test]
async fn a_file_that_is_shorter_than_it_was_breaks_the_answer_off() {
    let fixture = Fixture::start(limits());
    let cut = fixture.exchange(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let (head, body) = cut.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("content-length: 300000") && body.len() <= 100_010, "{head} {}", body.len());
}

#[tokio::test]
async fn who_takes_nothing_of_a_file_is_given_up() {
    let fixture = Fixture::start(ServerLimits { write_timeout: Duration::from_millis(100), ..limits() });
    let mut stream = fixture.connect().await;
    stream.write_all(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"write\"}", 1).await;
}

#[tokio::test]
async fn bodies_arrive_by_length_in_chunks_and_after_continue() {
    let fixture = Fixture::start(limits());
    let close = "Host: x\r\nConnection: close\r\n";
    let by_length = format!("POST /echo HTTP/1.1\r\n{close}Content-Length: 5\r\n\r\nhallo");
    assert!(fixture.exchange(by_length.as_bytes()).await.ends_with("hallo"));
    let chunked = format!(
        "POST /echo HTTP/1.1\r\n{close}Transfer-Encoding: chunked\r\n\r\n3\r\nhal\r\n2\r\nlo\r\n0\r\n\r\n"
    );
    assert!(fixture.exchange(chunked.as_bytes()).await.ends_with("hallo"));
    let mut stream = fixture.connect().await;
    let head = format!("POST /echo HTTP/1.1\r\n{close}Expect: 100-continue\r\nContent-Length: 5\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"hallo").await.unwrap();
    assert!(read_all(&mut stream).await.ends_with("hallo"));
    let broken = format!("POST /echo HTTP/1.1\r\n{close}Transfer-Encoding: chunked\r\n\r\nxyz\r\n");
    assert!(fixture.exchange(broken.as_bytes()).await.contains("hexadecimal"));
}

#[tokio::test]
async fn responses_fit_the_request_that_asked() {
    let fixture = Fixture::start(limits());
    let head = fixture.exchange(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(head.contains("content-length: 5") && head.ends_with("\r\n\r\n"), "{head}");
    let streamed = fixture.exchange(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(
        streamed.contains("transfer-encoding: chunked")
            && streamed.ends_with("3\r\nabc\r\n3\r\nabc\r\n0\r\n\r\n"),
        "{streamed}"
    );
    let old = fixture.exchange(b"GET /stream HTTP/1.0\r\n\r\n").await;
    assert!(!old.contains("chunked") && old.ends_with("\r\n\r\nabcabc"), "{old}");
    let mut kept = fixture.connect().await;
    kept.write_all(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").await.unwrap();
    assert!(read_one(&mut kept).await.contains("connection: keep-alive"));
}

#[tokio::test]
async fn what_is_no_request_is_refused_with_a_problem_and_counted() {
    let fixture = Fixture::start(limits());
    let many: String = (0..150).map(|n| format!("X-{n}: y\r\n")).collect();
    let long = "a".repeat(9 << 10);
    for (request, status, reason) in [
        ("GET / HTTP/1.1\r\nHost: x\r\nX-A : b\r\n\r\n".to_owned(), 400, "malformed"),
        (format!("GET / HTTP/1.1\r\nHost: x\r\n{many}\r\n"), 431, "headers"),
        (format!("GET /{long} HTTP/1.1\r\nHost: x\r\n\r\n"), 414, "uri"),
        ("POST / HTTP/1.1\r\nHost: x\r\nExpect: tea\r\n\r\n".to_owned(), 417, "expectation"),
    ] {
        let answer = fixture.exchange(request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(
            answer.contains(&format!("x-reason: {reason}\r\n")) && answer.contains("x-corr-id: "),
            "{answer}"
        );
        assert!(
            answer.contains("application/problem+json") && answer.contains("connection: close"),
            "{answer}"
        );
        assert_eq!(fixture.metric(&format!("rejected_total{{service=\"t\",reason=\"{reason}\"}}")), 1);
        let line = format!(
            "http_requests_total{{service=\"t\",route=\"none\",method=\"none\",status=\"{status}\"}}"
        );
        assert_eq!(fixture.metric(&line), 1);
    }
}

#[tokio::test]
async fn a_slow_head_is_answered_408_and_a_silent_connection_closed() {
    let fixture = Fixture::start(ServerLimits { read_timeout: Duration::from_millis(200), ..limits() });
    let begun = std::time::Instant::now();
    let answer = fixture.exchange(b"GET / HTTP/1.1\r\nHo").await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("x-reason: read_timeout"), "{answer}");
    assert!((150..900).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert_eq!(fixture.exchange(b"").await, "");
    assert_eq!(fixture.metric("io_timeouts_total{service=\"t\",op=\"read\"}"), 2);
}

#[tokio::test]
async fn dribbled_heads_end_at_the_same_time_as_silent_ones() {
    let fixture = Fixture::start(ServerLimits { read_timeout: Duration::from_millis(200), ..limits() });
    let mut stream = fixture.connect().await;
    for byte in b"GET / HTTP/1.1\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" {
        if stream.write_all(&[*byte]).await.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"read\"}", 1).await;
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_a_stalled_body_reported() {
    let short = Duration::from_millis(150);
    let fixture = Fixture::start(ServerLimits { idle_timeout: short, read_timeout: short, ..limits() });
    let mut stream = fixture.connect().await;
    stream.write_all(GET).await.unwrap();
    read_one(&mut stream).await;
    assert_eq!(read_all(&mut stream).await, "");
    let stalled = fixture.exchange(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc").await;
    assert!(stalled.contains("no byte of the body arrived in time"), "{stalled}");
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut() {
    let fixture = Fixture::start(ServerLimits { write_timeout: Duration::from_millis(150), ..limits() });
    let mut stream = fixture.connect().await;
    stream.write_all(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"write\"}", 1).await;
    fixture.eventually("connections_open{service=\"t\"}", 0).await;
}

#[tokio::test]
async fn a_response_may_be_more_patient_than_its_server() {
    let fixture = Fixture::start(ServerLimits { write_timeout: Duration::from_millis(50), ..limits() });
    let mut stream = fixture.connect().await;
    let begun = std::time::Instant::now();
    stream.write_all(b"GET /patient HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"write\"}", 1).await;
    assert!(begun.elapsed() >= Duration::from_millis(600));
    let (mut client, begun) = (h2_client(&fixture, 0).await, std::time::Instant::now());
    let request = Request::get("http://x/patient").body(Body::default()).unwrap();
    let _deaf = client.send_request(request).await.unwrap();
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"write\"}", 2).await;
    assert!(begun.elapsed() >= Duration::from_millis(600), "over HTTP/2 as well");
}

#[tokio::test]
async fn the_connection_cap_turns_newcomers_away_and_frees_idle_places() {
    let fixture = Fixture::start(ServerLimits { conns_max: 4, ..limits() });
    let mut busy = Vec::new();
    for _ in 0..4 {
        let mut stream = fixture.connect().await;
        stream.write_all(b"GET /stuck HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        busy.push(stream);
        fixture.eventually("connections_open{service=\"t\"}", busy.len() as u64).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let refused = read_all(&mut fixture.connect().await).await;
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("x-reason: conns"), "{refused}");
    assert!(refused.contains("retry-after: "), "{refused}");
    assert_eq!(fixture.metric("rejected_total{service=\"t\",reason=\"conns\"}"), 1);
    drop(busy);
    fixture.eventually("connections_open{service=\"t\"}", 0).await;
    let mut idle = Vec::new();
    for _ in 0..20 {
        let mut stream = fixture.connect().await;
        stream.write_all(GET).await.unwrap();
        let answer = read_one(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "an idle connection gave way: {answer}");
        idle.push(stream);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn one_address_has_its_share_of_connections() {
    let fixture = Fixture::start(ServerLimits { conns_per_ip_max: 2, ..limits() });
    let _held = (fixture.connect().await, fixture.connect().await);
    fixture.eventually("connections_open{service=\"t\"}", 2).await;
    // Told without being asked, so that nothing unread can reset the connection before the answer is seen.
    assert!(read_all(&mut fixture.connect().await).await.contains("x-reason: conns"));
    let trusted = TrustedProxies(vec!["127.0.0.0/8".parse().unwrap()]);
    fixture.server.set_limits(ServerLimits { conns_per_ip_max: 2, trusted_proxies: trusted, ..limits() });
    let mut stream = fixture.connect().await;
    stream.write_all(GET).await.unwrap();
    assert!(read_one(&mut stream).await.ends_with("hello"), "trusted proxies are exempt");
}

#[tokio::test]
async fn a_panic_is_answered_500_and_the_service_goes_on() {
    let fixture = Fixture::start(limits());
    for _ in 0..20 {
        let answer = fixture
            .exchange(b"GET /panic HTTP/1.1\r\nHost: x\r\nX-Corr-ID: me\r\nConnection: close\r\n\r\n")
            .await;
        assert!(answer.starts_with("HTTP/1.1 500 ") && answer.contains("x-reason: internal"), "{answer}");
        assert!(
            answer.contains("x-corr-id: me") && !answer.contains("asked to"),
            "nothing internal leaks: {answer}"
        );
    }
    assert_eq!(fixture.metric("tasks_panicked_total{service=\"t\",kind=\"request\"}"), 20);
    assert!(fixture.kernel.health().is_ok("t"));
}

#[tokio::test]
async fn an_answer_is_seen_even_if_the_body_was_not_read() {
    let fixture = Fixture::start(limits());
    let mut stream = fixture.connect().await;
    let length = 4 << 20;
    stream
        .write_all(format!("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n").as_bytes())
        .await
        .unwrap();
    stream.write_all(&vec![b'a'; 200 << 10]).await.unwrap();
    let answer = read_all(&mut stream).await;
    assert!(answer.ends_with("hello") && answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn drain_answers_what_is_in_flight_and_refuses_what_is_stuck() {
    let fixture = Fixture::start(limits());
    let (mut slow, mut stuck, mut idle) =
        (fixture.connect().await, fixture.connect().await, fixture.connect().await);
    slow.write_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    stuck.write_all(b"GET /stuck HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    idle.write_all(GET).await.unwrap();
    read_one(&mut idle).await;
    let drain = fixture.kernel.drain(Duration::from_secs(1), &[]);
    let (drained, slow, stuck, idle) =
        tokio::join!(drain, read_all(&mut slow), read_all(&mut stuck), read_all(&mut idle));
    assert!(slow.ends_with("slow") && slow.contains("connection: close"), "{slow}");
    assert!(stuck.contains("x-reason: draining"), "{stuck}");
    assert_eq!(idle, "");
    let [name] = &drained.stragglers.iter().filter(|name| name.contains("conn")).collect::<Vec<_>>()[..]
    else {
        panic!("{drained:?}")
    };
    assert!(name.contains("GET /stuck for"), "{name}");
    assert_eq!(fixture.metric("tasks_aborted_total{service=\"t\",kind=\"request\"}"), 1);
    assert!(TcpStream::connect(&fixture.address).await.is_err());
}

#[tokio::test]
async fn a_unix_socket_knows_its_peer_and_leaves_no_file() {
    let fixture = Fixture::start(limits());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.sock");
    fixture.server.listen(bind_unix(&path, false).unwrap(), None);
    let mut stream = UnixStream::connect(&path).await.unwrap();
    stream.write_all(b"GET /peer HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let answer = read_one(&mut stream).await;
    assert!(
        answer.ends_with(&format!("Unix {{ uid: {} }} false", rustix::process::getuid().as_raw())),
        "{answer}"
    );
    fixture.kernel.drain(Duration::from_secs(1), &[]).await;
    drop(fixture);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_trusted_proxy_names_the_client() {
    let trusted_proxies = TrustedProxies(vec!["127.0.0.1".parse().unwrap()]);
    let fixture = Fixture::start(ServerLimits { proxy_protocol: true, trusted_proxies, ..limits() });
    let request =
        b"PROXY TCP4 192.0.2.7 1.1.1.1 4000 80\r\nGET /peer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert!(fixture.exchange(request).await.contains("192.0.2.7:4000"));
    assert_eq!(fixture.exchange(GET).await, "", "without its header a trusted proxy is not served");
}

#[tokio::test]
async fn http2_is_served_in_the_clear_and_drained_with_goaway() {
    let fixture = Fixture::start(limits());
    let io = hyper_util::rt::TokioIo::new(fixture.connect().await);
    let (mut client, conn) =
        hyper::client::conn::http2::handshake::<_, _, Body>(hyper_util::rt::TokioExecutor::new(), io)
            .await
            .unwrap();
    let driver = fixture.kernel.service("client");
    driver.scoped("h2", String::new, async move {
        let _ = conn.await;
    });
    let get = |path: &str| Request::get(format!("http://x{path}")).body(Body::default()).unwrap();
    for _ in 0..3 {
        let response = client.send_request(get("/peer")).await.unwrap();
        assert_eq!(response.status(), 200);
    }
    let panicked = client.send_request(get("/panic")).await.unwrap();
    assert_eq!(
        (panicked.status().as_u16(), &panicked.headers()["x-reason"]),
        (500, &"internal".parse().unwrap())
    );
    let many = (0..150).fold(Request::get("http://x/"), |request, n| request.header(format!("x-{n}"), "y"));
    let refused = client.send_request(many.body(Body::default()).unwrap()).await.unwrap();
    assert_eq!(refused.status(), 431);
    let refusals = [
        (Request::get(format!("http://x/{}", "a".repeat(9 << 10))), 414),
        (Request::get("http://x/").header("expect", "tea"), 417),
        (Request::get("http://x/").header("host", "y"), 400),
        (Request::get("http://x/").header("x-long", "y".repeat(40 << 10)), 431),
    ];
    for (request, status) in refusals {
        let refused = client.send_request(request.body(Body::default()).unwrap()).await.unwrap();
        assert_eq!(refused.status(), status);
        assert!(refused.headers().contains_key("x-reason"));
    }
    let (slow, stuck) = (client.send_request(get("/slow")), client.send_request(get("/stuck")));
    let drain = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        fixture.kernel.drain(Duration::from_secs(1), &["client"]).await
    };
    let (slow, stuck, _) = tokio::join!(slow, stuck, drain);
    assert_eq!(slow.unwrap().status(), 200);
    assert_eq!(stuck.unwrap().headers()["x-reason"], "draining");
}

#[tokio::test]
async fn tls_offers_h2_and_a_stalled_handshake_ends() {
    let dir = tempfile::tempdir().unwrap();
    write_dev_ca(dir.path()).unwrap();
    let settings = TlsSettings {
        cert: "server.pem".into(),
        key: "server.key".into(),
        pq: PostQuantum::Hybrid,
        ..TlsSettings::default()
    };
    let tls = TlsServer::new(settings.load(dir.path()).unwrap());
    let fixture =
        Fixture::start_tls(ServerLimits { read_timeout: Duration::from_millis(300), ..limits() }, Some(tls));
    assert_eq!(fixture.exchange(b"\x16\x03").await, "");
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"handshake\"}", 1).await;
    let output = tokio::process::Command::new("curl")
        .args(["-sS", "--cacert"])
        .arg(dir.path().join("ca.pem"))
        .args(["-w", " %{http_version}", "--resolve"])
        .arg(format!("localhost:{}:127.0.0.1", fixture.address.rsplit_once(':').unwrap().1))
        .arg(format!("https://localhost:{}/peer", fixture.address.rsplit_once(':').unwrap().1))
        .output()
        .await
        .unwrap();
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(
        answer.contains("true") && answer.ends_with(" 2"),
        "{answer} {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn dates_are_written_as_http_has_them() {
    assert_eq!(http_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
    assert_eq!(http_date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
    assert_eq!(http_date(1_709_164_800), "Thu, 29 Feb 2024 00:00:00 GMT");
    assert_eq!(http_date(1_735_689_599), "Tue, 31 Dec 2024 23:59:59 GMT");
}

/// An HTTP/2 client whose streams may receive this much unasked.
async fn h2_client(fixture: &Fixture, window: u32) -> hyper::client::conn::http2::SendRequest<Body> {
    let io = hyper_util::rt::TokioIo::new(fixture.connect().await);
    let mut builder = hyper::client::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
    let (client, conn) = builder.initial_stream_window_size(window).handshake::<_, Body>(io).await.unwrap();
    fixture.kernel.service("client").scoped("h2", String::new, async move {
        let _ = conn.await;
    });
    client
}

#[tokio::test]
async fn a_stream_whose_window_stays_shut_is_reaped() {
    let fixture = Fixture::start(ServerLimits { write_timeout: Duration::from_millis(200), ..limits() });
    let mut client = h2_client(&fixture, 0).await;
    let get = |path: &str| Request::get(format!("http://x{path}")).body(Body::default()).unwrap();
    let deaf =
        [client.send_request(get("/endless")).await.unwrap(), client.send_request(get("/")).await.unwrap()];
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"write\"}", 2).await;
    drop(deaf);
    let quick = h2_client(&fixture, 1 << 20).await.send_request(get("/")).await.unwrap();
    assert_eq!(quick.status(), 200);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(
        fixture.metric("io_timeouts_total{service=\"t\",op=\"write\"}"),
        2,
        "one that was read is not"
    );
}

#[tokio::test]
async fn an_http2_upload_that_stalls_is_reported() {
    let fixture = Fixture::start(ServerLimits { read_timeout: Duration::from_millis(200), ..limits() });
    let mut client = h2_client(&fixture, 1 << 20).await;
    struct Never;
    impl http_body::Body for Never {
        type Data = Bytes;
        type Error = crate::http::BodyError;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            Poll::Pending
        }
    }
    let request = Request::post("http://x/echo").body(Body::stream(Never)).unwrap();
    let answer = client.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 400);
    assert_eq!(fixture.metric("io_timeouts_total{service=\"t\",op=\"read\"}"), 1);
}

#[tokio::test]
async fn a_tls_client_that_stops_reading_or_never_speaks_http2_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    write_dev_ca(dir.path()).unwrap();
    let settings =
        TlsSettings { cert: "server.pem".into(), key: "server.key".into(), ..TlsSettings::default() };
    let tls = TlsServer::new(settings.load(dir.path()).unwrap());
    let short = Duration::from_millis(200);
    let limits = ServerLimits { write_timeout: short, ..limits() };
    let fixture = Fixture::start_tls(limits.clone(), Some(tls));
    let roots = {
        use rustls::pki_types::pem::PemObject;
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(rustls::pki_types::CertificateDer::from_pem_file(dir.path().join("ca.pem")).unwrap())
            .unwrap();
        roots
    };
    let provider = Arc::new(crate::tls::provider(PostQuantum::Hybrid));
    let connect = async |alpn: &[u8]| {
        let builder = rustls::ClientConfig::builder_with_provider(provider.clone());
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_root_certificates(roots.clone()).with_no_client_auth();
        config.alpn_protocols = vec![alpn.to_vec()];
        let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
        tokio_rustls::TlsConnector::from(Arc::new(config))
            .connect(name, fixture.connect().await)
            .await
            .unwrap()
    };
    let mut deaf = connect(b"http/1.1").await;
    deaf.write_all(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"write\"}", 1).await;
    let _mute = connect(b"h2").await;
    // From now on: a handshake may take its time on a slow machine.
    fixture.server.set_limits(ServerLimits { read_timeout: short, ..limits });
    fixture.eventually("io_timeouts_total{service=\"t\",op=\"read\"}", 1).await;
    fixture.eventually("connections_open{service=\"t\"}", 0).await;
}
