//! From what is known and where one looks to the lines of a screen. Pure: the terminal comes later.

use super::keys::Key;
use super::model::{Fact, Model, Rate, fraction, span};
use crate::table::visible;
use std::time::Duration;

/// The pages, by the key that leads there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    All,
    Queues,
    Tenants,
    Refused,
    Sessions,
    Registry,
    Edge,
    Tasks,
    Routes,
}

pub(crate) const PAGES: [(Page, &str, &str); 9] = [
    (Page::All, "all", "every service"),
    (Page::Queues, "queues", "bounded queues, the fullest first"),
    (Page::Tenants, "tenants", "tenants of the gateway and its upstreams"),
    (Page::Refused, "refused", "refusals by reason, the most frequent first"),
    (Page::Sessions, "sessions", "sessions with other nodes"),
    (Page::Registry, "registry", "the registry's log"),
    (Page::Edge, "edge", "the edge's store"),
    (Page::Tasks, "tasks", "permanent tasks, those in trouble first"),
    (Page::Routes, "routes", "answers by route and status, the busiest first"),
];

/// Where one looks.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) page: Page,
    /// Which row of the page is chosen.
    row: usize,
    /// Only this service's rows.
    service: Option<String>,
    help: bool,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// What a key asks for beyond another view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    Nothing,
    /// All lines anew, for a terminal that was written over.
    Redraw,
    Suspend,
    Quit,
}

/// What is known of the node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Known<'a> {
    /// Nothing was answered yet.
    Waiting,
    Shown(&'a Model),
    /// What went wrong.
    Lost(&'a str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    /// The bar at the top.
    Bar,
    Head,
    Chosen,
    Alarm,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) text: String,
    pub(crate) style: Style,
}

/// The bar's words that do not come from the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bar<'a> {
    /// Where the node is.
    pub(crate) node: &'a str,
    pub(crate) interval: Duration,
    /// Since the last answer, if that is longer than it should be.
    pub(crate) silent: Option<Duration>,
}

impl View {
    pub(crate) fn new(width: usize, height: usize) -> View {
        View { page: Page::All, row: 0, service: None, help: false, width, height }
    }

    /// What a key changes.
    pub(crate) fn press(&mut self, key: Key, known: Known<'_>) -> Wish {
        let rows = match known {
            Known::Shown(model) => rows(&body(model, self)),
            _ => Vec::new(),
        };
        let last = rows.len().saturating_sub(1);
        let page = self.height.saturating_sub(6).max(1);
        self.row = self.row.min(last);
        let help = std::mem::take(&mut self.help);
        match key {
            Key::Char('q') | Key::Interrupt => return Wish::Quit,
            Key::Suspend => return Wish::Suspend,
            Key::Redraw => return Wish::Redraw,
            Key::Char('?' | 'h') => self.help = !help,
            Key::Char(digit @ '1'..='9') => self.go(PAGES[digit as usize - '1' as usize].0),
            Key::Tab | Key::Right => self.go(self.beside(1)),
            Key::Left => self.go(self.beside(PAGES.len() - 1)),
            Key::Up | Key::Char('k') => self.row = self.row.saturating_sub(1),
            Key::Down | Key::Char('j') => self.row = (self.row + 1).min(last),
            Key::PageUp => self.row = self.row.saturating_sub(page),
            Key::PageDown => self.row = (self.row + page).min(last),
            Key::Home => self.row = 0,
            Key::End => self.row = last,
            Key::Enter => {
                if let Some(service) = rows.get(self.row).and_then(Clone::clone) {
                    self.service = Some(service);
                    let page = if self.page == Page::All { Page::Queues } else { self.page };
                    self.go(page);
                }
            }
            Key::Escape if !help => {
                self.service = None;
                self.go(self.page);
            }
            Key::Escape | Key::Char(_) => {}
        }
        Wish::Nothing
    }

    fn go(&mut self, page: Page) {
        (self.page, self.row) = (page, 0);
    }

    fn beside(&self, steps: usize) -> Page {
        let at = PAGES.iter().position(|(page, ..)| *page == self.page).unwrap_or(0);
        PAGES[(at + steps) % PAGES.len()].0
    }

    fn wants(&self, service: &str) -> bool {
        self.service.as_ref().is_none_or(|wanted| wanted == service)
    }
}

/// The whole screen: exactly as many lines as it has, none wider.
pub(crate) fn screen(known: Known<'_>, view: &View, bar: &Bar<'_>) -> Vec<Line> {
    let line = |text: String, style| Line { text, style };
    let mut out = vec![line(first_line(known, bar), Style::Bar)];
    let tabs: Vec<String> =
        PAGES.iter().enumerate().map(|(at, (_, name, _))| format!("{} {name}", at + 1)).collect();
    out.push(line(tabs.join(" "), Style::Plain));
    let (_, name, about) = PAGES.iter().find(|(page, ..)| *page == view.page).unwrap_or(&PAGES[0]);
    let only = view.service.as_ref().map_or(String::new(), |service| format!("; only {service}, Esc: all"));
    out.push(line(format!("{}: {about}{only}", name.to_uppercase()), Style::Head));
    let room = view.height.saturating_sub(out.len() + 1);
    let (lines, place) = match known {
        Known::Shown(_) if view.help => (help(), String::new()),
        Known::Shown(model) => scrolled(&body(model, view), view, room),
        Known::Waiting => {
            (vec![line("Waiting for the first answer.".to_owned(), Style::Plain)], String::new())
        }
        Known::Lost(error) => {
            let mut lines: Vec<Line> =
                wrapped(error, view.width).into_iter().map(|text| line(text, Style::Alarm)).collect();
            lines.push(line(String::new(), Style::Plain));
            let again = format!("It is asked again every {}.", span(Some(bar.interval.as_secs_f64())));
            lines.push(line(again, Style::Plain));
            (lines, String::new())
        }
    };
    out.extend(lines);
    out.resize(view.height.saturating_sub(1), line(String::new(), Style::Plain));
    out.push(line(
        format!("q quit  ? help  1-9 pages  up/down rows  Enter: only that service  {place}"),
        Style::Head,
    ));
    // A terminal of a line or two still shows the node's state.
    out.truncate(view.height);
    for line in &mut out {
        line.text = cut(line.text.trim_end(), view.width);
    }
    out
}

fn first_line(known: Known<'_>, bar: &Bar<'_>) -> String {
    let state = match (known, bar.silent) {
        (Known::Waiting, _) => "waiting".to_owned(),
        (Known::Lost(_), _) => "NO ANSWER".to_owned(),
        (_, Some(silent)) => format!("NO ANSWER for {} s", silent.as_secs()),
        (Known::Shown(model), None) => {
            let missing = if model.missing.is_empty() {
                String::new()
            } else {
                format!(": {}", model.missing.join(" "))
            };
            match (model.ready, model.degraded) {
                (true, false) => "ready".to_owned(),
                (true, true) => format!("DEGRADED{missing}"),
                (false, _) => format!("NOT READY{missing}"),
            }
        }
    };
    let version = if let Known::Shown(model) = known { model.version.as_str() } else { "" };
    visible(format!("ron {version}  {}  {state}", bar.node).trim())
}

/// A line of a page, and whether it is a row that can be chosen: then, of which service it is.
struct Row {
    text: String,
    style: Style,
    choice: Option<Option<String>>,
}

/// For each row that can be chosen, its service.
fn rows(body: &[Row]) -> Vec<Option<String>> {
    body.iter().filter_map(|row| row.choice.clone()).collect()
}

/// The part of a page that fits, with the chosen row in it, and where that is.
fn scrolled(body: &[Row], view: &View, room: usize) -> (Vec<Line>, String) {
    let choices: Vec<usize> =
        body.iter().enumerate().filter(|(_, row)| row.choice.is_some()).map(|(at, _)| at).collect();
    let row = view.row.min(choices.len().saturating_sub(1));
    let chosen = choices.get(row).copied();
    let from = chosen.map_or(0, |at| (at + 1).saturating_sub(room));
    let shown = body.iter().enumerate().skip(from).take(room);
    let lines = shown.map(|(at, row)| {
        let mark = if chosen == Some(at) { ">" } else { " " };
        let style = if chosen == Some(at) { Style::Chosen } else { row.style };
        Line { text: format!("{mark}{}", row.text), style }
    });
    let place =
        if choices.is_empty() { String::new() } else { format!("row {} of {}", row + 1, choices.len()) };
    (lines.collect(), place)
}

fn body(model: &Model, view: &View) -> Vec<Row> {
    match view.page {
        Page::All => all(model, view),
        Page::Queues => queues(model, view),
        Page::Tenants => tenants(model),
        Page::Refused => refused(model, view, usize::MAX),
        Page::Sessions => sessions(model),
        Page::Registry => facts("registry", &model.registry),
        Page::Edge => facts("edge", &model.edge),
        Page::Tasks => tasks(model, view),
        Page::Routes => routes(model, view),
    }
}

/// Every page, one below the other, for a stream that is no terminal.
pub(crate) fn plain(model: &Model, node: &str) -> String {
    let bar = Bar { node, interval: Duration::ZERO, silent: None };
    let mut out = first_line(Known::Shown(model), &bar) + "\n";
    for (page, name, about) in PAGES {
        let view = View { page, ..View::new(usize::MAX, usize::MAX) };
        out += &format!("\n{}: {about}\n", name.to_uppercase());
        for row in body(model, &view) {
            out += row.text.trim_end();
            out.push('\n');
        }
    }
    out
}

/// Columns that line up; those with a name that begins with a blank are numbers and stand to the right.
struct Table {
    head: Vec<&'static str>,
    rows: Vec<(Vec<String>, Style, Option<String>)>,
}

impl Table {
    fn new(head: &[&'static str]) -> Table {
        Table { head: head.to_vec(), rows: Vec::new() }
    }

    fn push(&mut self, cells: Vec<String>, alarm: bool, service: Option<&str>) {
        let style = if alarm { Style::Alarm } else { Style::Plain };
        let cells = cells.iter().map(|cell| visible(cell)).collect();
        self.rows.push((cells, style, service.map(str::to_owned)));
    }

    fn rows(self) -> Vec<Row> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|(cells, ..)| cells[column].chars().count());
            cells.max().unwrap_or(0).max(self.head[column].trim().chars().count())
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let cells = cells.zip(&self.head).zip(&widths).map(|((cell, name), width)| {
                if name.starts_with(' ') { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        let head = line(&mut self.head.iter().map(|name| name.trim()));
        let mut out = vec![Row { text: head, style: Style::Head, choice: None }];
        if self.rows.is_empty() {
            out.push(said("none".to_owned()));
        }
        for (cells, style, service) in &self.rows {
            let text = line(&mut cells.iter().map(String::as_str));
            out.push(Row { text, style: *style, choice: Some(service.clone()) });
        }
        out
    }
}

fn said(text: String) -> Row {
    Row { text, style: Style::Plain, choice: None }
}

fn all(model: &Model, view: &View) -> Vec<Row> {
    let head =
        ["SERVICE", "STATE", " REQ/S", " REFUSED/S", " IN FLIGHT", " WAITING", " CONNS", " P50", " P99"];
    let mut table = Table::new(&head);
    for row in model.services.iter().filter(|row| view.wants(&row.name)) {
        let cells = vec![
            row.name.clone(),
            row.state.clone(),
            per_second(row.requests.per_second),
            per_second(row.refused.per_second),
            row.inflight.map_or("-".to_owned(), short),
            short(row.waiting),
            row.connections.map_or("-".to_owned(), short),
            span(row.p50),
            span(row.p99),
        ];
        table.push(cells, row.state != "ready", Some(&row.name));
    }
    let mut out = table.rows();
    out.push(said(String::new()));
    for (name, facts, shown) in [
        ("overlay", &model.overlay, &["sessions", "delivered", "duplicates", "frames refused"][..]),
        ("registry", &model.registry, &["head", "commits", "pending proposals", "checkpoint age (s)"]),
        ("edge", &model.edge, &["hits", "misses", "fills", "stored bytes"]),
    ] {
        let words: Vec<String> =
            facts.iter().filter(|fact| shown.contains(&fact.name)).map(in_words).collect();
        if !words.is_empty() && view.wants(name) {
            out.push(said(format!("{name:<8}  {}", words.join(", "))));
        }
    }
    for row in &model.upstreams {
        let upstream = format!(
            "upstream  {}: breaker {}, {} of {} servers healthy, {} of {} in flight",
            row.name, row.breaker, row.healthy, row.servers, row.inflight, row.max_inflight
        );
        let style = if row.breaker == "closed" { Style::Plain } else { Style::Alarm };
        out.push(Row { text: visible(&upstream), style, choice: None });
    }
    out.push(said(String::new()));
    out.extend(refused(model, view, 5).into_iter().map(|row| Row { choice: None, ..row }));
    out
}

fn in_words(fact: &Fact) -> String {
    let rate = fact.per_second.filter(|rate| *rate > 0.0);
    let rate = rate.map_or(String::new(), |rate| format!(" ({}/s)", per_second(Some(rate))));
    format!("{} {}{rate}", fact.name, fact.value)
}

fn queues(model: &Model, view: &View) -> Vec<Row> {
    let mut table =
        Table::new(&["SERVICE", "QUEUE", " DEPTH", " OF", "FULL", " DROPPED", " /S", "WHEN FULL"]);
    for row in model.queues.iter().filter(|row| view.wants(&row.service)) {
        let full = fraction(row);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most ten, at least none"
        )]
        let marks = (full * 10.0).ceil().clamp(0.0, 10.0) as usize;
        let room = if row.instances > 1.0 {
            format!("{}x{}", short(row.instances), short(row.capacity))
        } else {
            short(row.capacity)
        };
        let cells = vec![
            row.service.clone(),
            row.name.clone(),
            short(row.depth),
            room,
            format!("[{:<10}]", "#".repeat(marks)),
            short(row.dropped.total),
            per_second(row.dropped.per_second),
            row.policy.replace('_', " "),
        ];
        let dropping = row.dropped.per_second.is_some_and(|rate| rate > 0.0);
        table.push(cells, full >= 0.9 || dropping, Some(&row.service));
    }
    table.rows()
}

fn tenants(model: &Model) -> Vec<Row> {
    let mut table = Table::new(&["TENANT", "CLASS", " QUANTUM", " WAITING", " SHARE", " COST/S"]);
    for row in &model.tenants {
        let cells = vec![
            row.id.clone(),
            row.class.clone(),
            row.quantum.clone(),
            short(row.queued),
            short(row.share),
            per_second(row.served.per_second),
        ];
        table.push(cells, row.share > 0.0 && row.queued >= row.share, Some("gateway"));
    }
    let mut upstreams = Table::new(&["UPSTREAM", "BREAKER", " IN FLIGHT", " OF", " HEALTHY", " SERVERS"]);
    for row in &model.upstreams {
        let [inflight, max] = [row.inflight, row.max_inflight].map(short);
        let cells = vec![
            row.name.clone(),
            row.breaker.clone(),
            inflight,
            max,
            row.healthy.to_string(),
            row.servers.to_string(),
        ];
        upstreams.push(cells, row.breaker != "closed" || row.healthy < row.servers, Some("gateway"));
    }
    let mut out = token_note(model);
    out.extend(table.rows());
    out.push(said(String::new()));
    out.extend(upstreams.rows());
    out
}

fn token_note(model: &Model) -> Vec<Row> {
    let note = "The admin token is wanted to see this: --token T, RON_ADMIN__TOKEN, or --config FILE.";
    if model.token_wanted { vec![said(note.to_owned())] } else { Vec::new() }
}

fn refused(model: &Model, view: &View, most: usize) -> Vec<Row> {
    let mut table = Table::new(&["SERVICE", "REASON", " /S", " TOTAL"]);
    for row in model.refusals.iter().filter(|row| view.wants(&row.service)).take(most) {
        let Rate { total, per_second: rate } = row.count;
        let cells = vec![row.service.clone(), row.reason.clone(), per_second(rate), short(total)];
        table.push(cells, rate.is_some_and(|rate| rate > 0.0), Some(&row.service));
    }
    table.rows()
}

fn sessions(model: &Model) -> Vec<Row> {
    let mut out = token_note(model);
    let words: Vec<String> = model.overlay.iter().map(in_words).collect();
    for words in words.chunks(3) {
        out.push(said(words.join(", ")));
    }
    out.push(said(String::new()));
    let mut table = Table::new(&["NODE", "ADDRESS", "STATE", "BY", " RTT", " QUEUED", "ERROR"]);
    for row in &model.peers {
        let node: String = row.node.trim_start_matches("ed25519:").chars().take(12).collect();
        let cells = vec![
            node,
            row.address.clone(),
            row.state.clone(),
            row.direction.clone(),
            span(row.rtt_us.map(|us| us / 1e6)),
            row.queued.map_or("-".to_owned(), short),
            row.error.clone(),
        ];
        table.push(cells, !row.error.is_empty(), Some("overlay"));
    }
    out.extend(table.rows());
    out
}

fn facts(service: &str, facts: &[Fact]) -> Vec<Row> {
    if facts.is_empty() {
        return vec![said(format!("The node runs no {service}."))];
    }
    let mut table = Table::new(&["WHAT", " /S", "VALUE"]);
    for fact in facts {
        let rate = fact.per_second.map_or(String::new(), |rate| per_second(Some(rate)));
        table.push(vec![fact.name.to_owned(), rate, fact.value.clone()], false, Some(service));
    }
    table.rows()
}

fn tasks(model: &Model, view: &View) -> Vec<Row> {
    let mut table = Table::new(&["SERVICE", "TASK", " RUNNING", " NOT", " RESTARTS", "LAST EXIT"]);
    for row in model.tasks.iter().filter(|row| view.wants(&row.service)) {
        let [running, others, restarts] =
            [row.running, row.others, row.restarts].map(|number| number.to_string());
        let cells =
            vec![row.service.clone(), row.kind.clone(), running, others, restarts, row.last_exit.clone()];
        table.push(cells, row.others > 0, Some(&row.service));
    }
    table.rows()
}

fn routes(model: &Model, view: &View) -> Vec<Row> {
    let mut table = Table::new(&["SERVICE", "METHOD", "STATUS", " /S", " TOTAL", "ROUTE"]);
    for row in model.routes.iter().filter(|row| view.wants(&row.service)) {
        let Rate { total, per_second: rate } = row.count;
        let (method, status) = (row.method.clone(), row.status.clone());
        let alarm = status.starts_with('5') && rate.is_some_and(|rate| rate > 0.0);
        let cells =
            vec![row.service.clone(), method, status, per_second(rate), short(total), row.route.clone()];
        table.push(cells, alarm, Some(&row.service));
    }
    table.rows()
}

fn help() -> Vec<Line> {
    let mut text = vec![
        "1 to 9           another page; Tab, left and right go from one to the next".to_owned(),
        "up, down, j, k   choose a row; Page up, Page down, Home, End".to_owned(),
        "Enter            only the service of that row, on every page; Esc: all again".to_owned(),
        "Ctrl-L           draw everything anew".to_owned(),
        "q, Ctrl-C        quit".to_owned(),
        String::new(),
    ];
    for (at, (_, name, about)) in PAGES.iter().enumerate() {
        text.push(format!("{}  {name:<9} {about}", at + 1));
    }
    text.push(String::new());
    text.push("/S is per second between the last two looks; P50 and P99 are of the same time.".to_owned());
    text.into_iter().map(|text| Line { text, style: Style::Plain }).collect()
}

/// A text of at most so many columns; that something is missing is seen.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain((width > 0).then_some('~')).collect()
}

/// Words on lines of at most so many columns.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut out = vec![String::new()];
    for word in visible(text).split(' ') {
        let line = out.last_mut().expect("there is a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            out.push(word.to_owned());
        }
    }
    out
}

fn per_second(rate: Option<f64>) -> String {
    match rate {
        None => "-".to_owned(),
        Some(rate) if rate > 0.0 && rate < 9.95 => format!("{rate:.1}"),
        Some(rate) => short(rate),
    }
}

/// A number in at most six columns.
fn short(number: f64) -> String {
    match number {
        n if n < 99_999.5 => format!("{n:.0}"),
        n if n < 9_999_500.0 => format!("{:.0}k", n / 1e3),
        n if n < 9_999_500_000.0 => format!("{:.0}M", n / 1e6),
        n => format!("{:.0}G", n / 1e9),
    }
}

#[cfg(test)]
mod tests;
