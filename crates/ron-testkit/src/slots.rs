//! An upstream of known capacity: so many requests at a time, each taking so long, with faults on request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

/// The length of a good answer's body.
const BODY: usize = 1024;
/// What a slow answer takes, in usual service times.
const SLOW: u32 = 10;

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It takes ten times as long.
    Slow,
    /// The connection is reset instead.
    Reset,
    /// It is this status.
    Status(u16),
    /// Half of its body comes, then the end of the connection.
    Cut,
}

/// A running origin, on a thread and a port of its own.
#[derive(Debug)]
pub struct SlotOrigin {
    pub address: String,
    stop: Arc<Notify>,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    slots: Semaphore,
    service: Duration,
    open: AtomicUsize,
    seen: AtomicU64,
}

impl SlotOrigin {
    /// `choose` says what is wrong with the n-th answer.
    pub fn start(
        slots: usize,
        service: Duration,
        choose: impl Fn(u64) -> Fault + Send + Sync + 'static,
    ) -> SlotOrigin {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address").to_string();
        listener.set_nonblocking(true).expect("a socket of ours");
        let slots = Semaphore::new(slots);
        let state = Arc::new(State { slots, service, open: AtomicUsize::new(0), seen: AtomicU64::new(0) });
        let stop = Arc::new(Notify::new());
        let (stopped, shared) = (stop.clone(), state.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a thread can have a runtime");
            runtime.block_on(async {
                tokio::select! {
                    () = stopped.notified() => {}
                    () = accept(listener, shared, Arc::new(choose)) => {}
                }
            });
        });
        SlotOrigin { address, stop, state, thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Open connections.
    pub fn open(&self) -> usize {
        self.state.open.load(Ordering::SeqCst)
    }
}

impl Drop for SlotOrigin {
    fn drop(&mut self) {
        self.stop.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(
    listener: std::net::TcpListener,
    state: Arc<State>,
    choose: Arc<impl Fn(u64) -> Fault + Send + Sync + 'static>,
) {
    let listener = TcpListener::from_std(listener).expect("a socket of ours");
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let (state, choose) = (state.clone(), choose.clone());
        connections.spawn(async move {
            state.open.fetch_add(1, Ordering::SeqCst);
            let _ = serve(stream, &state, &*choose).await;
            state.open.fetch_sub(1, Ordering::SeqCst);
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn serve(
    mut stream: TcpStream,
    state: &State,
    choose: &(impl Fn(u64) -> Fault + Sync),
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(4096);
    loop {
        let end = loop {
            if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let whole = end + length.unwrap_or(0usize);
        while buffer.len() < whole {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        buffer.drain(..whole);
        let fault = choose(state.seen.fetch_add(1, Ordering::Relaxed));
        let slot = state.slots.acquire().await.map_err(std::io::Error::other)?;
        tokio::time::sleep(state.service * if fault == Fault::Slow { SLOW } else { 1 }).await;
        drop(slot);
        let status = if let Fault::Status(status) = fault { status } else { 200 };
        let mut answer = format!("HTTP/1.1 {status} Answer\r\nContent-Length: {BODY}\r\n\r\n").into_bytes();
        answer.resize(answer.len() + BODY, b'x');
        match fault {
            Fault::Reset => return stream.set_zero_linger(),
            Fault::Cut => return stream.write_all(&answer[..answer.len() - BODY / 2]).await,
            Fault::None | Fault::Slow | Fault::Status(_) => stream.write_all(&answer).await?,
        }
    }
}
