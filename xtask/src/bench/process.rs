//! What a process and its children use, from `/proc`.

use std::process::Command;

/// `USER_HZ`, which Linux keeps at 100 towards programs.
const TICKS: f64 = 100.0;
/// Where the proxy under test runs, and where everything else does.
pub(crate) const PROXY_CORE: &str = "0";
pub(crate) const CLIENT_CORE: &str = "1";

/// Seconds of processor time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpu {
    pub(crate) user: f64,
    pub(crate) system: f64,
}

impl Cpu {
    pub(crate) fn of(pid: u32) -> Cpu {
        let mut sum = Cpu { user: 0.0, system: 0.0 };
        for pid in tree(pid) {
            let fields = stat(pid);
            let field = |n: usize| fields.get(n).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
            // utime and stime are the 14th and 15th field, followed by those of children that have ended; what is
            // before the third was cut off.
            sum.user += (field(11) + field(13)) / TICKS;
            sum.system += (field(12) + field(14)) / TICKS;
        }
        sum
    }

    /// Seconds of both kinds that a process itself has had, without its children.
    pub(crate) fn own(pid: u32) -> f64 {
        let fields = stat(pid);
        let field = |n: usize| fields.get(n).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (field(11) + field(12)) / TICKS
    }

    pub(crate) fn since(self, before: Cpu) -> Cpu {
        Cpu { user: self.user - before.user, system: self.system - before.system }
    }

    pub(crate) fn total(self) -> f64 {
        self.user + self.system
    }
}

/// Resident memory of a process and its children in MiB.
pub(crate) fn rss_mib(pid: u32) -> f64 {
    let one = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().trim_end_matches(" kB").parse::<f64>().ok()
    };
    tree(pid).into_iter().filter_map(one).sum::<f64>() / 1024.0
}

/// Keeps a process, with all its threads, on one core.
pub(crate) fn pin(pid: u32, core: &str) -> bool {
    let output = Command::new("taskset").args(["-a", "-c", "-p", core, &pid.to_string()]).output();
    output.is_ok_and(|output| output.status.success())
}

/// The fields of `/proc/PID/stat` from the third on: the second, a name, may hold anything.
fn stat(pid: u32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_whitespace().map(str::to_owned).collect()
}

/// A process and its children, to any depth.
fn tree(root: u32) -> Vec<u32> {
    let all: Vec<u32> = std::fs::read_dir("/proc")
        .map(|dir| dir.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
        .unwrap_or_default();
    let parent = |pid: u32| stat(pid).get(1).and_then(|text| text.parse::<u32>().ok());
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let of = found[next];
        found.extend(all.iter().copied().filter(|pid| parent(*pid) == Some(of)));
        next += 1;
    }
    found
}
