//! What the edge's cache reads: fields of clients and origins, and heads from its index.

use crate::log::each;
use http::header::{
    CACHE_CONTROL, CONTENT_RANGE, CONTENT_TYPE, ETAG, EXPIRES, IF_NONE_MATCH, LAST_MODIFIED, LOCATION, RANGE,
    VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use svc_edge::cache::date::{format, parse};
use svc_edge::cache::directives::{CDN_CACHE_CONTROL, RequestRules, ResponseRules};
use svc_edge::cache::range::{ContentRange, Parts, Placed, Wanted};
use svc_edge::cache::validators::{EntityTag, Validators};
use svc_edge::cache::vary::Selecting;
use svc_edge::cache::{
    Body, Exchange, Policy, StoredHead, UnixMillis, Verdict, answer, combine, decide, freshen,
    freshen_by_head, invalidated, judge, make_completion, make_conditional, revalidation, surrogate_keys,
    validated,
};

const NOW: UnixMillis = UnixMillis(1_700_000_000_000);
const EXCHANGE: Exchange = Exchange { requested: UnixMillis(1_699_999_999_000), received: NOW };

/// Lines of the input as values of these fields, in turn.
fn values(data: &[u8], names: &[HeaderName]) -> HeaderMap {
    let lines = data.split(|byte| *byte == b'\n').zip(names.iter().cycle());
    lines.filter_map(|(value, name)| Some((name.clone(), HeaderValue::from_bytes(value).ok()?))).collect()
}

/// Lines of the input as fields with their names.
fn fields(data: &[u8]) -> HeaderMap {
    let lines = data.split(|byte| *byte == b'\n').filter_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?;
        Some((HeaderName::from_bytes(&line[..colon]).ok()?, value))
    });
    lines.take(64).collect()
}

pub(crate) fn date(data: &[u8]) {
    each(data, b"Sunday, 06-Nov-94 08:49:37 GMT", |data| {
        if let Some(secs) = parse(data, NOW).filter(|secs| *secs >= 0) {
            assert_eq!(parse(format(secs).as_bytes(), NOW), Some(secs));
        }
    });
}

/// A plain member is heard, whatever else stands in other lines.
pub(crate) fn directives(data: &[u8]) {
    each(data, b"max-age=60, private=\"a, b\", no-cache, s-maxage=\"7\", x=\"\\\"\"", |data| {
        let mut headers = values(data, &[CACHE_CONTROL, EXPIRES]);
        let before = ResponseRules::of(&headers, NOW);
        headers.append(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        assert_eq!(ResponseRules::of(&headers, NOW), ResponseRules { no_store: true, ..before });
        RequestRules::of(&headers);
    });
}

/// What is a dictionary stays one with one more member.
pub(crate) fn dictionary(data: &[u8]) {
    each(data, b"a=1.5, b=?0;p=\"x\", c=(tok :aGk=:), d=@12, e=%\"f%c3%bc\", f=\"g\\\\\"", |data| {
        let read = |lines: &[&[u8]]| svc_edge::cache::structured::dictionary(lines.iter().copied());
        let Some(members) = read(&[data]).filter(|members| !members.is_empty()) else { return };
        let more = read(&[data, b"zzzzzz"]).expect("one more member");
        let known = members.iter().any(|(name, _)| name == "zzzzzz");
        assert_eq!(more.len(), members.len() + usize::from(!known));
        ResponseRules::of(&values(data, &[CDN_CACHE_CONTROL]), NOW);
    });
}

/// Requests that differ in more than blanks and case never match.
pub(crate) fn vary(data: &[u8]) {
    let Some((which, data)) = data.split_first() else { return };
    let name =
        [http::header::ACCEPT_LANGUAGE, http::header::COOKIE, CONTENT_TYPE][usize::from(which % 3)].clone();
    let mut lines = data.splitn(2, |byte| *byte == b'\n');
    let (Some(a), Some(b)) = (lines.next(), lines.next()) else { return };
    let request = |value: &[u8]| values(value, std::slice::from_ref(&name));
    let bare = |headers: &HeaderMap| -> Vec<u8> {
        let lines: Vec<_> = headers.get_all(&name).iter().map(|value| value.as_bytes()).collect();
        let all = lines.join(&b","[..]).to_ascii_lowercase();
        all.into_iter().filter(|byte| !b" \t,".contains(byte)).collect()
    };
    let (a, b) = (request(a), request(b));
    let response = HeaderMap::from_iter([(VARY, HeaderValue::from(name.clone()))]);
    let selecting = Selecting::of(&response, &a).expect("one field");
    assert!(selecting.matches(&a));
    if selecting.matches(&b) {
        assert_eq!(bare(&a), bare(&b));
    }
    Selecting::of(&values(data, &[VARY]), &a);
}

/// A client that sends back a tag is known to have what it was sent with.
pub(crate) fn validators(data: &[u8]) {
    each(data, b"W/\"a\\\", \"b\"", |data| {
        let response = values(data, &[ETAG, LAST_MODIFIED]);
        let validators = Validators::of(&response, NOW);
        let tag = response.get(ETAG).filter(|value| EntityTag::of(value.as_bytes()).is_some());
        let mut request = values(data, &[IF_NONE_MATCH]);
        validators.are_known_to(&request, NOW);
        if let Some(tag) = tag {
            let listed = [b"\"x\" , ", tag.as_bytes(), b",W/\"y\""].concat();
            request.insert(IF_NONE_MATCH, HeaderValue::from_bytes(&listed).expect("a list of tags"));
            assert!(validators.are_known_to(&request, NOW));
        }
    });
}

/// What is placed lies within; what parts say they hold, they hold.
pub(crate) fn range(data: &[u8]) {
    each(data, b"bytes=0-9\nbytes 4-7/10", |data| {
        let mut lines = data.split(|byte| *byte == b'\n');
        let wanted = lines.next().unwrap_or_default();
        let mut parts: Option<Parts> = None;
        for line in lines.take(100) {
            let Some(read) = ContentRange::of(&values(line, &[CONTENT_RANGE])) else { continue };
            match &mut parts {
                None => parts = Parts::new(read.range, read.complete),
                Some(parts) => drop(parts.add(read.range, read.complete)),
            }
        }
        let Wanted::One(one) = Wanted::of(&Method::GET, &values(wanted, &[RANGE])) else { return };
        let Some(parts) = parts else { return };
        let Placed::At(place) = one.place(parts.complete()) else { return };
        assert!(place.start < place.end && place.end <= parts.complete().unwrap_or(u64::MAX));
        let missing = parts.missing(place.clone());
        match parts.pieces(place.clone()) {
            Some(pieces) => {
                assert_eq!(missing, None);
                let lengths = pieces.iter().map(|piece| piece.bytes.end - piece.bytes.start);
                assert_eq!(lengths.sum::<u64>(), place.end - place.start);
            }
            None => {
                let missing = missing.expect("something is missing");
                assert!(place.start <= missing.start && missing.end <= place.end);
            }
        }
    });
}

/// Whatever a reference is, it stays at the origin, and dots do not climb out.
pub(crate) fn location(data: &[u8]) {
    let target: Uri = "https://example.org/a/b?q".parse().expect("a URI");
    for seed in [&b"//example.org:443/a/./../b?c#d"[..], b"../x/./y?z"] {
        each(data, seed, |data| {
            let target: Uri = "https://example.org/a/b?q".parse().expect("a URI");
            let response = values(data, &[LOCATION]);
            for path in invalidated(&Method::POST, &target, (StatusCode::OK, &response)) {
                assert!(path.starts_with('/'), "{path}");
                let bare = path.split('?').next().unwrap_or_default();
                assert!(!bare.split('/').any(|segment| segment == "." || segment == ".."), "{path}");
            }
        });
    }
    let surrogate = [svc_edge::cache::SURROGATE_KEY, svc_edge::cache::CACHE_TAG];
    surrogate_keys(&values(data, &surrogate)).for_each(|key| assert!(!key.is_empty()));
    assert!(invalidated(&Method::GET, &target, (StatusCode::OK, &HeaderMap::new())).is_empty());
}

/// A whole exchange: whatever is stored is never answered with bytes that are not there, and lives through
/// the index and through an update.
pub(crate) fn exchange(data: &[u8]) {
    let seed = b"Range: bytes=0-4\nIf-None-Match: \"b\"\nA: 1\n\nCache-Control: max-age=60, stale-if-error=9\nVary: A\n\
        ETag: \"a\"\nContent-Range: bytes 0-4/10\nDate: Tue, 14 Nov 2023 22:13:20 GMT\n\n\
        Content-Range: bytes 5-9/10\nETag: \"a\"\nAge: 5";
    each(data, seed, |data| {
        let heads = paragraphs(data);
        let part = |at: usize| fields(heads.get(at).copied().unwrap_or_default());
        let (request, response, update) = (part(0), part(1), part(2));
        let plain = Policy::default();
        let other = Policy { cautious_age: true, accept_changed_tag: true, ..Policy::default() };
        for (status, policy) in [
            (StatusCode::OK, &plain),
            (StatusCode::OK, &other),
            (StatusCode::PARTIAL_CONTENT, &plain),
            (StatusCode::PARTIAL_CONTENT, &other),
            (StatusCode::NOT_FOUND, &plain),
        ] {
            let Ok(pending) = judge((&Method::GET, &request), (status, &response), EXCHANGE, policy) else {
                continue;
            };
            for head in [pending.clone().complete(5), pending.incomplete(5)].into_iter().flatten() {
                check(&request, &update, &head, policy);
            }
        }
    });
}

fn paragraphs(data: &[u8]) -> Vec<&[u8]> {
    let (mut rest, mut found) = (data, Vec::new());
    while let Some(at) = rest.windows(2).position(|pair| pair == b"\n\n") {
        found.push(&rest[..at]);
        rest = &rest[at + 2..];
    }
    found.push(rest);
    found
}

fn check(request: &HeaderMap, update: &HeaderMap, head: &StoredHead, policy: &Policy) {
    assert!(head.selecting().matches(request), "it was stored for this request");
    assert_eq!(StoredHead::decode(&head.encode()).as_ref(), Ok(head));
    for method in [Method::GET, Method::HEAD] {
        let asked = (&method, request);
        let verdict = decide(asked, &[head], policy, NOW);
        let freshness = head.freshness(policy, NOW);
        match answer(asked, head, freshness, NOW) {
            Some(answer) => {
                let content = answer.content.unwrap_or(0..0);
                match head.body() {
                    Body::Whole { len } => assert!(content.end <= *len),
                    Body::Parts(parts) => assert_eq!(parts.missing(content), None),
                }
            }
            None => assert!(!matches!(verdict, Verdict::Reuse(_)), "what is reused is there"),
        }
        let Verdict::Forward(forward) = verdict else { continue };
        let mut sent = request.clone();
        match forward.complete {
            Some((_, missing)) => make_completion(&mut sent, head, &missing),
            None => make_conditional(&mut sent, head),
        }
        let on = (forward.validate, forward.on_error);
        validated((StatusCode::NOT_MODIFIED, update), &sent, &[head], on, policy, NOW);
    }
    let conditional = |name: &HeaderName| name.as_str().starts_with("if-");
    if !head.selecting().fields().iter().any(|(name, _)| conditional(name)) {
        assert!(head.selecting().matches(&revalidation(head)));
    }
    for freshened in
        [freshen(head, request, update, EXCHANGE), freshen_by_head(head, request, update, EXCHANGE)]
    {
        assert_eq!(freshened.head.body(), head.body(), "no head changes the bytes");
        assert_eq!(StoredHead::decode(&freshened.head.encode()), Ok(freshened.head));
    }
    if let (Some((joined, _)), Body::Parts(before)) =
        (combine(head, request, (update, 5), EXCHANGE), head.body())
    {
        let len = joined.head.complete_len().unwrap_or(u64::MAX);
        for held in before.parts() {
            match joined.head.body() {
                Body::Whole { .. } => assert!(held.end <= len),
                Body::Parts(parts) => assert_eq!(parts.missing(held.clone()), None, "nothing is lost"),
            }
        }
    }
}

/// What the index gives back is what it would write.
pub(crate) fn stored_head(data: &[u8]) {
    let response = fields(
        b"Cache-Control: max-age=60\nVary: A, B\nETag: \"a\"\nContent-Range: bytes 2-4/10\nX: 1\nX: 2",
    );
    let pending = judge(
        (&Method::GET, &fields(b"A: 1")),
        (StatusCode::PARTIAL_CONTENT, &response),
        EXCHANGE,
        &Policy::default(),
    );
    let seed = pending.expect("storable").complete(3).expect("three bytes").encode();
    each(data, &seed, |data| {
        if let Ok(head) = StoredHead::decode(data) {
            assert_eq!(StoredHead::decode(&head.encode()), Ok(head));
        }
    });
}
