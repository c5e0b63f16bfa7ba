//! The store as a whole: durable, checked, bounded.

use super::*;
use crate::cache::{Exchange, Policy, StoredHead, UnixMillis, judge};
use crate::semantics::Coding;
use http::HeaderMap;
use http::header::{IF_MATCH, IF_NONE_MATCH};
use ron_kernel::kernel::Kernel;
use std::fs::File;
use std::time::Duration;

fn settings(max_bytes: u64, trust: Trust) -> Settings {
    Settings { max_bytes, responses_max: 50, trust, pins: vec!["pinned".to_owned()] }
}

/// What an origin says of bytes whose tag they are themselves.
fn head_of(bytes: &str) -> StoredHead {
    let headers = HeaderMap::from_iter([(http::header::ETAG, format!("\"{bytes}\"").parse().unwrap())]);
    let exchange = Exchange { requested: UnixMillis(0), received: UnixMillis(0) };
    let request = (&http::Method::GET, &HeaderMap::new());
    let pending = judge(request, (http::StatusCode::OK, &headers), exchange, &Policy::default()).unwrap();
    pending.complete(bytes.len() as u64).unwrap()
}

struct Store {
    kernel: Kernel,
    cas: Arc<Cas>,
}

impl Store {
    fn open(folder: Option<&Path>, settings: Settings) -> Store {
        let kernel = Kernel::new();
        let service = kernel.service("edge");
        let (cas, changes) = Cas::open(&service, folder, true, settings).unwrap();
        let (keeping, changes, own) = (cas.clone(), Arc::new(changes), service.clone());
        service.permanent("keeper", 0, move || keep(keeping.clone(), changes.clone(), own.clone()));
        let (scrubbing, own) = (cas.clone(), service.clone());
        service.permanent("scrub", 0, move || {
            scrub(scrubbing.clone(), own.clone(), || Duration::from_secs(3600))
        });
        Store { kernel, cas }
    }

    /// Ends it as a drain does, so that the folder can be opened again.
    async fn close(self) {
        let drained = self.kernel.drain(Duration::from_secs(2), &[]).await;
        assert!(drained.stragglers.is_empty(), "{drained:?}");
        let mut cas = self.cas;
        drop(self.kernel);
        for _ in 0..200 {
            match Arc::try_unwrap(cas) {
                Ok(_) => return,
                Err(held) => cas = held,
            }
            tokio::task::yield_now().await;
        }
        panic!("somebody still holds the store");
    }

    fn arrived(&self, bytes: &[u8]) -> Arrived {
        let mut upload = self.cas.upload().unwrap();
        for piece in bytes.chunks(100_000) {
            upload.write(piece).unwrap();
        }
        upload.finish(true).unwrap()
    }

    async fn put(&self, bytes: &[u8]) -> Result<Stored, CasError> {
        self.cas.put(Put { arrived: self.arrived(bytes), name: None }).await
    }

    async fn put_name(&self, name: &str, bytes: &[u8], conditions: &HeaderMap) -> Result<Stored, CasError> {
        let new = NewName {
            name: name.to_owned(),
            content_type: "text/plain".to_owned(),
            keys: vec!["all".to_owned()],
            encoded: vec![(Coding::Gzip, self.arrived(format!("gzip of {name}").as_bytes()))],
            conditions: Preconditions::of(conditions, 0),
            response: None,
        };
        self.cas.put(Put { arrived: self.arrived(bytes), name: Some(new) }).await
    }

    /// Stores a response of a site, with its bytes as their tag.
    async fn put_response(&self, name: &str, bytes: &str) -> Result<Stored, CasError> {
        let arrived = self.arrived(bytes.as_bytes());
        let (head, parts) = (head_of(bytes), vec![arrived.address]);
        let new = NewName {
            name: name.to_owned(),
            content_type: String::new(),
            keys: Vec::new(),
            encoded: Vec::new(),
            conditions: Preconditions::default(),
            response: Some(NewResponse { head, parts, modified: 0, since: self.cas.epoch() }),
        };
        self.cas.put(Put { arrived, name: Some(new) }).await
    }

    fn read(&self, address: &Address) -> Result<Vec<u8>, ReadError> {
        let object = self.cas.object(address).ok_or(ReadError::Gone)?;
        let mut reader = self.cas.reader(*address, &object)?;
        let (mut at, mut out) = (0, Vec::new());
        while at < reader.len {
            let bytes = reader.read(&(at..reader.len))?;
            at += bytes.len() as u64;
            out.extend_from_slice(&bytes);
        }
        Ok(out)
    }

    fn path_of(&self, address: &Address) -> std::path::PathBuf {
        self.cas.disk.as_ref().unwrap().path_of(address)
    }
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|n| (n.wrapping_mul(31) >> 3) as u8 ^ seed).collect()
}

fn flip(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt as _;
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_stored_is_there_after_a_restart_and_after_the_index_was_lost() {
    let folder = tempfile::tempdir().unwrap();
    let large = bytes(1_000_000, 1);
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    let first = store.put(&large).await.unwrap();
    assert_eq!((first.address, first.new), (blake3::hash(&large).into(), true));
    assert!(!store.put(&large).await.unwrap().new, "once is enough");
    let named = store.put_name("a/b.txt", b"hello", &HeaderMap::new()).await.unwrap();
    assert_eq!(store.cas.bytes(), 1_000_000 + 5 + 15);
    store.close().await;
    for lost in [false, true] {
        if lost {
            std::fs::remove_file(folder.path().join("index.redb")).unwrap();
            std::fs::write(folder.path().join("tmp/half"), b"of a former life").unwrap();
        }
        let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
        assert_eq!(store.read(&first.address).unwrap(), large);
        let found = store.cas.asset("a/b.txt").unwrap();
        let variants: Vec<_> =
            found.variants.iter().map(|(variant, _)| (variant.coding, variant.len)).collect();
        assert_eq!(variants, [(Coding::Identity, 5), (Coding::Gzip, 15)]);
        assert_eq!(found.variants[0].0.address, named.address);
        assert_eq!(found.variants[0].1.sha256.is_none(), lost, "it is learnt by the scrub");
        assert_eq!(store.cas.bytes(), 1_000_020);
        assert_eq!(std::fs::read_dir(folder.path().join("tmp")).unwrap().count(), 0);
        if lost {
            store.cas.progress().begin();
            while store.cas.asset("a/b.txt").unwrap().variants[0].1.sha256.is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_noted_and_not_committed_is_done_at_the_next_start_and_once() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    let (index, before) = (folder.path().join("index.redb"), folder.path().join("before"));
    let store = open();
    store.put(b"something").await.unwrap();
    store.close().await;
    std::fs::copy(&index, &before).unwrap();
    let store = open();
    let stored = store.put_response("\0k\0r", "a-body").await.unwrap();
    store.close().await;
    // As if it had been killed between the note and the commit.
    std::fs::rename(&before, &index).unwrap();
    let store = open();
    assert!(store.cas.response("\0k\0r").is_some());
    assert_eq!(store.read(&stored.address).unwrap(), b"a-body");
    assert_eq!(store.cas.forget(Names::Response("k".to_owned()), Preconditions::default()).await.unwrap(), 1);
    store.close().await;
    let store = open();
    assert!(store.cas.response("\0k\0r").is_none(), "what was purged since stays so");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_whose_file_is_missing_is_not_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::IfChecked));
    let stored = store.put_response("\0k\0r", "a-body").await.unwrap();
    std::fs::remove_file(store.path_of(&stored.address)).unwrap();
    assert_eq!(store.cas.responses("k").len(), 1);
    assert!(matches!(store.read(&stored.address), Err(ReadError::Gone)));
    assert!(store.cas.responses("k").is_empty(), "so that its origin is asked");
    store.put_response("\0k\0r", "a-body").await.unwrap();
    assert_eq!(store.read(&stored.address).unwrap(), b"a-body");
    assert_eq!(store.cas.responses("k").len(), 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_cannot_be_read_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    let stored = store.put_name("x", b"some bytes", &HeaderMap::new()).await.unwrap();
    store.close().await;
    std::fs::write(folder.path().join("index.redb"), bytes(10_000, 9)).unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    assert_eq!(store.cas.asset("x").unwrap().variants[0].0.address, stored.address);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_is_found_where_it_is_and_storing_the_object_again_mends_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    let large = bytes(700_000, 2);
    let stored = store.put(&large).await.unwrap();
    flip(&store.path_of(&stored.address), 500_000);
    let object = store.cas.object(&stored.address).unwrap();
    let mut reader = store.cas.reader(stored.address, &object).unwrap();
    assert_eq!(reader.read(&(0..1000)).unwrap(), &large[..1000], "the part before it is good");
    assert_eq!(reader.read(&(600_000..600_010)).unwrap(), &large[600_000..600_010], "and so is that behind");
    assert!(matches!(reader.read(&(499_999..500_001)), Err(ReadError::Corrupt)));
    store.cas.note_bad();
    assert!(store.cas.has_bad());
    assert!(!store.put(&large).await.unwrap().new);
    assert_eq!(store.read(&stored.address).unwrap(), large);
    assert!(!store.cas.has_bad(), "the good bytes took the place of the bad ones");
    let path = store.path_of(&stored.address);
    File::options().write(true).open(path).unwrap().set_len(600_000).unwrap();
    assert!(
        matches!(store.read(&stored.address), Err(ReadError::Corrupt)),
        "bytes that are missing are seen too"
    );
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_checked_once_and_again_when_its_file_changed() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::IfChecked));
    let small = bytes(5000, 3);
    let stored = store.put(&small).await.unwrap();
    let path = store.path_of(&stored.address);
    assert_eq!(store.read(&stored.address).unwrap(), small);
    let object = store.cas.object(&stored.address).unwrap();
    let before = std::fs::metadata(&path).unwrap().modified().unwrap();
    // Bad bytes under the same stamp are what a first read does not see; only the scrub does.
    flip(&path, 100);
    File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
    assert!(store.read(&stored.address).is_ok());
    store.cas.progress().begin();
    while store.cas.progress().passes.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(store.cas.progress().bad.load(Ordering::Relaxed), 1);
    assert!(object.condition.bad.load(Ordering::Relaxed) && store.cas.has_bad());
    assert!((store.cas.progress().ratio() - 1.0).abs() < 1e-9);
    File::options().write(true).open(&path).unwrap().set_modified(before + Duration::from_secs(1)).unwrap();
    assert!(matches!(store.read(&stored.address), Err(ReadError::Corrupt)), "another stamp, another check");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_serves_only_while_its_bytes_need_no_check() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::IfChecked));
    let stored = store.put(&bytes(600_000, 7)).await.unwrap();
    let object = store.cas.object(&stored.address).unwrap();
    assert!(store.cas.held_file(&object).is_none(), "nobody has opened it");
    let reader = store.cas.reader(stored.address, &object).unwrap();
    let file = reader.unchecked().expect("checked as a whole, being of moderate size").clone();
    store.cas.hold_file(&object, &file);
    assert!(store.cas.held_file(&object).is_some());
    store.cas.apply(settings(1 << 30, Trust::Never));
    assert!(store.cas.held_file(&object).is_none(), "every read is to be checked");
    assert!(store.cas.reader(stored.address, &object).unwrap().unchecked().is_none());
    store.cas.apply(settings(1 << 30, Trust::IfChecked));
    let path = store.path_of(&stored.address);
    let later = std::fs::metadata(&path).unwrap().modified().unwrap() + Duration::from_secs(1);
    flip(&path, 500_000);
    File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    assert!(store.cas.held_file(&object).is_none(), "another stamp, another check");
    assert!(matches!(store.cas.reader(stored.address, &object), Err(ReadError::Corrupt)));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_outboard_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    let large = bytes(300_000, 4);
    let stored = store.put(&large).await.unwrap();
    let outboard = store.cas.disk.as_ref().unwrap().outboard_of(&stored.address);
    let good = std::fs::read(&outboard).unwrap();
    std::fs::remove_file(&outboard).unwrap();
    assert_eq!(store.read(&stored.address).unwrap(), large);
    assert_eq!(std::fs::read(&outboard).unwrap(), good);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_there_is_no_room_the_least_wanted_go_and_never_the_pinned() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(100_000, Trust::Never));
    store.put_name("pinned", &bytes(10_000, 0), &HeaderMap::new()).await.unwrap();
    let first = store.put_name("first", &bytes(10_000, 1), &HeaderMap::new()).await.unwrap();
    for seed in 2..40 {
        store.put(&bytes(10_000, seed)).await.unwrap();
        assert!(store.cas.bytes() <= 100_000);
    }
    assert!(store.cas.asset("pinned").is_some());
    assert!(store.cas.asset("first").is_none(), "a name goes with its object");
    assert!(!store.path_of(&first.address).exists(), "and so does the file");
    let before = store.cas.bytes();
    assert!(
        matches!(store.put(&bytes(95_000, 0)).await, Err(CasError::Full)),
        "the pinned one is in its way"
    );
    assert_eq!(store.cas.bytes(), before, "and nobody goes in vain");
    assert!(store.put(&bytes(80_000, 0)).await.unwrap().new, "who was to go can still go");
    assert!(store.cas.upload().unwrap().write(&bytes(100_001, 0)).is_err());
    assert!(matches!(store.cas.can_hold(100_001), Err(CasError::Full)));
    store.close().await;
    let store = Store::open(Some(folder.path()), settings(100_000, Trust::Never));
    assert!(store.cas.asset("pinned").is_some() && store.cas.bytes() <= 100_000);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_change_under_conditions_and_objects_go_with_their_last_name() {
    let store = Store::open(None, settings(1 << 20, Trust::Never));
    let with = |name, value: &str| HeaderMap::from_iter([(name, value.parse().unwrap())]);
    let one = store.put_name("n", b"one", &with(IF_NONE_MATCH, "*")).await.unwrap();
    let again = store.put_name("n", b"two", &with(IF_NONE_MATCH, "*")).await;
    assert!(matches!(again, Err(CasError::Precondition)));
    let two = store.put_name("n", b"two", &with(IF_MATCH, &one.address.etag())).await.unwrap();
    assert!(!two.new);
    assert!(store.cas.object(&one.address).is_none(), "nothing led to it any more");
    let direct = store.put(b"two").await.unwrap();
    assert!(!direct.new && direct.address == two.address);
    store.put_name("m/1", b"three", &HeaderMap::new()).await.unwrap();
    store.put_name("m/2", b"three", &HeaderMap::new()).await.unwrap();
    let forget = async |which| store.cas.forget(which, Preconditions::default()).await.unwrap();
    assert_eq!(forget(Names::Prefix("m/".to_owned())).await, 2);
    assert_eq!(forget(Names::Key("all".to_owned())).await, 1);
    assert_eq!(forget(Names::Path("n".to_owned())).await, 0);
    assert_eq!(store.read(&two.address).unwrap(), b"two", "what was stored by its address stays");
    assert_eq!(store.cas.bytes(), 3);
    assert!(matches!(store.cas.can_hold(2 << 20), Err(CasError::Amnesia)));
    let (mut first, mut second) = (store.cas.upload().unwrap(), store.cas.upload().unwrap());
    first.write(&bytes(600_000, 1)).unwrap();
    let refused = second.write(&bytes(600_000, 2)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::StorageFull, "uploads have no more room than the store");
    drop((first, second));
    store.cas.upload().unwrap().write(&bytes(600_000, 3)).unwrap();
    store.close().await;
}

/// A response of an origin, made of these parts.
fn response(store: &Store, name: &str, fields: &str, parts: Vec<Address>) -> NewName {
    let headers: HeaderMap = fields
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
        .collect();
    let exchange = Exchange { requested: UnixMillis(1), received: UnixMillis(1) };
    let request = (&http::Method::GET, &HeaderMap::new());
    let judged = judge(request, (http::StatusCode::OK, &headers), exchange, &Policy::default());
    let head = judged.unwrap().complete(1).unwrap();
    NewName {
        name: name.to_owned(),
        content_type: String::new(),
        keys: vec!["k".to_owned()],
        encoded: Vec::new(),
        conditions: Preconditions::default(),
        response: Some(NewResponse { head, parts, modified: 7, since: store.cas.epoch() }),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_are_kept_within_their_bounds_and_over_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 20, Trust::Never));
    let put = async |store: &Store, name: &str, content: &[u8]| {
        let arrived = store.arrived(content);
        let new = response(store, name, "cache-control: max-age=60\nx: 1", vec![arrived.address]);
        store.cas.put(Put { arrived, name: Some(new) }).await
    };
    for number in 0..40 {
        put(&store, &response_name("/a\0s", &number.to_string()), &[number]).await.unwrap();
    }
    assert_eq!(store.cas.responses("/a\0s").len(), 32, "of one key only so many");
    for number in 0..100u8 {
        let name = response_name(&format!("/{number}?q\0s"), "");
        put(&store, &name, &[number, 1]).await.unwrap();
        assert!(store.cas.catalog.lock().responses() <= 50);
    }
    // Of two parts; gone with either of them.
    let (first, second) = (store.put(b"first").await.unwrap(), store.arrived(b"second"));
    let two = response(
        &store,
        &response_name("/two\0s", ""),
        "cache-control: max-age=60",
        vec![first.address, second.address],
    );
    store.cas.put(Put { arrived: second, name: Some(two) }).await.unwrap();
    assert_eq!(store.cas.responses("/two\0s")[0].parts.len(), 2);
    // What was put by name is not replaced by what an origin has.
    store.put_name("own", b"own", &HeaderMap::new()).await.unwrap();
    assert!(matches!(put(&store, "own", b"other").await, Err(CasError::Precondition)));
    let last = store.cas.responses("/99?q\0s")[0].clone();
    store.close().await;
    let store = Store::open(Some(folder.path()), settings(1 << 20, Trust::Never));
    let again = &store.cas.responses("/99?q\0s")[0];
    assert_eq!((&again.asset, again.parts[0].0), (&last.asset, last.parts[0].0));
    assert_eq!(store.cas.responses("/two\0s")[0].parts[0].0, first.address, "in their order");
    let forget = async |which| store.cas.forget(which, Preconditions::default()).await.unwrap();
    assert_eq!(
        forget(Names::Path(String::new())).await,
        0,
        "the page at the root, and nothing else of the site"
    );
    assert_eq!(forget(Names::Path("99".to_owned())).await, 1, "whatever the query");
    assert_eq!(forget(Names::Path("98?x".to_owned())).await, 0);
    assert_eq!(forget(Names::Path("98?q".to_owned())).await, 1);
    assert_eq!(forget(Names::Response("/97?q\0s".to_owned())).await, 1);
    assert_eq!(forget(Names::Prefix("two".to_owned())).await, 1);
    assert!(store.cas.object(&first.address).is_some(), "it was stored by its address too");
    assert!(forget(Names::Key("k".to_owned())).await > 0);
    assert_eq!(store.cas.catalog.lock().responses(), 0);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_no_row_leads_to_is_adopted_by_the_scrub() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    let address = Address::from(blake3::hash(b"orphan"));
    let path = store.path_of(&address);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, b"orphan").unwrap();
    store.cas.progress().begin();
    while store.cas.object(&address).is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(store.read(&address).unwrap(), b"orphan");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_scrub_saw_is_looked_at_again_when_it_is_acted_upon() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Some(folder.path()), settings(1 << 30, Trust::Never));
    let stored = store.put(b"still here").await.unwrap();
    let nowhere = Address([3; 32]);
    store.cas.changes.try_send(Op::Lost(stored.address)).unwrap();
    store.cas.changes.try_send(Op::Adopt { address: nowhere, len: 5, stored: 0 }).unwrap();
    store.put(b"another").await.unwrap();
    assert_eq!(store.read(&stored.address).unwrap(), b"still here");
    assert!(store.cas.object(&nowhere).is_none());
    std::fs::remove_file(store.path_of(&stored.address)).unwrap();
    store.cas.changes.try_send(Op::Lost(stored.address)).unwrap();
    store.put(b"a third").await.unwrap();
    assert!(store.cas.object(&stored.address).is_none(), "it is gone indeed");
    store.close().await;
}

#[tokio::test]
async fn what_an_origin_says_of_one_response_is_not_noted_of_another() {
    let store = Store::open(None, settings(1 << 20, Trust::Always));
    let name = response_name("/x\0http://a", "");
    let etag = |store: &Store| {
        let found = store.cas.response(&name)?;
        Some(found.asset.head.as_ref()?.headers()[http::header::ETAG].clone())
    };
    store.put_response(&name, "one").await.unwrap();
    let first = store.cas.response(&name).unwrap();
    store.put_response(&name, "two").await.unwrap();
    let second = store.cas.response(&name).unwrap();
    let freshen = async |found: &Response, head| {
        store.cas.freshen(name.as_str().into(), found.asset.clone(), head).await
    };
    for head in [Some(head_of("one")), None] {
        assert_eq!(freshen(&first, head).await.unwrap(), 0);
        assert_eq!(etag(&store).unwrap(), "\"two\"");
    }
    assert_eq!(freshen(&second, Some(head_of("new"))).await.unwrap(), 1);
    assert_eq!(etag(&store).unwrap(), "\"new\"");
    let third = store.cas.response(&name).unwrap();
    assert_eq!(freshen(&third, None).await.unwrap(), 1);
    assert!(etag(&store).is_none() && store.cas.bytes() == 0);
    store.close().await;
}

#[tokio::test]
async fn responses_make_place_for_each_other_and_never_take_that_of_what_was_put() {
    let store = Store::open(None, settings(1 << 20, Trust::Always));
    let plain = HeaderMap::new();
    let kept = store.put(b"kept by its address").await.unwrap();
    store.put_name("kept", b"kept by its name", &plain).await.unwrap();
    for number in 0..150 {
        store.put_response(&response_name(&format!("/{number}"), ""), &number.to_string()).await.unwrap();
    }
    let there = |number: u32| store.cas.response(&response_name(&format!("/{number}"), "")).is_some();
    assert_eq!((0..150).filter(|number| there(*number)).count(), 50);
    assert!(store.cas.object(&kept.address).is_some() && store.cas.asset("kept").is_some());
    store.close().await;
}

#[tokio::test]
async fn what_was_asked_for_before_a_purge_is_not_stored_after_it() {
    let store = Store::open(None, settings(1 << 20, Trust::Always));
    let name = response_name("/a/b?q=1\0http://host", "");
    let cases = [
        (Names::Asset(name.clone()), true),
        (Names::Path("a/b".to_owned()), true),
        (Names::Path("a/b?q=1".to_owned()), true),
        (Names::Path("a/b?q=2".to_owned()), false),
        (Names::Path("a".to_owned()), false),
        (Names::Prefix("a/".to_owned()), true),
        (Names::Prefix("b/".to_owned()), false),
        (Names::Response("/a/b?q=1\0http://host".to_owned()), true),
        (Names::Response("/a/b\0http://host".to_owned()), false),
        (Names::Key("news".to_owned()), true),
        (Names::Key("other".to_owned()), false),
    ];
    for (names, hits) in cases {
        let since = store.cas.epoch();
        store.cas.forget(names.clone(), Preconditions::default()).await.unwrap();
        let arrived = store.arrived(b"old");
        let parts = vec![arrived.address];
        let new = NewName {
            name: name.clone(),
            content_type: String::new(),
            keys: vec!["news".to_owned()],
            encoded: Vec::new(),
            conditions: Preconditions::default(),
            response: Some(NewResponse { head: head_of("old"), parts, modified: 0, since }),
        };
        let put = store.cas.put(Put { arrived, name: Some(new) }).await;
        assert_eq!(put.is_err(), hits, "{names:?}");
        store.cas.forget(Names::Asset(name.clone()), Preconditions::default()).await.unwrap();
    }
    // What was asked for so long ago that nobody knows is not stored either.
    let since = store.cas.epoch();
    for number in 0..2000 {
        let other = Names::Asset(number.to_string());
        store.cas.catalog.lock().note_forgotten(other);
    }
    assert!(store.cas.was_forgotten(&name, since) && !store.cas.was_forgotten(&name, store.cas.epoch()));
    store.close().await;
}

#[tokio::test]
async fn what_was_synced_is_not_replaced_by_what_was_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(Some(dir.path()), settings(1 << 20, Trust::Always));
    let stored = store.put(b"durable").await.unwrap();
    let hex = stored.address.to_string()[3..].to_owned();
    let path = dir.path().join("b3").join(&hex[..2]).join(&hex[2..4]).join(&hex);
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
    let first = inode();
    let again = async |sync| {
        let mut upload = store.cas.upload().unwrap();
        upload.write(b"durable").unwrap();
        let arrived = upload.finish(sync).unwrap();
        store.cas.put(Put { arrived, name: None }).await.unwrap();
    };
    again(false).await;
    assert_eq!(inode(), first, "the file that the disk has stays");
    again(true).await;
    assert_ne!(inode(), first);
    // What is bad or missing is replaced by anything good.
    let second = inode();
    store.cas.object(&stored.address).unwrap().condition.bad.store(true, Ordering::Relaxed);
    again(false).await;
    assert_ne!(inode(), second);
    std::fs::remove_file(&path).unwrap();
    again(false).await;
    assert_eq!(store.read(&stored.address).unwrap(), b"durable");
    store.close().await;
}

#[test]
fn names_that_come_and_go_leave_nothing_in_the_queue() {
    let mut catalog = Catalog::new(&[]);
    let object =
        |len| Object { len, sha256: None, direct: false, stored: 0, bytes: None, condition: Arc::default() };
    for number in 0..10_000u32 {
        let address = Address::from(blake3::hash(&number.to_le_bytes()));
        catalog.add(address, object(10));
        assert!(catalog.places() <= 2 * 3 + 100, "{}", catalog.places());
        if number > 2 {
            catalog.remove(&address);
        }
    }
    let mut going = Vec::new();
    assert!(catalog.make_room(30, 30, &mut going) && going.len() == 3, "and the others are all known");
}
