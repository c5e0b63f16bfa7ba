//! Which frame may follow which: requests, their answers and events, each whole or from START to END.

use crate::error::FrameError;
use crate::frame::{Flags, Frame, Kind};
use std::collections::BTreeMap;

/// Where a frame stands in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Whole,
    First,
    Middle,
    Last,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Take(Place),
    /// The rest of a message that was refused.
    Ignore,
    /// An error that answers nothing that is asked here: for the application to make sense of.
    Stray,
    Refuse(FrameError),
}

/// The requests of one side with the other's answers, and the events of the asking side.
///
/// A message that was refused half-way is kept as `Broken` until its END, or what is left of it would look like
/// requests of its own.
#[derive(Debug)]
pub(super) struct Exchanges {
    requests: BTreeMap<u64, Request>,
    events: BTreeMap<u64, Coming>,
    broken: usize,
    max: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coming {
    /// More frames of it follow.
    Open,
    /// All of it has come.
    Done,
    /// What follows is thrown away.
    Broken,
}

#[derive(Debug)]
struct Request {
    asked: Coming,
    answering: bool,
}

impl Exchanges {
    pub(super) fn new(max: u32) -> Exchanges {
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        Exchanges { requests: BTreeMap::new(), events: BTreeMap::new(), broken: 0, max }
    }

    /// Requests that are not answered and events that have not ended.
    pub(super) fn open(&self) -> usize {
        self.requests.len() + self.events.len() - self.broken
    }

    /// Refused messages that still come; as many as there may be good ones is the most a session bears.
    pub(super) fn is_overrun(&self) -> bool {
        self.broken > self.max
    }

    /// Forgets the oldest of what this side was told to stop sending, if there is too much of it.
    pub(super) fn prune(&mut self) {
        while self.is_overrun() {
            let broken = |(_, request): &(&u64, &Request)| request.asked == Coming::Broken;
            match self.requests.iter().find(broken).map(|(corr, _)| *corr) {
                Some(corr) => self.requests.remove(&corr),
                None => return,
            };
            self.broken -= 1;
        }
    }

    pub(super) fn knows(&self, corr: u64) -> bool {
        self.requests.contains_key(&corr)
    }

    /// Whether this frame belongs to a message that was refused.
    pub(super) fn is_broken(&self, frame: &Frame) -> bool {
        self.coming(frame) == Some(Coming::Broken)
    }

    /// A request, an answer to one, or an event.
    pub(super) fn judge(&mut self, frame: &Frame) -> Verdict {
        match frame.flags.kind() {
            Some(Kind::Request | Kind::Event) => self.asked(frame),
            Some(Kind::Response) => self.answered(frame),
            None => Verdict::Refuse(FrameError::Kind(frame.flags.bits())),
        }
    }

    fn coming(&self, frame: &Frame) -> Option<Coming> {
        match frame.flags.kind() {
            Some(Kind::Event) => self.events.get(&frame.corr).copied(),
            _ => self.requests.get(&frame.corr).map(|request| request.asked),
        }
    }

    fn asked(&mut self, frame: &Frame) -> Verdict {
        let (start, end) = (frame.flags.has(Flags::START), frame.flags.has(Flags::END));
        let event = frame.flags.kind() == Some(Kind::Event);
        let more = start && !end;
        match self.coming(frame) {
            Some(Coming::Broken) if !start => {
                if end {
                    self.forget(frame);
                }
                Verdict::Ignore
            }
            Some(Coming::Open) if !start => {
                match (event, end) {
                    (true, true) => self.forget(frame),
                    (false, true) => self.set(frame, Coming::Done),
                    _ => {}
                }
                Verdict::Take(if end { Place::Last } else { Place::Middle })
            }
            // A second START, or a number that is still in use.
            Some(_) => Verdict::Refuse(FrameError::Sequence),
            None if end && !start => Verdict::Refuse(FrameError::Sequence),
            None if event && !more => Verdict::Take(Place::Whole),
            // Nobody could answer, end or refuse by number what has none.
            None if frame.corr == 0 => Verdict::Refuse(FrameError::Sequence),
            None if self.open() >= self.max => Verdict::Refuse(FrameError::Busy),
            None => {
                self.set(frame, if more { Coming::Open } else { Coming::Done });
                Verdict::Take(if more { Place::First } else { Place::Whole })
            }
        }
    }

    fn answered(&mut self, frame: &Frame) -> Verdict {
        let (start, end) = (frame.flags.has(Flags::START), frame.flags.has(Flags::END));
        let error = frame.code >= 400;
        let Some(request) = self.requests.get_mut(&frame.corr) else {
            return if error { Verdict::Stray } else { Verdict::Refuse(FrameError::Sequence) };
        };
        if request.asked == Coming::Broken {
            return Verdict::Ignore;
        }
        let place = match (request.answering, start, end) {
            (true, true, _) | (false, false, true) => return Verdict::Refuse(FrameError::Sequence),
            (false, true, false) => Place::First,
            (false, ..) => Place::Whole,
            (true, false, false) => Place::Middle,
            (true, false, true) => Place::Last,
        };
        request.answering = true;
        // An error ends its exchange wherever it stands.
        if error || matches!(place, Place::Whole | Place::Last) {
            self.end(frame.corr);
        }
        Verdict::Take(place)
    }

    /// The exchange is over; what still comes of the request is thrown away.
    fn end(&mut self, corr: u64) {
        match self.requests.get_mut(&corr) {
            Some(request) if request.asked == Coming::Open => {
                request.asked = Coming::Broken;
                self.broken += 1;
            }
            Some(request) if request.asked == Coming::Done => {
                self.requests.remove(&corr);
            }
            _ => {}
        }
    }

    /// This frame was refused, and its message with it. Says whether the application knows of that message.
    pub(super) fn refuse(&mut self, frame: &Frame) -> bool {
        let (start, end) = (frame.flags.has(Flags::START), frame.flags.has(Flags::END));
        let before = self.coming(frame);
        if frame.flags.kind() == Some(Kind::Response) {
            self.end(frame.corr);
            return before.is_some();
        }
        self.forget(frame);
        let follows = before == Some(Coming::Open) || start;
        if follows && !end && frame.corr != 0 {
            self.set(frame, Coming::Broken);
            self.broken += 1;
        }
        matches!(before, Some(Coming::Open | Coming::Done))
    }

    fn set(&mut self, frame: &Frame, coming: Coming) {
        if frame.flags.kind() == Some(Kind::Event) {
            self.events.insert(frame.corr, coming);
        } else {
            let request = self.requests.entry(frame.corr);
            request.or_insert(Request { asked: coming, answering: false }).asked = coming;
        }
    }

    fn forget(&mut self, frame: &Frame) {
        let gone = match frame.flags.kind() {
            Some(Kind::Event) => self.events.remove(&frame.corr),
            _ => self.requests.remove(&frame.corr).map(|request| request.asked),
        };
        self.broken -= usize::from(gone == Some(Coming::Broken));
    }
}
