//! The writer of a connection: answers first, then what the engine has queued, in batches.

use crate::link::{End, Link};
use crate::shared::Shared;
use oap::Encoded;
use oap::session::Outgoing;
use ron_kernel::channel::Receiver;
use ron_transport::{WriteError, Writer};
use tokio::io::AsyncWrite;

/// Frames and bytes of one batch; a single frame may be larger.
const FRAMES: usize = 256;
const BYTES: usize = 64 << 10;

/// Writes until it is told to finish, and closes its half of the connection. Says if it could not.
pub(crate) async fn write<W: AsyncWrite + Unpin + Send>(
    shared: &Shared,
    link: &Link,
    replies: Receiver<Outgoing>,
    mut writer: Writer<W>,
) -> Result<(), End> {
    let mut batch: Vec<Encoded> = Vec::new();
    loop {
        let timeout = shared.settings.load().timeouts.write.0;
        let finishing = link.is_finishing();
        let mut any = false;
        while let Some(Outgoing { frame, checked }) = replies.try_recv() {
            writer.push(&frame, checked);
            any = true;
        }
        let opened = link.opened.get().filter(|_| !link.finishes_now());
        if let Some(opened) = opened {
            opened.egress.lock().take(FRAMES, BYTES, &mut batch);
            batch.iter().for_each(|frame| writer.push(frame, link.is_checked()));
        }
        if !any && batch.is_empty() {
            if finishing {
                return writer.close(timeout).await.map_err(|error| failed(shared, &error));
            }
            writer.relax();
            batch.shrink_to(0);
            link.wake.notified().await;
            // Whoever woke this is about to queue more: one turn of the others, and it all goes in one write.
            tokio::task::yield_now().await;
            continue;
        }
        writer.flush(timeout).await.map_err(|error| failed(shared, &error))?;
        link.wrote.notify_one();
        if let Some(opened) = opened {
            opened.egress.lock().written(&batch);
            shared.room.notify_waiters();
        }
        batch.clear();
    }
}

fn failed(shared: &Shared, error: &WriteError) -> End {
    match error {
        WriteError::Timeout => {
            shared.numbers.write_timeouts.inc();
            End::WriteTimeout
        }
        WriteError::Io(_) => End::Io,
    }
}
