//! The terminal: raw while the dashboard is shown, and as it was before whatever happens.

use super::screen::{Line, Style};
use rustix::termios::{OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Another screen than the one that scrolls, no cursor, no wrapping.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
/// How long a read waits for a key.
const TYPING: Duration = Duration::from_millis(500);
const LEAVE: &str = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l";

/// A terminal that shows the dashboard. When it is dropped the terminal is as it was.
#[derive(Debug)]
pub(crate) struct Terminal {
    input: Arc<File>,
    colours: bool,
    before: Arc<Before>,
}

/// The terminal and how it was.
#[derive(Debug)]
struct Before {
    output: File,
    modes: Termios,
}

impl Before {
    /// A terminal that is gone cannot be mended.
    fn restore(&self) {
        let _ = (&self.output).write_all(LEAVE.as_bytes());
        let _ = tcsetattr(&self.output, OptionalActions::Drain, &self.modes);
    }

    fn enter(&self) -> io::Result<()> {
        let mut raw = self.modes.clone();
        raw.make_raw();
        // A read waits for a while only, in tenths of a second, so that whoever reads can also end.
        raw.special_codes[SpecialCodeIndex::VMIN] = 0;
        raw.special_codes[SpecialCodeIndex::VTIME] = (TYPING.as_millis() / 100) as u8;
        tcsetattr(&self.output, OptionalActions::Drain, &raw)?;
        (&self.output).write_all(ENTER.as_bytes())
    }
}

impl Terminal {
    /// Takes the terminal that both ends are.
    pub(crate) fn enter(input: OwnedFd, output: OwnedFd, colours: bool) -> io::Result<Terminal> {
        let (input, output) = (File::from(input), File::from(output));
        let before = Arc::new(Before { modes: tcgetattr(&output)?, output });
        let terminal = Terminal { input: Arc::new(input), colours, before };
        terminal.before.enter()?;
        Ok(terminal)
    }

    /// From now on a panic's message is written to the terminal as it was.
    pub(crate) fn restore_before_panics(&self) {
        let (before, then) = (self.before.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |info| {
            before.restore();
            then(info);
        }));
    }

    /// Columns and lines; a terminal that does not say has the usual ones.
    pub(crate) fn size(&self) -> (usize, usize) {
        let size = tcgetwinsize(&self.before.output).ok();
        let size = size.map(|size| (usize::from(size.ws_col), usize::from(size.ws_row)));
        size.filter(|(width, height)| *width > 0 && *height > 0).unwrap_or((80, 24))
    }

    /// What is typed within a while, as soon as something is; none when the terminal is gone. Blocks.
    pub(crate) fn typing(&self) -> impl FnOnce() -> Option<Vec<u8>> + Send + 'static {
        let input = self.input.clone();
        move || {
            let (begun, mut buffer) = (Instant::now(), [0; 256]);
            match (&*input).read(&mut buffer) {
                // Only a terminal that is gone gives nothing at once.
                Ok(0) if begun.elapsed() < TYPING / 2 => None,
                Ok(read) => Some(buffer[..read].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => Some(Vec::new()),
                Err(_gone) => None,
            }
        }
    }

    /// Draws over what was there; nothing is cleared first, so nothing flickers.
    pub(crate) fn draw(&self, lines: &[Line]) -> io::Result<()> {
        let mut out = String::from("\x1b[H");
        for (at, line) in lines.iter().enumerate() {
            let (begin, end) = self.codes(line.style);
            let next = if at == 0 { "" } else { "\r\n" };
            out += &format!("{next}{begin}{}{end}\x1b[K", line.text);
        }
        (&self.before.output).write_all((out + "\x1b[J").as_bytes())
    }

    /// Everything is said by words; this only makes it easier to find.
    fn codes(&self, style: Style) -> (&'static str, &'static str) {
        match style {
            Style::Plain => ("", ""),
            Style::Bar | Style::Chosen => ("\x1b[7m", "\x1b[0m"),
            Style::Head => ("\x1b[1m", "\x1b[0m"),
            Style::Alarm if self.colours => ("\x1b[31m", "\x1b[0m"),
            Style::Alarm => ("\x1b[1m", "\x1b[0m"),
        }
    }

    /// Clears what others wrote.
    pub(crate) fn clear(&self) -> io::Result<()> {
        (&self.before.output).write_all(b"\x1b[2J")
    }

    /// Gives the terminal back, stops until somebody lets the process go on, and takes it again.
    pub(crate) fn suspend(&self) -> io::Result<()> {
        self.before.restore();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TSTP)?;
        self.before.enter()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.before.restore();
    }
}

/// Standard input and output, if both are one terminal that can be drawn on.
pub(crate) fn of_this_process() -> Option<(OwnedFd, OwnedFd)> {
    use std::io::IsTerminal as _;
    let (input, output) = (io::stdin(), io::stdout());
    let able = std::env::var_os("TERM").is_some_and(|term| term != "dumb" && !term.is_empty());
    if !able || !input.is_terminal() || !output.is_terminal() {
        return None;
    }
    Some((input.as_fd().try_clone_to_owned().ok()?, output.as_fd().try_clone_to_owned().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    use rustix::termios::LocalModes;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn pair() -> (File, OwnedFd) {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let user = ioctl_tiocgptpeer(&controller, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        (File::from(controller), user)
    }

    fn is_cooked(user: &OwnedFd) -> bool {
        let modes = tcgetattr(user).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    #[test]
    fn the_terminal_is_as_it_was_after_a_panic_and_before_its_message() {
        let (mut controller, user) = pair();
        assert!(is_cooked(&user));
        let (ends, seen) =
            ((user.try_clone().unwrap(), user.try_clone().unwrap()), user.try_clone().unwrap());
        let told = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (was_cooked, usual) = (told.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |info| {
            was_cooked.store(is_cooked(&seen), std::sync::atomic::Ordering::Relaxed);
            usual(info);
        }));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let terminal = Terminal::enter(ends.0, ends.1, false).unwrap();
            terminal.restore_before_panics();
            assert!(!is_cooked(&user), "raw while it is shown");
            panic!("on purpose");
        }));
        assert!(ended.is_err());
        assert!(told.load(std::sync::atomic::Ordering::Relaxed), "the message came to a raw terminal");
        assert!(is_cooked(&user));
        let mut buffer = [0; 1024];
        let read = controller.read(&mut buffer).unwrap();
        let shown = String::from_utf8_lossy(&buffer[..read]);
        assert!(shown.starts_with(ENTER) && shown.ends_with(LEAVE), "{shown:?}");
    }
}
