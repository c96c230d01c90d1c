//! Artifacts: announcing one to the queue, and sending its content where the queue says.
//!
//! Each attempt asks for a fresh upload URL. Content is read in pieces from its file by position, so that attempts and
//! files do not disturb each other and nothing is held in memory. Upload URLs are signed by themselves: a Hawk
//! header would break them.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Body, Method};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256, Sha512};
use tokio::io::{AsyncWriteExt as _, DuplexStream};
use tokio_util::io::ReaderStream;

use super::api::{Call, Service, answered, segment};
use super::claims::{Part, part};
use super::credentials::Credentials;
use super::refuse::{by_status, clean, refused, retry, transport};
use super::wire::WireCredentials;
use super::{ArtifactStorage, Dialect, Taskcluster};
use crate::domain::refusal::Refusal;
use crate::limits::{
    ARTIFACT_BYTES_PER_SECOND_MIN, ARTIFACT_CHUNK_BYTES, ARTIFACT_INLINE_BYTES_MAX, ARTIFACT_TRANSFER_TIMEOUT_MAX,
    ARTIFACT_WHOLE_BYTES_MAX,
};
use crate::source::{Artifact, ArtifactBody, Claim, Refused};

/// Content to be sent: the first `bytes` of a file.
#[derive(Clone, Copy)]
struct Content<'a> {
    file: &'a Arc<File>,
    bytes: u64,
    content_type: &'a str,
}

/// One artifact on its way: what it is called in logs, and the two things every call about it needs.
struct Upload<'a> {
    operation: String,
    path: String,
    expires: String,
    credentials: Arc<Credentials>,
    content: Option<Content<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireS3 {
    pub(super) put_url: String,
    content_type: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireObject {
    name: String,
    project_id: String,
    upload_id: String,
    expires: String,
    pub(super) credentials: WireCredentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireUpload {
    pub(super) upload_method: WireMethod,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireMethod {
    pub(super) data_inline: Option<bool>,
    put_url: Option<WirePutUrl>,
}

#[derive(Deserialize)]
struct WirePutUrl {
    url: String,
    #[serde(default)]
    headers: Map<String, Value>,
}

impl Taskcluster {
    /// Stores an artifact: one announcement, and for a file the calls that send its content.
    pub(super) async fn store(&self, claim: &Claim, artifact: &Artifact) -> Result<(), Refused> {
        let run = claim.run();
        let part = part(claim)?;
        let operation = format!("artifact {} of {run}", clean(&artifact.name));
        let name = segment(&artifact.name);
        let upload = Upload {
            path: format!("/task/{}/runs/{}/artifacts/{name}", segment(run.task.as_str()), run.run),
            expires: expires(artifact, part, &operation)?,
            credentials: part.credentials.load(),
            content: content(&artifact.body),
            operation,
        };
        match (&artifact.body, self.artifact_storage) {
            (ArtifactBody::File { .. }, ArtifactStorage::S3) => self.store_s3(&upload).await,
            (ArtifactBody::File { .. }, ArtifactStorage::Object) => self.store_object(&upload).await,
            (ArtifactBody::Link { target, content_type }, _) => {
                self.announce_link(&upload, run, target, content_type).await
            }
            (ArtifactBody::Reference { url, content_type }, _) => {
                self.announce_reference(&upload, url, content_type).await
            }
            (ArtifactBody::Error { reason, message }, _) => {
                let body = json!({
                    "storageType": "error",
                    "expires": upload.expires,
                    "reason": reason,
                    "message": message,
                });
                self.announce(&upload, body).await.map(drop)
            }
        }
    }

    /// createArtifact.
    async fn announce(&self, upload: &Upload<'_>, body: Value) -> Result<super::api::Reply, Refused> {
        let operation = upload.operation.clone();
        let call = Call::queue(operation, Method::POST, upload.path.clone()).body(body).signed_by(&upload.credentials);
        Ok(self.api.call(call).await?)
    }

    async fn announce_reference(&self, upload: &Upload<'_>, url: &str, content_type: &str) -> Result<(), Refused> {
        let body = json!({
            "storageType": "reference",
            "expires": upload.expires,
            "contentType": content_type,
            "url": url,
        });
        self.announce(upload, body).await.map(drop)
    }

    async fn announce_link(
        &self,
        upload: &Upload<'_>,
        run: &crate::domain::id::Run,
        target: &str,
        content_type: &str,
    ) -> Result<(), Refused> {
        match self.dialect {
            // That queue knows no links: the other artifact's own address serves the same readers.
            Dialect::Azure => {
                let url = format!(
                    "{}/task/{}/runs/{}/artifacts/{}",
                    self.api.queue_base(),
                    segment(run.task.as_str()),
                    run.run,
                    segment(target)
                );
                self.announce_reference(upload, &url, content_type).await
            }
            Dialect::ClaimWork => {
                let body = json!({
                    "storageType": "link",
                    "expires": upload.expires,
                    "contentType": content_type,
                    "artifact": target,
                });
                self.announce(upload, body).await.map(drop)
            }
        }
    }

    async fn store_s3(&self, upload: &Upload<'_>) -> Result<(), Refused> {
        let Some(content) = upload.content else {
            return Ok(());
        };
        let body = json!({
            "storageType": "s3",
            "expires": upload.expires,
            "contentType": content.content_type,
        });
        let answer: WireS3 = self.announce(upload, body).await?.json()?;
        let content_type = answer.content_type.as_deref().unwrap_or(content.content_type);
        let headers = headers([("content-type", content_type)], &upload.operation)?;
        self.put(upload, content, &answer.put_url, headers).await?;
        Ok(())
    }

    async fn store_object(&self, upload: &Upload<'_>) -> Result<(), Refused> {
        let Some(content) = upload.content else {
            return Ok(());
        };
        let body = json!({
            "storageType": "object",
            "expires": upload.expires,
            "contentType": content.content_type,
        });
        let object: WireObject = self.announce(upload, body).await?.json()?;
        let WireObject { name, project_id, upload_id, expires, credentials } = object;
        let signer = credentials.parse().map_err(|what| retry(format!("{}: {what}", upload.operation)))?;
        let operation = &upload.operation;
        let call = |method, step: &str, body: Value| Call {
            service: Service::Object,
            ..Call::queue(operation.clone(), method, format!("/{step}/{}", segment(&name)))
                .body(body)
                .signed_by(&signer)
        };

        let inline = read_small(content, operation).await?;
        let proposed = json!({
            "expires": expires,
            "projectId": project_id,
            "uploadId": upload_id,
            "proposedUploadMethods": methods(content, inline.as_deref()),
        });
        let create = call(Method::PUT, "upload", proposed);
        let chosen: WireUpload = self.api.call(create).await?.json()?;
        let hashes = match (inline, chosen.upload_method) {
            (Some(data), WireMethod { data_inline: Some(true), .. }) => Hashes::of(&data),
            (_, WireMethod { put_url: Some(put), .. }) => {
                let given = put.headers.iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap_or_default()));
                let headers = headers(given, operation)?;
                self.put(upload, content, &put.url, headers).await?
            }
            (_, _) => {
                let what = format!("{operation}: the object service chose no way of uploading that was proposed");
                return Err(retry(what));
            }
        };
        let finish = json!({
            "projectId": project_id,
            "uploadId": upload_id,
            "hashes": hashes.hex(),
        });
        self.api.call(call(Method::POST, "finish-upload", finish)).await?;
        let call = Call::queue(operation.clone(), Method::PUT, upload.path.clone())
            .body(json!({ "uploadId": upload_id }))
            .signed_by(&upload.credentials);
        self.api.call(call).await?;
        Ok(())
    }

    /// Sends content to an upload URL, and answers with what was sent.
    async fn put(
        &self,
        upload: &Upload<'_>,
        content: Content<'_>,
        url: &str,
        mut headers: HeaderMap,
    ) -> Result<Hashes, Refused> {
        let operation = &upload.operation;
        let url = self.api.reach().read(url).map_err(|what| retry(format!("{operation}: the upload URL {what}")))?;
        headers.insert(CONTENT_LENGTH, HeaderValue::from(content.bytes));
        let request = self.api.http().put(url).headers(headers);
        let request = request.timeout(patience(content.bytes, self.api.timeouts().call));
        let (fed, sent) = if content.bytes <= ARTIFACT_WHOLE_BYTES_MAX {
            // Most logs are this small: one read, no pipe.
            match whole(content).await {
                Ok(data) => {
                    let hashes = Hashes::of(&data);
                    (Ok(hashes), request.body(data).send().await)
                }
                Err(what) => return Err(refused(Refusal::Rejected, format!("{operation}: {what}"))),
            }
        } else {
            let (feed, drain) = tokio::io::duplex(ARTIFACT_CHUNK_BYTES);
            let stream = ReaderStream::with_capacity(drain, ARTIFACT_CHUNK_BYTES);
            let both = async { tokio::join!(pump(content, feed), request.body(Body::wrap_stream(stream)).send()) };
            // A storage that answers early and then stops reading would leave the pump waiting for ever.
            match tokio::time::timeout(patience(content.bytes, self.api.timeouts().call), both).await {
                Ok(both) => both,
                Err(_) => return Err(retry(format!("{operation}: the storage took too long"))),
            }
        };
        let response = match (&fed, sent) {
            (Err(Unread::File(what)), _) => {
                let what = format!("{operation}: {what}");
                return Err(refused(Refusal::Rejected, what));
            }
            (_, Err(error)) => return Err(transport(operation, error)),
            (_, Ok(response)) => response,
        };
        if !response.status().is_success() {
            let answered = answered(response).await;
            let status = answered.status;
            // Storage says 400 and 403 for slow and for late uploads too; a fresh URL may help.
            let refusal = match by_status(status, answered.after) {
                Refusal::Throttled { after } => Refusal::Throttled { after },
                Refusal::Rejected if matches!(status, 405 | 411 | 413 | 415) => Refusal::Rejected,
                Refusal::Retry { .. } | Refusal::Gone | Refusal::Rejected | Refusal::Denied | Refusal::Stale => {
                    Refusal::Retry { after: answered.after }
                }
            };
            return Err(refused(refusal, format!("{operation}: the storage answered {status}")));
        }
        fed.map_err(|_| retry(format!("{operation}: the storage answered before it had everything")))
    }
}

fn expires(artifact: &Artifact, part: &Part, operation: &str) -> Result<String, Refused> {
    artifact.expires.as_ref().or(part.task_expires.as_ref()).cloned().ok_or_else(|| {
        let what = format!("{operation}: neither it nor its task says when it expires");
        refused(Refusal::Rejected, what)
    })
}

fn content(body: &ArtifactBody) -> Option<Content<'_>> {
    match body {
        ArtifactBody::File { file, bytes, content_type } => Some(Content { file, bytes: *bytes, content_type }),
        ArtifactBody::Link { .. } | ArtifactBody::Reference { .. } | ArtifactBody::Error { .. } => None,
    }
}

fn patience(bytes: u64, call: Duration) -> Duration {
    let sending = Duration::from_secs(bytes / ARTIFACT_BYTES_PER_SECOND_MIN);
    call.saturating_add(sending).min(ARTIFACT_TRANSFER_TIMEOUT_MAX)
}

fn methods(content: Content<'_>, inline: Option<&[u8]>) -> Value {
    let mut methods = json!({
        "putUrl": { "contentType": content.content_type, "contentLength": content.bytes },
    });
    if let Some(data) = inline {
        methods["dataInline"] = json!({
            "contentType": content.content_type,
            "objectData": STANDARD.encode(data),
        });
    }
    methods
}

fn headers<'a>(given: impl IntoIterator<Item = (&'a str, &'a str)>, operation: &str) -> Result<HeaderMap, Refused> {
    let mut headers = HeaderMap::new();
    for (name, value) in given {
        let name = HeaderName::try_from(name).ok();
        let value = HeaderValue::from_str(value).ok();
        let (Some(name), Some(value)) = (name, value) else {
            let what = format!("{operation}: a header for the upload cannot be sent; is its content type one?");
            return Err(refused(Refusal::Rejected, what));
        };
        headers.insert(name, value);
    }
    Ok(headers)
}

/// What was sent, so that the object service can tell whether it arrived whole.
#[derive(Default)]
struct Hashes {
    sha256: Sha256,
    sha512: Sha512,
}

impl Hashes {
    fn of(data: &[u8]) -> Self {
        let mut hashes = Self::default();
        hashes.update(data);
        hashes
    }

    fn update(&mut self, data: &[u8]) {
        self.sha256.update(data);
        self.sha512.update(data);
    }

    fn hex(self) -> Value {
        json!({ "sha256": hex(&self.sha256.finalize()), "sha512": hex(&self.sha512.finalize()) })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        text.push_str(&format!("{byte:02x}"));
        text
    })
}

/// Why content did not get as far as the connection.
enum Unread {
    /// The file is at fault.
    File(String),
    /// The connection ended first; the request tells why.
    Connection,
}

/// Reads content piece by piece and hands it to the request, which takes it as fast as the network does.
async fn pump(content: Content<'_>, mut feed: DuplexStream) -> Result<Hashes, Unread> {
    let mut hashes = Hashes::default();
    let mut at = 0;
    while at < content.bytes {
        let piece = piece(content, at).await.map_err(Unread::File)?;
        hashes.update(&piece);
        at += piece.len() as u64;
        feed.write_all(&piece).await.map_err(|_| Unread::Connection)?;
    }
    feed.shutdown().await.map_err(|_| Unread::Connection)?;
    Ok(hashes)
}

async fn piece(content: Content<'_>, at: u64) -> Result<Vec<u8>, String> {
    let left = content.bytes - at;
    let wanted = usize::try_from(left).map_or(ARTIFACT_CHUNK_BYTES, |left| left.min(ARTIFACT_CHUNK_BYTES));
    let file = Arc::clone(content.file);
    let read = tokio::task::spawn_blocking(move || {
        let mut piece = vec![0; wanted];
        let read = file.read_at(&mut piece, at)?;
        piece.truncate(read);
        Ok::<_, std::io::Error>(piece)
    });
    let piece = read
        .await
        .map_err(|_| "reading its file was broken off".to_owned())?
        .map_err(|error| format!("its file cannot be read: {error}"))?;
    if piece.is_empty() {
        let bytes = content.bytes;
        return Err(format!("its file ends at byte {at}, though {bytes} were to be sent; something shortened it"));
    }
    Ok(piece)
}

/// The whole content, where it is small enough to travel inside a request.
async fn read_small(content: Content<'_>, operation: &str) -> Result<Option<Vec<u8>>, Refused> {
    if content.bytes >= ARTIFACT_INLINE_BYTES_MAX {
        return Ok(None);
    }
    let data = whole(content).await.map_err(|what| refused(Refusal::Rejected, format!("{operation}: {what}")))?;
    Ok(Some(data))
}

async fn whole(content: Content<'_>) -> Result<Vec<u8>, String> {
    let mut data = Vec::new();
    while (data.len() as u64) < content.bytes {
        let next = piece(content, data.len() as u64).await?;
        if data.is_empty() {
            data = next;
        } else {
            data.extend_from_slice(&next);
        }
    }
    Ok(data)
}
