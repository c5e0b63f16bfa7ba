//! `ron top`, on a terminal and off one.

use ron_testkit::{Node, command, get, ron};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{SpecialCodeIndex, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Every service, on free ports.
const WHOLE: &str = "[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n\
    [[gateway.tenants]]\nid = \"acme\"\nkeys = []\n\
    [[gateway.upstreams]]\nname = \"nobody\"\nservers = [\"http://127.0.0.1:1\"]\n\
    [[gateway.routes]]\npath = \"/*\"\nupstream = \"nobody\"\n[edge]\nlisten = \"127.0.0.1:0\"\n\
    [overlay]\nlisten = \"127.0.0.1:0\"\n[registry]\nlisten = \"127.0.0.1:0\"\n";

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ron.toml"), WHOLE).unwrap();
    dir
}

fn node() -> Node {
    Node::spawn(folder(), &["up", "--config", "ron.toml"], &[])
}

/// A terminal with `ron top` on it, as a user has it.
struct Screen {
    controller: File,
    user: OwnedFd,
    seen: Arc<Mutex<Vec<u8>>>,
    child: Child,
}

fn size(width: u16, height: u16) -> Winsize {
    Winsize { ws_col: width, ws_row: height, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Screen {
    fn open(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Screen {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let controller = openpt(flags).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        tcsetwinsize(&controller, size(80, 24)).unwrap();
        let user = ioctl_tiocgptpeer(&controller, flags).unwrap();
        let top = command(args, dir);
        // In a session of its own, whose terminal tells it when its size changes.
        let mut session = Command::new("setsid");
        session.arg("--ctty").arg(top.get_program()).args(top.get_args()).current_dir(dir);
        session.env_remove("NO_COLOR").env("TERM", "xterm").envs(env.iter().copied());
        let end = || user.try_clone().unwrap();
        session.stdin(end()).stdout(end()).stderr(end());
        let child = session.spawn().expect("setsid is everywhere");
        let controller = File::from(controller);
        let (seen, mut reader) = (Arc::new(Mutex::new(Vec::new())), controller.try_clone().unwrap());
        let all = seen.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = reader.read(&mut buffer) {
                all.lock().unwrap().extend_from_slice(&buffer[..read]);
            }
        });
        Screen { controller, user, seen, child }
    }

    fn all(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    /// The lines of the last screen that was drawn as a whole.
    fn lines(&self) -> Vec<String> {
        let all = self.all();
        let Some((drawn, _)) = all.rsplit_once("\x1b[J") else { return Vec::new() };
        let Some((_, last)) = drawn.rsplit_once("\x1b[H") else { return Vec::new() };
        let plain = ["\x1b[K", "\x1b[0m", "\x1b[1m", "\x1b[7m", "\x1b[31m"]
            .iter()
            .fold(last.to_owned(), |text, code| text.replace(code, ""));
        plain.split("\r\n").map(str::to_owned).collect()
    }

    fn press(&mut self, keys: &str) {
        self.controller.write_all(keys.as_bytes()).unwrap();
    }

    fn eventually(&self, what: &str, holds: impl Fn(&[String]) -> bool) {
        let begun = Instant::now();
        while !holds(&self.lines()) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what} never held: {:#?}", self.lines());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn shows(&self, text: &str) {
        self.eventually(text, |lines| lines.iter().any(|line| line.contains(text)));
    }

    /// What of the terminal's modes a shell would notice.
    fn modes(&self) -> String {
        let modes = tcgetattr(&self.user).unwrap();
        let minimum = modes.special_codes[SpecialCodeIndex::VMIN];
        format!("{:?} {:?} {:?} {minimum}", modes.input_modes, modes.output_modes, modes.local_modes)
    }

    fn wait(&mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "it does not end: {:#?}", self.lines());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ended, and the terminal is as it was: modes, cursor, wrapping, the screen that scrolls.
    fn is_restored(&mut self, modes: &str) {
        assert_eq!(self.wait(), Some(0), "{}", self.all());
        assert_eq!(self.modes(), modes);
        let begun = Instant::now();
        while !self.all().ends_with("\x1b[?7h\x1b[?25h\x1b[?1049l") {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", self.all().split_off(0));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const TOP: [&str; 5] = ["top", "--config", "ron.toml", "--interval", "200ms"];

#[test]
fn keys_and_sizes_change_the_screen_and_the_terminal_is_left_as_it_was() {
    let node = node();
    let cooked = Screen::open(node.dir.path(), &["--version"], &[]).modes();
    let mut screen = Screen::open(node.dir.path(), &TOP, &[]);
    screen.shows("ready");
    screen.eventually("24 lines of the node", |lines| lines.len() == 24 && lines[0].contains(&node.admin()));
    for service in ["gateway", "edge", "overlay", "registry"] {
        screen.shows(service);
    }
    assert_ne!(screen.modes(), cooked, "keys are read one by one");
    get(&node.gateway(), "/nobody-is-there");
    screen.press("4");
    screen.shows("upstream_error");
    screen.press("3");
    screen.shows("acme");
    screen.press("6");
    screen.shows("b3:");
    // From the overview down to the second service, and into it.
    screen.press("1");
    screen.shows(">edge");
    screen.press("\x1b[B");
    screen.shows(">gateway");
    screen.press("\r");
    screen.shows("only gateway");
    screen.eventually("its queues alone", |lines| !lines.iter().any(|line| line.contains("proposals")));
    screen.press("?");
    screen.shows("Ctrl-L");
    screen.press("\x1b");
    for (width, height) in [(132, 50), (40, 10), (20, 3), (80, 24)] {
        tcsetwinsize(&screen.controller, size(width, height)).unwrap();
        screen.eventually("the new size", |lines| {
            let fits = lines.iter().all(|line| line.chars().count() <= usize::from(width));
            lines.len() == usize::from(height) && fits
        });
    }
    screen.press("q");
    screen.is_restored(&cooked);
}

#[test]
fn signals_and_interrupts_leave_the_terminal_as_it_was() {
    let node = node();
    let cooked = Screen::open(node.dir.path(), &["--version"], &[]).modes();
    for signal in ["TERM", "INT", "HUP"] {
        let mut screen = Screen::open(node.dir.path(), &TOP, &[]);
        screen.shows("ready");
        let told =
            Command::new("kill").args([&format!("-{signal}"), &screen.child.id().to_string()]).status();
        assert!(told.unwrap().success());
        screen.is_restored(&cooked);
    }
    let mut screen = Screen::open(node.dir.path(), &TOP, &[]);
    screen.shows("ready");
    screen.press("\x03");
    screen.is_restored(&cooked);
}

#[test]
fn a_node_that_does_not_answer_is_waited_for() {
    let dir = folder();
    let mut screen = Screen::open(dir.path(), &TOP, &[]);
    screen.shows("NO ANSWER");
    screen.shows("start it with `ron up`");
    // Words alone say it where colours are not wanted.
    assert!(screen.all().contains("\x1b[31m"));
    let plain = Screen::open(dir.path(), &TOP, &[("NO_COLOR", "1")]);
    plain.shows("NO ANSWER");
    assert!(!plain.all().contains("\x1b[31m"));
    let mut node = Node::spawn(dir, &["up", "--config", "ron.toml"], &[]);
    screen.shows("ready");
    assert_eq!(node.stop(), 0);
    screen.shows("NO ANSWER");
    screen.press("q");
    assert_eq!(screen.wait(), Some(0));
}

#[test]
fn off_a_terminal_everything_is_printed_once() {
    let node = node();
    get(&node.gateway(), "/nobody-is-there");
    let shown = ron(&TOP, node.dir.path());
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.status.success() && !text.contains('\x1b'), "{text}");
    for part in ["ready", "QUEUES", "upstream_error", "acme", "proposals", "deep_verifier", "head"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let shown = ron(&[&TOP[..], &["--json"]].concat(), node.dir.path());
    let sample: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!((&sample["ready"], sample["services"].as_array().unwrap().len()), (&true.into(), 4));
    let row = |list: &str, key: &str, value: &str| {
        let rows = sample[list].as_array().unwrap().iter();
        rows.clone().find(|row| row[key] == value).unwrap_or_else(|| panic!("no {value} in {list}")).clone()
    };
    assert_eq!(row("refusals", "reason", "upstream_error")["count"]["total"], 1.0);
    assert!(row("services", "service", "gateway")["requests"]["per_second"].is_number());
    assert_eq!(row("tenants", "id", "acme")["queued"], 0.0);
    assert_eq!(sample["registry"]["head"]["value"], "0");
    // By its address alone: what needs the token is not shown, and that is said.
    let url = format!("http://{}", node.admin());
    let shown = ron(&["top", "--url", &url, "--interval", "200ms", "--json"], Path::new("/"));
    let sample: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!((&sample["token_wanted"], &sample["tenants"]), (&true.into(), &serde_json::json!([])));
}

#[test]
fn what_cannot_be_is_said_at_once() {
    let dir = folder();
    let check = |args: &[&str], code: i32, said: &str| {
        let output = ron(args, dir.path());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(said), "{text}");
    };
    check(&["top", "--interval", "1ms", "--config", "ron.toml"], 64, "between 200ms and 1m");
    check(&["top", "--url", "nowhere"], 64, "expected the admin listener's URL");
    check(&["top"], 64, "there is no ./ron-data here");
    check(&["top", "--config", "ron.toml"], 1, "start it with `ron up`");
    let origin = ron_testkit::Origin::start(|_| ron_testkit::Script::Body(b"hi".to_vec()));
    check(&["top", "--url", &origin.url()], 1, "is no admin plane of a ron node");
}
