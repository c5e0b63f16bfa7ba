//! The keys of `[overlay]`.

use oap::frame::{FRAME_MAX, FRAME_MIN_MAX};
use oap::gossip::{Config as EngineConfig, EgressLimits, HistoryLimits, WhenFull};
use ron_kernel::config::Problems;
use ron_kernel::units::{Size, Span};
use ron_kernel::{choice, settings};
use ron_transport::{Address, Listen, Mode, PeerAddress, PeerTlsSettings};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The capacity of a peer's queue, which permits can only make smaller.
pub(crate) const EGRESS_FRAMES: usize = 512;

/// For how long after a signature messages wait for others. In the bench of eight nodes at 10,000/s one millisecond cost
/// 25 us of CPU a delivery, and two 19.
const GATHER: Duration = Duration::from_millis(2);

settings! {
    /// The overlay.
    pub struct OverlaySettings {
        /// Whether `ron up` starts the overlay.
        enabled: bool = true => Restart;
        /// Address that peers dial: IP:PORT, where port 0 picks a free one, or unix:PATH for nodes of this user on this
        /// machine, or quic:IP:PORT in a build with the feature `quic`.
        listen: Listen = Listen::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 9500))) => Restart;
        /// The address that others should write for this node, if it is not the one it listens on; `ron overlay peers`
        /// shows it.
        advertise: String = String::new() => Hot;
        /// Who may be a peer.
        admit: Admit = Admit::Listed => Hot;
        /// Nodes to dial and to admit, each as ed25519:…@host:port, …@unix:PATH or …@quic:host:port.
        peers: Vec<String> = Vec::new() => Hot;
        /// New connections per second from one client address, and so many at once; as many per node. 0 is off.
        handshakes_per_ip: u64 = 10 => Hot;
        /// From a connection's beginning to the end of HELLO.
        handshake_timeout: Span = Span::secs(3) => Hot;
        /// Connections open at one time, both ways; half of them, and never more than 256, may be in their handshake.
        max_conns: usize = 1024 => Hot;
        /// Bytes that all queues together may hold.
        queue_bytes: Size = Size::mib(256) => Restart;
        /// TLS between nodes.
        tls: PeerTlsSettings = PeerTlsSettings::default() => Hot;
        /// What a peer may have and do.
        peer: PeerSettings = PeerSettings::default() => Hot;
        /// How messages are carried.
        gossip: GossipSettings = GossipSettings::default() => Hot;
        /// How long things may take.
        timeouts: TimeoutSettings = TimeoutSettings::default() => Hot;
    }
}

choice! {
    /// Who may be a peer.
    pub enum Admit {
        /// Nodes in `peers`.
        Listed = "listed",
        /// Any node.
        Any = "any",
    }
}

settings! {
    /// What a peer may have and do.
    pub struct PeerSettings {
        /// Frames that may wait to be written to a peer, at most 512.
        inflight_frames: usize = EGRESS_FRAMES => Restart;
        /// And their bytes.
        egress_bytes: Size = Size::mib(4) => Restart;
        /// Messages, or bundles of small ones, pushed to a peer each second; it may push twice as many. 0 is no limit.
        max_rps: u64 = 200 => Restart;
        /// How long nobody talks to a node that misbehaved.
        greylist: Span = Span::secs(600) => Restart;
    }
}

choice! {
    /// What a full queue to a peer does.
    pub enum EgressFull {
        /// The newcomer is refused, and announced later.
        RejectNew = "reject_new",
        /// The oldest frame of the lowest lane makes room.
        DropOldest = "drop_oldest",
    }
}

settings! {
    /// How messages are carried.
    pub struct GossipSettings {
        /// Peers that a message is pushed to; the others are told of it.
        relay_fanout: usize = 8 => Restart;
        /// Messages, or bundles of small ones, pushed to a peer at once, before `peer.max_rps` counts.
        burst_budget_frames: u64 = 8 => Restart;
        /// Largest frame, 16KiB to 1MiB.
        max_frame_bytes: Size = Size::mib(1) => Restart;
        /// How far a publisher's clock may be ahead.
        skew: Span = Span::secs(120) => Restart;
        /// What messages larger than a frame are cut into, 4KiB to 512KiB.
        chunk_bytes: Size = Size::kib(64) => Restart;
        /// Largest message, at most 64MiB.
        max_message_bytes: Size = Size::mib(8) => Restart;
        /// Hops that a message is pushed over, 1 to 255; further nodes ask for it.
        hop_limit: u64 = 16 => Restart;
        /// Messages that are remembered, so that each is delivered once.
        seen_max: usize = 65_536 => Restart;
        /// What is kept of each topic for nodes that come late.
        history: HistorySettings = HistorySettings::default() => Restart;
        /// What a full queue to a peer does.
        egress_full: EgressFull = EgressFull::RejectNew => Restart;
    }
}

settings! {
    /// What is kept of each topic.
    pub struct HistorySettings {
        /// Messages, a bundle of small ones counted as one.
        count: usize = 1024 => Restart;
        /// Their bytes.
        bytes: Size = Size::mib(64) => Restart;
        /// For how long; older messages are not taken either.
        age: Span = Span::secs(600) => Restart;
    }
}

settings! {
    /// How long things may take; sessions that open after a change keep to it.
    pub struct TimeoutSettings {
        /// From a frame's first byte to its last.
        read: Span = Span::secs(5) => Hot;
        /// For a batch of frames, at most 64KiB or one frame, to be taken by the peer; the session then ends.
        write: Span = Span::secs(5) => Hot;
        /// For a session from which nothing comes; a quarter of it passes between two pings. 30s under `ron run`.
        idle: Span = Span::secs(15) => Hot;
    }
}

impl OverlaySettings {
    /// What can be judged without files.
    pub fn validate(&self, danger_ok: bool, problems: &mut Problems) {
        self.validate_numbers(problems);
        for (key, value) in [
            ("handshake_timeout", self.handshake_timeout),
            ("timeouts.read", self.timeouts.read),
            ("timeouts.write", self.timeouts.write),
            ("timeouts.idle", self.timeouts.idle),
            ("gossip.skew", self.gossip.skew),
            ("gossip.history.age", self.gossip.history.age),
        ] {
            if value.0 < Duration::from_millis(10) {
                problems.add(format!("overlay.{key}"), "must be at least 10ms");
            }
        }
        let plain = self.tls.mode == Mode::Off && !danger_ok;
        let unsafe_words = "is not on this machine, and tls.mode = \"off\" sends everything unprotected; use TLS, a loopback address, or node.danger_ok = true";
        if plain && !self.listen.is_local() {
            problems.add("overlay.listen", unsafe_words);
        }
        let no_quic =
            "is QUIC, which is always encrypted, and tls.mode is \"off\"; write host:port for plain TCP";
        if self.tls.mode == Mode::Off && matches!(self.listen, Listen::Quic(_)) {
            problems.add("overlay.listen", no_quic);
        }
        for (index, peer) in self.peers.iter().enumerate() {
            match peer.parse::<PeerAddress>() {
                Ok(peer) if self.tls.mode == Mode::Off && matches!(peer.at, Address::Quic(..)) => {
                    problems.add(format!("overlay.peers[{index}]"), no_quic)
                }
                Err(error) => problems.add(format!("overlay.peers[{index}]"), error),
                Ok(peer) if plain && !peer.at.is_local() => {
                    problems.add(format!("overlay.peers[{index}]"), unsafe_words)
                }
                Ok(peer) if self.listed().filter(|other| other.node == peer.node).count() > 1 => problems
                    .add(format!("overlay.peers[{index}]"), "names a node that another entry names too"),
                Ok(_) => {}
            }
        }
        if let Some((key, problem)) = self.tls.check() {
            problems.add(format!("overlay.tls.{key}"), problem);
        }
    }

    fn validate_numbers(&self, problems: &mut Problems) {
        let (peer, gossip) = (&self.peer, &self.gossip);
        let ranges = [
            ("max_conns", self.max_conns as u64, 1, 1 << 20),
            ("queue_bytes", self.queue_bytes.0, 1 << 20, 1 << 40),
            ("handshakes_per_ip", self.handshakes_per_ip, 0, 1 << 20),
            ("peer.inflight_frames", peer.inflight_frames as u64, 8, EGRESS_FRAMES as u64),
            ("peer.egress_bytes", peer.egress_bytes.0, 64 << 10, 1 << 40),
            ("peer.max_rps", peer.max_rps, 0, 1 << 24),
            ("gossip.relay_fanout", gossip.relay_fanout as u64, 1, 1 << 16),
            ("gossip.burst_budget_frames", gossip.burst_budget_frames, 1, 1 << 24),
            (
                "gossip.max_frame_bytes",
                gossip.max_frame_bytes.0,
                u64::from(FRAME_MIN_MAX),
                u64::from(FRAME_MAX),
            ),
            ("gossip.chunk_bytes", gossip.chunk_bytes.0, 4 << 10, 512 << 10),
            ("gossip.max_message_bytes", gossip.max_message_bytes.0, 1, 64 << 20),
            ("gossip.hop_limit", gossip.hop_limit, 1, 255),
            ("gossip.seen_max", gossip.seen_max as u64, 16, 1 << 28),
            ("gossip.history.count", gossip.history.count as u64, 1, 1 << 24),
            ("gossip.history.bytes", gossip.history.bytes.0, 1, 1 << 40),
        ];
        for (key, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                problems.add(format!("overlay.{key}"), format!("is {value}; it must be {least} to {most}"));
            }
        }
        // A frame takes its place with seven eighths of the bytes, the rest being for control.
        if gossip.max_frame_bytes.0 > peer.egress_bytes.0 / 8 * 7 {
            problems.add(
                "overlay.peer.egress_bytes",
                "must hold a frame of gossip.max_frame_bytes and an eighth more",
            );
        }
    }

    /// The peers that can be read; [`OverlaySettings::validate`] names the others.
    pub(crate) fn listed(&self) -> impl Iterator<Item = PeerAddress> {
        self.peers.iter().filter_map(|peer| peer.parse().ok())
    }

    /// The files whose change should lead to a reload.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        self.tls.files(base)
    }

    /// What the engine is told.
    pub(crate) fn engine(&self) -> EngineConfig {
        let (peer, gossip, small) = (&self.peer, &self.gossip, |n: u64| u32::try_from(n).unwrap_or(u32::MAX));
        let when_full = match gossip.egress_full {
            EgressFull::RejectNew => WhenFull::RejectNew,
            EgressFull::DropOldest => WhenFull::DropOldest,
        };
        let history = &gossip.history;
        EngineConfig {
            relay_fanout: gossip.relay_fanout,
            burst_budget_frames: small(gossip.burst_budget_frames),
            max_rps: small(peer.max_rps),
            max_frame_bytes: small(gossip.max_frame_bytes.0),
            skew: gossip.skew.0,
            chunk_bytes: small(gossip.chunk_bytes.0),
            max_message_bytes: gossip.max_message_bytes.usize(),
            hop_limit: u8::try_from(gossip.hop_limit).unwrap_or(u8::MAX),
            seen_max: gossip.seen_max,
            history: HistoryLimits { count: history.count, bytes: history.bytes.usize(), age: history.age.0 },
            egress: EgressLimits {
                frames: peer.inflight_frames,
                bytes: peer.egress_bytes.usize(),
                when_full,
            },
            greylist: peer.greylist.0,
            gather: GATHER,
            ..EngineConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(settings: &OverlaySettings, danger_ok: bool) -> Vec<String> {
        let mut problems = Problems::default();
        settings.validate(danger_ok, &mut problems);
        problems.list.iter().map(|problem| format!("{} {}", problem.path, problem.message)).collect()
    }

    #[test]
    fn the_defaults_are_good() {
        assert_eq!(problems(&OverlaySettings::default(), false), Vec::<String>::new());
    }

    #[test]
    fn plain_tcp_is_for_this_machine_unless_danger_is_taken() {
        let key = "ed25519:6kpsY-KcUgq-9VB7Ey7F-ZVHdq6-vnuSQh7qaRRG0iw";
        let mut settings = OverlaySettings::default();
        settings.tls.mode = Mode::Off;
        assert_eq!(problems(&settings, false), Vec::<String>::new());
        settings.tls.pq = ron_kernel::tls::PostQuantum::Required;
        let found = problems(&settings, true);
        assert!(found.len() == 1 && found[0].contains("overlay.tls.pq"), "{found:?}");
        settings.tls.pq = ron_kernel::tls::PostQuantum::Hybrid;
        settings.listen = "0.0.0.0:9500".parse().unwrap();
        settings.peers = vec![format!("{key}@10.0.0.2:9500")];
        let found = problems(&settings, false);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("overlay.listen") && found[1].contains("overlay.peers[0]"), "{found:?}");
        assert_eq!(problems(&settings, true), Vec::<String>::new());
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let mut settings = OverlaySettings { max_conns: 0, ..OverlaySettings::default() };
        settings.gossip.hop_limit = 256;
        settings.peer.inflight_frames = 513;
        settings.timeouts.idle = Span::millis(1);
        settings.tls.ca = "ca.pem".to_owned();
        settings.peers = vec!["nobody".to_owned()];
        let found = problems(&settings, false).join("\n");
        for key in ["max_conns", "hop_limit", "inflight_frames", "timeouts.idle", "tls.cert", "peers[0]"] {
            assert!(found.contains(key), "{key} is not in {found}");
        }
    }
}
