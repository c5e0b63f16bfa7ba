//! Following a registry: what it governs is checked here, added to the file's configuration, and swapped in as a whole.
//!
//! [`begin`] reads the configuration with what was kept from before, [`start`] goes on from there. `source` asks,
//! `ron_log::Follower` judges, `set` says what items mean to the configuration, `layers` which of them is in force,
//! `keep` what outlives the process, `task` is the life of it.

mod keep;
mod layers;
mod notice;
mod set;
mod source;
mod task;
#[cfg(test)]
mod tests;

pub use keep::Found;
pub use layers::Layers;
pub(crate) use set::validate;
pub use source::FOLLOW_IDLE;
pub use task::{Parts, STATUS, TASK, start};

use crate::config::Config;
use keep::{Keep, Kept, trust_roots};
use notice::Notice;
use ron_kernel::config::{Loaded, Sources};
use ron_kernel::kernel::Service;
use ron_kernel::node::DataDir;
use ron_log::TrustRoots;
use set::Set;
use std::sync::Arc;

/// The configuration with what was kept of a registry, and what is needed to follow it further.
#[derive(Debug)]
pub struct Begun {
    pub loaded: Loaded<Config>,
    pub layers: Arc<Layers>,
    keep: Keep,
    /// None if nothing is followed, or the registry of this process has yet to make its trust roots.
    kept: Option<(TrustRoots, Kept)>,
}

/// Reads the configuration: the file and, if a registry is followed, the last that was good of what it governs.
pub fn begin(
    service: &Service,
    sources: &Sources,
    file: Loaded<Config>,
    data: &DataDir,
) -> anyhow::Result<Begun> {
    let node = &file.value.node;
    let keep = Keep::new(data, node.amnesia);
    let notice = Notice::new(service);
    let Some(follow) = &node.follow else {
        let layers = Arc::new(Layers::new(notice));
        return Ok(Begun { loaded: file, layers, keep, kept: None });
    };
    let path = data.join(&follow.trust_roots);
    if follow.url.is_empty() && !path.exists() {
        let layers = Arc::new(Layers::new(notice));
        return Ok(Begun { loaded: file, layers, keep, kept: None });
    }
    let roots = trust_roots(&path, &follow.trust_roots_b3)?;
    let kept = keep.read(&roots)?;
    let (loaded, layers) = Layers::begin(notice, sources, Set::of(&kept.follower), kept.good.clone())?;
    Ok(Begun { loaded, layers: Arc::new(layers), keep, kept: Some((roots, kept)) })
}

/// The effective configuration of a node that need not run, and what stands in the way of something newer.
pub fn effective(
    sources: &Sources,
    file: Loaded<Config>,
    data: &DataDir,
) -> anyhow::Result<(Loaded<Config>, Vec<String>)> {
    let begun = begin(&ron_kernel::kernel::Kernel::new().service("kernel"), sources, file, data)?;
    let sets = begun.layers.sets();
    let mut remarks = Vec::new();
    if let Some(rejected) = sets.rejected {
        let in_force = match sets.in_force.is_empty() {
            true => "the file alone is in force".to_owned(),
            false => format!("version {} is in force", sets.in_force.version),
        };
        remarks.push(format!("registry version {} is rejected, {in_force}:", rejected.version));
        remarks.extend(rejected.problems.iter().map(|problem| format!("  {problem}")));
    }
    if let Some(found) = begun.kept.and_then(|(_, kept)| kept.evidence) {
        remarks.push(format!("{}: `ron registry evidence` shows it", found.evidence));
    }
    Ok((begun.loaded, remarks))
}
