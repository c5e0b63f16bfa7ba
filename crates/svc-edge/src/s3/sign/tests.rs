//! Requests whose signatures Amazon's documentation gives.

use super::*;
use proptest::prelude::*;

/// 24 May 2013, midnight.
const MIDNIGHT: Duration = Duration::from_secs(1_369_353_600);
const SCOPE: Scope<'static> = Scope { region: "us-east-1", service: "s3" };
const BUCKET: &str = "examplebucket.s3.amazonaws.com";

fn credentials() -> Credentials {
    Credentials {
        access_key_id: "AKIAIOSFODNN7EXAMPLE".to_owned(),
        secret_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned(),
        session_token: None,
    }
}

fn signed(method: Method, target: &str, fields: &[(&'static str, &'static str)], body: &[u8]) -> HeaderMap {
    let field = |(name, value): &(&'static str, &'static str)| {
        (HeaderName::from_static(name), HeaderValue::from_static(value))
    };
    let mut headers: HeaderMap = fields.iter().map(field).collect();
    let request = Unsigned { method: &method, host: BUCKET, target, payload: Sha256::digest(body).into() };
    sign(request, &mut headers, &credentials(), SCOPE, MIDNIGHT).unwrap();
    headers
}

#[test]
fn requests_have_the_signatures_that_are_documented() {
    let check = |headers: &HeaderMap, names: &str, signature: &str| {
        let expected = format!(
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders={names}, Signature={signature}"
        );
        assert_eq!(headers[AUTHORIZATION], expected.as_str());
        assert_eq!(headers[DATE], "20130524T000000Z");
    };
    let got = signed(Method::GET, "/test.txt", &[("range", "bytes=0-9")], b"");
    let names = "host;range;x-amz-content-sha256;x-amz-date";
    check(&got, names, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
    assert_eq!(got[CONTENT_SHA256], hex(&EMPTY).as_str());

    let fields = [("date", "Fri, 24 May 2013 00:00:00 GMT"), ("x-amz-storage-class", "REDUCED_REDUNDANCY")];
    let target = format!("/{}", encode("test$file.text", true));
    let put = signed(Method::PUT, &target, &fields, b"Welcome to Amazon S3.");
    let names = "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class";
    check(&put, names, "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");

    let names = "host;x-amz-content-sha256;x-amz-date";
    let got = signed(Method::GET, "/?lifecycle", &[], b"");
    check(&got, names, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
    let got = signed(Method::GET, "/?prefix=J&max-keys=2", &[], b"");
    check(&got, names, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

/// The smallest request of the scheme's own suite, which is of another service and has no field but `X-Amz-Date`.
#[test]
fn the_plainest_request_of_the_suite_has_its_signature() {
    let credentials = Credentials {
        access_key_id: "AKIDEXAMPLE".to_owned(),
        secret_key: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".to_owned(),
        session_token: None,
    };
    let scope = Scope { region: "us-east-1", service: "service" };
    let at = moment(Duration::from_secs(1_440_938_160));
    assert_eq!(at, "20150830T123600Z");
    let headers = HeaderMap::from_iter([(DATE, HeaderValue::try_from(&at).unwrap())]);
    let request =
        Unsigned { method: &Method::GET, host: "example.amazonaws.com", target: "/", payload: EMPTY };
    let value = authorization(request, &headers, &credentials, scope, &at);
    let signature = "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31";
    assert!(value.ends_with(&format!("SignedHeaders=host;x-amz-date, Signature={signature}")), "{value}");
}

#[test]
fn a_session_token_is_sent_signed_and_kept_out_of_logs() {
    let with = Credentials { session_token: Some("visitor".to_owned()), ..credentials() };
    let mut headers = HeaderMap::new();
    let request = Unsigned { method: &Method::GET, host: BUCKET, target: "/a", payload: EMPTY };
    sign(request, &mut headers, &with, SCOPE, MIDNIGHT).unwrap();
    assert_eq!(headers[SECURITY_TOKEN], "visitor");
    assert!(headers[AUTHORIZATION].to_str().unwrap().contains("x-amz-date;x-amz-security-token,"));
    let shown = format!("{headers:?} {with:?}");
    assert!(
        !shown.contains("visitor") && !shown.contains("Signature=") && !shown.contains("wJalr"),
        "{shown}"
    );
    let bad = Credentials { session_token: Some("two\nlines".to_owned()), ..credentials() };
    assert!(sign(request, &mut HeaderMap::new(), &bad, SCOPE, MIDNIGHT).is_err());
}

proptest! {
    /// Whatever a key consists of: it is sent in characters that no server reads in another way.
    #[test]
    fn an_encoded_key_is_plain_and_decodes_to_itself(key in "\\PC{0,40}") {
        let encoded = encode(&key, false);
        prop_assert!(encoded.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte)));
        let mut bytes = Vec::new();
        let mut rest = encoded.as_str();
        while let Some(first) = rest.chars().next() {
            let taken = if first == '%' { 3 } else { 1 };
            let (one, behind) = rest.split_at(taken);
            bytes.push(if taken == 3 { u8::from_str_radix(&one[1..], 16).unwrap() } else { one.as_bytes()[0] });
            rest = behind;
        }
        prop_assert_eq!(String::from_utf8(bytes).unwrap(), key);
    }

    /// A signature depends on all of the request that is signed.
    #[test]
    fn another_request_has_another_signature(path in "/[a-z]{1,8}", other in "/[a-z]{1,8}") {
        let of = |path: &str| signed(Method::GET, path, &[], b"")[AUTHORIZATION].clone();
        prop_assert_eq!(of(&path) == of(&other), path == other);
    }
}
