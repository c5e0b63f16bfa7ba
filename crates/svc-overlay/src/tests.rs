//! The overlay within one process: what needs a look inside, or a peer that no process could be.

use crate::config::OverlaySettings;
use crate::conn::{Origin, serve};
use crate::handle::{Next, PublishError};
use crate::link::End;
use crate::overlay::Overlay;
use crate::shared::{INGRESS_FRAMES, Shared};
use bytes::Bytes;
use oap::control::Hello;
use oap::frame::{APP_CONTROL, APP_GOSSIP, FRAME_MAX, Frame};
use oap::gossip::{Incoming, PeerId, Topic};
use oap::session::Role;
use oap::{Decoded, Decoder, NodeId};
use ron_kernel::kernel::Kernel;
use ron_kernel::key::PrivateKey;
use ron_kernel::node::{DataDir, NodeSettings};
use ron_transport::{Mode, Writer};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadBuf};
use tokio::time::Instant;

pub(crate) fn overlay(change: impl FnOnce(&mut OverlaySettings)) -> (Kernel, Arc<Overlay>) {
    let mut settings =
        OverlaySettings { listen: "127.0.0.1:0".parse().unwrap(), ..OverlaySettings::default() };
    settings.admit = crate::config::Admit::Any;
    settings.tls.mode = Mode::Off;
    change(&mut settings);
    let (kernel, key) = (Kernel::new(), PrivateKey::generate().unwrap());
    let data = DataDir::of(&NodeSettings::default(), None);
    let overlay = Overlay::build(&kernel.service("overlay"), &settings, &data, &key).unwrap();
    overlay.ready();
    (kernel, Arc::new(overlay))
}

pub(crate) fn shared(overlay: &Overlay) -> &Arc<Shared> {
    &overlay.handle().shared
}

fn topic(name: &str) -> Topic {
    Topic::parse(name).unwrap()
}

fn origin(shared: &Shared) -> Origin {
    Origin { role: Role::Listener, at: "test".to_owned(), proved: None, began: shared.now() }
}

/// Waits for what other tasks bring about.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what} never held");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Reads from the other side until it panics, within a frame.
struct Panics {
    io: tokio::io::ReadHalf<DuplexStream>,
    reads: usize,
}

impl AsyncRead for Panics {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_read(cx, out);
        if polled.is_ready() {
            self.reads += 1;
            assert!(self.reads < 2, "a reader that is killed");
        }
        polled
    }
}

async fn hello(theirs: &mut DuplexStream, decoder: &mut Decoder, node: NodeId) {
    let hello = Hello { node: Some(node), ..Hello::default() };
    let frame = Frame::request(APP_CONTROL, 1, hello.payload(None)).encode(FRAME_MAX).unwrap();
    theirs.write_all(&frame.to_vec()).await.unwrap();
    loop {
        if let Some(Decoded::Frame(frame)) = decoder.next_frame().unwrap() {
            assert_eq!((frame.code, frame.corr), (200, 1));
            return;
        }
        assert!(theirs.read_buf(decoder.space()).await.unwrap() > 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_killed_within_a_frame_takes_its_writer_and_session_with_it() {
    let (kernel, overlay) = overlay(|_| {});
    let shared = shared(&overlay).clone();
    let (ours, mut theirs) = tokio::io::duplex(1 << 16);
    let (read, write) = tokio::io::split(ours);
    let (own, at) = (shared.clone(), origin(&shared));
    let reader = Panics { io: read, reads: 0 };
    let served = async move { serve(&own, reader, Writer::new(write), at, None).await };
    let (end, ()) = tokio::join!(served, async {
        let mut decoder = Decoder::new(FRAME_MAX);
        hello(&mut theirs, &mut decoder, NodeId([7; 32])).await;
        eventually("the engine knows it", || shared.index.lock().nodes.len() == 1).await;
        // The beginning of a frame, at which the reader dies.
        theirs.write_all(&[0, 0]).await.unwrap();
        // The writer has closed its half as it should: there is an end, and no error.
        let mut rest = Vec::new();
        theirs.read_to_end(&mut rest).await.unwrap();
    });
    assert_eq!(end, (End::Panic, true));
    eventually("the engine has forgotten it", || shared.index.lock().nodes.is_empty()).await;
    for line in [
        "session_close_total{reason=\"panic\"} 1",
        "tasks_panicked_total{service=\"overlay\",kind=\"reader\"} 1",
        "sessions_active 0",
    ] {
        eventually(line, || kernel.metrics().scrape().contains(line)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_that_is_behind_loses_the_oldest_and_is_told() {
    let (kernel, overlay) = overlay(|_| {});
    let handle = overlay.handle();
    let mut subscription = handle.subscribe(&topic("t")).unwrap();
    for number in 0..1030u32 {
        let soon = Instant::now() + Duration::from_secs(20);
        handle.publish(&topic("t"), Bytes::from(number.to_string()), soon).await.unwrap();
    }
    eventually("it has lost six", || kernel.metrics().scrape().contains("subscriber_lagged_total 6")).await;
    let wait = Duration::from_secs(20);
    assert_eq!(subscription.next(wait).await, Some(Next::Lagged(6)));
    let Some(Next::Delivery(first)) = subscription.next(wait).await else { panic!("a message comes") };
    assert_eq!(first.payload, "6");
    drop(subscription);
    assert!(shared(&overlay).subscribers.lock().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_find_no_room_before_the_engine_are_answered_429_and_counted() {
    let (kernel, overlay) = overlay(|_| {});
    let shared = shared(&overlay).clone();
    // An engine that begins forgets whoever was there before.
    overlay.handle().known().await.unwrap();
    let (link, replies) = crate::link::Link::new(&shared, Role::Listener, "test".to_owned(), None);
    let link = Arc::new(link);
    let peer = PeerId(u64::MAX);
    shared.index.lock().links.insert(peer, link.clone());
    let frame = |corr| Incoming { peer, corr, payload: Bytes::from_static(b"\x07\x01a") };
    // Under one lock, so that the engine takes none of them meanwhile.
    let mut frames: Vec<Incoming> = (0..INGRESS_FRAMES as u64 + 3).map(frame).collect();
    shared.receive(&link, &mut frames);
    let mut refused = Vec::new();
    while let Some(answer) = replies.try_recv() {
        let mut decoder = Decoder::new(FRAME_MAX);
        decoder.push(&answer.frame.to_vec());
        let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else { panic!("it reads") };
        assert_eq!((frame.app, frame.code), (APP_GOSSIP, 429));
        refused.push(frame.corr);
    }
    assert_eq!(refused, [512, 513, 514]);
    let page = kernel.metrics().scrape();
    for line in [
        "queue_dropped_total{service=\"overlay\",queue=\"gossip_ingress\"} 3",
        "busy_rejections_total{service=\"overlay\",endpoint=\"\",queue=\"gossip_ingress\"} 3",
        "rejected_total{service=\"overlay\",reason=\"busy\"} 3",
        "frame_reject_total{reason=\"busy\"} 3",
    ] {
        assert!(page.contains(line), "{line} is not in {page}");
    }
}

/// As many frames of a peer as it may have before the engine on its own, and some.
fn too_much(shared: &Shared, peer: PeerId) {
    let (link, _replies) = crate::link::Link::new(shared, Role::Listener, "test".to_owned(), None);
    let frame = |corr| Incoming { peer, corr, payload: Bytes::from_static(b"\x07\x01a") };
    shared.receive(&link, &mut (0..200).map(frame).collect());
}

// On one thread, so that the engine has no turn before this waits.
#[tokio::test]
async fn a_peer_with_too_much_before_the_engine_is_read_on_when_the_engine_has_taken_it() {
    let (kernel, overlay) = overlay(|_| {});
    let shared = shared(&overlay).clone();
    overlay.handle().known().await.unwrap();
    let (busy, idle) = (PeerId(u64::MAX), PeerId(u64::MAX - 1));
    too_much(&shared, busy);
    let mut pause = std::pin::pin!(shared.pause(busy));
    assert!(std::future::poll_fn(|cx| Poll::Ready(pause.as_mut().poll(cx).is_pending())).await);
    // Somebody else is none the worse for it.
    let mut other = std::pin::pin!(shared.pause(idle));
    assert!(std::future::poll_fn(|cx| Poll::Ready(other.as_mut().poll(cx).is_ready())).await);
    pause.await;
    assert!(kernel.metrics().scrape().contains("reads_paused_total 1"));
}

#[tokio::test]
async fn a_peer_with_too_much_before_an_engine_that_takes_nothing_waits_a_moment_only() {
    let (kernel, overlay) = overlay(|_| {});
    let shared = shared(&overlay).clone();
    assert_eq!(kernel.drain(Duration::from_secs(3), &[]).await.stragglers, Vec::<String>::new());
    too_much(&shared, PeerId(u64::MAX));
    shared.pause(PeerId(u64::MAX)).await;
    assert_eq!(shared.waiting(), 200);
    assert!(kernel.metrics().scrape().contains("reads_paused_total 1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_drain_has_begun_nothing_is_taken() {
    let (kernel, overlay) = overlay(|_| {});
    let drained = kernel.drain(Duration::from_secs(3), &[]).await;
    assert_eq!(drained.stragglers, Vec::<String>::new());
    let published = overlay.handle().publish(&topic("t"), Bytes::new(), Instant::now()).await;
    assert_eq!(published, Err(PublishError::Canceled));
    assert!(overlay.handle().subscribe(&topic("t")).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_too_large_is_refused_by_name() {
    let (_kernel, overlay) = overlay(|settings| settings.gossip.max_message_bytes = "10B".parse().unwrap());
    let published = overlay.handle().publish(&topic("t"), Bytes::from_static(&[0; 11]), Instant::now()).await;
    assert_eq!(published, Err(PublishError::TooLarge(11)));
}
