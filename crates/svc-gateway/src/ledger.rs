//! The ledger of buffered bytes: what has been read from one side and not yet been taken by the other, by tenant and
//! in all. Every piece of a streamed body is booked when it is read and given back when its last copy is dropped,
//! wherever that is: in a socket's write, or in the buffers of HTTP/2.

use bytes::Bytes;
use ron_kernel::http::Body;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Beyond the limit by this factor (in quarters), nobody is let in.
const HARD_QUARTERS: u64 = 5;

/// All accounts together.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    held: AtomicU64,
    limit: AtomicU64,
}

/// One tenant's account.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) tenant: String,
    held: AtomicU64,
    ledger: Arc<Ledger>,
}

/// What the ledger says to a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Fine,
    /// The ledger is full and the tenant holds more than its part, which is this much.
    OverShare(u64),
    /// The ledger is more than full, whoever's fault it is.
    Full,
}

impl Ledger {
    pub(crate) fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// An account for each name; those of before are kept with what they hold.
    pub(crate) fn accounts<'a>(
        self: &Arc<Self>,
        tenants: impl Iterator<Item = &'a str>,
        former: &[Arc<Account>],
    ) -> Vec<Arc<Account>> {
        let former: HashMap<&str, &Arc<Account>> =
            former.iter().map(|account| (account.tenant.as_str(), account)).collect();
        let fresh = |tenant: &str| {
            let (held, ledger) = (AtomicU64::new(0), self.clone());
            Arc::new(Account { tenant: tenant.to_owned(), held, ledger })
        };
        tenants
            .map(|tenant| former.get(tenant).map_or_else(|| fresh(tenant), |known| (*known).clone()))
            .collect()
    }
}

impl Account {
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether this tenant may begin another request, among all the accounts there are.
    pub(crate) fn room(&self, all: &[Arc<Account>]) -> Room {
        let (held, limit) =
            (self.ledger.held.load(Ordering::Relaxed), self.ledger.limit.load(Ordering::Relaxed));
        if held <= limit {
            return Room::Fine;
        }
        let holders = all.iter().filter(|account| account.held() > 0).count().max(1) as u64;
        let share = limit / holders;
        if self.held() > share {
            Room::OverShare(share)
        } else if held > limit / 4 * HARD_QUARTERS {
            Room::Full
        } else {
            Room::Fine
        }
    }

    /// A body whose pieces are booked as they come.
    pub(crate) fn booked(self: &Arc<Self>, body: Body) -> Body {
        let account = self.clone();
        body.map_data(move |piece| Ok(account.book(piece)))
    }

    /// Books a piece until its last copy is gone.
    pub(crate) fn book(self: &Arc<Self>, piece: Bytes) -> Bytes {
        if piece.is_empty() {
            return piece;
        }
        let length = piece.len() as u64;
        self.held.fetch_add(length, Ordering::Relaxed);
        self.ledger.held.fetch_add(length, Ordering::Relaxed);
        Bytes::from_owner(Booked { piece, account: self.clone() })
    }
}

struct Booked {
    piece: Bytes,
    account: Arc<Account>,
}

impl AsRef<[u8]> for Booked {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        let length = self.piece.len() as u64;
        self.account.held.fetch_sub(length, Ordering::Relaxed);
        self.account.ledger.held.fetch_sub(length, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_booked_until_their_last_copy_is_gone() {
        let ledger = Arc::new(Ledger::default());
        ledger.set_limit(100);
        let accounts = ledger.accounts(["a", "b"].into_iter(), &[]);
        let [a, b] = [&accounts[0], &accounts[1]];
        let piece = a.book(Bytes::from(vec![0; 80]));
        let part = piece.slice(..10);
        let _small = b.book(Bytes::from(vec![0; 10]));
        assert_eq!((a.held(), a.room(&accounts)), (80, Room::Fine));
        let more = b.book(Bytes::from(vec![0; 20]));
        assert_eq!((a.room(&accounts), b.room(&accounts)), (Room::OverShare(50), Room::Fine));
        let most = a.book(Bytes::from(vec![0; 80]));
        assert_eq!(b.room(&accounts), Room::Full, "past the limit by more than a quarter");
        let again = ledger.accounts(["b", "c", "a"].into_iter(), &accounts);
        assert_eq!((again[2].held(), again[1].held()), (160, 0), "a reload forgets nothing");
        drop((piece, most, more));
        assert_eq!((a.held(), b.held()), (80, 10), "a part keeps the whole");
        drop(part);
        assert_eq!((a.held(), ledger.held.load(Ordering::Relaxed)), (0, 10));
    }
}
