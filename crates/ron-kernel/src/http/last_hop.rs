//! `Max-Forwards` (RFC 9110 section 7.6.2): requests that say how far they may travel.

use super::Body;
use crate::problem::Rejection;
use crate::reason::Reason;
use http::header::{ALLOW, HeaderMap, HeaderValue, MAX_FORWARDS};
use http::{Method, Response, StatusCode};

/// How many more hops a request may take, if it is one that counts them.
pub fn max_forwards(method: &Method, headers: &HeaderMap) -> Option<u64> {
    if ![Method::OPTIONS, Method::TRACE].contains(method) {
        return None;
    }
    headers.get(MAX_FORWARDS)?.to_str().ok()?.trim().parse().ok()
}

/// What the last hop answers instead of passing such a request on.
pub fn last_hop(method: &Method) -> Result<Response<Body>, Rejection> {
    let allow = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
    if method != Method::OPTIONS {
        // It may hold what its sender must not see.
        return Err(Rejection::new(Reason::Method, "a request is not reflected").header(ALLOW, allow));
    }
    let mut response = Response::new(Body::default());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response.headers_mut().insert(ALLOW, allow);
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_options_and_trace_count_their_hops() {
        let headers = HeaderMap::from_iter([(MAX_FORWARDS, HeaderValue::from_static(" 3 "))]);
        assert_eq!(max_forwards(&Method::OPTIONS, &headers), Some(3));
        assert_eq!(max_forwards(&Method::TRACE, &headers), Some(3));
        assert_eq!(max_forwards(&Method::GET, &headers), None);
        for odd in ["-1", "x", ""] {
            let headers = HeaderMap::from_iter([(MAX_FORWARDS, HeaderValue::from_static(odd))]);
            assert_eq!(max_forwards(&Method::TRACE, &headers), None, "{odd:?}");
        }
    }

    #[test]
    fn the_last_hop_says_what_is_allowed_and_reflects_nothing() {
        let answer = last_hop(&Method::OPTIONS).unwrap();
        assert_eq!(answer.status(), StatusCode::NO_CONTENT);
        assert!(answer.headers()[ALLOW].to_str().unwrap().contains("OPTIONS"));
        assert_eq!(last_hop(&Method::TRACE).unwrap_err().reason, Reason::Method);
    }
}
