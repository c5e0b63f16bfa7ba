//! What two sessions say to each other: HELLO, PING, GOAWAY, all JSON objects in frames of application 0.

use crate::error::FrameError;
use crate::frame::{FRAME_MAX, FRAME_MIN_MAX, VERSION};
use crate::node::NodeId;
use bytes::Bytes;
use serde_json::{Map, Value, json};

/// The feature that appends a checksum to every frame after HELLO.
pub const CRC32C: &str = "crc32c";
/// The feature of a side that asks only: it takes no part in the gossip.
pub const CLIENT: &str = "client";
/// Requests that a peer takes at once if it does not say.
pub const INFLIGHT: u32 = 512;
/// More than this many entries of a list, or bytes of a text, are nobody's honest HELLO.
const LIST_MAX: usize = 32;
const TEXT_MAX: usize = 256;

/// What a side says about itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub ua: String,
    pub versions: Vec<u16>,
    pub max_frame: u32,
    pub max_inflight: u32,
    pub features: Vec<String>,
    pub node: Option<NodeId>,
}

impl Default for Hello {
    fn default() -> Hello {
        Hello {
            ua: String::new(),
            versions: vec![VERSION],
            max_frame: FRAME_MAX,
            max_inflight: INFLIGHT,
            features: Vec::new(),
            node: None,
        }
    }
}

/// What a listener chose from two HELLOs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub version: u16,
    pub max_frame: u32,
    pub features: Vec<String>,
}

impl Hello {
    pub fn parse(payload: &[u8]) -> Result<Hello, FrameError> {
        Hello::read(&object(payload)?).ok_or(FrameError::Control)
    }

    /// A listener's answer: what it says about itself, and its choice.
    pub fn parse_answer(payload: &[u8]) -> Result<(Hello, Choice), FrameError> {
        let object = object(payload)?;
        let read = || {
            let choice = object.get("choice")?.as_object()?;
            let choice = Choice {
                version: choice.get("version")?.as_u64()?.try_into().ok()?,
                max_frame: choice.get("max_frame")?.as_u64()?.try_into().ok()?,
                features: texts(choice, "features")?,
            };
            Some((Hello::read(&object)?, choice))
        };
        read().ok_or(FrameError::Control)
    }

    fn read(object: &Map<String, Value>) -> Option<Hello> {
        // Whoever says what kind of control frame it is does not mean HELLO.
        if object.contains_key("t") {
            return None;
        }
        let or = |name: &str, default: u32| match object.get(name) {
            None => Some(default),
            Some(value) => value.as_u64().map(|value| u32::try_from(value).unwrap_or(u32::MAX)),
        };
        let versions = match object.get("versions") {
            None => vec![VERSION],
            Some(list) => {
                let list = list.as_array().filter(|list| list.len() <= LIST_MAX)?;
                let one = |value: &Value| value.as_u64().map(|it| u16::try_from(it).unwrap_or(0));
                list.iter().map(one).collect::<Option<_>>()?
            }
        };
        let node = match object.get("node") {
            None => None,
            Some(text) => Some(NodeId::parse(text.as_str()?)?),
        };
        let ua = object.get("ua").map_or(Some(""), Value::as_str).filter(|ua| ua.len() <= TEXT_MAX)?;
        let (max_frame, max_inflight) = (or("max_frame", FRAME_MAX)?, or("max_inflight", INFLIGHT)?);
        if max_frame < FRAME_MIN_MAX || max_inflight == 0 {
            return None;
        }
        Some(Hello {
            ua: ua.to_owned(),
            versions,
            max_frame: max_frame.min(FRAME_MAX),
            max_inflight,
            features: texts(object, "features")?,
            node,
        })
    }

    /// What a listener chooses; no version in common is nobody's choice.
    pub fn choose(&self, dialer: &Hello) -> Option<Choice> {
        let common = self.versions.iter().filter(|version| dialer.versions.contains(version));
        let features = self.features.iter().filter(|feature| dialer.features.contains(feature));
        Some(Choice {
            version: *common.max()?,
            max_frame: self.max_frame.min(dialer.max_frame),
            features: features.cloned().collect(),
        })
    }

    /// Whether a listener could choose this from what both said.
    pub fn allows(&self, choice: &Choice) -> bool {
        self.versions.contains(&choice.version)
            && (FRAME_MIN_MAX..=self.max_frame).contains(&choice.max_frame)
            && choice.features.iter().all(|feature| self.features.contains(feature))
    }

    pub fn payload(&self, choice: Option<&Choice>) -> Bytes {
        let mut object = json!({
            "ua": self.ua,
            "versions": self.versions,
            "max_frame": self.max_frame,
            "max_inflight": self.max_inflight,
            "features": self.features,
        });
        if let Some(node) = self.node {
            object["node"] = node.to_string().into();
        }
        if let Some(choice) = choice {
            object["choice"] = json!({
                "version": choice.version,
                "max_frame": choice.max_frame,
                "features": choice.features,
            });
        }
        object.to_string().into()
    }
}

/// Why a side ends a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goaway {
    Draining,
    Idle,
    Duplicate,
    Protocol,
    Limit,
    Policy,
}

impl Goaway {
    pub const ALL: [Goaway; 6] =
        [Goaway::Draining, Goaway::Idle, Goaway::Duplicate, Goaway::Protocol, Goaway::Limit, Goaway::Policy];

    pub const fn name(self) -> &'static str {
        match self {
            Goaway::Draining => "draining",
            Goaway::Idle => "idle",
            Goaway::Duplicate => "duplicate",
            Goaway::Protocol => "protocol",
            Goaway::Limit => "limit",
            Goaway::Policy => "policy",
        }
    }
}

/// A control frame after HELLO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    Ping(u64),
    Pong(u64),
    Goaway(Goaway),
    /// A kind that this side does not know.
    Unknown,
}

impl Control {
    pub fn parse(payload: &[u8]) -> Result<Control, FrameError> {
        let object = object(payload)?;
        let number = || object.get("n").and_then(Value::as_u64).ok_or(FrameError::Control);
        match object.get("t").and_then(Value::as_str).ok_or(FrameError::Control)? {
            "ping" => Ok(Control::Ping(number()?)),
            "pong" => Ok(Control::Pong(number()?)),
            "goaway" => {
                let name = object.get("reason").and_then(Value::as_str).ok_or(FrameError::Control)?;
                let known = Goaway::ALL.into_iter().find(|reason| reason.name() == name);
                known.map(Control::Goaway).ok_or(FrameError::Control)
            }
            _ => Ok(Control::Unknown),
        }
    }

    pub fn payload(&self) -> Bytes {
        let object = match self {
            Control::Ping(n) => json!({"t": "ping", "n": n}),
            Control::Pong(n) => json!({"t": "pong", "n": n}),
            Control::Goaway(reason) => json!({"t": "goaway", "reason": reason.name()}),
            Control::Unknown => json!({"t": ""}),
        };
        object.to_string().into()
    }
}

/// A parsed text is many times its size, so that no long one is parsed.
fn object(payload: &[u8]) -> Result<Map<String, Value>, FrameError> {
    if payload.len() > FRAME_MIN_MAX as usize {
        return Err(FrameError::Control);
    }
    serde_json::from_slice(payload).ok().ok_or(FrameError::Control)
}

fn texts(object: &Map<String, Value>, name: &str) -> Option<Vec<String>> {
    let Some(list) = object.get(name) else { return Some(Vec::new()) };
    let list = list.as_array().filter(|list| list.len() <= LIST_MAX)?;
    let one = |value: &Value| value.as_str().filter(|text| text.len() <= TEXT_MAX).map(str::to_owned);
    list.iter().map(one).collect()
}
