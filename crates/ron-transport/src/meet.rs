//! Two nodes that dial each other end up with one session, and both with the same.

use oap::NodeId;
use oap::session::Role;

/// Whether a session that opens now takes the place of an open one with the same node. Of two that were dialled from
/// different sides, the one that the lower key dialled stays; of two from one side the newer does, since whoever
/// dials again has lost the older.
pub fn newer_stays(own: NodeId, peer: NodeId, older: Role, newer: Role) -> bool {
    let ours_stay = own < peer;
    older == newer || ours_stay == (newer == Role::Dialer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Which of two sessions a node keeps, as the side that dialled it, when they open in some order.
    fn kept(own: NodeId, peer: NodeId, first: Role, second: Role) -> NodeId {
        let stays = if newer_stays(own, peer, first, second) { second } else { first };
        if stays == Role::Dialer { own } else { peer }
    }

    proptest! {
        #[test]
        fn both_sides_keep_the_same_session_in_whatever_order_they_open(a: [u8; 32], b: [u8; 32]) {
            prop_assume!(a != b);
            let (a, b) = (NodeId(a), NodeId(b));
            let orders = [(Role::Dialer, Role::Listener), (Role::Listener, Role::Dialer)];
            let expected = kept(a, b, Role::Dialer, Role::Listener);
            for (first, second) in orders {
                prop_assert_eq!(kept(a, b, first, second), expected);
                prop_assert_eq!(kept(b, a, first, second), expected);
            }
        }

        #[test]
        fn a_node_that_dials_again_gets_its_newer_session(a: [u8; 32], b: [u8; 32]) {
            prop_assert!(newer_stays(NodeId(a), NodeId(b), Role::Listener, Role::Listener));
        }
    }
}
