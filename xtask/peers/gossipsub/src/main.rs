//! One node of rust-libp2p's gossipsub: TCP, Noise and Yamux, signed messages, everything else as the library has it.
//!
//! `cargo xtask bench overlay` starts it and tells it on standard input what to do, a line at a time; it ends with that
//! input. It publishes and follows within its own process, which is cheaper than over HTTP as a user of ron does.

mod load;

use futures::StreamExt as _;
use libp2p::gossipsub::{self, DataTransform, Event, IdentTopic, Message, RawMessage, TopicHash};
use libp2p::swarm::SwarmEvent;
use libp2p::{Multiaddr, Swarm, noise, tcp, yamux};
use load::{Load, Seen};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};

const TOPIC: &str = "bench";

type Behaviour = gossipsub::Behaviour<Counting>;

/// Counts what comes, copies included, and leaves it as it is.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicU64>);

impl DataTransform for Counting {
    fn inbound_transform(&self, raw: RawMessage) -> Result<Message, std::io::Error> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(Message {
            source: raw.source,
            data: raw.data,
            sequence_number: raw.sequence_number,
            topic: raw.topic,
        })
    }

    fn outbound_transform(&self, _: &TopicHash, data: Vec<u8>) -> Result<Vec<u8>, std::io::Error> {
        Ok(data)
    }
}

struct Node {
    swarm: Swarm<Behaviour>,
    topic: IdentTopic,
    copies: Counting,
    seen: Seen,
    load: Option<Load>,
}

/// One thread, as the nodes of ron have in this benchmark.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut node = Node::start()?;
    let mut lines = BufReader::new(stdin()).lines();
    loop {
        let load = node.load.as_mut();
        tokio::select! {
            event = node.swarm.select_next_some() => node.noted(event),
            line = lines.next_line() => match line? {
                Some(line) => node.told(&line)?,
                None => return Ok(()),
            },
            due = async { match load { Some(load) => load.due().await, None => std::future::pending().await } } => {
                node.publish(due);
            }
        }
    }
}

impl Node {
    fn start() -> Result<Node, Box<dyn Error>> {
        let copies = Counting::default();
        let mut swarm = libp2p::SwarmBuilder::with_new_identity()
            .with_tokio()
            .with_tcp(tcp::Config::default(), noise::Config::new, yamux::Config::default)?
            .with_behaviour(|key| {
                let signed = gossipsub::MessageAuthenticity::Signed(key.clone());
                Ok(Behaviour::new_with_transform(signed, gossipsub::Config::default(), copies.clone())?)
            })?
            .with_swarm_config(|config| config.with_idle_connection_timeout(Duration::from_secs(3600)))
            .build();
        let topic = IdentTopic::new(TOPIC);
        swarm.behaviour_mut().subscribe(&topic)?;
        swarm.listen_on("/ip4/127.0.0.1/tcp/0".parse()?)?;
        Ok(Node { swarm, topic, copies, seen: Seen::default(), load: None })
    }

    fn noted(&mut self, event: SwarmEvent<Event>) {
        match event {
            SwarmEvent::NewListenAddr { address, .. } => {
                println!("node {address}/p2p/{}", self.swarm.local_peer_id());
            }
            SwarmEvent::Behaviour(Event::Message { message, .. }) => self.seen.note(&message.data),
            _ => {}
        }
    }

    /// `dial ADDRESS`, `follow`, `pace RATE MILLIS SIZE`, `flat MILLIS SIZE`, `count`, `seen FROM TO`.
    fn told(&mut self, line: &str) -> Result<(), Box<dyn Error>> {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["dial", address] => self.swarm.dial(address.parse::<Multiaddr>()?)?,
            ["follow"] => self.seen.keeps = true,
            ["pace", rate, millis, size] => {
                self.load = Some(Load::paced(rate.parse()?, millis.parse()?, size.parse()?));
            }
            ["flat", millis, size] => self.load = Some(Load::flat(millis.parse()?, size.parse()?)),
            ["count"] => {
                let behaviour = self.swarm.behaviour();
                let topic = self.topic.hash();
                let links = behaviour.all_peers().filter(|(_, topics)| topics.contains(&&topic)).count();
                let mesh = behaviour.mesh_peers(&topic).count();
                let copies = self.copies.0.load(Ordering::Relaxed);
                println!("count {links} {mesh} {} {copies}", self.seen.count);
            }
            ["seen", from, to] => println!("seen{}", self.seen.between(from.parse()?, to.parse()?)),
            _ => return Err(format!("not understood: {line:?}").into()),
        }
        Ok(())
    }

    /// Publishes what is due by now; when that was the last of it, says what became of all.
    fn publish(&mut self, due: u64) {
        let Some(load) = &mut self.load else { return };
        while load.next < due {
            let taken = self.swarm.behaviour_mut().publish(self.topic.clone(), load.payload()).is_ok();
            load.told(taken);
            if !taken && load.waits() {
                break;
            }
        }
        if load.over() {
            println!("{}", load.report());
            self.load = None;
        }
    }
}
