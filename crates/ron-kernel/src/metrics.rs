//! Counters, histograms and computed gauges in the Prometheus text format.
//!
//! A handle is fetched once and then costs one atomic. Looking a series up, or scraping, reads a snapshot and
//! takes no lock that an increment takes; only the first sight of a label set does. Gauges are computed when
//! scraped. Every family is bounded: past its cap new label sets share the series `other`.

use crate::fnv::Fnv;
use arc_swap::ArcSwap;
use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Write as _};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Label sets a family may hold; the next one is counted as `other`.
const SERIES_MAX: usize = 2000;

/// Upper bounds of latency buckets, in seconds: 250 us to 30 s.
const SECONDS: [f64; BOUNDS] =
    [0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];
/// Upper bounds of buckets of whole numbers: of hops, of entries in a batch.
const COUNTS: [u64; BOUNDS] = [0, 1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024];
const BOUNDS: usize = 14;

#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    pub fn inc(&self) {
        self.add(1);
    }

    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram of times.
#[derive(Clone, Debug, Default)]
pub struct Histogram(Arc<Buckets>);

impl Histogram {
    pub fn observe(&self, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let bucket = SECONDS.iter().position(|bound| seconds <= *bound);
        self.0.add(bucket, u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX));
    }

    pub fn count(&self) -> u64 {
        self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// A histogram of whole numbers.
#[derive(Clone, Debug, Default)]
pub struct Counts(Arc<Buckets>);

impl Counts {
    pub fn observe(&self, count: u64) {
        self.0.add(COUNTS.iter().position(|bound| count <= *bound), count);
    }
}

#[derive(Debug, Default)]
struct Buckets {
    /// The last is of what is above every bound.
    counts: [AtomicU64; BOUNDS + 1],
    /// Of numbers, or of microseconds.
    sum: AtomicU64,
}

impl Buckets {
    fn add(&self, bucket: Option<usize>, amount: u64) {
        self.counts[bucket.unwrap_or(BOUNDS)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(amount, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, labels: &str, bounds: &[impl fmt::Display], sum: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (index, count) in self.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            let le = bounds.get(index).map_or("+Inf".to_owned(), ToString::to_string);
            line(out, &format!("{name}_bucket"), &format!("{labels}{comma}le=\"{le}\""), total);
        }
        line(out, &format!("{name}_sum"), labels, sum);
        line(out, &format!("{name}_count"), labels, total);
    }
}

/// A kind of series that a family can hold.
pub trait Series: Clone + Default + Send + Sync + 'static {
    const KIND: &'static str;
    fn write(&self, out: &mut String, name: &str, labels: &str);
}

impl Series for Counter {
    const KIND: &'static str = "counter";
    fn write(&self, out: &mut String, name: &str, labels: &str) {
        line(out, name, labels, self.value());
    }
}

impl Series for Histogram {
    const KIND: &'static str = "histogram";
    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let sum = self.0.sum.load(Ordering::Relaxed);
        let seconds = format!("{}.{:06}", sum / 1_000_000, sum % 1_000_000);
        self.0.write(out, name, labels, &SECONDS, &seconds);
    }
}

impl Series for Counts {
    const KIND: &'static str = "histogram";
    fn write(&self, out: &mut String, name: &str, labels: &str) {
        self.0.write(out, name, labels, &COUNTS, &self.0.sum.load(Ordering::Relaxed).to_string());
    }
}

fn line(out: &mut String, name: &str, labels: &str, value: impl fmt::Display) {
    let _ = if labels.is_empty() {
        writeln!(out, "{name} {value}")
    } else {
        writeln!(out, "{name}{{{labels}}} {value}")
    };
}

/// Series by the hash of their label values, so that a look-up allocates nothing; those of one hash share a list.
type Known<S, const N: usize> = HashMap<u64, Vec<([Box<str>; N], S)>, BuildHasherDefault<AsIs>>;

/// A number that is a hash already.
#[derive(Clone, Copy, Debug, Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("keys are numbers")
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

fn hash_of(values: &[&str]) -> u64 {
    let mut hash = Fnv::default();
    for value in values {
        hash.write(value.as_bytes());
        hash.write_u8(0xff);
    }
    hash.finish()
}

/// All series of one name. `N` is the number of labels.
pub struct Family<S, const N: usize> {
    name: &'static str,
    help: &'static str,
    labels: [&'static str; N],
    series: ArcSwap<Known<S, N>>,
    /// Held while a new label set is added, never by a look-up, an increment or a scrape.
    growing: Mutex<()>,
}

impl<S: Series, const N: usize> Family<S, N> {
    /// The series of these label values, made at first sight.
    pub fn with(&self, values: [&str; N]) -> S {
        if let Some(series) = self.find(values, &self.series.load()) {
            return series;
        }
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.series.load_full();
        let values = if current.len() >= SERIES_MAX { ["other"; N] } else { values };
        if let Some(series) = self.find(values, &current) {
            return series;
        }
        let mut grown = HashMap::clone(&current);
        let series = S::default();
        let alike = grown.entry(hash_of(&values)).or_default();
        alike.push((values.map(Box::<str>::from), series.clone()));
        self.series.store(Arc::new(grown));
        series
    }

    fn find(&self, values: [&str; N], series: &Known<S, N>) -> Option<S> {
        let alike = series.get(&hash_of(&values))?;
        let same = |known: &[Box<str>; N]| known.iter().zip(values).all(|(known, value)| **known == *value);
        alike.iter().find(|(known, _)| same(known)).map(|(_, series)| series.clone())
    }
}

trait Collect: Send + Sync {
    fn collect(&self, out: &mut String);
}

impl<S: Series, const N: usize> Collect for Family<S, N> {
    fn collect(&self, out: &mut String) {
        header(out, self.name, self.help, S::KIND);
        let series = self.series.load();
        let mut rows: Vec<_> = series.values().flatten().collect();
        rows.sort_by(|a, b| a.0.cmp(&b.0));
        for (values, series) in rows {
            let pairs: Vec<_> = self.labels.iter().copied().zip(values.iter().map(|v| &**v)).collect();
            series.write(out, self.name, &render_labels(&pairs));
        }
    }
}

fn header(out: &mut String, name: &str, help: &str, kind: &str) {
    let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

fn render_labels(pairs: &[(&str, &str)]) -> String {
    let mut out = String::new();
    for (name, value) in pairs {
        let comma = if out.is_empty() { "" } else { "," };
        let _ = write!(out, "{comma}{name}=\"");
        for c in value.chars() {
            match c {
                '\\' => out.push_str("\\\\"),
                '"' => out.push_str("\\\""),
                '\n' => out.push_str("\\n"),
                c => out.push(c),
            }
        }
        out.push('"');
    }
    out
}

/// The rows of a family that is computed when scraped.
#[derive(Debug)]
pub struct Rows<'a> {
    name: &'a str,
    out: &'a mut String,
}

impl Rows<'_> {
    pub fn row(&mut self, labels: &[(&str, &str)], value: impl fmt::Display) {
        line(self.out, self.name, &render_labels(labels), value);
    }
}

type RowsFn = Box<dyn Fn(&mut Rows<'_>) + Send + Sync>;

struct Computed {
    name: &'static str,
    help: &'static str,
    kind: &'static str,
    rows: Vec<RowsFn>,
}

/// Everything that `/metrics` shows.
#[derive(Clone, Default)]
pub struct Metrics {
    families: Arc<Mutex<BTreeMap<&'static str, Arc<dyn Any>>>>,
    computed: Arc<Mutex<BTreeMap<&'static str, Computed>>>,
}

/// A stored family, both as what it is (to be handed out again) and as what can be scraped.
trait Any: Collect {
    fn as_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync>;
}

impl<S: Series, const N: usize> Any for Family<S, N> {
    fn as_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync> {
        self
    }
}

impl Metrics {
    /// The family of this name, the same for everyone who asks with the same labels.
    pub fn family<S: Series, const N: usize>(
        &self,
        name: &'static str,
        help: &'static str,
        labels: [&'static str; N],
    ) -> Arc<Family<S, N>> {
        let mut families = self.families.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = families.entry(name).or_insert_with(|| {
            let series = ArcSwap::from_pointee(HashMap::default());
            Arc::new(Family::<S, N> { name, help, labels, series, growing: Mutex::new(()) })
        });
        stored.clone().as_any().downcast().expect("one metric name has one kind and one set of labels")
    }

    /// Adds rows to a family that is computed when scraped; several owners may add to one name.
    pub fn computed(
        &self,
        name: &'static str,
        help: &'static str,
        kind: &'static str,
        rows: impl Fn(&mut Rows<'_>) + Send + Sync + 'static,
    ) {
        let mut computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner);
        let family = computed.entry(name).or_insert_with(|| Computed { name, help, kind, rows: Vec::new() });
        family.rows.push(Box::new(rows));
    }

    /// The whole page in the Prometheus text format.
    pub fn scrape(&self) -> String {
        let mut out = String::with_capacity(16 << 10);
        let families: Vec<_> = {
            let families = self.families.lock().unwrap_or_else(PoisonError::into_inner);
            families.values().cloned().collect()
        };
        for family in families {
            family.collect(&mut out);
        }
        let computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner);
        for family in computed.values() {
            header(&mut out, family.name, family.help, family.kind);
            for rows in &family.rows {
                rows(&mut Rows { name: family.name, out: &mut out });
            }
        }
        out
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl<S, const N: usize> fmt::Debug for Family<S, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Family({})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_shared_and_rendered_with_escaped_labels() {
        let metrics = Metrics::default();
        let family = metrics.family::<Counter, 1>("hits_total", "Hits.", ["who"]);
        family.with(["a\"b"]).inc();
        metrics.family::<Counter, 1>("hits_total", "Hits.", ["who"]).with(["a\"b"]).add(2);
        assert!(metrics.scrape().contains("hits_total{who=\"a\\\"b\"} 3\n"), "{}", metrics.scrape());
    }

    #[test]
    fn label_sets_past_the_cap_are_counted_as_other() {
        let metrics = Metrics::default();
        let family = metrics.family::<Counter, 1>("many_total", "Many.", ["n"]);
        for n in 0..SERIES_MAX + 50 {
            family.with([&n.to_string()]).inc();
        }
        assert_eq!(family.with(["other"]).value(), 50);
        assert!(family.series.load().len() <= SERIES_MAX + 1);
    }

    #[test]
    fn a_histogram_counts_cumulatively() {
        let metrics = Metrics::default();
        let latency = metrics.family::<Histogram, 0>("latency_seconds", "Latency.", []).with([]);
        latency.observe(Duration::from_millis(3));
        latency.observe(Duration::from_secs(60));
        let page = metrics.scrape();
        assert!(page.contains("latency_seconds_bucket{le=\"0.0025\"} 0\n"), "{page}");
        assert!(page.contains("latency_seconds_bucket{le=\"0.005\"} 1\n"), "{page}");
        assert!(page.contains("latency_seconds_bucket{le=\"+Inf\"} 2\n"), "{page}");
        assert!(page.contains("latency_seconds_sum 60.003000\n"), "{page}");
    }

    #[test]
    fn a_histogram_of_counts_knows_small_ones_apart_and_large_ones_as_more() {
        let metrics = Metrics::default();
        let hops = metrics.family::<Counts, 0>("hops", "Hops.", []).with([]);
        [0, 3, 5, 2000].into_iter().for_each(|count| hops.observe(count));
        let page = metrics.scrape();
        for line in ["bucket{le=\"0\"} 1", "bucket{le=\"2\"} 1", "bucket{le=\"3\"} 2", "bucket{le=\"6\"} 3"] {
            assert!(page.contains(&format!("hops_{line}\n")), "{line}: {page}");
        }
        for line in ["bucket{le=\"1024\"} 3", "bucket{le=\"+Inf\"} 4", "sum 2008", "count 4"] {
            assert!(page.contains(&format!("hops_{line}\n")), "{line}: {page}");
        }
    }

    #[test]
    fn computed_rows_are_read_when_scraped() {
        let metrics = Metrics::default();
        let depth = Arc::new(AtomicU64::new(0));
        let seen = depth.clone();
        let read = move |rows: &mut Rows<'_>| rows.row(&[("q", "a")], seen.load(Ordering::Relaxed));
        metrics.computed("depth", "Depth.", "gauge", read);
        depth.store(7, Ordering::Relaxed);
        assert!(metrics.scrape().contains("depth{q=\"a\"} 7\n"));
    }
}
