//! Mirrors: whoever has a copy of the log is asked for its newest checkpoint, so that a log restored from something older
//! is not continued beside it. What a mirror shows counts by the log's own signature; one that is away holds up nobody.

use crate::guard::{self, Hold, Seer};
use crate::shared::Shared;
use crate::store::RestoreError;
use http::StatusCode;
use ron_kernel::health::Severity;
use ron_kernel::http::client::{Address, CallLimits, Get, Remote};
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Missing;
use ron_kernel::task::TaskResult;
use ron_kernel::tls::ClientTlsSettings;
use ron_log::{Checkpoint, Note};
use serde_json::Value;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

pub(crate) const MIRRORS_MAX: usize = 32;
/// For one mirror to answer; writes wait so long for all of them at the start.
const PATIENCE: Duration = Duration::from_secs(3);
/// Until they are asked again.
const PAUSE: Duration = Duration::from_secs(60);

pub(crate) static MIRROR_IDLE: LockSpec = LockSpec {
    service: "registry",
    name: "mirror_idle",
    rank: 40,
    guards: "the connections kept to one mirror; taken alone, for a push or a pop",
};

/// Where a mirror's checkpoint is: server and path.
pub(crate) fn parse(url: &str) -> Result<(Address, String), String> {
    let wants = || format!("{url:?} is no http:// or https:// address of a checkpoint");
    let (scheme, rest) = url.split_once("://").ok_or_else(wants)?;
    let (authority, path) = rest.split_once('/').ok_or_else(wants)?;
    let path = format!("/{path}");
    path.parse::<http::uri::PathAndQuery>().map_err(|_bad| wants())?;
    Ok((format!("{scheme}://{authority}").parse()?, path))
}

/// The task: asks all of them at the start and then now and again.
pub(crate) async fn watch(shared: Arc<Shared>) -> TaskResult {
    let mut mirrors: Vec<Mirror> = Vec::new();
    let mut missing = Missing::new(&shared.service, "mirror", Severity::Degraded);
    loop {
        let settings = shared.settings.load_full();
        mirrors = take_over(&shared, mirrors, &settings.mirrors);
        let asking = mirrors.iter().map(|mirror| Box::pin(mirror.ask(&shared)) as Asking<'_>).collect();
        let unknown = tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            unknown = all(asking) => unknown,
        };
        match unknown.first() {
            Some(why) => missing.because(why),
            None => missing.note(false),
        }
        shared.holds.set(&Seer::Mirrors, None);
        shared.checkpoint_wanted.notify_one();
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}

type Asking<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// Asks all at once; gives what went wrong.
async fn all(mut asking: Vec<Asking<'_>>) -> Vec<String> {
    let mut wrong = Vec::new();
    std::future::poll_fn(|context| {
        asking.retain_mut(|one| match one.as_mut().poll(context) {
            Poll::Ready(told) => {
                wrong.extend(told.err());
                false
            }
            Poll::Pending => true,
        });
        if asking.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    wrong
}

struct Mirror {
    url: String,
    remote: Arc<Remote>,
    path: String,
}

/// The configured mirrors; those that stay keep their connections, and nothing is held up by those that go.
fn take_over(shared: &Shared, mut before: Vec<Mirror>, urls: &[String]) -> Vec<Mirror> {
    let mut mirrors = Vec::new();
    for url in urls {
        if let Some(index) = before.iter().position(|mirror| mirror.url == *url) {
            mirrors.push(before.swap_remove(index));
        } else if let Ok((address, path)) = parse(url) {
            let remote = Remote::new(&shared.service, &MIRROR_IDLE, address);
            if remote.address.is_https() {
                let tls = ClientTlsSettings::default().load(Path::new("."));
                remote.set_tls(tls.inspect_err(|error| tracing::warn!(%error, "no TLS to mirrors")).ok());
            }
            mirrors.push(Mirror { url: url.clone(), remote, path });
        }
    }
    for gone in before {
        shared.holds.set(&gone.seer(), None);
    }
    mirrors
}

impl Mirror {
    fn seer(&self) -> Seer {
        Seer::Mirror(self.url.clone())
    }

    /// Asks it, and does what follows from the answer; or says why what it has seen is not known.
    async fn ask(&self, shared: &Arc<Shared>) -> Result<(), String> {
        let seen = self.compare(shared).await;
        seen.map_err(|why| {
            tracing::warn!(mirror = self.url, why, "what it has seen of the log is not known");
            format!("what {} has seen of the log is not known: {why}", self.url)
        })
    }

    async fn compare(&self, shared: &Arc<Shared>) -> Result<(), String> {
        let told = tokio::time::timeout(PATIENCE, self.fetch()).await;
        let note = told.unwrap_or_else(|_elapsed| Err("it did not answer in time".to_owned()))?;
        let seen = Checkpoint::verify(&note, &shared.log_key)
            .map_err(|bad| format!("what it shows is no checkpoint of this log: {bad}"))?;
        let (who, working) = (self.seer(), shared.clone());
        match tokio::task::spawn_blocking(move || judge(&working, who, &seen)).await {
            Ok(Ok(hold)) => shared.holds.set(&self.seer(), hold),
            Ok(Err(error)) => return Err(format!("it cannot be compared: {error}")),
            Err(panic) => shared.panicked("the comparison with a mirror", &panic.to_string()),
        }
        Ok(())
    }

    /// The note it shows: as it is, or in JSON as a registry's head or a follower's state has it.
    async fn fetch(&self) -> Result<Note, String> {
        let get = Get { path: &self.path, host: self.remote.address.authority() };
        let limits = CallLimits { connect_timeout: Duration::from_secs(2), silence: PATIENCE };
        let answer = self.remote.call(&get, &mut None, limits).await.map_err(|error| error.to_string())?;
        let (status, text) = crate::witness::read(answer).await?;
        if status != StatusCode::OK {
            return Err(format!("it answered {status}"));
        }
        note_of(&text).ok_or_else(|| "its answer has no checkpoint".to_owned())
    }
}

fn note_of(text: &str) -> Option<Note> {
    let json: Option<Value> = serde_json::from_str(text).ok();
    let text = match &json {
        Some(json) => json["note"].as_str().or(json["checkpoint"]["note"].as_str())?,
        None => text,
    };
    Note::parse(text.as_bytes()).ok()
}

fn judge(shared: &Shared, who: Seer, seen: &Checkpoint) -> Result<Option<Hold>, RestoreError> {
    let reader = shared.store.reader()?;
    let has = reader.head()?.version + 1;
    guard::judge(&reader, has, who, seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpointor::make;
    use crate::config::RegistrySettings;
    use crate::fixture::Fixture;
    use ron_kernel::config::Problems;

    #[test]
    fn a_mirror_is_an_address_of_a_checkpoint() {
        let (address, path) = parse("https://cdn.example/log/checkpoint?x=1").unwrap();
        assert_eq!((address.authority(), path.as_str()), ("cdn.example:443", "/log/checkpoint?x=1"));
        let problems = |mirrors: Vec<String>| {
            let settings = RegistrySettings { mirrors, ..RegistrySettings::default() };
            let mut problems = Problems::default();
            settings.validate(false, false, &mut problems);
            problems.to_string()
        };
        let good = |index: u32| format!("http://127.0.0.1:{}/checkpoint", index + 1);
        assert_eq!(problems((0..32).map(good).collect()), "");
        assert!(problems((0..33).map(good).collect()).contains("more than 32"));
        for bad in ["127.0.0.1:1/checkpoint", "ftp://a.example/checkpoint", "https://a.example"] {
            assert!(problems(vec![bad.to_owned()]).contains("registry.mirrors[0]"), "{bad}");
        }
    }

    #[test]
    fn a_note_is_read_alone_and_out_of_what_registries_and_followers_say() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(2);
        let note = make(&registry.shared, None).unwrap().0.note;
        let text = note.to_string();
        let head = serde_json::json!({"version": 2, "checkpoint": {"size": 3, "note": text}}).to_string();
        let follower = serde_json::json!({"checkpoint": 3, "note": text}).to_string();
        for shown in [text.as_str(), &head, &follower] {
            assert_eq!(note_of(shown).as_ref(), Some(&note), "{shown}");
        }
        for shown in ["", "{}", r#"{"note":7}"#, r#"{"checkpoint":null}"#, "no note"] {
            assert!(note_of(shown).is_none(), "{shown}");
        }
    }
}
