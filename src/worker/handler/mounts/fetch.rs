//! Brings content to this host: from the cache of downloads, or over HTTP, resumed and retried.
//!
//! The origin is asked each time, so that a task gets no artifact from the cache that it may not read; the answer's `ETag` says
//! whether the cached content is still the same. Only a URL with a digest needs no request.

use std::fs::File;
use std::io::{self, Seek as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use reqwest::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED, LOCATION, RANGE,
};
use reqwest::{Client, Response, StatusCode};
use tokio::io::{AsyncWriteExt as _, BufWriter};
use tokio::time::{Instant, timeout};
use url::Url;

use journeyman_domain::backoff::{Backoff, Policy};
use journeyman_domain::id::TaskId;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::limits::{
    CALL_TIMEOUT, CONNECT_TIMEOUT, DOWNLOAD_ATTEMPTS_MAX, DOWNLOAD_HOPS_MAX, DOWNLOAD_PROGRESS_INTERVAL,
    DOWNLOAD_ROOM_BYTES, DOWNLOAD_STALL_MAX, DOWNLOAD_WRITE_BYTES,
};
use journeyman_domain::refusal::{CallError, Refusal};
use journeyman_platform::host::caches::{CacheStore, NewDownload};
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::address::{Range, classify};
use journeyman_platform::http::client::{client_builder, retry_after, root_cause};
use journeyman_platform::http::resolver::{FilteringResolver, Judge, system_lookup};
use journeyman_platform::unpack::Compression;

use super::super::{Context, PrepareError, PrepareFailure};
use super::payload::{Content, Origin};
use super::{StopOnDrop, blocking, decompress_into};
use crate::task::file::digest;

const RETRY: Policy = Policy { first: Duration::from_secs(1), max: Duration::from_secs(30) };

/// Downloads content for tasks. Clones share connections and the cache.
#[derive(Debug, Clone)]
pub(super) struct Fetcher {
    pub(super) store: Arc<CacheStore>,
    pub(super) client: Client,
    retry: Policy,
}

/// What one attempt came to.
enum Attempt {
    Complete { key: Option<String>, is_gzip: bool },
    Cached(File),
}

/// Why an attempt failed.
enum FetchError {
    /// Another attempt may succeed.
    Retry {
        after: Option<Duration>,
        why: String,
    },
    Final(PrepareError),
}

/// A download over several attempts.
struct Partial {
    download: NewDownload,
    bytes: u64,
    /// Names the content that the bytes are of, for servers that resume.
    validator: Option<String>,
}

impl From<PrepareError> for FetchError {
    fn from(error: PrepareError) -> Self {
        Self::Final(error)
    }
}

impl From<CallError> for FetchError {
    fn from(CallError { refusal, message }: CallError) -> Self {
        match refusal {
            Refusal::Gone | Refusal::Rejected | Refusal::Denied => Self::Final(PrepareError::malformed(vec![message])),
            Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Stale | Refusal::Full => {
                Self::Retry { after: refusal.retry_after(), why: message }
            }
        }
    }
}

impl Fetcher {
    pub(super) fn new(store: Arc<CacheStore>) -> reqwest::Result<Self> {
        // A task could ask the metadata service of a cloud for the worker's own credentials, from the worker's address.
        let judge: Judge = Arc::new(|_, address| match classify(address).range {
            Range::Metadata => Err("it leads to a metadata service".to_owned()),
            Range::Public | Range::Private | Range::Unusable => Ok(()),
        });
        let resolver = FilteringResolver { judge, lookup: system_lookup(), timeout: CONNECT_TIMEOUT };
        let builder = client_builder().connect_timeout(CONNECT_TIMEOUT).dns_resolver(resolver);
        Ok(Self { store, client: builder.build()?, retry: RETRY })
    }

    /// Returns the content as a file, positioned at its start.
    pub(super) async fn fetch(&self, content: &Content, context: &Context) -> Result<File, PrepareError> {
        match content {
            Content::Inline(bytes) => {
                let (store, bytes) = (Arc::clone(&self.store), bytes.clone());
                blocking("content", move || {
                    let download = store.new_download()?;
                    io::Write::write_all(&mut download.file(), &bytes)?;
                    rewound(download.finish(None)?)
                })
                .await
            }
            Content::Remote { origin, sha256 } => self.fetch_remote(origin, sha256.as_deref(), context).await,
        }
    }

    async fn fetch_remote(
        &self,
        origin: &Origin,
        sha256: Option<&str>,
        context: &Context,
    ) -> Result<File, PrepareError> {
        let _one_at_a_time = self.store.exclusive(&origin.identity()).await;
        if let (Origin::Url(_), Some(key)) = (origin, sha256.map(|sha256| digest_key(origin, sha256)))
            && let Some(file) = self.find(&key).await?
            && let Ok(file) = self.verified(file, &key, sha256, origin).await
        {
            context.log().write_note(&format!("{origin}: downloaded before"));
            return Ok(file);
        }
        let store = Arc::clone(&self.store);
        let download = blocking("download", move || store.new_download()).await?;
        let mut partial = Partial { download, bytes: 0, validator: None };
        let (mut backoff, mut jitter) = (Backoff::NEW, Jitter::seeded(u64::from(std::process::id())));
        let started = Instant::now();
        let attempt = loop {
            let before = partial.bytes;
            match self.attempt(origin, sha256, &mut partial, context).await {
                Ok(attempt) => break attempt,
                Err(FetchError::Final(error)) => return Err(error),
                Err(FetchError::Retry { after, why }) => {
                    if partial.bytes > before {
                        backoff.reset();
                    }
                    if backoff.tries() >= DOWNLOAD_ATTEMPTS_MAX {
                        let text = format!("{origin}: {why}; gave up after {DOWNLOAD_ATTEMPTS_MAX} attempts");
                        return Err(PrepareError::new(PrepareFailure::Unavailable, text));
                    }
                    let wait = backoff.wait(self.retry, after, &mut jitter);
                    context.log().write_note(&format!("{origin}: {why}; trying again in {:.1} s", wait.as_secs_f32()));
                    tokio::time::sleep(wait).await;
                }
            }
        };
        match attempt {
            Attempt::Cached(file) => {
                context.log().write_note(&format!("{origin}: downloaded before"));
                Ok(file)
            }
            Attempt::Complete { key, is_gzip } => {
                let (bytes, elapsed) = (partial.bytes, started.elapsed());
                let (store, subject) = (Arc::clone(&self.store), origin.to_string());
                let (expected, stop) = (sha256.map(str::to_owned), StopOnDrop::default());
                let stopped = Arc::clone(&stop.0);
                let keeping = move || keep(&store, partial.download, key, is_gzip, expected, &subject, &stopped);
                let file = blocking("download", keeping).await??;
                context.log().write_note(&format!(
                    "{origin}: {} downloaded in {:.1} s",
                    in_mib(bytes),
                    elapsed.as_secs_f32()
                ));
                Ok(file)
            }
        }
    }

    async fn find(&self, key: &str) -> Result<Option<File>, PrepareError> {
        let (store, key) = (Arc::clone(&self.store), key.to_owned());
        blocking("cached download", move || store.find_download(&key)).await
    }

    /// Cached content with a digest is read again, because what runs as the worker's user may have changed it, and removed if it has.
    async fn verified(
        &self,
        file: File,
        key: &str,
        sha256: Option<&str>,
        origin: &Origin,
    ) -> Result<File, PrepareError> {
        let Some(sha256) = sha256.map(str::to_owned) else { return Ok(file) };
        let (store, key, subject) = (Arc::clone(&self.store), key.to_owned(), origin.to_string());
        blocking("cached download", move || match check_digest(&file, &sha256, &subject)? {
            Ok(()) => rewound(file).map(Ok),
            Err(error) => store.remove_download(&key).map(|()| Err(error)),
        })
        .await?
    }

    /// Goes on with the download where the attempt before ended, if the server resumes it.
    async fn attempt(
        &self,
        origin: &Origin,
        sha256: Option<&str>,
        partial: &mut Partial,
        context: &Context,
    ) -> Result<Attempt, FetchError> {
        let response = self.request(origin, partial, context).await?;
        let validator = validator(response.headers());
        let by_validator = || validator.as_ref().map(|text| format!("{} {text}", origin.identity()));
        let key = sha256.map(|sha256| digest_key(origin, sha256)).or_else(by_validator);
        if let Some(key) = &key
            && let Some(file) = self.find(key).await?
            && let Ok(file) = self.verified(file, key, sha256, origin).await
        {
            return Ok(Attempt::Cached(file));
        }
        if response.status() != StatusCode::PARTIAL_CONTENT {
            partial.bytes = 0;
            let file = partial.download.file().try_clone();
            blocking("download", move || file.and_then(|mut file| file.set_len(0).and_then(|()| file.rewind())))
                .await?;
        }
        partial.validator = validator;
        let is_gzip = response.headers().get(CONTENT_ENCODING).is_some_and(|value| value == "gzip");
        self.receive(origin, response, partial, context).await?;
        Ok(Attempt::Complete { key, is_gzip })
    }

    async fn receive(
        &self,
        origin: &Origin,
        mut response: Response,
        partial: &mut Partial,
        context: &Context,
    ) -> Result<(), FetchError> {
        let total = response.content_length().map(|left| left.saturating_add(partial.bytes));
        self.make_room(total.unwrap_or_default(), response.content_length().unwrap_or_default()).await?;
        let file = partial.download.file().try_clone().map_err(|error| PrepareError::from_io("download", &error))?;
        let mut file = BufWriter::with_capacity(DOWNLOAD_WRITE_BYTES, tokio::fs::File::from_std(file));
        let (started, resumed_at) = (Instant::now(), partial.bytes);
        let (mut noted_at, mut room_at) = (started, partial.bytes);
        loop {
            let chunk = match timeout(DOWNLOAD_STALL_MAX, response.chunk()).await {
                Ok(Ok(Some(chunk))) => chunk,
                Ok(Ok(None)) => break,
                Ok(Err(error)) => {
                    file.flush().await.map_err(|error| PrepareError::from_io("download", &error))?;
                    return Err(retry(format!("the connection failed: {}", root_cause(&error.without_url()))));
                }
                Err(_) => {
                    file.flush().await.map_err(|error| PrepareError::from_io("download", &error))?;
                    return Err(retry(format!("nothing was received for {} s", DOWNLOAD_STALL_MAX.as_secs())));
                }
            };
            file.write_all(&chunk).await.map_err(|error| PrepareError::from_io("download", &error))?;
            partial.bytes += chunk.len() as u64;
            if total.is_none() && partial.bytes - room_at >= DOWNLOAD_ROOM_BYTES {
                room_at = partial.bytes;
                self.make_room(partial.bytes, DOWNLOAD_ROOM_BYTES).await?;
            }
            if noted_at.elapsed() >= DOWNLOAD_PROGRESS_INTERVAL {
                noted_at = Instant::now();
                let rate = (partial.bytes - resumed_at) / started.elapsed().as_secs().max(1);
                let of = total.map_or_else(String::new, |total| format!(" of {}", in_mib(total)));
                let text = format!("{origin}: {}{of}, {}/s", in_mib(partial.bytes), in_mib(rate));
                context.log().write_note(&text);
                context.set_progress(&text);
            }
        }
        file.flush().await.map_err(|error| PrepareError::from_io("download", &error))?;
        match total {
            Some(total) if total != partial.bytes => {
                Err(retry(format!("only {} of {total} bytes came", partial.bytes)))
            }
            Some(_) | None => Ok(()),
        }
    }

    async fn make_room(&self, total: u64, bytes: u64) -> Result<(), PrepareError> {
        let max = self.store.limits().downloads_bytes_max;
        if total > max {
            let text = format!("download: {} or more, and `host.download_cache` is {}", in_mib(total), in_mib(max));
            return Err(PrepareError::new(PrepareFailure::Unavailable, text));
        }
        let store = Arc::clone(&self.store);
        let room =
            tokio::task::spawn_blocking(move || store.make_room(bytes)).await.map_err(io::Error::other).flatten();
        room.map_err(|error| {
            if error.kind() == io::ErrorKind::StorageFull {
                return PrepareError::new(PrepareFailure::Unavailable, format!("download: {error}"));
            }
            PrepareError::from_io("download", &error)
        })
    }

    /// Requests the content and follows redirects, to the head of a successful response.
    async fn request(&self, origin: &Origin, partial: &Partial, context: &Context) -> Result<Response, FetchError> {
        let mut url = match origin {
            Origin::Url(url) => url.clone(),
            Origin::Artifact { task, name } => artifact_url(origin, task, name, context)?,
            Origin::Indexed { namespace, name } => {
                let task = deployment(origin, context)?.find_indexed(namespace).await?;
                artifact_url(origin, &task, name, context)?
            }
        };
        let queue = context.deployment().filter(|_| !matches!(origin, Origin::Url(_)));
        let queue = queue.map(|deployment| (deployment, format!("{}/api/queue/", deployment.root_url())));
        for _ in 0..DOWNLOAD_HOPS_MAX {
            let mut request = self.client.get(url.clone());
            // What a queue redirects to carries its own signature.
            if let Some((deployment, prefix)) = &queue
                && url.as_str().starts_with(prefix)
                && let Some(signature) = deployment.sign("GET", &url)
            {
                request = request.header(AUTHORIZATION, signature);
            } else if let (Some(validator), true) = (&partial.validator, partial.bytes > 0) {
                request = request.header(RANGE, format!("bytes={}-", partial.bytes)).header(IF_RANGE, validator);
            }
            // No resolver judges what is an address already.
            let address = url.host_str().and_then(|host| host.trim_matches(['[', ']']).parse().ok());
            if address.is_some_and(|address| classify(address).range == Range::Metadata) {
                return Err(malformed(origin, "it leads to a metadata service").into());
            }
            let response = match timeout(CALL_TIMEOUT, request.send()).await {
                Ok(Ok(response)) => response,
                Ok(Err(error)) => {
                    return Err(retry(format!("cannot be reached: {}", root_cause(&error.without_url()))));
                }
                Err(_) => return Err(retry(format!("no answer within {} s", CALL_TIMEOUT.as_secs()))),
            };
            if !response.status().is_redirection() {
                return check_status(origin, response, partial);
            }
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|text| response.url().join(text).ok());
            let next = next.filter(|next| matches!(next.scheme(), "http" | "https"));
            url = next.ok_or_else(|| malformed(origin, "it redirects to no http or https URL"))?;
        }
        Err(malformed(origin, &format!("more than {DOWNLOAD_HOPS_MAX} redirects")).into())
    }
}

/// A URL does not lead to what only the readers of an artifact may have.
fn digest_key(origin: &Origin, sha256: &str) -> String {
    let kind = if matches!(origin, Origin::Url(_)) { "url" } else { "artifact" };
    format!("{kind} sha256:{sha256}")
}

fn check_status(origin: &Origin, response: Response, partial: &Partial) -> Result<Response, FetchError> {
    let status = response.status();
    match status.as_u16() {
        200 => Ok(response),
        206 if starts_at(response.headers(), partial.bytes) => Ok(response),
        206 | 408 | 425 | 429 | 500.. => Err(FetchError::Retry {
            after: retry_after(response.headers(), stamp()),
            why: format!("the answer is {status}"),
        }),
        401 | 403 => {
            Err(malformed(origin, &format!("{status}: the task may not read it; does it have the scope?")).into())
        }
        _ => Err(malformed(origin, &format!("the answer is {status}")).into()),
    }
}

fn starts_at(headers: &HeaderMap, bytes: u64) -> bool {
    let range = headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    range.and_then(|range| range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()) == Some(bytes)
}

fn deployment<'a>(origin: &Origin, context: &'a Context) -> Result<&'a Arc<dyn crate::task::Deployment>, PrepareError> {
    context.deployment().ok_or_else(|| malformed(origin, "tasks of this queue have no artifacts to mount"))
}

fn artifact_url(origin: &Origin, task: &TaskId, name: &str, context: &Context) -> Result<Url, PrepareError> {
    let (root, task) = (deployment(origin, context)?.root_url(), urlencoding::encode(task.as_str()));
    let text = format!("{root}/api/queue/v1/task/{task}/artifacts/{}", urlencoding::encode(name));
    Url::parse(&text).map_err(|_| malformed(origin, "its URL is invalid"))
}

/// A strong `ETag`, or when the content was changed last.
fn validator(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let etag = text(ETAG).filter(|etag| !etag.starts_with("W/"));
    etag.or_else(|| text(LAST_MODIFIED)).map(str::to_owned)
}

/// Checks complete content, and keeps it where its key is known. Blocks.
fn keep(
    store: &Arc<CacheStore>,
    download: NewDownload,
    key: Option<String>,
    is_gzip: bool,
    sha256: Option<String>,
    subject: &str,
    stopped: &AtomicBool,
) -> io::Result<Result<File, PrepareError>> {
    let download = if is_gzip {
        let plain = store.new_download()?;
        let packed = rewound(download.file().try_clone()?)?;
        let canceled = || stopped.load(Ordering::Relaxed);
        if let Err(error) = decompress_into(packed, Some(Compression::Gz), plain.file(), store, subject, &canceled) {
            return Ok(Err(error));
        }
        plain
    } else {
        download
    };
    if let Some(sha256) = sha256
        && let Err(error) = check_digest(download.file(), &sha256, subject)?
    {
        return Ok(Err(error));
    }
    let file = rewound(download.finish(key.as_deref())?)?;
    store.make_room(0)?;
    Ok(Ok(file))
}

fn check_digest(file: &File, sha256: &str, subject: &str) -> io::Result<Result<(), PrepareError>> {
    let found = digest(file, file.metadata()?.len())?;
    if found == sha256 {
        return Ok(Ok(()));
    }
    let text = format!("{subject}: its SHA-256 is {found}, and the payload requires {sha256}");
    Ok(Err(PrepareError::malformed(vec![text])))
}

pub(super) fn rewound(mut file: File) -> io::Result<File> {
    file.rewind()?;
    Ok(file)
}

fn malformed(origin: &Origin, why: &str) -> PrepareError {
    PrepareError::malformed(vec![format!("{origin}: {why}")])
}

fn retry(why: String) -> FetchError {
    FetchError::Retry { after: None, why }
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
pub(in crate::handler) fn in_mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
