//! What is stored under names, a page at a time, with its bytes: for whoever takes it away as a whole.

use super::{Edge, Snapshot};
use crate::cas::{Cas, Listed};
use crate::semantics::decode_path;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Method, Response};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::Body;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use serde_json::{Value, json};

/// Names of one page.
const PAGE_NAMES: usize = 1000;
/// Bytes of contents in one page; one content is in any, unless it is larger than this.
const PAGE_BYTES: u64 = 4 << 20;

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
struct Page {
    prefix: String,
    after: Option<String>,
}

impl Page {
    /// `prefix=` as in a path, `after=` as the page before named it.
    fn of(query: Option<&str>) -> Option<Page> {
        let (mut prefix, mut after) = (None, None);
        for pair in query.unwrap_or_default().split('&') {
            match pair.split_once('=')? {
                ("prefix", value) => prefix = Some(decode_path(value).ok()?),
                ("after", value) => {
                    after = Some(String::from_utf8(URL_SAFE_NO_PAD.decode(value).ok()?).ok()?);
                }
                _ => return None,
            }
        }
        Some(Page { prefix: prefix?, after })
    }
}

impl Edge {
    pub(super) async fn list(
        &self,
        request: &Parts,
        snapshot: &Snapshot,
        budget: Budget,
    ) -> Result<Response<Body>, Rejection> {
        self.authorize(request, "edge:write", snapshot)?;
        let page = Page::of(request.uri.query()).ok_or_else(|| {
            Rejection::new(Reason::Malformed, "expected ?prefix=PATH, then &after=NEXT of the page before")
        })?;
        let cas = self.cas.clone();
        let body = self.reading(budget, move || written(&cas, &page)).await?;
        let mut response = Response::new(Body::default());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if request.method == Method::GET {
            *response.body_mut() = Body::full(body.to_string());
        }
        Ok(response)
    }
}

/// A page. Reads files. What went since it was listed, or is found bad, is left out.
fn written(cas: &Cas, page: &Page) -> Value {
    let names = cas.list(&page.prefix, page.after.as_deref(), PAGE_NAMES);
    let (mut assets, mut bytes, mut looked) = (Vec::new(), 0, None);
    let mut more = names.len() == PAGE_NAMES;
    for Listed { name, asset, address, object } in names {
        let fits = object.len <= PAGE_BYTES;
        if fits && bytes + object.len > PAGE_BYTES {
            more = true;
            break;
        }
        looked = Some(name.clone());
        let mut entry = json!({"name": name.replacen('\0', "?", 1), "b3": address.to_string(),
            "size": object.len, "type": asset.content_type});
        if fits {
            let Some(content) = cas.whole(address, &object) else { continue };
            bytes += object.len;
            entry["body"] = STANDARD.encode(content).into();
        }
        assets.push(entry);
    }
    let next = looked.filter(|_| more).map(|name| URL_SAFE_NO_PAD.encode(name.as_bytes()));
    json!({"assets": assets, "next": next})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_asked_for_in_one_way() {
        let page = |prefix: &str, after: Option<&str>| {
            Some(Page { prefix: prefix.to_owned(), after: after.map(str::to_owned) })
        };
        assert_eq!(Page::of(Some("prefix=tiles/")), page("tiles/", None));
        assert_eq!(Page::of(Some("prefix=a%20b&after=YQA")), page("a b", Some("a\0")));
        for bad in [
            None,
            Some(""),
            Some("prefix="),
            Some("after=YQ"),
            Some("prefix=a&b=1"),
            Some("prefix=a&after=!"),
        ] {
            assert_eq!(Page::of(bad), None, "{bad:?}");
        }
    }
}
