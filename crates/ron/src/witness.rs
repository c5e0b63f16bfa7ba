//! `ron registry witness`: an HTTP service that cosigns what continues, and forgets nothing it has cosigned.

use crate::Usage;
use crate::cli::WitnessOptions;
use crate::commands::print;
use anyhow::Context as _;
use ed25519_dalek::SigningKey;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use ron_kernel::config::Problems;
use ron_kernel::http::{Body, BodyError, ConnInfo, Handler, Server, bind_tcp};
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::{Ending, Kernel, Service};
use ron_kernel::key::PrivateKey;
use ron_kernel::lock::Lock;
use ron_kernel::observe::{LogSettings, Logs};
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID};
use ron_kernel::process::{self, Reloader, Signals};
use ron_kernel::reason::Reason;
use ron_log::note::{NOTE_MAX, NoteKeyKind, is_key_name};
use ron_log::witness::AddError;
use ron_log::{NoteKey, Witness, checkpoint};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The largest request: a note, and 63 hashes before it.
const BODY_MAX: usize = NOTE_MAX + 4096;
/// Requests that are checked at a time; others wait in their connections, of which there are few.
const CHECKS_MAX: usize = 16;
const DRAIN_DEADLINE: Duration = Duration::from_secs(3);

static SEEN: LockSpec =
    LockSpec { service: "witness", name: "seen", rank: 1, guards: "what is cosigned, in memory and on disk" };

pub(crate) fn run(options: WitnessOptions) -> anyhow::Result<ExitCode> {
    if !is_key_name(&options.name) {
        return Err(Usage("--name: 1 to 255 bytes without spaces or `+`".to_owned()).into());
    }
    let logs = logs(&options).map_err(|problem| Usage(problem.to_string()))?;
    let key = SigningKey::from_bytes(&PrivateKey::read(&options.key)?.seed());
    let _logs = Logs::start(&LogSettings::default());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(CHECKS_MAX)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let code = runtime.block_on(serve(options, logs, key));
    runtime.shutdown_background();
    code
}

async fn serve(options: WitnessOptions, logs: Vec<NoteKey>, key: SigningKey) -> anyhow::Result<ExitCode> {
    let kernel = Kernel::new();
    let (own, service) = (kernel.service("kernel"), kernel.service("witness"));
    let signals = Signals::catch(&own).context("cannot catch signals")?;
    let file = StateFile::open(&options.state)?;
    let witness = file.read(logs)?;
    let public = NoteKey::cosignature(&options.name, key.verifying_key());
    let bound = bind_tcp(options.listen).context("--listen")?;
    let url = format!("http://{}", bound.address());
    let cosigner = Arc::new(Cosigner {
        name: options.name.clone(),
        key,
        seen: Lock::new(service.inventory(), &SEEN, (witness, file)),
        service: service.clone(),
    });
    let (again, listed) = (cosigner.clone(), options.logs.clone());
    let reload = move || {
        let newer = self::logs(&options).map_err(|problem| {
            let mut problems = Problems::default();
            problems.add("", problem.to_string());
            problems
        })?;
        again.seen.lock().0.logs = newer;
        Ok((0, Vec::new()))
    };
    let reloader = Reloader::new(&own, reload, move || listed.iter().cloned().collect());
    process::start(&own, &signals, &reloader);
    Server::new(&service, Front(cosigner), ron_kernel::admin::limits()).listen(bound, None);
    own.ready();
    service.ready();
    print(&format!("{public}\n{url}"))?;
    let ending = kernel.ending().await;
    kernel.drain(DRAIN_DEADLINE, &["kernel"]).await;
    match ending {
        Ending::Asked => Ok(ExitCode::SUCCESS),
        Ending::Fatal(reason) => anyhow::bail!("stopped: {reason}"),
    }
}

/// The verifier lines of the flags and the file.
fn logs(options: &WitnessOptions) -> anyhow::Result<Vec<NoteKey>> {
    let mut lines = options.log.clone();
    if let Some(file) = &options.logs {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("--logs: cannot read {}", file.display()))?;
        let of_file = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.extend(of_file.map(str::to_owned));
    }
    anyhow::ensure!(!lines.is_empty(), "name the logs to watch, with --log LINE or --logs FILE");
    let key = |line: &String| {
        NoteKey::parse(line).filter(|key| key.kind == NoteKeyKind::Ed25519).with_context(|| {
            format!(
                "{line:?} is no log's verifier line: expected NAME+ID+KEY, as GET /registry/log-key gives it"
            )
        })
    };
    lines.iter().map(key).collect()
}

struct Cosigner {
    name: String,
    key: SigningKey,
    seen: Lock<(Witness, StateFile)>,
    service: Service,
}

/// What the listener asks; a check outlives the connection that wanted it.
struct Front(Arc<Cosigner>);

impl Handler for Front {
    async fn call(&self, mut request: Request<Body>, _: &ConnInfo) -> Response<Body> {
        let corr = CorrId::from_headers(request.headers());
        let answer = if request.uri().path() != "/add-checkpoint" {
            Err(Rejection::new(Reason::NotFound, "a witness has but one path: /add-checkpoint"))
        } else if request.method() != Method::POST {
            let post = HeaderValue::from_static("POST");
            Err(Rejection::new(Reason::Method, "a checkpoint is sent by POST").header(ALLOW, post))
        } else {
            match request.body_mut().collect(BODY_MAX).await {
                Ok(body) => {
                    let cosigner = self.0.clone();
                    let added = tokio::task::spawn_blocking(move || cosigner.add(&body)).await;
                    added.unwrap_or_else(|_panic| Err(Rejection::new(Reason::Internal, "the check failed")))
                }
                Err(BodyError::TooLarge) => {
                    Err(Rejection::new(Reason::BodyCap, "a checkpoint with its proof is smaller"))
                }
                Err(error) => Err(Rejection::new(Reason::Malformed, error.to_string())),
            }
        };
        match answer {
            Err(refused) => refused.into_response(&corr),
            Ok((status, kind, text)) => {
                let mut response = Response::new(Body::full(text));
                *response.status_mut() = status;
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
                response.headers_mut().insert(X_CORR_ID, corr.value().clone());
                response
            }
        }
    }
}

impl Cosigner {
    /// Checks, makes durable, and only then signs; one at a time.
    fn add(&self, body: &[u8]) -> Result<(StatusCode, &'static str, String), Rejection> {
        let mut seen = self.seen.lock();
        let (witness, file) = &mut *seen;
        let continued = match witness.check(body) {
            Ok(continued) => continued,
            Err(error) => {
                tracing::info!(%error, "not cosigned");
                let reason = match error {
                    AddError::Stale { size } | AddError::Fork { size } => {
                        return Ok((StatusCode::CONFLICT, "text/x.tlog.size", format!("{size}\n")));
                    }
                    AddError::UnknownLog => Reason::NotFound,
                    AddError::Unsigned => Reason::Forbidden,
                    AddError::Inconsistent => Reason::Invalid,
                    _ => Reason::Malformed,
                };
                return Err(Rejection::new(reason, error.to_string()));
            }
        };
        let mut next = witness.clone();
        next.note(&continued);
        if let Err(error) = file.write(&next.text()) {
            // After a failed flush nobody knows what the disk holds; what it holds is read again at the next start.
            self.service.fail_closed(format!("the state cannot be kept: {}", crate::said(&error)));
            return Err(Rejection::new(Reason::Internal, "what is cosigned cannot be kept"));
        }
        *witness = next;
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let line = checkpoint::cosign(&continued.text, &self.name, &self.key, time);
        let size = continued.checkpoint.size;
        tracing::info!(log = continued.checkpoint.origin, size, "cosigned");
        Ok((StatusCode::OK, "text/plain; charset=utf-8", line.to_string()))
    }
}

/// Where a witness keeps what it has cosigned; one process at a time.
struct StateFile {
    path: PathBuf,
    folder: File,
    _lock: File,
}

impl StateFile {
    fn open(path: &Path) -> anyhow::Result<StateFile> {
        let path = std::path::absolute(path)?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        let folder = File::open(folder)
            .with_context(|| format!("--state: there is no folder {}", folder.display()))?;
        let lock = path.with_added_extension("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(&lock);
        let lock = lock.with_context(|| format!("--state: cannot lock {}", path.display()))?;
        if lock.try_lock().is_err() {
            anyhow::bail!(
                "{} is in use by another witness: each needs its own state and key",
                path.display()
            );
        }
        Ok(StateFile { path, folder, _lock: lock })
    }

    fn read(&self, logs: Vec<NoteKey>) -> anyhow::Result<Witness> {
        match std::fs::read_to_string(&self.path) {
            Ok(text) => Witness::parse(&text, logs)
                .with_context(|| format!("{} is no witness's state: restore it, for a witness that forgets can be made to sign two histories", self.path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                tracing::info!(file = %self.path.display(), "nothing cosigned yet");
                Ok(Witness::new(logs))
            }
            Err(error) => Err(error).with_context(|| format!("cannot read {}", self.path.display())),
        }
    }

    /// Replaces the file as a whole, durably: bytes, then name.
    fn write(&self, text: &str) -> anyhow::Result<()> {
        let temporary = self.path.with_added_extension("new");
        let mut file = File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()?;
        std::fs::rename(&temporary, &self.path)?;
        Ok(self.folder.sync_all()?)
    }
}
