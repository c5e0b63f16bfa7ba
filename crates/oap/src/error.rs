//! What can be wrong with a frame, whether the session survives it, and what the peer is told.

use bytes::Bytes;
use serde_json::json;

/// What a decoder or a session finds wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    #[error("a frame of {len} bytes is larger than {max}")]
    TooLarge { len: u64, max: u32 },
    #[error("a length of {0} is shorter than a header")]
    TooShort(u32),
    #[error("the capability does not end within its frame")]
    CapBeyondFrame,
    #[error("version {0} is not spoken here")]
    BadVersion(u16),
    #[error("the flags {0:#06x} have bits that mean nothing")]
    BadFlags(u16),
    #[error("the checksum is another")]
    Checksum,
    #[error("the flags {0:#06x} are not exactly one of REQ, RESP and EVENT")]
    Kind(u16),
    #[error("the code {0} does not belong in this frame")]
    Code(u16),
    #[error("a capability belongs in a frame with START")]
    CapOnNonStart,
    #[error("the compressed payload cannot be inflated")]
    Inflate,
    #[error("the compressed payload inflates to more than is allowed")]
    InflateTooLarge,
    #[error("a frame that does not follow from those before")]
    Sequence,
    #[error("nobody here speaks application {0:#06x}")]
    UnknownApp(u16),
    #[error("too many requests at once")]
    Busy,
    #[error("no new requests are taken here")]
    GoingAway,
    #[error("a control frame that says nothing known")]
    Control,
}

impl FrameError {
    /// Whether the next frame's beginning or meaning is lost with it; the session then ends.
    pub fn is_fatal(self) -> bool {
        matches!(
            self,
            FrameError::TooLarge { .. }
                | FrameError::TooShort(_)
                | FrameError::CapBeyondFrame
                | FrameError::BadVersion(_)
                | FrameError::BadFlags(_)
                | FrameError::Checksum
        )
    }

    /// The short stable code in problem bodies and metrics.
    pub fn code(self) -> &'static str {
        match self {
            FrameError::TooLarge { .. } | FrameError::InflateTooLarge => "frame_too_large",
            FrameError::BadVersion(_) => "bad_version",
            FrameError::BadFlags(_) => "bad_flags",
            FrameError::CapOnNonStart => "cap_on_non_start",
            FrameError::Sequence => "sequence",
            FrameError::UnknownApp(_) => "unknown_app",
            FrameError::Busy => "busy",
            FrameError::GoingAway => "draining",
            FrameError::TooShort(_)
            | FrameError::CapBeyondFrame
            | FrameError::Checksum
            | FrameError::Kind(_)
            | FrameError::Code(_)
            | FrameError::Inflate
            | FrameError::Control => "malformed",
        }
    }

    /// The response's status.
    pub fn status(self) -> u16 {
        match self.code() {
            "frame_too_large" => 413,
            "unknown_app" => 404,
            "busy" => 429,
            "draining" => 503,
            _ => 400,
        }
    }

    pub fn problem(self) -> Bytes {
        problem(self.status(), self.code(), &self.to_string())
    }
}

/// A problem body, as every error response carries one.
pub fn problem(status: u16, code: &str, detail: &str) -> Bytes {
    let kind = format!("urn:ron:error:{code}");
    let retryable = matches!(status, 429 | 503 | 504);
    let body =
        json!({"type": kind, "status": status, "code": code, "detail": detail, "retryable": retryable});
    Bytes::from(body.to_string())
}
