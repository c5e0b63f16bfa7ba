//! A peer that says exactly what a test wants it to say.

use ed25519_dalek::SigningKey;
use oap::control::Hello;
use oap::frame::{APP_CONTROL, APP_GOSSIP, FRAME_MAX, Flags, Frame, Kind};
use oap::gossip::wire::Gossip;
use oap::gossip::{Envelope, Topic};
use oap::{Decoded, Decoder, NodeId};
use ron_testkit::Node;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(super) struct Raw {
    pub(super) stream: TcpStream,
    decoder: Decoder,
    key: SigningKey,
    seq: u64,
    /// Whether checksums were agreed on.
    checked: bool,
}

pub(super) fn id_of(key: u8) -> NodeId {
    NodeId(SigningKey::from_bytes(&[key; 32]).verifying_key().to_bytes())
}

impl Raw {
    /// A connection over which nothing was said yet.
    pub(super) fn connect(node: &Node, key: u8) -> Raw {
        let stream = TcpStream::connect(node.address("overlay", "oap")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        let key = SigningKey::from_bytes(&[key; 32]);
        Raw { stream, decoder: Decoder::new(FRAME_MAX), key, seq: unix_ms() * 1000, checked: false }
    }

    /// A session of a node that says it has this key.
    pub(super) fn hello(node: &Node, key: u8) -> Raw {
        Raw::hello_with(node, [key; 32], &[])
    }

    /// A session of a node with the key of this seed that offers these features.
    pub(super) fn hello_with(node: &Node, seed: [u8; 32], features: &[&str]) -> Raw {
        let mut raw = Raw::connect(node, 0);
        raw.key = SigningKey::from_bytes(&seed);
        let own = NodeId(raw.key.verifying_key().to_bytes());
        let features: Vec<String> = features.iter().map(|name| (*name).to_owned()).collect();
        let hello = Hello { node: Some(own), features, ..Hello::default() };
        raw.send(&Frame::request(APP_CONTROL, 1, hello.payload(None)));
        let answer = raw.answer().expect("HELLO is answered");
        assert_eq!((answer.code, answer.corr), (200, 1), "{answer:?}");
        let said: serde_json::Value = serde_json::from_slice(&answer.payload).unwrap();
        raw.checked = said["choice"]["features"].as_array().unwrap().iter().any(|name| name == "crc32c");
        raw.decoder.agree(FRAME_MAX, raw.checked);
        raw
    }

    pub(super) fn send(&mut self, frame: &Frame) {
        let encoded = frame.encode(FRAME_MAX).unwrap();
        let mut bytes = encoded.to_vec();
        if self.checked {
            bytes.extend(encoded.checksum());
        }
        self.stream.write_all(&bytes).unwrap();
    }

    pub(super) fn send_bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The next frame; none at the end.
    pub(super) fn frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(Decoded::Frame(frame)) = self.decoder.next_frame().unwrap() {
                return Some(frame);
            }
            let mut piece = [0; 65_536];
            match self.stream.read(&mut piece) {
                Ok(0) => return None,
                Ok(read) => self.decoder.push(&piece[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("nothing comes: {error}"),
            }
        }
    }

    /// The next response.
    pub(super) fn answer(&mut self) -> Option<Frame> {
        loop {
            let frame = self.frame()?;
            if frame.flags.kind() == Some(Kind::Response) {
                return Some(frame);
            }
        }
    }

    /// Reads to the end; says how the peer was told to go.
    pub(super) fn goaway(&mut self) -> Option<String> {
        let mut said = None;
        while let Some(frame) = self.frame() {
            if frame.app == APP_CONTROL && frame.flags == Flags::EVENT {
                let body: serde_json::Value = serde_json::from_slice(&frame.payload).unwrap();
                said = body["reason"].as_str().map(str::to_owned);
            }
        }
        said
    }

    /// A signed message, as its publisher would push it.
    pub(super) fn message(&mut self, topic: &str, payload: &[u8]) -> Frame {
        self.seq += 1;
        let origin = NodeId(self.key.verifying_key().to_bytes());
        let topic = Topic::parse(topic).unwrap();
        let mut envelope =
            Envelope { origin, seq: self.seq, time: unix_ms(), topic, bundle: false, signature: None };
        let id = envelope.id(payload);
        envelope.sign(id, &self.key);
        let gossip = Gossip::Message { hops: 0, envelope, payload: payload.to_vec().into() };
        let encoded = gossip.encode(FRAME_MAX).unwrap().to_vec();
        let mut decoder = Decoder::new(FRAME_MAX);
        decoder.push(&encoded);
        let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else { panic!("it reads") };
        assert_eq!(frame.app, APP_GOSSIP);
        frame
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}
