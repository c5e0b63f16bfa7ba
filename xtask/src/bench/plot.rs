//! Figures as a picture: panels side by side, each with lines over the same steps.

use std::fmt::Write as _;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 50.0;
pub(super) const COLOURS: [&str; 5] = ["#c0392b", "#2471a3", "#1e8449", "#b7950b", "#7d3c98"];

/// A value for each step; what is not a number is passed over.
pub(super) struct Line<'a> {
    pub(super) name: &'a str,
    pub(super) colour: &'a str,
    pub(super) dashed: bool,
    pub(super) values: Vec<f64>,
}

pub(super) struct Panel<'a> {
    pub(super) title: &'a str,
    pub(super) unit: &'a str,
    /// Whether each grid line is ten times the one below it.
    pub(super) tenfold: bool,
    pub(super) lines: Vec<Line<'a>>,
}

/// What the panels have in common.
pub(super) struct Steps<'a> {
    pub(super) title: &'a str,
    /// What a step is called, or nothing.
    pub(super) names: Vec<String>,
    /// Upright lines before these steps, and what they say.
    pub(super) rules: Vec<(usize, &'a str)>,
}

/// The page as SVG.
pub(super) fn svg(steps: &Steps<'_>, panels: &[Panel<'_>]) -> String {
    let (width, height) = ((WIDTH + LEFT + 30.0) * panels.len() as f64, TOP + HEIGHT + 110.0);
    let panels: String = panels
        .iter()
        .enumerate()
        .map(|(place, of)| panel(place as f64 * (WIDTH + LEFT + 30.0) + LEFT, steps, of))
        .collect();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{panels}</svg>\n"
    )
}

/// Where values stand between the bottom of a panel and its top, and the values of its grid lines.
struct Scale {
    ticks: Vec<f64>,
    tenfold: bool,
}

impl Scale {
    fn of(panel: &Panel<'_>) -> Scale {
        let values = || panel.lines.iter().flat_map(|line| &line.values).copied().filter(|it| it.is_finite());
        let most = values().fold(0.0, f64::max);
        if !panel.tenfold {
            let top = ceiling(most);
            return Scale {
                ticks: (0..=4).map(|tick| top * f64::from(tick) / 4.0).collect(),
                tenfold: false,
            };
        }
        let least = values().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min).min(most);
        let power = |value: f64| if value > 0.0 { value.log10() } else { 0.0 };
        let (bottom, top) = (power(least).floor() as i32, power(most).ceil() as i32);
        Scale { ticks: (bottom..=top.max(bottom + 1)).map(|tick| 10f64.powi(tick)).collect(), tenfold: true }
    }

    fn share(&self, value: f64) -> f64 {
        let (bottom, top) = (self.ticks[0], self.ticks[self.ticks.len() - 1]);
        if self.tenfold {
            (value.max(bottom) / bottom).log10() / (top / bottom).log10()
        } else {
            (value - bottom) / (top - bottom)
        }
    }

    fn label(&self, value: f64) -> String {
        let decimals = if self.tenfold { value < 1.0 } else { self.ticks[self.ticks.len() - 1] < 10.0 };
        if decimals { format!("{value:.2}") } else { format!("{value:.0}") }
    }
}

fn panel(left: f64, steps: &Steps<'_>, panel: &Panel<'_>) -> String {
    let (bottom, right) = (TOP + HEIGHT, left + WIDTH);
    let scale = Scale::of(panel);
    let x = |step: f64| left + WIDTH * step / steps.names.len() as f64;
    let y = |value: f64| bottom - HEIGHT * scale.share(value);
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "<text x=\"{left}\" y=\"22\" font-size=\"16\">{}</text>", panel.title);
    let _ = writeln!(out, "<text x=\"{left}\" y=\"40\" fill=\"#555\">{}</text>", panel.unit);
    for value in &scale.ticks {
        let (at, before, label) = (y(*value), left - 6.0, scale.label(*value));
        let _ = writeln!(
            out,
            "<path d=\"M{left} {at}H{right}\" stroke=\"#ddd\"/>\
             <text x=\"{before}\" y=\"{}\" text-anchor=\"end\">{label}</text>",
            at + 4.0
        );
    }
    for (step, name) in steps.names.iter().enumerate() {
        let (at, below) = (x(step as f64 + 0.5), bottom + 18.0);
        let _ = writeln!(out, "<text x=\"{at}\" y=\"{below}\" text-anchor=\"middle\">{name}</text>");
    }
    let (middle, below) = (left + WIDTH / 2.0, bottom + 38.0);
    let title = steps.title;
    let _ = writeln!(
        out,
        "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\" fill=\"#555\">{title}</text>"
    );
    for (step, says) in &steps.rules {
        let at = x(*step as f64);
        let _ = writeln!(
            out,
            "<path d=\"M{at} {TOP}v{HEIGHT}\" stroke=\"#888\" stroke-dasharray=\"6 4\"/>\
             <text x=\"{}\" y=\"{}\" fill=\"#555\">{says}</text>",
            at + 4.0,
            TOP + 14.0
        );
    }
    for (index, line) in panel.lines.iter().enumerate() {
        let share = index as f64 / panel.lines.len() as f64;
        let _ = writeln!(out, "{}", drawn(line, |step| x(step as f64 + 0.5), y, left + WIDTH * share));
    }
    out
}

/// A line, and its name below at `left`.
fn drawn(line: &Line<'_>, x: impl Fn(usize) -> f64, y: impl Fn(f64) -> f64, left: f64) -> String {
    let (colour, below) = (line.colour, TOP + HEIGHT + 66.0);
    let dashes = if line.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
    let point = |(step, value): (usize, &f64)| {
        let (x, y) = (x(step), y(*value));
        value.is_finite().then(|| format!("{x:.1},{y:.1}"))
    };
    let points: Vec<String> = line.values.iter().enumerate().filter_map(point).collect();
    format!(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}/>\n\
         <path d=\"M{left} {}h16\" stroke=\"{colour}\" stroke-width=\"3\"{dashes}/>\
         <text x=\"{}\" y=\"{below}\">{}</text>",
        points.join(" "),
        below - 4.0,
        left + 20.0,
        line.name
    )
}

/// The next of 1, 1.2, 1.6, 2, 4, 8 times a power of ten: ends of axes whose quarters are round.
fn ceiling(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-9).log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 4.0, 8.0, 10.0];
    steps.iter().map(|step| step * power).find(|end| *end >= value).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel_of(tenfold: bool, values: &[f64]) -> Panel<'static> {
        let line = Line { name: "a", colour: COLOURS[0], dashed: false, values: values.to_vec() };
        Panel { title: "t", unit: "ms", tenfold, lines: vec![line] }
    }

    #[test]
    fn a_tenfold_scale_reaches_from_below_the_least_to_above_the_most() {
        let scale = Scale::of(&panel_of(true, &[0.5, f64::NAN, 200.0]));
        assert_eq!(scale.ticks, [0.1, 1.0, 10.0, 100.0, 1000.0]);
        for (share, tick) in [0.0, 0.25, 0.5, 0.75, 1.0].into_iter().zip(&scale.ticks) {
            assert!((scale.share(*tick) - share).abs() < 1e-9, "{tick}");
        }
    }

    #[test]
    fn a_panel_without_values_is_drawn_empty() {
        for tenfold in [false, true] {
            let steps = Steps { title: "s", names: vec!["0".into(), "1".into()], rules: vec![(1, "here")] };
            let page = svg(&steps, &[panel_of(tenfold, &[f64::NAN, f64::NAN])]);
            assert!(page.contains("points=\"\"") && page.contains(">here<"), "{page}");
            assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        }
    }
}
