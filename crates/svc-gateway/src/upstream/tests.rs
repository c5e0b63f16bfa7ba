//! Which server is picked, and which is left out.

use super::*;
use ron_kernel::kernel::Kernel;

fn upstream(servers: usize, balance: Balance) -> Upstream {
    let service = Kernel::new().service("gateway");
    let settings = UpstreamSettings {
        name: "u".into(),
        servers: (1..=servers).map(|port| format!("http://127.0.0.1:{port}")).collect(),
        balance,
        ..UpstreamSettings::default()
    };
    let shared = Shared {
        connect_timeouts: service.io_timeout("connect"),
        latency: service.metrics().family("l", "", ["upstream"]),
        served: service.metrics().family("s", "", ["tenant"]),
        parts: service.metrics().family("view_parts_total", "", ["view", "part", "result"]),
        ledger: Arc::default(),
        service,
    };
    Upstream::new(&settings, Path::new("/"), None, None, 0, &shared)
}

/// How often each server is picked in 3,000 picks.
fn picks(upstream: &Upstream) -> Vec<usize> {
    let mut counts = vec![0; upstream.servers.len()];
    for _ in 0..3000 {
        counts[upstream.pick(&mut Vec::new()).unwrap()] += 1;
    }
    counts
}

fn fail(upstream: &Upstream, server: usize) {
    for _ in 0..upstream.limits.failures {
        upstream.note_failure(&upstream.servers[server]);
    }
}

#[test]
fn round_robin_goes_round() {
    assert_eq!(picks(&upstream(3, Balance::RoundRobin)), [1000, 1000, 1000]);
}

#[test]
fn the_slower_and_the_busier_of_two_gets_less() {
    ron_kernel::random::reseed(1);
    let upstream = upstream(3, Balance::P2c);
    assert!(picks(&upstream).iter().all(|count| (900..1100).contains(count)), "nothing is known: even");
    for (server, latency) in upstream.servers.iter().zip([1, 1, 10]) {
        server.note_success(Duration::from_millis(latency));
    }
    let _busy: Vec<Loaded> = (0..5).map(|_| Loaded::new(&upstream.servers[1])).collect();
    let counts = picks(&upstream);
    // Every pair with the first is won by it; the second beats the third (6 x 1 ms against 1 x 10 ms).
    assert!(
        (1900..2100).contains(&counts[0]) && (900..1100).contains(&counts[1]) && counts[2] == 0,
        "{counts:?}"
    );
}

#[test]
fn one_that_nothing_is_known_of_is_asked_first_unless_it_has_more_to_do() {
    let upstream = upstream(2, Balance::P2c);
    upstream.servers[0].note_success(Duration::from_millis(400));
    assert_eq!(picks(&upstream), [0, 3000], "to know it too");
    let asked = Loaded::new(&upstream.servers[1]);
    assert_eq!(picks(&upstream), [3000, 0], "it has one to answer");
    drop(asked);
    upstream.note_failure(&upstream.servers[1]);
    assert!(picks(&upstream).iter().all(|count| *count > 1000), "it was asked, and may be well again");
    upstream.servers[1].note_success(Duration::from_millis(1));
    assert_eq!(picks(&upstream), [0, 3000]);
}

#[test]
fn a_server_that_keeps_failing_is_left_out_but_never_more_than_half_of_them() {
    let upstream = upstream(4, Balance::P2c);
    for server in 0..4 {
        fail(&upstream, server);
    }
    let now = Instant::now();
    let out = |at: Instant| upstream.servers.iter().filter(|server| server.is_ejected(at)).count();
    assert_eq!((out(now), out(now + upstream.limits.open)), (2, 0));
    assert_eq!(picks(&upstream)[..2], [0, 0]);
    let alone = self::upstream(1, Balance::P2c);
    fail(&alone, 0);
    assert_eq!(alone.pick(&mut Vec::new()), Some(0), "the only one is asked whatever it does");
}

#[test]
fn the_breaker_does_not_hold_a_left_out_servers_failures_against_the_others() {
    let upstream = upstream(2, Balance::P2c);
    let ask = |server: usize| {
        let mut watched = upstream.watch().unwrap();
        upstream.note_failure(&upstream.servers[server]);
        watched.good = Some(false);
    };
    for _ in 0..upstream.limits.failures {
        ask(0);
    }
    assert!(upstream.servers[0].is_ejected(Instant::now()));
    assert_eq!(upstream.breaker_level(), 0, "the other one has done nothing yet");
    // The last failure of the one that is out was noted after it went.
    for _ in 1..upstream.limits.failures {
        ask(1);
    }
    assert_eq!(upstream.breaker_level(), 2, "it fails as well, and is the last");
}

#[test]
fn an_ejection_gets_longer_each_time_until_the_server_answers() {
    let upstream = upstream(2, Balance::P2c);
    let (server, open) = (&upstream.servers[0], upstream.limits.open);
    let mut now = Instant::now();
    let fail = |now: Instant| (0..5).map(|_| server.note_failure(5, open, true, now)).collect::<Vec<_>>();
    for times in [1, 2, 3] {
        assert_eq!(fail(now), [false, false, false, false, true]);
        assert_eq!(fail(now), [false; 5], "it is out already");
        now += open * times;
        assert!(server.is_ejected(now - Duration::from_millis(2)) && !server.is_ejected(now), "{times}");
    }
    server.note_success(Duration::from_millis(1));
    fail(now);
    assert!(!server.is_ejected(now + open), "forgiven");
}

#[test]
fn two_checks_in_a_row_change_what_is_thought_of_a_server() {
    let upstream = upstream(2, Balance::P2c);
    let server = &upstream.servers[0];
    for good in [false, true, false] {
        assert!(!server.checked(good) && server.is_healthy());
    }
    assert!(server.checked(false) && !server.is_healthy());
    assert_eq!(picks(&upstream)[0], 0);
    assert!(!server.checked(true) && server.checked(true) && server.is_healthy());
    for server in &upstream.servers {
        server.checked(false);
        server.checked(false);
    }
    assert!(upstream.pick(&mut Vec::new()).is_none() && upstream.is_down());
}

#[tokio::test]
async fn a_connection_idle_for_long_is_closed() {
    use std::io::{Read as _, Write as _};
    struct Get;
    impl Outgoing for Get {
        fn method(&self) -> &http::Method {
            &http::Method::GET
        }
        fn write_http1(&self, out: &mut bytes::BytesMut) {
            out.extend_from_slice(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n");
        }
        fn http2(&self, _: &str, _: &str) -> http::Request<()> {
            http::Request::new(())
        }
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut buffer = [0; 1024];
        assert!(stream.read(&mut buffer).unwrap() > 0);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        stream.read(&mut buffer).unwrap()
    });
    let service = Kernel::new().service("gateway");
    let remote = Remote::new(&service, &IDLE, format!("http://{address}").parse().unwrap());
    let limits = CallLimits { connect_timeout: Duration::from_secs(5), silence: Duration::from_secs(5) };
    remote.call(&Get, &mut None, limits).await.unwrap();
    remote.tidy(Instant::now() + Duration::from_secs(29));
    assert!(!served.is_finished(), "it may still be used");
    remote.tidy(Instant::now() + Duration::from_secs(31));
    assert_eq!(served.join().unwrap(), 0, "the server sees the end of it");
}

#[test]
fn those_tried_before_come_last() {
    let upstream = upstream(3, Balance::P2c);
    let mut tried = vec![0, 2];
    assert_eq!(upstream.pick(&mut tried), Some(1));
    let mut tried = vec![0, 1, 2];
    assert!(upstream.pick(&mut tried).is_some() && tried.is_empty());
}
