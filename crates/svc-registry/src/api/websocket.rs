//! The stream over WebSocket (RFC 6455): the same events, each a text message.

use super::Asked;
use super::answer::malformed;
use super::stream::{Cursor, Event};
use crate::shared::Shared;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::{Buf, BytesMut};
use http::header::{
    CONNECTION, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{Method, Response, StatusCode, Version};
use ron_kernel::http::{Body, Io, Tunnel};
use ron_kernel::problem::{Rejection, X_CORR_ID};
use ron_kernel::reason::Reason;
use serde_json::json;
use sha1::{Digest as _, Sha1};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// Largest message that is read; a reader has nothing to say but to answer pings.
const MESSAGE_MAX: usize = 4 << 10;

/// How long a client may take to notice that it is over.
const LINGER: Duration = Duration::from_secs(1);

const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// Changes the protocol; a task of its own feeds the connection.
pub(super) fn upgrade(
    shared: &Arc<Shared>,
    asked: &Asked<'_>,
    cursor: Cursor,
) -> Result<Response<Body>, Rejection> {
    let headers = asked.headers();
    let has = |name, word: &str| {
        let value = headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or("");
        value.split(',').any(|part| part.trim().eq_ignore_ascii_case(word))
    };
    let key = headers.get(SEC_WEBSOCKET_KEY).and_then(|key| key.to_str().ok());
    let good = has(UPGRADE, "websocket") && has(CONNECTION, "upgrade") && has(SEC_WEBSOCKET_VERSION, "13");
    let good = good && asked.head.method == Method::GET && asked.head.version == Version::HTTP_11;
    let is_nonce = |key: &&str| BASE64_STANDARD.decode(key).is_ok_and(|nonce| nonce.len() == 16);
    let Some(key) = key.filter(|_| good).filter(is_nonce) else {
        let refused = malformed("this is for WebSocket, version 13, over HTTP/1.1");
        return Err(refused.header(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13")));
    };
    let accept = BASE64_STANDARD.encode(Sha1::digest(format!("{key}{GUID}")));
    let accept = HeaderValue::from_str(&accept).expect("base64 is plain text");
    let (near, far) = UnixStream::pair().map_err(|error| {
        tracing::warn!(%error, "no socket pair for a WebSocket");
        Rejection::new(Reason::NotReady, "no stream can be opened now")
    })?;
    let silence = shared.settings.load().stream.heartbeat.0 * 3 + Duration::from_secs(1);
    let peer = asked.conn.address.clone();
    shared.service.scoped("websocket", move || format!("of {peer}"), async move {
        let _ = serve(far, cursor).await;
    });
    let mut response = Response::new(Body::tunnel(Tunnel::new(Io::from(near), silence)));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static("websocket"));
    response.headers_mut().insert(SEC_WEBSOCKET_ACCEPT, accept);
    response.headers_mut().insert(X_CORR_ID, asked.corr.value().clone());
    response.extensions_mut().insert(super::stream::patience(shared));
    Ok(response)
}

async fn serve(mut socket: UnixStream, mut cursor: Cursor) -> std::io::Result<()> {
    let mut buffer = BytesMut::new();
    let mut stalled = Duration::ZERO;
    loop {
        tokio::select! {
            biased;
            read = socket.read_buf(&mut buffer) => {
                if read? == 0 {
                    return Ok(());
                }
                while let Some(frame) = take_frame(&mut buffer) {
                    match frame {
                        Ok((PING, said)) => socket.write_all(&message(PONG, &said)).await?,
                        Ok((CLOSE, said)) => return close(socket, &said).await,
                        Ok(_) => {}
                        Err(code) => return close(socket, &code.to_be_bytes()).await,
                    }
                }
            }
            events = cursor.next(stalled) => {
                let Some(events) = events else {
                    // Going away, or nothing more to say.
                    return close(socket, &1001u16.to_be_bytes()).await;
                };
                let begun = Instant::now();
                for event in events {
                    let frame = match &event {
                        Event::Heartbeat => message(PING, b""),
                        event => {
                            let said = json!({"event": event.name(), "id": event.id(), "data": event.data()});
                            message(TEXT, said.to_string().as_bytes())
                        }
                    };
                    socket.write_all(&frame).await?;
                }
                stalled = begun.elapsed();
            }
        }
    }
}

/// Says that it is over. What the client sends until it has read that is thrown away, for unread it would cut it off.
async fn close(mut socket: UnixStream, said: &[u8]) -> std::io::Result<()> {
    socket.write_all(&message(CLOSE, said)).await?;
    socket.shutdown().await?;
    let rest = async {
        let mut thrown = [0; 4 << 10];
        while socket.read(&mut thrown).await? > 0 {}
        Ok(())
    };
    tokio::time::timeout(LINGER, rest).await.unwrap_or(Ok(()))
}

/// A frame as a server sends it.
fn message(opcode: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0x80 | opcode];
    match payload.len() {
        short @ 0..126 => out.push(short as u8),
        middle @ 126..0x1_0000 => {
            out.push(126);
            out.extend((middle as u16).to_be_bytes());
        }
        long => {
            out.push(127);
            out.extend((long as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(payload);
    out
}

/// The next frame of a client, if it is there; or the code to close with.
fn take_frame(buffer: &mut BytesMut) -> Option<Result<(u8, Vec<u8>), u16>> {
    let (first, second) = (*buffer.first()?, *buffer.get(1)?);
    let (length, start) = match second & 127 {
        126 => (usize::from(u16::from_be_bytes([*buffer.get(2)?, *buffer.get(3)?])), 4),
        // As a whole it need not be read to be refused.
        127 => (usize::MAX, 10),
        short => (usize::from(short), 2),
    };
    let (opcode, is_last) = (first & 15, first & 128 != 0);
    let known = match opcode {
        0..=BINARY => true,
        // What controls is short and comes in one piece; a reason to close begins with a code.
        CLOSE..=PONG => is_last && length <= 125 && (opcode != CLOSE || length != 1),
        _ => false,
    };
    // What a client sends is masked, and uses no extension.
    if !known || second & 128 == 0 || first & 0x70 != 0 {
        return Some(Err(1002));
    }
    if length > MESSAGE_MAX {
        return Some(Err(1009));
    }
    if buffer.len() < start + 4 + length {
        return None;
    }
    buffer.advance(start);
    let mask = buffer.split_to(4);
    let payload =
        buffer.split_to(length).iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask).collect();
    Some(Ok((opcode, payload)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_in_any_pieces_and_refused_unmasked() {
        let whole = [0x89, 0x83, 1, 2, 3, 4, b'a' ^ 1, b'b' ^ 2, b'c' ^ 3];
        for cut in 0..whole.len() {
            let mut buffer = BytesMut::from(&whole[..cut]);
            assert_eq!(take_frame(&mut buffer), None);
            buffer.extend_from_slice(&whole[cut..]);
            assert_eq!(take_frame(&mut buffer), Some(Ok((PING, b"abc".to_vec()))));
            assert!(buffer.is_empty());
        }
        assert_eq!(take_frame(&mut BytesMut::from(&[0x81, 1, b'a'][..])), Some(Err(1002)));
        assert_eq!(take_frame(&mut BytesMut::from(&[0x81, 0xff, 0, 0][..])), Some(Err(1009)));
        for bad in [
            &[0x89, 0xfe, 0, 126][..],
            &[0x09, 0x80, 0, 0, 0, 0],
            &[0x83, 0x80, 0, 0, 0, 0],
            &[0x8b, 0x80, 0, 0, 0, 0],
            &[0x88, 0x81, 0, 0, 0, 0, 1],
            &[0xc1, 0x80, 0, 0, 0, 0],
        ] {
            assert_eq!(take_frame(&mut BytesMut::from(bad)), Some(Err(1002)), "{bad:x?}");
        }
        assert_eq!(message(TEXT, &[0; 200])[..4], [0x81, 126, 0, 200]);
    }
}
