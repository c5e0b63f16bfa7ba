//! Views: which path asks for one, and what it asks of whom. Pure.

use crate::config::{PartSettings, RouteSettings, ViewSettings};
use crate::routes::{check_path, unescaped};
use ron_kernel::config::Problems;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// The most calls that one view may make.
const CALLS_MAX: usize = 64;
/// The member of the answer that says what is missing.
const ERRORS: &str = "errors";

/// Which path asks for which view. Looking one up costs a few hashes per segment, however many there are.
#[derive(Debug, Default)]
pub(crate) struct Views {
    root: Branch,
}

/// What may follow a segment.
#[derive(Debug, Default)]
struct Branch {
    literal: HashMap<String, Branch>,
    /// Any segment that no literal is.
    any: Option<Box<Branch>>,
    /// The view that ends here.
    view: Option<usize>,
}

/// A text with places for the values of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(String),
    /// The n-th value.
    Value(usize),
}

impl Views {
    pub(crate) fn new(settings: &[ViewSettings]) -> Views {
        let mut views = Views::default();
        for (index, view) in settings.iter().enumerate() {
            views.root.leaf(&view.path).view.get_or_insert(index);
        }
        views
    }

    /// The view of a path whose needless escapes are undone, and the values in it.
    pub(crate) fn find<'a>(&self, path: &'a str) -> Option<(usize, Vec<&'a str>)> {
        if self.root.literal.is_empty() && self.root.any.is_none() {
            return None;
        }
        let segments: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
        let mut values = Vec::new();
        let view = self.root.find(&segments, &mut values)?;
        Some((view, values))
    }

    /// Every problem of the views, by key.
    pub(crate) fn check(
        views: &[ViewSettings],
        routes: &[RouteSettings],
        upstreams: &HashSet<&str>,
        problems: &mut Problems,
    ) {
        let mut taken = Views::default();
        for (index, view) in views.iter().enumerate() {
            let at = format!("gateway.views[{index}]");
            check_path(&view.path.replace(['{', '}'], "_"), &at, problems);
            if view.path.ends_with("/*") {
                problems.add(format!("{at}.path"), "is a view's, which is one path: it may not end in *");
            }
            match names_of(&view.path) {
                Err(message) => problems.add(format!("{at}.path"), message),
                Ok(names) => check_parts(view, &names, upstreams, &at, problems),
            }
            let other = taken.root.leaf(&view.path).view.replace(index);
            let route = routes.iter().position(|route| route.path == view.path);
            let taken = other.map(|other| format!("gateway.views[{other}]"));
            if let Some(taken) = taken.or(route.map(|route| format!("gateway.routes[{route}]"))) {
                problems.add(format!("{at}.path"), format!("is taken by {taken}"));
            }
            if view.timeout.0 == Duration::ZERO {
                problems.add(format!("{at}.timeout"), "must be more than 0");
            }
            if view.max_bytes.0 == 0 {
                problems.add(format!("{at}.max_bytes"), "must be more than 0");
            }
            if !(1..=CALLS_MAX).contains(&view.max_calls) {
                problems.add(format!("{at}.max_calls"), format!("must be 1 to {CALLS_MAX}"));
            }
        }
    }
}

fn check_parts(
    view: &ViewSettings,
    names: &[&str],
    upstreams: &HashSet<&str>,
    at: &str,
    problems: &mut Problems,
) {
    if view.parts.is_empty() {
        problems.add(format!("{at}.parts"), "needs at least one part");
    }
    if view.parts.len() > view.max_calls {
        let message = format!("are more than max_calls, which is {}", view.max_calls);
        problems.add(format!("{at}.parts"), message);
    }
    let mut known = HashSet::new();
    for (number, part) in view.parts.iter().enumerate() {
        let at = format!("{at}.parts[{number}]");
        if part.name.is_empty() || part.name == ERRORS {
            problems.add(format!("{at}.name"), "must be a name, and another one than \"errors\"");
        }
        if !known.insert(&part.name) {
            problems.add(format!("{at}.name"), format!("{:?} is the name of two parts", part.name));
        }
        if !upstreams.contains(part.upstream.as_str()) {
            problems.add(format!("{at}.upstream"), format!("there is no upstream {:?}", part.upstream));
        }
        match Template::parse(&part.path, names) {
            Err(message) => problems.add(format!("{at}.path"), message),
            Ok(template) => {
                let sample = template.fill(&vec!["x"; names.len()]);
                if !sample.starts_with('/') || sample.parse::<http::uri::PathAndQuery>().is_err() {
                    problems.add(format!("{at}.path"), "is no path: it begins with /");
                }
            }
        }
    }
}

impl Branch {
    /// The end of a path with places for values.
    fn leaf(&mut self, path: &str) -> &mut Branch {
        path.trim_start_matches('/').split('/').fold(self, |branch, segment| {
            if segment.starts_with('{') {
                branch.any.get_or_insert_default()
            } else {
                branch.literal.entry(segment.to_owned()).or_default()
            }
        })
    }

    fn find<'a>(&self, segments: &[&'a str], values: &mut Vec<&'a str>) -> Option<usize> {
        let [segment, rest @ ..] = segments else { return self.view };
        if let Some(found) = self.literal.get(*segment).and_then(|branch| branch.find(rest, values)) {
            return Some(found);
        }
        // Whatever a dead end has gathered is given up again.
        let (any, before) = (self.any.as_ref().filter(|_| !segment.is_empty())?, values.len());
        values.push(segment);
        let found = any.find(rest, values);
        if found.is_none() {
            values.truncate(before);
        }
        found
    }
}

impl Template {
    /// Reads a text in which `{name}` stands for the value of that name.
    fn parse(text: &str, names: &[&str]) -> Result<Template, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) =
                after.split_once('}').ok_or_else(|| format!("{text:?} has a {{ without its }}"))?;
            let value = names.iter().position(|known| *known == name);
            let value = value.ok_or_else(|| format!("{{{name}}} is not in the view's path"))?;
            pieces.extend([Piece::Literal(before.to_owned()), Piece::Value(value)]);
            rest = after;
        }
        pieces.push(Piece::Literal(rest.to_owned()));
        Ok(Template(pieces))
    }

    /// The text with these values, each so written that it can be nothing but one value.
    pub(crate) fn fill(&self, values: &[&str]) -> String {
        let mut out = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Literal(text) => out.push_str(text),
                Piece::Value(index) => push_escaped(&mut out, values.get(*index).copied().unwrap_or("")),
            }
        }
        out
    }
}

impl PartSettings {
    /// What is asked for, by the names in the view's path. Validation has seen that it can be read.
    pub(crate) fn template(&self, view: &ViewSettings) -> Template {
        let names = names_of(&view.path).unwrap_or_default();
        Template::parse(&self.path, &names).unwrap_or(Template(Vec::new()))
    }
}

/// The names in a view's path, in order.
fn names_of(path: &str) -> Result<Vec<&str>, String> {
    let mut names = Vec::new();
    for segment in path.split('/').filter(|segment| segment.contains(['{', '}'])) {
        let name = segment.strip_prefix('{').and_then(|segment| segment.strip_suffix('}'));
        let name = name.filter(|name| !name.is_empty() && !name.contains(['{', '}']));
        let name = name.ok_or_else(|| format!("{segment:?} is no segment of the form {{name}}"))?;
        if names.contains(&name) {
            return Err(format!("{{{name}}} is there twice"));
        }
        names.push(name);
    }
    Ok(names)
}

/// Writes a segment so that it means the same in a path and in a query, and nothing else.
fn push_escaped(out: &mut String, segment: &str) {
    for byte in unescaped(segment) {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
            out.push('%');
            out.push(char::from(DIGITS[usize::from(byte >> 4)]));
            out.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn view(path: &str) -> ViewSettings {
        ViewSettings { path: path.into(), ..ViewSettings::default() }
    }

    #[test]
    fn a_literal_goes_before_a_value_and_dead_ends_are_left_again() {
        let views = Views::new(&[view("/v/{a}"), view("/v/me"), view("/v/me/{b}/x"), view("/v/{a}/{b}")]);
        assert_eq!(views.find("/v/7"), Some((0, vec!["7"])));
        assert_eq!(views.find("/v/me"), Some((1, vec![])));
        assert_eq!(views.find("/v/me/1/x"), Some((2, vec!["1"])));
        assert_eq!(views.find("/v/me/1"), Some((3, vec!["me", "1"])));
        for nothing in ["/", "/v", "/v/", "/v/me/", "/v/a/b/c", "v/7", "/w/7", ""] {
            assert_eq!(views.find(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_value_stays_one_value_wherever_it_is_put() {
        let template = Template::parse("/posts/{id}?u={id}&v={other}", &["other", "id"]).unwrap();
        assert_eq!(template.fill(&["o", "7"]), "/posts/7?u=7&v=o");
        assert_eq!(template.fill(&["%2F", "a&b=c%3f+"]), "/posts/a%26b%3Dc%3F%2B?u=a%26b%3Dc%3F%2B&v=%2F");
        assert!(Template::parse("/a/{b", &["b"]).unwrap_err().contains("without its }"));
        assert!(Template::parse("/a/{c}", &["b"]).unwrap_err().contains("not in the view's path"));
    }

    #[test]
    fn a_view_that_could_not_work_is_refused() {
        let part = |name: &str, path: &str| PartSettings {
            name: name.into(),
            upstream: "u".into(),
            path: path.into(),
            required: false,
        };
        let said = |views: &[ViewSettings]| {
            let routes = [RouteSettings { path: "/taken".into(), ..RouteSettings::default() }];
            let mut problems = Problems::default();
            Views::check(views, &routes, &HashSet::from(["u"]), &mut problems);
            problems.to_string()
        };
        let with = |path: &str, parts: Vec<PartSettings>| ViewSettings { parts, ..view(path) };
        let good = with("/v/{id}", vec![part("a", "/a/{id}")]);
        assert_eq!(said(std::slice::from_ref(&good)), "");
        let check = |view: ViewSettings, wanted: &str| {
            let said = said(&[good.clone(), view]);
            assert!(said.contains(wanted), "{wanted}: {said}");
        };
        check(with("/v/{other}", vec![part("a", "/")]), "is taken by gateway.views[0]");
        check(with("/taken", vec![part("a", "/")]), "is taken by gateway.routes[0]");
        check(with("/w/*", vec![part("a", "/")]), "may not end in *");
        check(with("/w/{a}{b}", vec![part("a", "/")]), "no segment of the form");
        check(with("/w/{a}/{a}", vec![part("a", "/")]), "is there twice");
        check(with("w", vec![part("a", "/")]), "does not begin with /");
        check(with("/w", vec![]), "needs at least one part");
        check(with("/w", vec![part("a", "/"); 2]), "is the name of two parts");
        check(with("/w", vec![part("errors", "/")]), "another one than");
        check(with("/w", vec![part("a", "/{id}")]), "{id} is not in the view's path");
        check(with("/w", vec![part("a", "b")]), "it begins with /");
        let unknown = PartSettings { upstream: "none".into(), ..part("a", "/") };
        check(with("/w", vec![unknown]), "there is no upstream \"none\"");
        let parts = (0..9).map(|n| part(&n.to_string(), "/")).collect();
        check(with("/w", parts), "are more than max_calls, which is 8");
        check(ViewSettings { max_calls: 65, ..with("/w", vec![part("a", "/")]) }, "must be 1 to 64");
    }

    proptest! {
        /// Whatever a client writes in a segment, a part gets one path of the template's form.
        #[test]
        fn no_value_changes_the_form_of_what_is_asked(value in "[!-~]{1,20}") {
            prop_assume!(!value.contains(['/', '?', '#']) && crate::routes::plain(&value).is_some());
            let template = Template::parse("/p/{a}?x={a}", &["a"]).unwrap();
            let filled = template.fill(&[&value]);
            let uri: http::Uri = filled.parse().unwrap();
            prop_assert_eq!(uri.path().matches('/').count(), 2);
            let query = uri.query().unwrap();
            prop_assert!(!query.contains('&') && query.matches('=').count() == 1, "{}", filled);
            let bytes: Vec<u8> = unescaped(&value).collect();
            prop_assert_eq!(unescaped(&query[2..]).collect::<Vec<u8>>(), bytes);
        }
    }
}
