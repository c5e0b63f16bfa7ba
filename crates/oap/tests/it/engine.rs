//! One engine, and what a peer can say to it.

use crate::net::{key, node_id};
use bytes::Bytes;
use oap::control::Goaway;
use oap::frame::FRAME_MAX;
use oap::gossip::bundle;
use oap::gossip::wire::{Gossip, Window};
use oap::gossip::{
    Action, Cause, Ceiling, Config, ConnectError, Delivery, Engine, Envelope, HistoryLimits, Lane, MessageId,
    Now, Offence, Outcome, PeerId, PublishError, Queue, SharedEgress, Topic,
};
use oap::{Decoded, Decoder};
use std::collections::BTreeSet;
use std::time::Duration;

const START: u64 = 1_700_000_000_000;

fn at(ms: u64) -> Now {
    Now { mono: Duration::from_millis(ms), unix_ms: START + ms }
}

fn topic() -> Topic {
    Topic::parse("t").expect("a topic")
}

/// An engine that follows the topic, with so many peers.
struct Bench {
    engine: Engine,
    peers: Vec<(PeerId, SharedEgress)>,
}

impl Bench {
    fn new(config: Config, peers: usize) -> Bench {
        let mut engine = Engine::new(config, key(0), 1, Ceiling::new(1 << 28), at(0));
        engine.follow(at(0), &topic());
        let connect = |node| engine.connect(at(0), node_id(node), FRAME_MAX).expect("connected");
        let peers = (1..=peers).map(connect).collect();
        let mut bench = Bench { engine, peers };
        bench.said();
        bench.actions();
        bench
    }

    /// What was queued for each peer since the last time.
    fn said(&mut self) -> Vec<Vec<Gossip>> {
        self.peers.iter().map(|(_, egress)| said(egress)).collect()
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.engine.poll()).filter(|it| !matches!(it, Action::Wake(_))).collect()
    }

    fn hear(&mut self, now: Now, peer: usize, gossip: &Gossip) {
        let mut decoder = Decoder::new(FRAME_MAX);
        decoder.push(&gossip.encode(FRAME_MAX).expect("a frame").to_vec());
        let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else { panic!("{gossip:?}") };
        self.engine.receive(now, self.peers[peer].0, frame.corr, &frame.payload);
    }

    fn delivered(&mut self) -> Vec<Delivery> {
        let deliver = |action| match action {
            Action::Deliver(delivery) => Some(delivery),
            _ => None,
        };
        self.actions().into_iter().filter_map(deliver).collect()
    }

    fn outcome(&self, outcome: Outcome) -> u64 {
        self.engine.ledger().outcome(outcome)
    }
}

fn said(egress: &SharedEgress) -> Vec<Gossip> {
    let mut batch = Vec::new();
    egress.lock().take(usize::MAX, usize::MAX, &mut batch);
    egress.lock().written(&batch);
    let read = |frame: &oap::Encoded| {
        let mut decoder = Decoder::new(FRAME_MAX);
        decoder.push(&frame.to_vec());
        let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else { panic!("{frame:?}") };
        Gossip::parse(&frame.payload).expect("gossip")
    };
    batch.iter().map(read).collect()
}

/// A message by somebody who is no peer.
fn by_99(seq: u64, time: u64, hops: u8) -> (Gossip, MessageId) {
    let payload = Bytes::from(format!("payload {seq}"));
    let mut envelope = Envelope {
        origin: node_id(99),
        seq,
        time: START + time,
        topic: topic(),
        bundle: false,
        signature: None,
    };
    let id = envelope.id(&payload);
    envelope.sign(id, &key(99));
    (Gossip::Message { hops, envelope, payload }, id)
}

fn ihave(id: MessageId, history: bool) -> Gossip {
    Gossip::IHave { history, topic: topic(), entries: vec![(id, 9)] }
}

fn pushed(said: &[Vec<Gossip>]) -> Vec<usize> {
    let pushes = |said: &Vec<Gossip>| said.iter().filter(|it| matches!(it, Gossip::Message { .. })).count();
    said.iter().map(pushes).collect()
}

#[test]
fn a_publication_says_who_got_it_pushed_announced_or_not_at_all() {
    let config = Config { relay_fanout: 2, announce_max: 1, max_rps: 0, ..Config::default() };
    let mut bench = Bench::new(config, 5);
    let first = bench.engine.publish(at(1), &topic(), Bytes::from_static(b"a")).expect("published");
    assert_eq!(bench.peers.iter().map(|(_, egress)| egress.depth()).sum::<usize>(), 2);
    assert_eq!((first.queued, first.lazy, first.refused), (2, 3, 0));
    let second = bench.engine.publish(at(1), &topic(), Bytes::from_static(b"b")).expect("published");
    assert_eq!((second.queued, second.lazy, second.refused), (2, 0, 3));
    let full = bench.engine.ledger().shed().collect::<Vec<_>>();
    assert_eq!(full, [(Queue::Announce, Lane::Control, Cause::Full, 3)]);
    assert_eq!(bench.delivered().len(), 2, "who follows it here gets it too");
    let large = Bytes::from(vec![0; (8 << 20) + 1]);
    assert_eq!(bench.engine.publish(at(1), &topic(), large), Err(PublishError::TooLarge((8 << 20) + 1)));
    assert_eq!(pushed(&bench.said()).iter().sum::<usize>(), 4);
    bench.engine.tick(at(100));
    let announced = |said: &Vec<Gossip>| said.iter().any(|it| matches!(it, Gossip::IHave { .. }));
    assert_eq!(bench.said().iter().filter(|said| announced(said)).count(), 3);
}

#[test]
fn a_publication_that_nobody_has_room_for_is_busy_and_leaves_nothing_behind() {
    let mut config = Config { announce_max: 0, max_rps: 0, ..Config::default() };
    config.egress.frames = 8;
    let mut bench = Bench::new(config, 2);
    let mut taken = 0;
    let busy = loop {
        match bench.engine.publish(at(1), &topic(), Bytes::from_static(b"a")) {
            Ok(_) => taken += 1,
            Err(error) => break error,
        }
    };
    assert_eq!((busy, taken), (PublishError::Busy, 7));
    assert_eq!(bench.delivered().len(), 7);
    assert_eq!(bench.engine.history(&topic()).count(), 7);
    assert_eq!(bench.engine.full_peers(), (2, 2));
    bench.said();
    // A peer that had no room is spared for a moment, so that this one is announced or refused at first.
    assert!(bench.engine.publish(at(3000), &topic(), Bytes::from_static(b"a")).is_ok());
}

#[test]
fn what_is_published_together_is_signed_together_and_passed_on_by_others() {
    let config = || Config { max_rps: 0, ..Config::default() };
    let mut origin = Bench::new(config(), 1);
    // Too large for a bundle.
    let messages = (0..70).map(|number: u8| (topic(), Bytes::from(vec![number; 17 << 10]))).collect();
    let published = origin.engine.publish_all(at(1), messages, false, false);
    assert_eq!(published.iter().flatten().filter(|it| it.queued == 1).count(), 70);
    // The receiver has heard of the origin, the next one has not.
    let mut relay = Bench::new(config(), 2);
    for said in origin.said().remove(0) {
        relay.hear(at(2), 0, &said);
    }
    assert_eq!(relay.delivered().len(), 70);
    let mut last = Bench::new(config(), 1);
    let mut passed_on = relay.said().remove(1);
    // In any order, each by itself.
    passed_on.reverse();
    for said in &passed_on {
        last.hear(at(3), 0, said);
    }
    assert_eq!((passed_on.len(), last.delivered().len()), (70, 70));
    assert_eq!(last.outcome(Outcome::Invalid), 0);
}

/// How many messages each of them carries the signature of, one after the other.
fn groups(said: &[Gossip]) -> Vec<usize> {
    let mut groups: Vec<(Vec<u8>, usize)> = Vec::new();
    for gossip in said {
        let Gossip::Message { envelope, .. } = gossip else { continue };
        let bytes = envelope.signature.as_ref().expect("signed").bytes.to_vec();
        let messages = messages(std::slice::from_ref(gossip));
        match groups.last_mut().filter(|(known, _)| *known == bytes) {
            Some((_, count)) => *count += messages,
            None => groups.push((bytes, messages)),
        }
    }
    groups.into_iter().map(|(_, count)| count).collect()
}

#[test]
fn what_comes_soon_after_a_signature_is_accepted_at_once_and_signed_together() {
    let gather = Duration::from_millis(1);
    let mut bench = Bench::new(Config { max_rps: 0, gather, ..Config::default() }, 2);
    let publish = |bench: &mut Bench, ms: u64| {
        bench.engine.publish(at(ms), &topic(), Bytes::from(vec![0; 1024])).expect("published")
    };
    assert_eq!(publish(&mut bench, 5).queued, 2);
    assert_eq!(groups(&bench.said()[0]), [1], "the first waits for nobody");
    let waits: Vec<_> = (0..10).map(|_| publish(&mut bench, 5)).collect();
    assert!(waits.iter().all(|it| (it.queued, it.lazy, it.refused) == (2, 0, 0)));
    assert!(groups(&bench.said()[0]).is_empty());
    assert_eq!(bench.delivered().len(), 1, "what was accepted is not delivered before the others get it");
    assert_eq!(bench.engine.due(), Duration::from_micros(5_125), "one alone makes others wait little");
    bench.engine.tick(at(6));
    assert_eq!(groups(&bench.said()[0]), [10]);
    let delivered: BTreeSet<_> = bench.delivered().into_iter().map(|it| it.id).collect();
    assert_eq!(delivered, waits.iter().map(|it| it.id).collect());
    publish(&mut bench, 6);
    assert_eq!(bench.engine.due(), Duration::from_millis(7), "many make others wait as long as they may");
    bench.engine.sign_gathered(at(6));
    assert_eq!(groups(&bench.said()[0]), [1]);
    // No more wait than are signed together, and nobody waits longer for the next.
    for _ in 0..130 {
        publish(&mut bench, 6);
    }
    assert_eq!(groups(&bench.said()[0]), [64, 64]);
    assert_eq!(publish(&mut bench, 7).queued, 2);
    assert_eq!(groups(&bench.said()[0]), [2, 1], "what waited goes first");
    // What a node has accepted it sends out before it ends.
    publish(&mut bench, 7);
    bench.engine.sign_gathered(at(7));
    assert_eq!(groups(&bench.said()[0]), [1]);
    let large = Bytes::from(vec![0; 200 << 10]);
    bench.engine.publish(at(7), &topic(), large).expect("published");
    assert_eq!(groups(&bench.said()[0]), [1], "what is large does not wait");
}

#[test]
fn nothing_waits_to_be_signed_while_a_peer_may_be_short_of_room() {
    let gather = Duration::from_secs(1);
    let config = Config { max_rps: 0, announce_max: 64, gather, ..Config::default() };
    let (frames, mut bench) = (config.egress.frames, Bench::new(config, 2));
    let mut taken = 0;
    let busy = loop {
        match bench.engine.publish(at(1), &topic(), Bytes::from_static(b"a")) {
            Ok(published) => taken += usize::from(published.queued == 2),
            Err(error) => break error,
        }
    };
    let said = bench.said();
    // All but an eighth, which is for control.
    assert_eq!((busy, said[0].len()), (PublishError::Busy, frames - frames / 8));
    let pushed_to = |said: &Vec<Gossip>| messages(said);
    assert_eq!(
        said.iter().map(pushed_to).collect::<Vec<_>>(),
        [taken, taken],
        "whatever was said to be pushed is"
    );
    // So it is with few tokens left.
    let config = Config { max_rps: 1, burst_budget_frames: 3, gather, ..Config::default() };
    let mut bench = Bench::new(config, 1);
    let mut publish = || bench.engine.publish(at(1), &topic(), Bytes::from_static(b"a")).expect("published");
    let said: Vec<_> = (0..5).map(|_| publish()).map(|it| (it.queued, it.lazy)).collect();
    // The first takes a token, and all that follow one more, as a bundle.
    assert_eq!(said, [(1, 0); 5]);
    bench.engine.sign_gathered(at(1));
    assert_eq!(bench.said().iter().map(|said| groups(said)).collect::<Vec<_>>(), [[1, 4]]);
    let topics: Vec<Topic> = (0..5).map(|it| Topic::parse(&format!("t{it}")).expect("a topic")).collect();
    let mut publish =
        |topic| bench.engine.publish(at(1), topic, Bytes::from_static(b"a")).expect("published");
    let said: Vec<_> = topics.iter().map(&mut publish).map(|it| (it.queued, it.lazy)).collect();
    assert_eq!(said, [(1, 0), (0, 1), (0, 1), (0, 1), (0, 1)], "one token is left");
    bench.engine.sign_gathered(at(1));
    assert_eq!(pushed(&bench.said()), [1]);
}

#[test]
fn small_messages_that_are_published_together_travel_as_one_and_arrive_as_many() {
    let config = || Config { max_rps: 0, ..Config::default() };
    let mut origin = Bench::new(config(), 1);
    let given = |count: u8| (0..count).map(|number| (topic(), Bytes::from(vec![number; 100]))).collect();
    let published = origin.engine.publish_all(at(1), given(70), false, false);
    let ids = |deliveries: &[Delivery]| deliveries.iter().map(|it| it.id).collect::<Vec<_>>();
    let expected: Vec<_> = published.iter().flatten().map(|it| it.id).collect();
    assert_eq!((expected.len(), ids(&origin.delivered())), (70, expected.clone()));
    let sent = origin.said().remove(0);
    assert_eq!((sent.len(), groups(&sent)), (1, vec![70]));
    let mut relay = Bench::new(config(), 2);
    relay.hear(at(2), 0, &sent[0]);
    let delivered = relay.delivered();
    assert_eq!(ids(&delivered), expected);
    assert!(delivered.windows(2).all(|two| two[0].seq < two[1].seq), "in order");
    for (number, delivery) in delivered.iter().enumerate() {
        let id = MessageId::of(delivery.origin, delivery.seq, &delivery.topic, &delivery.payload);
        assert_eq!((id, &delivery.payload[..]), (delivery.id, &[number as u8; 100][..]));
    }
    relay.hear(at(2), 1, &sent[0]);
    assert_eq!((relay.outcome(Outcome::Delivered), relay.outcome(Outcome::Duplicate)), (70, 70));
    let passed_on = relay.said().remove(1);
    assert_eq!(groups(&passed_on), [70]);
    let mut last = Bench::new(config(), 1);
    last.hear(at(3), 0, &passed_on[0]);
    assert_eq!(ids(&last.delivered()), expected);
    // Whoever comes later is told of one thing, and has all of it when he asks for it.
    let kept: Vec<_> = last.engine.history(&topic()).map(|kept| (kept.id, kept.count)).collect();
    assert_eq!(kept.len(), 1);
    last.hear(at(4), 0, &Gossip::IWant { ids: vec![kept[0].0] });
    assert_eq!(groups(&last.said().remove(0)), [70]);
}

#[test]
fn a_history_counts_bundles_as_one_each_and_none_has_more_than_a_quarter_of_what_is_kept() {
    let mut config = Config { max_rps: 0, ..Config::default() };
    config.history.count = 40;
    let mut bench = Bench::new(config, 1);
    for ms in 1..=30 {
        let messages = (0..25).map(|number| (topic(), Bytes::from(vec![number]))).collect();
        assert!(bench.engine.publish_all(at(ms), messages, false, false).iter().all(Result::is_ok));
    }
    let counts: Vec<_> = bench.engine.history(&topic()).map(|kept| kept.count).collect();
    assert_eq!(counts.len(), 40);
    assert!(counts.iter().all(|count| *count <= 10), "{counts:?}");
}

#[test]
fn sixty_four_messages_of_a_kib_travel_as_one() {
    let mut bench = Bench::new(Config { max_rps: 0, ..Config::default() }, 1);
    let messages = (0..128).map(|number| (topic(), Bytes::from(vec![number; 1024]))).collect();
    assert!(bench.engine.publish_all(at(1), messages, false, false).iter().all(Result::is_ok));
    let counts: Vec<_> = bench.engine.history(&topic()).map(|kept| kept.count).collect();
    assert_eq!(counts, [64, 64]);
}

#[test]
fn what_says_that_it_is_a_bundle_and_is_none_is_refused() {
    let config = || Config { max_message_bytes: 100, max_rps: 0, ..Config::default() };
    let refused = |payload: Bytes, offence| {
        let mut bench = Bench::new(config(), 1);
        bench.hear(at(10), 0, &enveloped_by_99(payload, 5));
        assert_eq!((bench.delivered().len(), bench.outcome(Outcome::Invalid)), (0, 1));
        let score = bench.engine.peers(at(10)).first().map_or(i64::MIN, |peer| peer.score);
        assert!(score < 0, "{offence}: {score}");
    };
    let (two, one) = (
        bundle::encode([(5, &b"a"[..]), (6, b"b")].into_iter()),
        bundle::encode([(5, &b"a"[..])].into_iter()),
    );
    let mut bench = Bench::new(config(), 1);
    bench.hear(at(10), 0, &enveloped_by_99(two.clone(), 5));
    assert_eq!(bench.delivered().len(), 2);
    refused(one, "a message alone");
    refused(Bytes::new(), "nothing");
    refused(two.slice(..two.len() - 1), "cut off");
    refused([&two[..], b"\0"].concat().into(), "something after it");
    let twice = [&two[..], &two[9..]].concat();
    refused(twice.into(), "a sequence twice");
    refused(bundle::encode([(5, &b"a"[..]), (6, &[0; 101])].into_iter()), "a message that is too large");
    let many = (0..=bundle::MESSAGES_MAX as u64).map(|seq| (seq, &b""[..]));
    refused(bundle::encode(many), "too many");
    let large = (0..700).map(|seq| (seq, &[0; 100][..]));
    refused(bundle::encode(large), "too many bytes");
}

/// Messages in what was said, those of bundles included.
fn messages(said: &[Gossip]) -> usize {
    let count = |it: &Gossip| match it {
        Gossip::Message { envelope, payload, .. } if envelope.bundle => {
            bundle::count(payload, FRAME_MAX as usize).expect("a bundle")
        }
        Gossip::Message { .. } => 1,
        _ => 0,
    };
    said.iter().map(count).sum()
}

/// Whatever bytes, signed as a bundle.
fn enveloped_by_99(payload: Bytes, seq: u64) -> Gossip {
    let mut envelope = Envelope {
        origin: node_id(99),
        seq,
        time: START + 10,
        topic: topic(),
        bundle: true,
        signature: None,
    };
    envelope.sign(envelope.id(&payload), &key(99));
    Gossip::Message { hops: 0, envelope, payload }
}

#[test]
fn whoever_comes_after_a_burst_is_told_of_all_that_is_kept_of_it() {
    let mut config = Config { max_rps: 0, ..Config::default() };
    config.history.count = 100;
    let mut bench = Bench::new(config, 1);
    for ms in 1..=150 {
        bench.engine.publish(at(ms), &topic(), Bytes::from_static(b"a")).expect("published");
    }
    let mut told = |node: usize, ms: u64| {
        let (_, egress) = bench.engine.connect(at(ms), node_id(node), FRAME_MAX).expect("connected");
        let count = |said: Gossip| if let Gossip::Digest { count, .. } = said { Some(count) } else { None };
        said(&egress).into_iter().find_map(count)
    };
    assert_eq!(told(7, 5_000), Some(100), "long after it");
    assert_eq!(told(8, 594_000), Some(100), "until shortly before its end");
    // While messages push others out, what goes next is left aside.
    for ms in 594_001..=594_050 {
        bench.engine.publish(at(ms), &topic(), Bytes::from_static(b"a")).expect("published");
    }
    let (_, egress) = bench.engine.connect(at(594_060), node_id(9), FRAME_MAX).expect("connected");
    let told = said(&egress).into_iter().find_map(|said| match said {
        Gossip::Digest { window, count, .. } => Some((window.since - START, count)),
        _ => None,
    });
    assert_eq!(told, Some((113, 88)), "all but the oldest twelve");
}

#[test]
fn of_several_publications_each_has_its_own_outcome_or_all_end_with_the_first_that_is_busy() {
    let most = 17 << 10;
    let mut config = Config { announce_max: 0, max_rps: 0, max_message_bytes: most, ..Config::default() };
    config.egress.frames = 8;
    let messages = |large: usize| {
        // Too large for a bundle.
        let payload = |number: usize| Bytes::from(vec![0; most + usize::from(number == large)]);
        (0..12).map(|number| (topic(), payload(number))).collect::<Vec<_>>()
    };
    let busy =
        |done: &[Result<_, PublishError>]| done.iter().filter(|it| **it == Err(PublishError::Busy)).count();
    let mut bench = Bench::new(config.clone(), 1);
    let done = bench.engine.publish_all(at(1), messages(2), false, false);
    assert_eq!((done.len(), done[2]), (12, Err(PublishError::TooLarge(most + 1))));
    assert_eq!((done.iter().flatten().count(), busy(&done)), (7, 4));
    let mut bench = Bench::new(config, 1);
    let done = bench.engine.publish_all(at(1), messages(2), true, false);
    assert_eq!((done.len(), done.iter().flatten().count(), busy(&done)), (9, 7, 1));
    assert_eq!(bench.engine.history(&topic()).count(), 7, "nothing is left of the others");
}

#[test]
fn a_budget_turns_pushes_into_announcements() {
    let mut bench = Bench::new(Config::default(), 1);
    let reach: Vec<_> = (0..20)
        .map(|_| bench.engine.publish(at(1), &topic(), Bytes::from_static(b"a")).expect("published"))
        .map(|it| (it.queued, it.lazy))
        .collect();
    assert_eq!(reach[..8], [(1, 0); 8]);
    assert_eq!(reach[8..], [(0, 1); 12]);
    let later = bench.engine.publish(at(11), &topic(), Bytes::from_static(b"a")).expect("published");
    assert_eq!((later.queued, later.lazy), (1, 0), "200 a second");
}

#[test]
fn a_message_is_delivered_once_and_passed_on_to_the_others() {
    let mut bench = Bench::new(Config::default(), 3);
    let (message, id) = by_99(1, 0, 0);
    bench.hear(at(1), 0, &message);
    let delivered = bench.delivered();
    assert_eq!(delivered.len(), 1);
    assert_eq!((delivered[0].id, delivered[0].hops, &delivered[0].payload[..]), (id, 1, &b"payload 1"[..]));
    let said = bench.said();
    assert_eq!(pushed(&said), [0, 1, 1]);
    let Gossip::Message { hops, .. } = &said[1][0] else { panic!("{said:?}") };
    assert_eq!(*hops, 1);
    // Who keeps pushing what is known is pruned, and from then on is told instead of pushed to.
    bench.hear(at(2), 1, &message);
    assert_eq!((bench.delivered().len(), bench.outcome(Outcome::Duplicate)), (0, 1));
    assert_eq!(bench.said()[1], []);
    for seq in 2..=5 {
        bench.hear(at(2), 0, &by_99(seq, 0, 0).0);
        bench.said();
        bench.hear(at(3), 1, &by_99(seq, 0, 0).0);
    }
    assert_eq!(bench.said()[1], [Gossip::Prune { topic: topic() }]);
    bench.hear(at(3), 0, &by_99(6, 0, 0).0);
    assert_eq!(pushed(&bench.said()), [0, 0, 1]);
    bench.engine.tick(at(100));
    assert!(matches!(&bench.said()[1][..], [Gossip::IHave { history: false, .. }]));
}

#[test]
fn what_is_announced_and_does_not_come_is_grafted() {
    let mut bench = Bench::new(Config::default(), 3);
    bench.hear(at(1), 2, &Gossip::Prune { topic: topic() });
    let (message, id) = by_99(1, 0, 0);
    bench.hear(at(1), 1, &ihave(id, false));
    bench.hear(at(1), 2, &ihave(id, false));
    assert!(bench.said().iter().all(Vec::is_empty), "it may still be pushed");
    let due = bench.engine.due().as_millis() as u64 + 1;
    assert!((3..300).contains(&due), "a matter of round trips: {due}");
    bench.engine.tick(at(due));
    assert_eq!(bench.said()[1], [Gossip::Graft { topic: topic(), ids: vec![id] }]);
    // The first does not answer, so the next is asked.
    let mut now = due;
    while bench.outcome(Outcome::Delivered) == 0 {
        now = bench.engine.due().as_millis() as u64 + 1;
        assert!(now < 10_000, "nobody else is asked");
        bench.engine.tick(at(now));
        if bench.said()[2].contains(&Gossip::Graft { topic: topic(), ids: vec![id] }) {
            bench.hear(at(now), 2, &message);
        }
    }
    assert_eq!(bench.delivered().len(), 1);
    assert!(now - due < 1000, "{now}");
    // The one grafted is eager again.
    bench.said();
    bench.hear(at(now), 0, &by_99(2, 0, 0).0);
    assert_eq!(pushed(&bench.said()), [0, 1, 1]);
}

#[test]
fn a_message_that_nobody_gives_is_given_up_and_counted() {
    let mut bench = Bench::new(Config::default(), 1);
    bench.hear(at(1), 0, &ihave(MessageId([7; 32]), false));
    let mut now = 1;
    while bench.engine.kept().2 > 0 && now < 120_000 {
        now = bench.engine.due().as_millis() as u64 + 1;
        bench.engine.tick(at(now));
    }
    let shed: Vec<_> = bench.engine.ledger().shed().filter(|it| it.0 == Queue::Missing).collect();
    assert_eq!(shed, [(Queue::Missing, Lane::Control, Cause::Timeout, 1)]);
}

#[test]
fn a_full_fan_out_answers_a_graft_with_the_message_and_a_prune() {
    let config = Config { relay_fanout: 1, ..Config::default() };
    let mut bench = Bench::new(config, 2);
    let (message, id) = by_99(1, 0, 0);
    bench.hear(at(1), 0, &message);
    bench.said();
    bench.hear(at(2), 1, &Gossip::Graft { topic: topic(), ids: vec![id] });
    let said = bench.said();
    assert!(matches!(&said[1][..], [Gossip::Prune { .. }, Gossip::Message { .. }]), "{said:?}");
}

#[test]
fn a_forged_message_does_not_silence_the_true_one() {
    let mut bench = Bench::new(Config::default(), 2);
    let (good, _) = by_99(1, 0, 0);
    let Gossip::Message { hops, mut envelope, payload } = good.clone() else { unreachable!() };
    envelope.signature.as_mut().expect("signed").bytes[3] ^= 1;
    bench.hear(at(1), 0, &Gossip::Message { hops, envelope: envelope.clone(), payload: payload.clone() });
    envelope.signature = None;
    bench.hear(at(1), 0, &Gossip::Message { hops, envelope, payload });
    assert_eq!((bench.delivered().len(), bench.outcome(Outcome::Invalid)), (0, 2));
    bench.hear(at(2), 1, &good);
    assert_eq!(bench.delivered().len(), 1);
    let unsigned = Config { signed: false, ..Config::default() };
    let mut bench = Bench::new(unsigned, 1);
    let Gossip::Message { hops, envelope, payload } = good else { unreachable!() };
    bench.hear(
        at(1),
        0,
        &Gossip::Message { hops, envelope: Envelope { signature: None, ..envelope }, payload },
    );
    assert_eq!(bench.delivered().len(), 1);
}

/// A message of the first peer itself, whose signature is good or somebody else's.
fn by_1(seq: u64, good: bool) -> (Gossip, MessageId) {
    let (payload, time) = (Bytes::from(format!("payload {seq}")), START);
    let mut envelope =
        Envelope { origin: node_id(1), seq, time, topic: topic(), bundle: false, signature: None };
    let id = envelope.id(&payload);
    envelope.sign(id, &key(if good { 1 } else { 98 }));
    (Gossip::Message { hops: 0, envelope, payload }, id)
}

#[test]
fn what_a_proved_origin_says_itself_is_checked_before_anybody_else_gets_it() {
    for (good, given) in [(true, 1), (false, 0)] {
        let mut bench = Bench::new(Config::default(), 2);
        let (origin, other) = (bench.peers[0].0, 1);
        bench.engine.prove(origin);
        // The other wants announcements only.
        bench.hear(at(0), other, &Gossip::Prune { topic: topic() });
        let (message, id) = by_1(1, good);
        bench.hear(at(1), 0, &message);
        assert_eq!(bench.delivered().len(), 1);
        bench.hear(at(2), other, &Gossip::IWant { ids: vec![id] });
        assert_eq!(pushed(&bench.said()), [0, given]);
        assert_eq!(bench.outcome(Outcome::Invalid), 1 - given as u64);
        assert_eq!(bench.engine.history(&topic()).count(), given);
        assert_eq!(bench.engine.kept().0 == 0, given == 0);
        // Asked again, it is not checked again, and what was thrown away stays so.
        bench.hear(at(3), other, &Gossip::IWant { ids: vec![id] });
        assert_eq!(pushed(&bench.said()), [0, given]);
    }
}

#[test]
fn an_origin_is_not_believed_unproved_nor_where_its_message_is_pushed_on() {
    for (proved, pruned) in [(false, true), (true, false)] {
        let mut bench = Bench::new(Config::default(), 2);
        if proved {
            bench.engine.prove(bench.peers[0].0);
        }
        if pruned {
            bench.hear(at(0), 1, &Gossip::Prune { topic: topic() });
        }
        bench.hear(at(1), 0, &by_1(1, false).0);
        assert_eq!((bench.delivered().len(), bench.outcome(Outcome::Invalid)), (0, 1));
        bench.hear(at(2), 0, &by_1(2, true).0);
        assert_eq!(bench.delivered().len(), 1);
        assert_eq!(pushed(&bench.said()), [0, usize::from(!pruned)]);
    }
}

#[test]
fn an_origin_without_a_signature_is_not_believed_either() {
    let mut bench = Bench::new(Config::default(), 1);
    bench.engine.prove(bench.peers[0].0);
    let payload = Bytes::from_static(b"x");
    let envelope =
        Envelope { origin: node_id(1), seq: 1, time: START, topic: topic(), bundle: false, signature: None };
    bench.hear(at(1), 0, &Gossip::Message { hops: 0, envelope, payload });
    assert_eq!((bench.delivered().len(), bench.outcome(Outcome::Invalid)), (0, 1));
}

#[test]
fn more_origins_than_are_remembered_are_all_checked() {
    let mut bench = Bench::new(Config { max_rps: 0, ..Config::default() }, 1);
    for round in 0..2 {
        for number in 0..1100 {
            let payload = Bytes::from(format!("{round}"));
            let mut envelope = Envelope {
                origin: node_id(number + 200),
                seq: round,
                time: START,
                topic: topic(),
                bundle: false,
                signature: None,
            };
            let id = envelope.id(&payload);
            envelope.sign(id, &key(if number == 1099 { 98 } else { number + 200 }));
            bench.hear(at(1), 0, &Gossip::Message { hops: 0, envelope, payload });
        }
    }
    assert_eq!((bench.delivered().len(), bench.outcome(Outcome::Invalid)), (2198, 2));
}

#[test]
fn messages_from_elsewhere_in_time_or_too_far_away_are_refused() {
    let mut bench = Bench::new(Config::default(), 1);
    let now = at(3_600_000);
    let age = 720_000;
    for (time, hops, outcome) in [
        (3_600_000 + 120_001, 0, Outcome::Invalid),
        (3_600_000 + 120_000, 0, Outcome::Delivered),
        (3_600_000 - age, 0, Outcome::Delivered),
        (3_600_000 - age - 1, 0, Outcome::Expired),
        (3_600_000, 15, Outcome::Delivered),
        (3_600_000, 16, Outcome::Invalid),
    ] {
        let before = bench.outcome(outcome);
        bench.hear(now, 0, &by_99(time + u64::from(hops), time, hops).0);
        assert_eq!(bench.outcome(outcome), before + 1, "{time} {hops}");
    }
    // One that came sixteen hops is not pushed any further.
    let mut bench = Bench::new(Config::default(), 2);
    bench.hear(at(1), 0, &by_99(1, 0, 15).0);
    assert_eq!(pushed(&bench.said()), [0, 0]);
    bench.engine.tick(at(100));
    assert!(matches!(&bench.said()[1][..], [Gossip::IHave { .. }]));
}

#[test]
fn what_was_forgotten_is_not_taken_again() {
    let history = HistoryLimits { count: 2, ..Config::default().history };
    let config = Config { seen_max: 4, history, max_rps: 0, ..Config::default() };
    let mut bench = Bench::new(config, 1);
    for seq in 1..=8 {
        bench.hear(at(seq), 0, &by_99(seq, 0, 0).0);
    }
    assert_eq!(bench.delivered().len(), 8);
    // The first four are out of memory, and still refused; so is one that never came but is older.
    for seq in [1, 4, 0] {
        bench.hear(at(20), 0, &by_99(seq, 0, 0).0);
    }
    assert_eq!((bench.delivered().len(), bench.outcome(Outcome::Expired)), (0, 3));
    bench.hear(at(21), 0, &by_99(6, 0, 0).0);
    assert_eq!(bench.outcome(Outcome::Duplicate), 1);
    bench.hear(at(22), 0, &by_99(9, 0, 0).0);
    assert_eq!((bench.delivered().len(), bench.engine.kept().1), (1, 4));
}

#[test]
fn who_pushes_more_than_its_budget_is_refused_by_number_and_then_sent_away() {
    let mut bench = Bench::new(Config::default(), 2);
    let mut refused = Vec::new();
    let mut sent_away = None;
    for seq in 1..=2000 {
        let (message, id) = by_99(seq, 0, 0);
        bench.hear(at(1), 0, &message);
        for action in bench.actions() {
            match action {
                Action::Refuse(_, corr) if corr == id.corr() => refused.push(seq),
                Action::Disconnect(_, why) => sent_away = sent_away.or(Some((seq, why))),
                Action::Greylisted { node, offence, .. } => {
                    assert_eq!((node, offence), (node_id(1), Offence::Excessive));
                }
                _ => {}
            }
        }
    }
    assert_eq!(refused.first(), Some(&33), "four times the burst");
    assert_eq!(sent_away, Some((432, Goaway::Policy)));
    let shed: Vec<_> = bench.engine.ledger().shed().filter(|it| it.2 == Cause::Budget).collect();
    assert_eq!(shed, [(Queue::Ingress, Lane::Normal, Cause::Budget, 400)]);
    assert!(matches!(
        bench.engine.connect(at(2), node_id(1), FRAME_MAX),
        Err(ConnectError::Greylisted { .. })
    ));
    assert!(bench.engine.connect(at(600_002), node_id(1), FRAME_MAX).is_ok(), "after ten minutes");
}

#[test]
fn what_comes_at_once_after_a_silence_is_no_excess_as_far_as_it_could_have_been_sent_meanwhile() {
    // Eight are no excess at any time, and a hundred for each second, but for thirty of them.
    for (silence_ms, allowed) in [(999, 8), (5000, 508), (30_000, 3008), (900_000, 3008)] {
        let config = Config { max_rps: 100, burst_budget_frames: 2, ..Config::default() };
        let mut bench = Bench::new(config, 2);
        for seq in 1..=allowed + 800 {
            let (message, _) = by_99(seq, silence_ms, 0);
            bench.hear(at(silence_ms), 0, &message);
            assert_eq!(bench.outcome(Outcome::Shed) > 0, seq > allowed, "{silence_ms} ms, message {seq}");
        }
        let sent_away = bench.actions().iter().any(|action| matches!(action, Action::Disconnect(..)));
        assert!(sent_away, "who goes on all the same is not believed");
    }
}

#[test]
fn who_talks_nonsense_is_sent_away() {
    type Offend = fn(&mut Bench);
    let cases: [(&str, Offend); 5] = [
        ("garbage", |bench| {
            bench.engine.receive(at(1), bench.peers[0].0, 0, &Bytes::from_static(b"\xffjunk"))
        }),
        ("a false number", |bench| {
            let (message, _) = by_99(1, 0, 0);
            let Gossip::Message { .. } = &message else { unreachable!() };
            let mut decoder = Decoder::new(FRAME_MAX);
            decoder.push(&message.encode(FRAME_MAX).expect("a frame").to_vec());
            let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else { unreachable!() };
            bench.engine.receive(at(1), bench.peers[0].0, frame.corr ^ 1, &frame.payload);
        }),
        ("announcing what may not be", |bench| {
            let entries = vec![(MessageId([1; 32]), (8 << 20) + 1)];
            bench.hear(at(1), 0, &Gossip::IHave { history: false, topic: topic(), entries });
        }),
        ("replaying", |bench| bench.hear(at(1), 0, &by_99(1, 0, 0).0)),
        ("control frames without end", |bench| {
            for _ in 0..300 {
                bench.hear(at(1), 0, &Gossip::Prune { topic: topic() });
            }
        }),
    ];
    for (name, offend) in cases {
        let mut bench = Bench::new(Config { burst_budget_frames: 1000, ..Config::default() }, 1);
        let away = |bench: &mut Bench| {
            bench.actions().iter().any(|action| matches!(action, Action::Disconnect(_, Goaway::Policy)))
        };
        let often = (0..150).take_while(|_| {
            offend(&mut bench);
            !away(&mut bench)
        });
        assert!(often.count() < 149, "{name}");
        assert_eq!(bench.engine.peers(at(1)), vec![], "{name}");
    }
}

#[test]
fn a_refusal_by_a_peer_makes_it_an_announcement() {
    let mut bench = Bench::new(Config::default(), 1);
    let published = bench.engine.publish(at(1), &topic(), Bytes::from_static(b"a")).expect("published");
    assert_eq!(pushed(&bench.said()), [1]);
    bench.engine.refused(at(50), bench.peers[0].0, published.id.corr());
    bench.engine.tick(at(100));
    let Gossip::IHave { entries, .. } = &bench.said()[0][0] else { panic!("announced") };
    assert_eq!(entries[..], [(published.id, 1)]);
    let next = bench.engine.publish(at(60), &topic(), Bytes::from_static(b"b")).expect("published");
    assert_eq!((next.queued, next.lazy), (0, 1), "it is spared");
    let next = bench.engine.publish(at(5000), &topic(), Bytes::from_static(b"c")).expect("published");
    assert_eq!((next.queued, next.lazy), (1, 0), "for a while");
}

#[test]
fn histories_that_differ_are_told_and_those_that_do_not_are_not() {
    let mut bench = Bench::new(Config::default(), 1);
    for seq in 1..=3 {
        bench.hear(at(seq), 0, &by_99(seq, seq, 0).0);
    }
    bench.said();
    let ids: Vec<MessageId> = bench.engine.history(&topic()).map(|kept| kept.id).collect();
    let window = Window { since: START, until: START + 10_000 };
    let digest = |ids: &[MessageId], round| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.0).collect();
        let hash = *blake3::hash(&bytes).as_bytes();
        Gossip::Digest { round, topic: topic(), window, count: ids.len() as u32, hash }
    };
    bench.hear(at(10_000), 0, &digest(&ids, 0));
    bench.engine.tick(at(10_100));
    assert!(!bench.said()[0].iter().any(|it| matches!(it, Gossip::IHave { .. })));
    bench.hear(at(10_200), 0, &digest(&ids[1..], 0));
    assert_eq!(bench.said()[0], [digest(&ids, 1)], "so that the other side tells too");
    bench.engine.tick(at(10_300));
    let said = bench.said();
    let entries: Vec<_> = ids.iter().map(|id| (*id, 9)).collect();
    assert!(said[0].contains(&Gossip::IHave { history: true, topic: topic(), entries }), "{said:?}");
    bench.hear(at(10_400), 0, &digest(&ids[1..], 2));
    assert!(!bench.said()[0].iter().any(|it| matches!(it, Gossip::Digest { .. })), "it ends");
    // What a history is told of is asked for at once, and says nothing about the tree.
    let (old, id) = by_99(9, 5, 0);
    bench.hear(at(10_500), 0, &ihave(id, true));
    assert_eq!(bench.said()[0], [Gossip::IWant { ids: vec![id] }]);
    bench.hear(at(10_501), 0, &old);
    assert_eq!(bench.delivered().len(), 4);
}

#[test]
fn announcements_that_wait_for_room_are_not_counted_as_shed() {
    let mut config = Config { max_rps: 0, ..Config::default() };
    config.egress.frames = 8;
    let mut bench = Bench::new(config, 1);
    let publish = |bench: &mut Bench, ms| {
        let reach = bench.engine.publish(at(ms), &topic(), Bytes::from_static(b"a")).expect("published");
        (reach.queued, reach.lazy)
    };
    assert_eq!((1..=9).map(|_| publish(&mut bench, 1)).filter(|it| *it == (1, 0)).count(), 7);
    // The last place is for control frames, and taken by the first two announcements; a third has to wait.
    bench.engine.tick(at(40));
    assert_eq!(publish(&mut bench, 41), (0, 1));
    let shed = bench.engine.ledger().shed_total();
    for ms in [100, 200, 300] {
        bench.engine.tick(at(ms));
    }
    assert_eq!(bench.engine.ledger().shed_total(), shed);
    assert_eq!(bench.said()[0].len(), 8);
    bench.engine.tick(at(400));
    assert!(matches!(&bench.said()[0][..], [Gossip::IHave { entries, .. }] if entries.len() == 1));
}

#[test]
fn who_can_wait_does_so_while_most_peers_have_half_a_queue_to_write_and_for_no_single_one() {
    let mut config = Config { max_rps: 0, ..Config::default() };
    config.egress.frames = 8;
    let publish = |bench: &mut Bench, patient| {
        let message = vec![(topic(), Bytes::from_static(b"a"))];
        let done = bench.engine.publish_all(at(1), message, true, patient);
        done[0].map(|it| (it.queued, it.lazy))
    };
    let mut bench = Bench::new(config.clone(), 4);
    assert_eq!(
        (0..9).filter(|_| publish(&mut bench, true) == Ok((4, 0))).count(),
        5,
        "half of eight and one"
    );
    assert_eq!(publish(&mut bench, true), Err(PublishError::Busy));
    assert_eq!(publish(&mut bench, false), Ok((4, 0)), "there is room for who cannot wait");
    said(&bench.peers[0].1);
    assert_eq!(publish(&mut bench, true), Err(PublishError::Busy), "three of four");
    said(&bench.peers[1].1);
    assert_eq!(publish(&mut bench, true), Ok((4, 0)));
    // One of four that alone is eager, and does not keep up: the others are told, and can ask for it.
    let mut bench = Bench::new(config, 4);
    publish(&mut bench, true).expect("published");
    for peer in 1..4 {
        bench.hear(at(1), peer, &Gossip::Prune { topic: topic() });
    }
    assert_eq!((0..6).filter(|_| publish(&mut bench, true) == Ok((1, 3))).count(), 6);
    assert_eq!(publish(&mut bench, true), Ok((0, 4)));
}

#[test]
fn a_peer_whose_queue_has_emptied_is_pushed_to_again_and_one_that_refused_is_not() {
    let mut config = Config { max_rps: 0, ..Config::default() };
    config.egress.frames = 8;
    let mut bench = Bench::new(config, 1);
    let publish = |bench: &mut Bench, ms| {
        bench.engine.publish(at(ms), &topic(), Bytes::from_static(b"a")).expect("published").queued
    };
    assert_eq!((0..8).map(|_| publish(&mut bench, 1)).sum::<usize>(), 7);
    assert_eq!(publish(&mut bench, 2), 0);
    bench.said();
    assert_eq!(publish(&mut bench, 3), 1);
    // Its own word counts for longer than room in its queue here.
    bench.engine.refused(at(4), bench.peers[0].0, 0);
    bench.said();
    assert_eq!((publish(&mut bench, 5), publish(&mut bench, 3000)), (0, 1));
}

#[test]
fn where_there_are_many_announcements_the_next_wait_longer() {
    let mut bench = Bench::new(Config { relay_fanout: 1, max_rps: 0, ..Config::default() }, 2);
    let peers: Vec<PeerId> = bench.peers.iter().map(|(peer, _)| *peer).collect();
    for peer in peers.iter().cycle().take(200) {
        bench.engine.rtt(*peer, Duration::from_millis(1));
    }
    let publish = |bench: &mut Bench, ms| {
        bench.engine.publish(at(ms), &topic(), Bytes::from_static(b"a")).expect("published");
    };
    let announced = |bench: &mut Bench, ms| {
        bench.engine.tick(at(ms));
        let ids = |it: &Gossip| if let Gossip::IHave { entries, .. } = it { entries.len() } else { 0 };
        bench.said().iter().flatten().map(ids).sum::<usize>()
    };
    (0..20).for_each(|_| publish(&mut bench, 1));
    assert_eq!((announced(&mut bench, 5), announced(&mut bench, 6)), (0, 20));
    publish(&mut bench, 10);
    assert_eq!((announced(&mut bench, 34), announced(&mut bench, 35)), (0, 1));
    // That was one.
    publish(&mut bench, 40);
    assert_eq!((announced(&mut bench, 44), announced(&mut bench, 45)), (0, 1));
}

#[test]
fn a_history_larger_than_the_room_for_it_is_announced_in_parts() {
    let config = Config { announce_max: 4, max_rps: 0, ..Config::default() };
    let mut bench = Bench::new(config, 1);
    for seq in 1..=20 {
        bench.hear(at(seq), 0, &by_99(seq, seq, 0).0);
    }
    let mut told = BTreeSet::new();
    for round in 1..=60 {
        let window = Window { since: START, until: START + 100 };
        let digest = Gossip::Digest { round: 2, topic: topic(), window, count: 0, hash: [0; 32] };
        bench.hear(at(round * 1000), 0, &digest);
        bench.engine.tick(at(round * 1000 + 100));
        for said in bench.said().remove(0) {
            if let Gossip::IHave { entries, .. } = said {
                assert!(entries.len() <= 4);
                told.extend(entries);
            }
        }
    }
    assert_eq!(told.len(), 20);
    let shed: Vec<_> = bench.engine.ledger().shed().collect();
    assert_eq!(shed, [(Queue::Announce, Lane::Bulk, Cause::Full, 60 * 16)]);
}

#[test]
fn histories_keep_to_their_bounds() {
    let history = HistoryLimits { count: 5, bytes: 30, age: Duration::from_secs(60) };
    let config = Config { history, max_rps: 0, topics_max: 3, ..Config::default() };
    let mut bench = Bench::new(config, 1);
    for seq in 1..=9 {
        bench.hear(at(seq), 0, &by_99(seq, seq, 0).0);
    }
    assert_eq!(bench.engine.history(&topic()).count(), 3, "30 bytes");
    assert_eq!(bench.engine.kept().0, 27);
    bench.engine.tick(at(61_000));
    assert_eq!((bench.engine.history(&topic()).count(), bench.engine.kept().0), (0, 0), "a minute");
    for number in 0..5 {
        let topic = Topic::parse(&format!("other/{number}")).expect("a topic");
        bench.engine.publish(at(61_001 + number), &topic, Bytes::from_static(b"x")).expect("published");
    }
    assert_eq!(bench.engine.kept().0, 2, "three topics, of which one is followed");
    let shed: Vec<_> = bench.engine.ledger().shed().filter(|it| it.0 == Queue::Topics).collect();
    assert_eq!(shed, [(Queue::Topics, Lane::Bulk, Cause::Dropped, 3)]);
}

#[test]
fn a_node_connects_once_and_never_to_itself() {
    let mut bench = Bench::new(Config::default(), 1);
    let (peer, _) = bench.peers[0];
    assert_eq!(bench.engine.connect(at(1), node_id(0), FRAME_MAX).err(), Some(ConnectError::Myself));
    assert_eq!(bench.engine.connect(at(1), node_id(1), FRAME_MAX).err(), Some(ConnectError::Connected(peer)));
    bench.engine.disconnect(at(2), peer);
    let (again, egress) = bench.engine.connect(at(3), node_id(1), FRAME_MAX).expect("connected");
    assert_ne!(again, peer);
    assert_eq!(said(&egress)[0], Gossip::Topics(vec![(true, topic())]));
    assert_eq!(bench.engine.node(), node_id(0));
    // An engine that takes over knows nobody by the numbers of the one before.
    let mut next = Engine::new(Config::default(), key(0), 1, Ceiling::new(1 << 20), at(3));
    next.number_peers_above(again.0);
    let (other, _) = next.connect(at(3), node_id(1), FRAME_MAX).expect("connected");
    assert!(other > again);
}
