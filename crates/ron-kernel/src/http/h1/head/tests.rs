//! Shapes that are accepted, and shapes that smuggle.

use super::*;
use proptest::prelude::*;

const LIMITS: HeadLimits = HeadLimits { headers_max: 100, bytes_max: 32 << 10 };

fn request(text: &str) -> Result<Option<RequestHead>, HeadError> {
    HeadReader::default().request(&mut BytesMut::from(text), LIMITS)
}

fn accepted(text: &str) -> RequestHead {
    request(text).unwrap().unwrap()
}

fn refused(text: &str) -> HeadError {
    request(text).expect_err(text)
}

#[test]
fn a_plain_request_is_read() {
    let head = accepted("GET /a?b=c HTTP/1.1\r\nHost: x\r\nX-A:  v \r\n\r\n");
    assert_eq!((head.method, head.uri.path(), head.uri.query()), (Method::GET, "/a", Some("b=c")));
    assert_eq!(
        (head.framing, head.keep_alive, &head.headers["x-a"]),
        (Framing::Length(0), true, &"v".parse().unwrap())
    );
}

#[test]
fn bodies_are_framed_by_exactly_one_rule() {
    assert_eq!(
        accepted("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n").framing,
        Framing::Length(5)
    );
    assert_eq!(
        accepted("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n").framing,
        Framing::Chunked
    );
}

#[test]
fn smuggling_shapes_are_malformed() {
    for fields in [
        "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 3\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n",
        "Content-Length: 3, 3\r\n",
        "Content-Length: +3\r\n",
        "Content-Length: -3\r\n",
        "Content-Length: 0x3\r\n",
        "Content-Length: \r\n",
        "Content-Length: 9999999999999999999\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "X-A : b\r\n",
        "X-A: b\r\n folded\r\n",
        " X-A: b\r\n",
        "X-A: b\nX-B: c\r\n",
        "X-A: b\rX-B: c\r\n",
        "X-A: a\0b\r\n",
        "X A: b\r\n",
        ": b\r\n",
        "no colon\r\n",
    ] {
        let text = format!("POST / HTTP/1.1\r\nHost: x\r\n{fields}\r\n");
        assert!(matches!(refused(&text), HeadError::Malformed(_)), "{fields:?}");
    }
    for text in [
        "GET / HTTP/1.1\nHost: x\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\n\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: x\r\n\r\n",
        "GET / HTTP/1.2\r\nHost: x\r\n\r\n",
        "GET /#f HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET\t/ HTTP/1.1\r\nHost: x\r\n\r\n",
        "G{T / HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "\rGET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "\n",
        "GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\";x=\"\r\n\r\n",
        "GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET http://u:p@a/ HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        assert!(matches!(refused(text), HeadError::Malformed(_)), "{text:?}");
    }
}

#[test]
fn limits_are_answered_by_their_own_error() {
    let many: String = (0..101).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(refused(&format!("GET / HTTP/1.1\r\n{many}\r\n")), HeadError::TooLarge);
    let long = "a".repeat(40 << 10);
    assert_eq!(refused(&format!("GET / HTTP/1.1\r\nHost: x\r\nX: {long}")), HeadError::TooLarge);
    assert_eq!(refused(&format!("GET /{long} HTTP/1.1\r\n")), HeadError::UriTooLong);
    assert_eq!(refused(&format!("GET /{}", "a".repeat(9 << 10))), HeadError::UriTooLong);
    assert_eq!(refused("GET / HTTP/1.1\r\nHost: x\r\nExpect: tea\r\n\r\n"), HeadError::Expectation);
}

#[test]
fn connections_persist_as_their_version_says() {
    assert!(!accepted("GET / HTTP/1.1\r\nHost: x\r\nConnection: foo, Close\r\n\r\n").keep_alive);
    assert!(!accepted("GET / HTTP/1.0\r\n\r\n").keep_alive);
    assert!(accepted("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").keep_alive);
    assert!(accepted("\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n").keep_alive);
}

#[test]
fn responses_are_framed_by_status_and_method() {
    let framing = |text: &str, method| {
        HeadReader::default()
            .response(&mut BytesMut::from(text), LIMITS, &method)
            .map(|head| head.unwrap().framing)
    };
    assert_eq!(framing("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", Method::GET), Ok(Framing::Length(5)));
    assert_eq!(framing("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", Method::HEAD), Ok(Framing::Length(0)));
    assert_eq!(
        framing("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", Method::GET),
        Ok(Framing::Length(0))
    );
    assert_eq!(
        framing("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", Method::GET),
        Ok(Framing::Chunked)
    );
    assert_eq!(framing("HTTP/1.1 200 \r\n\r\n", Method::GET), Ok(Framing::UntilClose));
    for coding in ["chunked", "unheard-of"] {
        let both = format!("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: {coding}\r\n\r\n");
        assert!(framing(&both, Method::GET).is_err(), "{coding}");
    }
}

// RFC 9112 section 6.3.
#[test]
fn a_response_in_a_coding_that_does_not_exist_ends_with_its_connection() {
    let read = |fields: &str| {
        let text = format!("HTTP/1.1 200 OK\r\n{fields}\r\n");
        let head = HeadReader::default().response(&mut BytesMut::from(&*text), LIMITS, &Method::GET);
        head.map(|head| head.map(|head| (head.framing, head.keep_alive, head.waits_for_us)).unwrap())
    };
    assert_eq!(read("Transfer-Encoding: unheard-of\r\n"), Ok((Framing::UntilClose, false, true)));
    let closing = "Transfer-Encoding: unheard-of\r\nConnection: close\r\n";
    assert_eq!(read(closing), Ok((Framing::UntilClose, false, false)));
    assert_eq!(read("").map(|it| it.2), Ok(false), "a server that says nothing of it closes by itself");
    // What somebody may have meant, and what can be read in two ways, is refused as ever.
    for bad in
        ["gzip", "GZip", "deflate, chunked", "x, chunked", "chunked, x", "identity", "a b", "x;q=1", ""]
    {
        assert!(read(&format!("Transfer-Encoding: {bad}\r\n")).is_err(), "{bad:?}");
    }
    assert!(read("Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n").is_err());
}

proptest! {
    #[test]
    fn a_head_reads_alike_however_it_is_cut(cuts in proptest::collection::vec(1usize..20, 0..40)) {
        let text = "\r\nPOST /p?q HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nX-B: 2\r\nContent-Length: 3\r\n\r\nabc";
        let (mut reader, mut buffer, mut sent) = (HeadReader::default(), BytesMut::new(), 0);
        let mut cuts = cuts.into_iter();
        let head = loop {
            let end = (sent + cuts.next().unwrap_or(1000)).min(text.len());
            buffer.extend_from_slice(&text.as_bytes()[sent..end]);
            sent = end;
            if let Some(head) = reader.request(&mut buffer, LIMITS).unwrap() {
                break head;
            }
        };
        prop_assert_eq!(head.headers.len(), 4);
        prop_assert_eq!(&buffer[..], &text.as_bytes()[text.len() - 3..sent.max(text.len() - 3)]);
    }

    #[test]
    fn an_answer_does_not_hang_on_the_cuts(bytes in "[\r\nG /:]{0,12}") {
        let text = format!("{bytes}GET / HTTP/1.0\r\n\r\n");
        let whole = request(&text).is_ok_and(|head| head.is_some());
        let (mut reader, mut buffer, mut outcome) = (HeadReader::default(), BytesMut::new(), Ok(None));
        for byte in text.bytes() {
            buffer.extend_from_slice(&[byte]);
            outcome = reader.request(&mut buffer, LIMITS);
            if !matches!(outcome, Ok(None)) {
                break;
            }
        }
        prop_assert_eq!(whole, matches!(outcome, Ok(Some(_))));
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = HeadReader::default().request(&mut BytesMut::from(&bytes[..]), LIMITS);
        let _ = HeadReader::default().response(&mut BytesMut::from(&bytes[..]), LIMITS, &Method::GET);
    }
}
