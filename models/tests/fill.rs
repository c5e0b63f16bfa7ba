//! The fill queue: from requests that miss over the board and the queue to workers, tasks and back, with tasks that
//! die, clients that leave and purges. No object is lost, none is fetched twice at once, everybody is served in the end.
//!
//! The board is the production source; the queue and the tasks around it are written down here as steps.

use models::board::Board;
use models::explore;

const CLIENTS: u8 = 4;
const KEYS: [&str; 2] = ["a", "b"];
const QUEUE: usize = 1;
/// Flights whose origin has not answered yet.
const PLACES: usize = 1;
/// What may go wrong, in all.
const FAULTS: u8 = 2;

#[derive(Clone, Copy, Debug)]
enum Action {
    Arrive(u8),
    /// A worker takes one out of the queue and has a task fetch it.
    Take,
    /// The origin answers the one that was asked for first, and it is stored.
    Land,
    /// A client sees that its flight has ended; if that was lost, it begins anew.
    Notice(u8),
    Leave(u8),
    KillWorker,
    Restart,
    /// The task of the one that was asked for first.
    KillTask,
    Purge(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Queued,
    Asking,
    Landed,
    Busy,
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flight {
    key: usize,
    at: At,
    /// What it brings is out of date.
    parted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Client {
    Outside,
    Waits(usize),
    Answered,
}

#[derive(Clone, Default)]
struct State {
    board: Board<usize>,
    flights: Vec<Flight>,
    queue: Vec<usize>,
    clients: Vec<Client>,
    stored: [bool; KEYS.len()],
    dead: bool,
    faults: u8,
}

impl State {
    fn ask(&mut self, client: u8) {
        // All but the last want the same.
        let key = usize::from(client + 1 == CLIENTS);
        let client = &mut self.clients[usize::from(client)];
        if self.stored[key] {
            *client = Client::Answered;
            return;
        }
        let number = self.flights.len();
        let (flight, leads) = self.board.join(KEYS[key], || number);
        *client = Client::Waits(flight);
        if leads {
            self.flights.push(Flight { key, at: At::Queued, parted: false });
            if self.queue.len() < QUEUE {
                self.queue.push(number);
            } else {
                self.end(number, At::Busy);
            }
        }
    }

    /// As whoever brings a flight in leaves it, also by its death.
    fn end(&mut self, number: usize, at: At) {
        let flight = &mut self.flights[number];
        flight.at = at;
        self.board.leave(KEYS[flight.key], |joined| *joined == number);
    }

    fn first_asked(&self) -> Option<usize> {
        self.flights.iter().position(|flight| flight.at == At::Asking)
    }

    fn take(&mut self) -> bool {
        let asking = self.flights.iter().filter(|flight| flight.at == At::Asking).count();
        if self.dead || asking >= PLACES || self.queue.is_empty() {
            return false;
        }
        let number = self.queue.remove(0);
        self.flights[number].at = At::Asking;
        true
    }

    fn land(&mut self) -> bool {
        let Some(number) = self.first_asked() else { return false };
        let flight = self.flights[number];
        self.stored[flight.key] |= !flight.parted;
        self.end(number, At::Landed);
        true
    }

    fn notice(&mut self, client: u8) -> bool {
        let Client::Waits(number) = self.clients[usize::from(client)] else { return false };
        match self.flights[number].at {
            At::Queued | At::Asking => return false,
            At::Landed | At::Busy => self.clients[usize::from(client)] = Client::Answered,
            At::Lost => self.ask(client),
        }
        true
    }

    fn fault(&mut self) -> bool {
        self.faults += 1;
        self.faults <= FAULTS
    }

    fn kill_task(&mut self) -> bool {
        let Some(number) = self.first_asked() else { return false };
        self.end(number, At::Lost);
        self.fault()
    }

    fn purge(&mut self, key: usize) -> bool {
        self.board.part(|known| known == KEYS[key]);
        self.flights.iter_mut().filter(|flight| flight.key == key).for_each(|flight| flight.parted = true);
        self.stored[key] = false;
        self.fault()
    }

    fn check(&self) -> Result<(), String> {
        let active = |flight: &Flight| matches!(flight.at, At::Queued | At::Asking);
        for (number, flight) in self.flights.iter().enumerate() {
            let places = self.queue.iter().filter(|queued| **queued == number).count();
            if places != usize::from(flight.at == At::Queued) {
                return Err(format!("flight {number} is in the queue {places} times: {flight:?}"));
            }
        }
        for (key, name) in KEYS.iter().enumerate() {
            let good = |flight: &&Flight| flight.key == key && !flight.parted && active(flight);
            if self.flights.iter().filter(good).count() > 1 {
                return Err(format!("{name} is fetched twice at once"));
            }
        }
        for (key, number) in self.board.iter() {
            let flight = self.flights[*number];
            if KEYS[flight.key] != key || flight.parted || !active(&flight) {
                return Err(format!("{key} leads to what is over: {flight:?}"));
            }
        }
        let waits = |client: &Client| matches!(client, Client::Waits(_));
        if !self.dead && self.clients.iter().any(waits) {
            let mut on = self.clone();
            let notices = (0..CLIENTS).any(|client| self.clone().notice(client));
            if !notices && !on.take() && !on.land() {
                return Err("somebody waits, and nothing goes on".to_owned());
            }
        }
        Ok(())
    }
}

fn step(state: &State, action: Action) -> Result<Option<State>, String> {
    let mut next = state.clone();
    let possible = match action {
        Action::Arrive(client) => {
            let outside = next.clients[usize::from(client)] == Client::Outside;
            if outside {
                next.ask(client);
            }
            outside
        }
        Action::Take => next.take(),
        Action::Land => next.land(),
        Action::Notice(client) => next.notice(client),
        Action::Leave(client) => {
            let waited = matches!(next.clients[usize::from(client)], Client::Waits(_));
            next.clients[usize::from(client)] = Client::Answered;
            waited
        }
        Action::KillWorker => !std::mem::replace(&mut next.dead, true) && next.fault(),
        Action::Restart => std::mem::replace(&mut next.dead, false),
        Action::KillTask => next.kill_task(),
        Action::Purge(key) => next.purge(usize::from(key)),
    };
    if !possible {
        return Ok(None);
    }
    next.check()?;
    Ok(Some(next))
}

#[test]
fn nothing_is_lost_nothing_is_fetched_twice_and_everybody_is_served() {
    let first = State { clients: vec![Client::Outside; usize::from(CLIENTS)], ..State::default() };
    let mut actions = vec![Action::Take, Action::Land, Action::KillWorker, Action::Restart, Action::KillTask];
    actions.extend((0..CLIENTS).flat_map(|it| [Action::Arrive(it), Action::Notice(it)]));
    // Who leaves, and what is purged, is one of several alike.
    actions.extend([Action::Leave(0), Action::Purge(0)]);
    let print = |state: &State| {
        let mut joinable: Vec<_> =
            state.board.iter().map(|(key, flight)| (key.to_owned(), *flight)).collect();
        joinable.sort_unstable();
        // What has ended and nobody looks at any more makes no difference.
        let matters = |number: usize, flight: &Flight| {
            matches!(flight.at, At::Queued | At::Asking) || state.clients.contains(&Client::Waits(number))
        };
        let flights = state.flights.iter().enumerate();
        let flights: Vec<_> = flights.map(|(it, flight)| matters(it, flight).then_some(*flight)).collect();
        let rest = (state.stored, state.dead, state.faults);
        (joinable, flights, state.queue.clone(), state.clients.clone(), rest)
    };
    let states = explore(first, &actions, 1_000_000, print, step);
    assert!(states > 1000, "{states}");
}
