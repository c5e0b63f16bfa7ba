//! What readers see: HEAD and the items, swapped in as a whole after each batch. Nobody waits for the writer.

use ron_log::{B3, Head, State, Tree};

/// The last entry, as it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadInfo {
    pub(crate) version: u64,
    pub(crate) hash: B3,
    pub(crate) payload_b3: B3,
    /// The version that last changed the signer set.
    pub(crate) signers_version: u64,
    pub(crate) committed_at: u64,
}

impl HeadInfo {
    pub(crate) fn head(&self) -> Head {
        Head { version: self.version, hash: self.hash }
    }
}

/// The registry after an entry.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) head: HeadInfo,
    pub(crate) state: State,
    pub(crate) tree: Tree,
}
