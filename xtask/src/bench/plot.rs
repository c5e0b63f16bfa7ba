//! The overload run as a picture.

use super::overload::{MULTIPLES, Step, TENANTS};
use std::fmt::Write as _;
use std::path::Path;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 50.0;
const COLOURS: [&str; 5] = ["#c0392b", "#2471a3", "#1e8449", "#b7950b", "#7d3c98"];

struct Line<'a> {
    name: &'a str,
    colour: &'a str,
    dashed: bool,
    values: Vec<f64>,
}

/// Writes goodput, latency and shares over the offered load.
pub(super) fn write(path: &Path, capacity: f64, alone_p99: f64, steps: &[Step]) -> std::io::Result<()> {
    let line = |name, colour, dashed, values| Line { name, colour, dashed, values };
    let of = |field: fn(&Step) -> f64| steps.iter().map(field).collect::<Vec<f64>>();
    let flat = |value: f64| vec![value; steps.len()];
    let goodput = [
        line("good answers", COLOURS[1], false, of(|step| step.goodput)),
        line("capacity", "#888", true, flat(capacity)),
    ];
    let latency = [
        line("p99", COLOURS[0], false, of(|step| step.p99)),
        line("p50", COLOURS[1], false, of(|step| step.p50)),
        line("p99 alone", "#888", true, flat(alone_p99)),
        line("twice that", "#bbb", true, flat(alone_p99 * 2.0)),
    ];
    let share = |(index, name): (usize, &&'static str)| {
        let values = steps.iter().map(|step| step.shares[index]).collect();
        line(*name, COLOURS[index], index == 0, values)
    };
    let shares: Vec<Line<'_>> = TENANTS.iter().enumerate().map(share).collect();
    let panels = [
        panel(0.0, "Goodput", "requests/s", &goodput),
        panel(1.0, "Latency of those that behave", "ms", &latency),
        panel(2.0, "What each tenant got of what it was due", "share", &shares),
    ];
    let (width, height) = ((WIDTH + LEFT + 30.0) * 3.0, TOP + HEIGHT + 110.0);
    let text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
        panels.concat()
    );
    std::fs::write(path, text)
}

fn panel(place: f64, title: &str, unit: &str, lines: &[Line<'_>]) -> String {
    let left = place * (WIDTH + LEFT + 30.0) + LEFT;
    let bottom = TOP + HEIGHT;
    let top_value = ceiling(lines.iter().flat_map(|line| &line.values).copied().fold(0.0, f64::max));
    let x = |index: usize| left + WIDTH * (index as f64 + 0.5) / MULTIPLES.len() as f64;
    let y = |value: f64| bottom - HEIGHT * value / top_value;
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "<text x=\"{left}\" y=\"22\" font-size=\"16\">{title}</text>");
    let _ = writeln!(out, "<text x=\"{left}\" y=\"40\" fill=\"#555\">{unit}</text>");
    for tick in 0..=4 {
        let value = top_value * f64::from(tick) / 4.0;
        let at = y(value);
        let label = if top_value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") };
        let _ = writeln!(
            out,
            "<path d=\"M{left} {at}H{}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{}\" text-anchor=\"end\">{label}</text>",
            left + WIDTH,
            left - 6.0,
            at + 4.0
        );
    }
    for (index, multiple) in MULTIPLES.iter().enumerate() {
        let (at, below) = (x(index), bottom + 18.0);
        let _ = writeln!(out, "<text x=\"{at}\" y=\"{below}\" text-anchor=\"middle\">{multiple}x</text>");
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">offered load over capacity</text>",
        left + WIDTH / 2.0,
        bottom + 38.0
    );
    for (index, line) in lines.iter().enumerate() {
        let points: Vec<String> = line
            .values
            .iter()
            .enumerate()
            .map(|(index, value)| format!("{:.1},{:.1}", x(index), y(*value)))
            .collect();
        let dashes = if line.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
        let colour = line.colour;
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}/>",
            points.join(" ")
        );
        let (at, below) = (left + index as f64 * WIDTH / lines.len() as f64, bottom + 66.0);
        let _ = writeln!(
            out,
            "<path d=\"M{at} {}h16\" stroke=\"{colour}\" stroke-width=\"3\"{dashes}/><text x=\"{}\" y=\"{below}\">{}</text>",
            below - 4.0,
            at + 20.0,
            line.name
        );
    }
    out
}

/// The next of 1, 1.2, 1.6, 2, 4, 8 times a power of ten: ends of axes whose quarters are round.
fn ceiling(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-9).log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 4.0, 8.0, 10.0];
    steps.iter().map(|step| step * power).find(|end| *end >= value).unwrap_or(value)
}
