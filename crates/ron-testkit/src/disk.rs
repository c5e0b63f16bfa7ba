//! A file system that is soon full.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of a few MiB in memory.
#[derive(Debug)]
pub struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Of a size as `mount` reads it, such as `6m`; `None` where nobody may mount one.
    pub fn mount(size: &str) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().ok()?;
        let options = format!("size={size}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(dir.path()).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(SmallDisk(dir))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes up what room is left, until the file is removed.
    pub fn fill(&self) -> PathBuf {
        let ballast = self.path().join("ballast");
        let mut file = std::fs::File::create(&ballast).expect("a name needs no room");
        while file.write_all(&[0; 4096]).is_ok() {}
        ballast
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}
