//! Chromium, driven through the pipes of its own protocol: one command at a time, answers as they come.

use base64::Engine as _;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a page may take to show what is waited for; its software renderer shares the machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page.
pub(crate) struct Browser {
    child: Child,
    commands: File,
    answers: BufReader<File>,
    session: Option<String>,
    sent: u64,
    _folder: TempDir,
}

impl Browser {
    pub(crate) fn open(url: &str) -> Browser {
        let folder = tempfile::tempdir().unwrap();
        let made = Command::new("mkfifo").args(["commands", "answers"]).current_dir(folder.path()).status();
        assert!(made.unwrap().success());
        // The shell gives it the two descriptors that it expects, and is then replaced by it.
        let script = "exec chromium --headless --no-sandbox --disable-dev-shm-usage --no-first-run \
            --use-angle=swiftshader --enable-unsafe-swiftshader --window-size=800,600 --remote-debugging-pipe \
            --user-data-dir=profile about:blank 3<commands 4>answers 2>log";
        let child = Command::new("sh").args(["-c", script]).current_dir(folder.path()).spawn().unwrap();
        let commands = File::options().write(true).open(folder.path().join("commands")).unwrap();
        let answers = BufReader::new(File::open(folder.path().join("answers")).unwrap());
        let mut browser = Browser { child, commands, answers, session: None, sent: 0, _folder: folder };
        let page = browser.call("Target.createTarget", &json!({"url": url}));
        let wanted = json!({"targetId": page["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", &wanted);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        browser
    }

    fn call(&mut self, method: &str, params: &Value) -> Value {
        self.sent += 1;
        let mut command = json!({"id": self.sent, "method": method, "params": params});
        if let Some(session) = &self.session {
            command["sessionId"] = session.as_str().into();
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).unwrap();
        loop {
            let mut answer = Vec::new();
            let read = self.answers.read_until(0, &mut answer).unwrap();
            assert!(read > 0, "chromium has ended; is it installed? `cargo xtask test` does that");
            let answer: Value = serde_json::from_slice(answer.strip_suffix(b"\0").unwrap()).unwrap();
            if answer["id"] == self.sent {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    /// The value of an expression in the page.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let wanted = json!({"expression": expression, "returnByValue": true});
        self.call("Runtime.evaluate", &wanted)["result"]["value"].clone()
    }

    /// Waits until an expression has a value that is not null.
    pub(crate) fn wait_for(&mut self, expression: &str) -> Value {
        let begun = Instant::now();
        loop {
            let value = self.evaluate(expression);
            if !value.is_null() {
                return value;
            }
            let page = self.evaluate("document.documentElement.outerHTML");
            assert!(begun.elapsed() < PATIENCE, "{expression} never had a value: {page}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// A picture of the page, as PNG.
    pub(crate) fn picture(&mut self) -> Vec<u8> {
        let shot = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        base64::engine::general_purpose::STANDARD.decode(shot["data"].as_str().unwrap()).unwrap()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
