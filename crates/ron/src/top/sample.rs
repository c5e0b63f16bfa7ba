//! One look at a node: what its admin plane said, nothing worked out yet.

use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// What was answered at one time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// When, on a clock that only goes on.
    pub(crate) at: Duration,
    pub(crate) metrics: Metrics,
    pub(crate) ready: Value,
    pub(crate) version: Value,
    pub(crate) channels: Value,
    pub(crate) tasks: Value,
    pub(crate) gateway: Behind,
    pub(crate) overlay: Behind,
    /// The registry's last entry, if the registry itself could be asked.
    pub(crate) head: Option<Value>,
}

/// What stands behind the admin token.
#[derive(Clone, Debug, Default)]
pub(crate) enum Behind {
    /// The service does not run.
    #[default]
    Absent,
    /// The token was not given, or is not the node's.
    Refused,
    Said(Value),
}

impl Behind {
    /// By the status of the answer.
    pub(crate) fn of(status: u16, body: &[u8]) -> Behind {
        match (status, serde_json::from_slice(body)) {
            (200, Ok(said)) => Behind::Said(said),
            (401, _) => Behind::Refused,
            _ => Behind::Absent,
        }
    }

    pub(crate) fn said(&self) -> Option<&Value> {
        if let Behind::Said(said) = self { Some(said) } else { None }
    }
}

/// A page of metrics: by name, then by labels as they were written.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Metrics(BTreeMap<String, BTreeMap<String, Series>>);

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Series {
    labels: Vec<(String, String)>,
    pub(crate) value: f64,
}

impl Series {
    /// A label's value; empty if it has none such.
    pub(crate) fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }
}

impl Metrics {
    /// Reads the Prometheus text format. A line that is none of it is passed over.
    pub(crate) fn parse(page: &str) -> Metrics {
        let mut all = Metrics::default();
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse() else { continue };
            let (name, written) = match series.split_once('{') {
                Some((name, rest)) => (name, rest.strip_suffix('}').unwrap_or(rest)),
                None => (series, ""),
            };
            let Some(labels) = labels(written) else { continue };
            let family = all.0.entry(name.to_owned()).or_default();
            family.insert(written.to_owned(), Series { labels, value });
        }
        all
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Every series of a name, with its labels as they were written.
    pub(crate) fn all(&self, name: &str) -> impl Iterator<Item = (&str, &Series)> {
        self.0.get(name).into_iter().flatten().map(|(written, series)| (written.as_str(), series))
    }

    /// One series by its labels as they were written.
    pub(crate) fn one(&self, name: &str, written: &str) -> Option<f64> {
        Some(self.0.get(name)?.get(written)?.value)
    }

    /// The sum of those that are wanted; none if there is none.
    pub(crate) fn sum(&self, name: &str, wanted: impl Fn(&Series) -> bool) -> Option<f64> {
        let values = self.all(name).filter(|(_, series)| wanted(series)).map(|(_, series)| series.value);
        values.reduce(|sum, value| sum + value)
    }
}

/// `name="value",…` with the escapes of the format.
fn labels(written: &str) -> Option<Vec<(String, String)>> {
    let (mut out, mut rest) = (Vec::new(), written);
    while !rest.is_empty() {
        let (name, after) = rest.split_once("=\"")?;
        let (mut value, mut chars) = (String::new(), after.char_indices());
        let end = loop {
            match chars.next()? {
                (end, '"') => break end,
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        out.push((name.to_owned(), value));
        rest = &after[end + 1..];
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_page_of_metrics_is_read_with_its_escapes() {
        let page = "# TYPE a counter\na{x=\"1\",y=\"q\\\"\\\\\\n,}\"} 2.5\na{x=\"2\",y=\"\"} 4\nb 7\nbad{x 3\nworse\n";
        let metrics = Metrics::parse(page);
        let first = metrics.all("a").next().unwrap().1;
        assert_eq!((first.label("x"), first.label("y"), first.label("z")), ("1", "q\"\\\n,}", ""));
        assert_eq!(metrics.sum("a", |_| true), Some(6.5));
        assert_eq!(metrics.sum("a", |series| series.label("x") == "2"), Some(4.0));
        assert_eq!((metrics.one("b", ""), metrics.sum("none", |_| true)), (Some(7.0), None));
        assert_eq!(metrics.sum("bad", |_| true), None);
    }

    proptest! {
        #[test]
        fn no_page_makes_the_reader_fail(page in "[a-z{}=\",\\\\ 0-9.\n#é-]{0,200}") {
            let _ = Metrics::parse(&page);
        }
    }
}
