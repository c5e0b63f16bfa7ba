//! A process hands its listening sockets to the one that takes its place, so that no connection is refused between them.
//!
//! The newcomer connects to a Unix socket in the data folder and says what it runs. The process there answers with the
//! names of its sockets and, beside them, the sockets themselves; the lock of the data folder goes along. Until the
//! newcomer says that it is ready both accept; then the first stops, and ends when what it has begun has ended. If the
//! newcomer fails before that, nothing has happened.

use crate::http::listener::{self, Socket};
use crate::http::{BindError, Bound, bind_tcp, bind_unix};
use crate::kernel::{Ending, Service};
use crate::task::TaskResult;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde_json::{Value, json};
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::UnixListener;

/// The socket's name in the data folder.
pub const SOCKET: &str = "takeover.sock";
/// What the sockets that are not a service's are called.
pub const LOCK: &str = "lock";
pub const OWN: &str = "takeover";

/// Sockets and files that one process may hand over.
const HANDED_MAX: usize = 16;
/// The longest question or answer.
const MESSAGE_MAX: usize = 4096;
/// For one step of the talk; a newcomer's start may take its time.
const STEP: Duration = Duration::from_secs(5);
const START: Duration = Duration::from_secs(60);

const READY: &[u8] = b"ready\n";
const DONE: &[u8] = b"done\n";

#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    #[error("nobody is there to take over from ({0}): start without --takeover")]
    Nobody(io::Error),
    #[error("the running process refuses: {0}")]
    Refused(String),
    #[error("the running process does not hand over: {0}")]
    Broken(#[from] io::Error),
}

/// What was handed over, by name.
#[derive(Debug, Default)]
pub struct Handed(Vec<(String, OwnedFd)>);

impl Handed {
    pub fn take(&mut self, name: &str) -> Option<OwnedFd> {
        let index = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(index).1)
    }
}

/// What this process listens on, and what a former one listened on.
#[derive(Debug, Default)]
pub struct Sockets {
    /// By `service.name`.
    listening: Mutex<Vec<(String, Weak<Socket>)>>,
    /// What was handed over and nobody has asked for yet.
    inherited: Mutex<Handed>,
}

impl Sockets {
    /// Takes what a former process handed over.
    pub fn inherit(&self, handed: Handed) {
        *self.inherited.lock().unwrap_or_else(PoisonError::into_inner) = handed;
    }

    /// Closes what was handed over and is not wanted any more.
    pub fn forget_inherited(&self) {
        self.inherit(Handed::default());
    }

    /// Everything that is listened on now.
    pub fn offer(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        self.live().into_iter().map(|(name, socket)| Ok((name, socket.fd()?))).collect()
    }

    /// From now on another process has them: no file is to be removed.
    fn hand_over(&self) {
        for (_, socket) in self.live() {
            socket.hand_over();
        }
    }

    fn live(&self) -> Vec<(String, Arc<Socket>)> {
        let listening = self.listening.lock().unwrap_or_else(PoisonError::into_inner);
        listening.iter().filter_map(|(name, socket)| Some((name.clone(), socket.upgrade()?))).collect()
    }

    fn find(
        &self,
        name: String,
        adopt: impl FnOnce(OwnedFd) -> Option<Bound>,
        bind: impl FnOnce() -> Result<Bound, BindError>,
    ) -> Result<Bound, BindError> {
        let inherited = self.inherited.lock().unwrap_or_else(PoisonError::into_inner).take(&name);
        let bound = match inherited.and_then(adopt) {
            Some(bound) => bound,
            None => bind()?,
        };
        let known = (name, bound.downgrade());
        self.listening.lock().unwrap_or_else(PoisonError::into_inner).push(known);
        Ok(bound)
    }
}

impl Service {
    /// A TCP listener that can be handed over: the one of a former process if it has this address, else a new one.
    pub fn bind_tcp(&self, name: &str, address: SocketAddr) -> Result<Bound, BindError> {
        let name = format!("{}.{name}", self.name());
        self.kernel().sockets().find(name, |fd| listener::adopt_tcp(fd, address), || bind_tcp(address))
    }

    /// The same with a Unix socket.
    pub fn bind_unix(&self, name: &str, path: &Path, for_all: bool) -> Result<Bound, BindError> {
        let name = format!("{}.{name}", self.name());
        self.kernel().sockets().find(name, |fd| listener::adopt_unix(fd, path), || bind_unix(path, for_all))
    }
}

/// The newcomer's end of the talk.
#[derive(Debug)]
pub struct Taking(UnixStream);

/// Asks the process whose socket this is for everything it listens on. Blocks.
pub fn ask(socket: &Path, services: &[String]) -> Result<(Taking, Handed), TakeoverError> {
    let mut stream = UnixStream::connect(socket).map_err(TakeoverError::Nobody)?;
    stream.set_read_timeout(Some(STEP))?;
    stream.set_write_timeout(Some(STEP))?;
    stream.write_all(format!("{}\n", json!({"takeover": 1, "services": services})).as_bytes())?;
    let (mut text, mut fds) = (Vec::new(), Vec::new());
    while !text.ends_with(b"\n") && text.len() < MESSAGE_MAX {
        let mut piece = [0; MESSAGE_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [IoSliceMut::new(&mut piece)];
        let read =
            recvmsg(&stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).map_err(io::Error::from)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if read.bytes == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        text.extend_from_slice(&piece[..read.bytes]);
    }
    let answer: Value = serde_json::from_slice(&text).map_err(io::Error::from)?;
    if let Some(why) = answer["refused"].as_str() {
        return Err(TakeoverError::Refused(why.to_owned()));
    }
    let names: Vec<&str> =
        answer["handed"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if names.len() != fds.len() {
        return Err(io::Error::other("it sent other sockets than it named").into());
    }
    let handed = names.into_iter().map(str::to_owned).zip(fds).collect();
    Ok((Taking(stream), Handed(handed)))
}

impl Taking {
    /// Says that the newcomer serves; returns once the other has stopped to accept. Blocks.
    pub fn ready(mut self) -> Result<(), TakeoverError> {
        self.0.write_all(READY)?;
        let mut answer = [0; DONE.len()];
        self.0.read_exact(&mut answer)?;
        if answer == DONE { Ok(()) } else { Err(io::Error::other("it answered something else").into()) }
    }
}

/// What a process with these services gets, or why nothing.
pub type Offer = dyn Fn(&[String]) -> Result<Vec<(String, OwnedFd)>, String> + Send + Sync;

/// Answers newcomers until one has taken over.
pub async fn serve(service: Service, listener: Arc<UnixListener>, offer: Arc<Offer>) -> TaskResult {
    loop {
        let stream = tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            accepted = listener.accept() => accepted?.0,
        };
        let talk = tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            talk = talk(stream, &*offer) => talk,
        };
        match talk {
            Ok(mut stream) => {
                tracing::info!("another process has taken over; this one ends with its last connection");
                service.kernel().sockets().hand_over();
                service.kernel().end(Ending::HandedOver);
                // It waits for this only to be sure; if it is gone, so be it.
                let _ = stream.write_all(DONE).await;
                service.shutdown().draining().await;
                return Ok(());
            }
            Err(error) => tracing::warn!(%error, "a takeover came to nothing, this process goes on"),
        }
    }
}

/// Hands everything over and waits until the newcomer is ready.
async fn talk(mut stream: tokio::net::UnixStream, offer: &Offer) -> io::Result<tokio::net::UnixStream> {
    let peer = stream.peer_cred()?.uid();
    if peer != rustix::process::geteuid().as_raw() && peer != 0 {
        return Err(io::Error::other(format!("user {peer} asked, who is not this process's")));
    }
    let question = tokio::time::timeout(STEP, line(&mut stream)).await??;
    let question: Value = serde_json::from_slice(&question)?;
    let services = question["services"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let services: Vec<String> = services.map(str::to_owned).collect();
    let offered = match offer(&services) {
        Ok(offered) if offered.len() <= HANDED_MAX => offered,
        Ok(_) => return Err(io::Error::other("there are too many sockets to hand over")),
        Err(why) => {
            stream.write_all(format!("{}\n", json!({"refused": why})).as_bytes()).await?;
            return Err(io::Error::other(why));
        }
    };
    let names: Vec<&str> = offered.iter().map(|(name, _)| name.as_str()).collect();
    let text = format!("{}\n", json!({"handed": names}));
    let fds: Vec<BorrowedFd<'_>> = offered.iter().map(|(_, fd)| fd.as_fd()).collect();
    let sent = stream.async_io(Interest::WRITABLE, || send(&stream, text.as_bytes(), &fds)).await?;
    if sent != text.len() {
        return Err(io::Error::other("the answer was not taken whole"));
    }
    drop(offered);
    let ready = tokio::time::timeout(START, line(&mut stream)).await??;
    if ready != READY {
        return Err(io::Error::other("the newcomer is not ready"));
    }
    Ok(stream)
}

fn send(stream: &tokio::net::UnixStream, text: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("there are too many sockets to hand over"));
    }
    Ok(sendmsg(stream, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Up to the end of a line.
async fn line(stream: &mut tokio::net::UnixStream) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    while !text.ends_with(b"\n") {
        if text.len() >= MESSAGE_MAX || stream.read_buf(&mut text).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;
    use std::os::unix::net::UnixListener as StdListener;

    /// A process that offers one pair of sockets to who runs the gateway alone.
    fn serving(dir: &Path) -> (Kernel, UnixStream) {
        let kernel = Kernel::new();
        let service = kernel.service("kernel");
        let listener = StdListener::bind(dir.join(SOCKET)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = Arc::new(UnixListener::from_std(listener).unwrap());
        let (kept, given) = UnixStream::pair().unwrap();
        let given = Arc::new(OwnedFd::from(given));
        let own = service.clone();
        service.permanent("takeover", 0, move || {
            let given = given.clone();
            let offer = move |services: &[String]| {
                if services != ["gateway"] {
                    return Err("not these services".to_owned());
                }
                Ok(vec![("given".to_owned(), given.try_clone().unwrap())])
            };
            serve(own.clone(), listener.clone(), Arc::new(offer))
        });
        (kernel, kept)
    }

    async fn asking(dir: &Path, services: &[&str]) -> Result<(Taking, Handed), TakeoverError> {
        let (socket, services) = (dir.join(SOCKET), services.iter().map(|name| (*name).to_owned()).collect());
        let ask = move || ask(&socket, &Vec::<String>::clone(&services));
        tokio::task::spawn_blocking(ask).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_socket_is_handed_over_and_works_on_the_other_side() {
        let dir = tempfile::tempdir().unwrap();
        let (kernel, mut kept) = serving(dir.path());
        let refused = asking(dir.path(), &["gateway", "registry"]).await.unwrap_err();
        assert!(refused.to_string().contains("not these services"), "{refused}");
        // One that goes away before it is ready has taken nothing.
        drop(asking(dir.path(), &["gateway"]).await.unwrap());
        let (taking, mut handed) = asking(dir.path(), &["gateway"]).await.unwrap();
        assert!(handed.take("other").is_none());
        let mut given = UnixStream::from(handed.take("given").unwrap());
        given.write_all(b"over").unwrap();
        let mut text = [0; 4];
        kept.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"over");
        tokio::task::spawn_blocking(|| taking.ready()).await.unwrap().unwrap();
        assert_eq!(kernel.ending().await, Ending::HandedOver);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn without_anybody_there_is_nothing_to_take_over() {
        let dir = tempfile::tempdir().unwrap();
        let nobody = asking(dir.path(), &["gateway"]).await.unwrap_err();
        assert!(nobody.to_string().contains("start without --takeover"), "{nobody}");
    }
}
