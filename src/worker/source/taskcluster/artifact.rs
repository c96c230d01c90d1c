//! Artifact uploads: creates the artifact in the queue and sends its content where the queue says.
//!
//! Each attempt requests a fresh upload URL. Content is read from its file by position, so that concurrent attempts
//! do not interfere and nothing large is held in memory. Upload URLs are signed; a Hawk header would break them.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderValue};
use reqwest::{Body, Method};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256, Sha512};
use tokio::io::{AsyncWriteExt as _, DuplexStream};
use tokio_util::io::ReaderStream;

use super::claim_calls::TaskclusterClaim;
use super::credentials::Credentials;
use super::error_response::{classify_status, sanitize, summary_line, transport_error};
use super::transport::{ApiRequest, ApiResponse, FailedCall, read_error_response};
use super::wire::WireCredentials;
use super::{ArtifactStorage, Dialect};
use crate::source::{Artifact, ArtifactBody, CallError};
use crate::task::{ArtifactErrorReason, ContentEncoding, TaskFile};
use journeyman_domain::id::Run;
use journeyman_domain::limits::{ARTIFACT_BYTES_PER_SECOND_MIN, ARTIFACT_CHUNK_BYTES, ARTIFACT_TRANSFER_TIMEOUT_MAX};
use journeyman_domain::refusal::Refusal;

/// The first `bytes` of a file.
#[derive(Clone, Copy)]
struct FileContent<'a> {
    file: &'a TaskFile,
    bytes: u64,
    content_type: &'a str,
    encoding: ContentEncoding,
}

struct Upload {
    operation: String,
    path: String,
    expires: String,
    credentials: Arc<Credentials>,
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
    put_url: Option<WirePutUrl>,
}

#[derive(Deserialize)]
struct WirePutUrl {
    url: String,
    #[serde(default)]
    headers: HashMap<String, String>,
}

impl TaskclusterClaim {
    pub(super) async fn upload_artifact(&self, artifact: &Artifact) -> Result<(), CallError> {
        let run = &self.run;
        let operation = format!("artifact {} of {run}", sanitize(&artifact.name));
        let upload = Upload {
            path: artifact_path(run, &artifact.name),
            expires: expiry_of(artifact, self, &operation)?,
            credentials: self.credentials.load(),
            operation,
        };
        let body = match (&artifact.body, self.service.dialect) {
            (ArtifactBody::File { file, bytes, content_type, encoding }, _) => {
                let content = FileContent { file, bytes: *bytes, content_type, encoding: *encoding };
                return match self.service.artifact_storage {
                    ArtifactStorage::S3 => self.store_s3(&upload, content).await,
                    ArtifactStorage::Object => self.store_object(&upload, content).await,
                };
            }
            (ArtifactBody::Link { target, content_type }, Dialect::ClaimWork) => {
                json!({ "storageType": "link", "contentType": content_type, "artifact": target })
            }
            // The Azure dialect has no links; a reference to the other artifact's URL serves the same readers.
            (ArtifactBody::Link { target, content_type }, Dialect::Azure) => {
                let url = format!("{}{}", self.service.api.0.queue_url, artifact_path(run, target));
                json!({ "storageType": "reference", "contentType": content_type, "url": url })
            }
            (ArtifactBody::Reference { url, content_type }, _) => {
                json!({ "storageType": "reference", "contentType": content_type, "url": url })
            }
            (ArtifactBody::Error { reason, message }, _) => {
                json!({ "storageType": "error", "reason": error_reason(*reason), "message": message })
            }
        };
        self.create_artifact(&upload, body).await.map(drop)
    }

    async fn create_artifact(&self, upload: &Upload, mut body: Value) -> Result<ApiResponse, CallError> {
        body["expires"] = upload.expires.as_str().into();
        let call = ApiRequest::to_queue(upload.operation.clone(), Method::POST, upload.path.clone());
        let answer = self.service.api.call(call.body(body).signed_by(&upload.credentials)).await;
        answer.map_err(|FailedCall { status, error }| match status {
            Some(507) => CallError::new(Refusal::Full, error.message),
            _ => error,
        })
    }

    async fn store_s3(&self, upload: &Upload, content: FileContent<'_>) -> Result<(), CallError> {
        let mut body = json!({ "storageType": "s3", "contentType": content.content_type });
        if self.service.dialect == Dialect::ClaimWork {
            body["contentLength"] = content.bytes.into();
        }
        let created = match self.create_artifact(upload, body.clone()).await {
            // Services before v96.7 refuse the length of the content.
            Err(error) if error.refusal == Refusal::Rejected && self.service.dialect == Dialect::ClaimWork => {
                body.as_object_mut().map(|body| body.remove("contentLength"));
                self.create_artifact(upload, body).await
            }
            created => created,
        };
        let answer: WireS3 = created?.json()?;
        let content_type = answer.content_type.unwrap_or_else(|| content.content_type.to_owned());
        let mut headers = HashMap::from([("content-type".to_owned(), content_type)]);
        if content.encoding == ContentEncoding::Gzip {
            headers.insert("content-encoding".to_owned(), "gzip".to_owned());
        }
        self.put_content(upload, content, &answer.put_url, &headers).await.map(drop)
    }

    async fn store_object(&self, upload: &Upload, content: FileContent<'_>) -> Result<(), CallError> {
        let body = json!({ "storageType": "object", "contentType": content.content_type });
        let object: WireObject = self.create_artifact(upload, body).await?.json()?;
        let WireObject { name, project_id, upload_id, expires, credentials } = object;
        let signer = credentials.parse().map_err(|what| CallError::retry(format!("{}: {what}", upload.operation)))?;
        let operation = &upload.operation;
        let call = |method, step: &str, body: Value| ApiRequest {
            service: "object",
            ..ApiRequest::to_queue(operation.clone(), method, format!("/{step}/{}", urlencoding::encode(&name)))
                .body(body)
                .signed_by(&signer)
        };

        let proposed = json!({
            "expires": expires,
            "projectId": project_id,
            "uploadId": upload_id,
            "proposedUploadMethods": {
                "putUrl": { "contentType": content.content_type, "contentLength": content.bytes },
            },
        });
        let create = call(Method::PUT, "upload", proposed);
        let chosen: WireUpload = self.service.api.call(create).await?.json()?;
        let Some(put) = chosen.upload_method.put_url else {
            return Err(CallError::retry(format!("{operation}: the object service did not accept an upload by URL")));
        };
        let hashes = self.put_content(upload, content, &put.url, &put.headers).await?;
        let finish = json!({
            "projectId": project_id,
            "uploadId": upload_id,
            "hashes": {
                "sha256": hex::encode(hashes.sha256.finalize()),
                "sha512": hex::encode(hashes.sha512.finalize()),
            },
        });
        self.service.api.call(call(Method::POST, "finish-upload", finish)).await?;
        let call = ApiRequest::to_queue(operation.clone(), Method::PUT, upload.path.clone())
            .body(json!({ "uploadId": upload_id }))
            .signed_by(&upload.credentials);
        Ok(self.service.api.call(call).await.map(drop)?)
    }

    async fn put_content(
        &self,
        upload: &Upload,
        content: FileContent<'_>,
        url: &str,
        headers: &HashMap<String, String>,
    ) -> Result<Hashes, CallError> {
        let (api, operation) = (&self.service.api, &upload.operation);
        let url = api.0.address_policy.parse_url(url);
        let url = url.map_err(|what| CallError::retry(format!("{operation}: the upload URL {what}")))?;
        let mut headers = HeaderMap::try_from(headers).map_err(|_| {
            let what = format!("{operation}: invalid upload header; is the content type valid?");
            CallError::new(Refusal::Rejected, what)
        })?;
        headers.insert(CONTENT_LENGTH, HeaderValue::from(content.bytes));
        let request = api.0.http.put(url).headers(headers);
        let timeout = transfer_timeout(content.bytes, api.0.timeouts.call);
        let request = request.timeout(timeout);
        let (writer, reader) = tokio::io::duplex(ARTIFACT_CHUNK_BYTES);
        let stream = ReaderStream::with_capacity(reader, ARTIFACT_CHUNK_BYTES);
        let both =
            async { tokio::join!(stream_content(content, writer), request.body(Body::wrap_stream(stream)).send()) };
        // A storage that responds early and stops reading would block the reader forever.
        let both = tokio::time::timeout(timeout, both).await;
        let (read, sent) = both.map_err(|_| CallError::retry(format!("{operation}: the upload timed out")))?;
        let sent_hashes = read.map_err(|what| CallError::new(Refusal::Rejected, format!("{operation}: {what}")))?;
        let response = sent.map_err(|error| transport_error(operation, error))?;
        if !response.status().is_success() {
            let answered = read_error_response(response).await;
            let status = answered.status;
            // Storage services also return 400 and 403 for slow or late uploads; a fresh URL may help.
            let refusal = match status {
                405 | 408 | 411 | 413 | 415 | 429 => classify_status(status, answered.retry_after),
                507 => Refusal::Full,
                _ => Refusal::Retry { retry_after: answered.retry_after },
            };
            let mut what = format!("{operation}: storage responded with {status}");
            // XML, the form of an object storage's errors, may repeat what was signed.
            if answered.content_type.starts_with("text/plain") {
                write!(what, ": {}", summary_line(&String::from_utf8_lossy(&answered.body))).ok();
            }
            return Err(CallError::new(refusal, what));
        }
        sent_hashes
            .ok_or_else(|| CallError::retry(format!("{operation}: storage responded before the upload was complete")))
    }
}

fn expiry_of(artifact: &Artifact, state: &TaskclusterClaim, operation: &str) -> Result<String, CallError> {
    artifact.expires.as_ref().or(state.task_expires.as_ref()).cloned().ok_or_else(|| {
        let what = format!("{operation}: neither the artifact nor its task has an expiry");
        CallError::new(Refusal::Rejected, what)
    })
}

/// The reason as the queue spells it.
const fn error_reason(reason: ArtifactErrorReason) -> &'static str {
    match reason {
        ArtifactErrorReason::Missing => "file-missing-on-worker",
        ArtifactErrorReason::Irregular => "invalid-resource-on-worker",
        ArtifactErrorReason::TooLarge => "too-large-file-on-worker",
        ArtifactErrorReason::Unreadable => "file-not-readable-on-worker",
    }
}

fn artifact_path(run: &Run, name: &str) -> String {
    format!("/task/{}/runs/{}/artifacts/{}", urlencoding::encode(run.task.as_str()), run.run, urlencoding::encode(name))
}

fn transfer_timeout(bytes: u64, call: Duration) -> Duration {
    let sending = Duration::from_secs(bytes / ARTIFACT_BYTES_PER_SECOND_MIN);
    call.saturating_add(sending).min(ARTIFACT_TRANSFER_TIMEOUT_MAX)
}

/// Digests of the sent content, which the object service compares.
#[derive(Default)]
struct Hashes {
    sha256: Sha256,
    sha512: Sha512,
}

/// Fails if the file cannot be read; `None` if the connection was closed early, for which the response has the reason.
async fn stream_content(content: FileContent<'_>, mut writer: DuplexStream) -> Result<Option<Hashes>, String> {
    let mut hashes = Hashes::default();
    let mut at = 0;
    while at < content.bytes {
        let chunk = read_chunk(content, at).await?;
        hashes.sha256.update(&chunk);
        hashes.sha512.update(&chunk);
        at += chunk.len() as u64;
        if writer.write_all(&chunk).await.is_err() {
            return Ok(None);
        }
    }
    Ok(writer.shutdown().await.is_ok().then_some(hashes))
}

async fn read_chunk(content: FileContent<'_>, at: u64) -> Result<Vec<u8>, String> {
    let remaining = content.bytes - at;
    let wanted =
        usize::try_from(remaining).map_or(ARTIFACT_CHUNK_BYTES, |remaining| remaining.min(ARTIFACT_CHUNK_BYTES));
    let file = content.file.clone();
    let read = tokio::task::spawn_blocking(move || {
        let mut chunk = vec![0; wanted];
        let read = file.read_at(&mut chunk, at)?;
        chunk.truncate(read);
        Ok::<_, std::io::Error>(chunk)
    });
    let chunk = read
        .await
        .map_err(|_| "reading the file was interrupted".to_owned())?
        .map_err(|error| format!("cannot read the file: {error}"))?;
    if chunk.is_empty() {
        let bytes = content.bytes;
        return Err(format!("file was truncated at byte {at} of {bytes} during the upload"));
    }
    Ok(chunk)
}
