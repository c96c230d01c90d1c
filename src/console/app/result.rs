//! Results and artifacts of a task: Markdown and images are shown, everything else is offered.

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::future::join_all;
use futures_util::stream::try_unfold;
use maud::{Markup, PreEscaped, html};
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag};
use serde::Deserialize;
use serde_json::Value as Json;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::listing::{parse_id, path};
use super::targets::QueueTarget;
use super::{Console, PageError, Shared, within, within_moment};
use crate::console::page;
use crate::console::rows::{Table, Value, cell};
use journeyman_domain::id::Run;
use journeyman_domain::limits::{CONSOLE_IMAGES_MAX, CONSOLE_TEXT_BYTES_MAX};
use journeyman_worker::source::CallError;

/// What a browser may draw. SVG can hold scripts.
const IMAGES: [&str; 5] = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/avif"];
/// Artifacts with this prefix need no scope.
const PUBLIC: &str = "public/";

fn text<'a>(artifact: &'a Json, name: &str) -> &'a str {
    artifact[name].as_str().unwrap_or_default()
}

fn media_type(artifact: &Json) -> &str {
    text(artifact, "contentType").split(';').next().unwrap_or_default().trim()
}

/// Shows that the page of a task has led to an artifact of it, without the token of the page.
#[derive(Clone)]
pub struct ArtifactKey([u8; 32]);

impl Default for ArtifactKey {
    fn default() -> Self {
        Self(Sha256::digest(format!("{}{}", Uuid::new_v4(), Uuid::new_v4())).into())
    }
}

impl ArtifactKey {
    fn sign(&self, target: &str, run: &Run, name: &str) -> String {
        let subject = Sha256::digest(format!("{target}\n{run}\n{name}"));
        URL_SAFE_NO_PAD.encode(Sha256::digest([&self.0[..], &subject].concat()))
    }
}

fn address(console: &Console, target: &QueueTarget, run: &Run, name: &str) -> String {
    let encoded = name.split('/').map(urlencoding::encode).collect::<Vec<_>>().join("/");
    let signed = if console.is_private {
        format!("?key={}", console.artifact_key.sign(&target.name, run, name))
    } else {
        String::new()
    };
    format!("{}/{}/{encoded}{signed}", path(target, run.task.as_str()), run.run)
}

pub(super) fn table(console: &Console, target: &QueueTarget, run: &Run, artifacts: &[Json]) -> Markup {
    let rows = artifacts.iter().map(|artifact| {
        let name = text(artifact, "name").to_owned();
        let href = address(console, target, run, &name);
        let shown = if name.starts_with(PUBLIC) { Value::Link { text: name, href } } else { Value::Text(name) };
        vec![cell(shown), cell(text(artifact, "contentType"))]
    });
    page::table(&Table::new(format!("artifacts of run {}", run.run), &["name", "type"], rows).or("None."))
}

/// The result, Markdown and images of a run.
pub(super) async fn shown(console: &Console, target: &QueueTarget, run: &Run, artifacts: &[Json]) -> Markup {
    let public = || artifacts.iter().filter(|artifact| text(artifact, "name").starts_with(PUBLIC));
    let images = public().filter(|artifact| IMAGES.contains(&media_type(artifact))).take(CONSOLE_IMAGES_MAX);
    let is_markdown =
        |artifact: &Json| media_type(artifact) == "text/markdown" || text(artifact, "name").ends_with(".md");
    let wanted = public().filter(|artifact| is_markdown(artifact) || text(artifact, "name") == "public/result.json");
    let reading = wanted.take(CONSOLE_IMAGES_MAX).map(async |artifact| {
        let name = text(artifact, "name");
        (name, is_markdown(artifact), within_moment(small(target, run, name)).await)
    });
    let texts = join_all(reading).await;
    html! {
        @for (name, is_markdown, read) in &texts {
            section.result {
                p.dim { (name) }
                @match read {
                    Ok(text) if *is_markdown => (markdown(text)),
                    Ok(text) => (result(text)),
                    Err(PageError(_, why)) => p.empty { (why) },
                }
            }
        }
        @for image in images {
            @let name = text(image, "name");
            figure { img src=(address(console, target, run, name)) alt=(name) loading="lazy"; figcaption { (name) } }
        }
    }
}

/// A result with Markdown in it, as annotations of a build have, or any other.
fn result(text: &str) -> Markup {
    let Ok(value) = serde_json::from_slice::<Json>(text.as_bytes()) else { return html! { pre { (text) } } };
    match value["markdown"].as_str() {
        Some(source) => markdown(source),
        None => html! { pre { (serde_json::to_string_pretty(&value).unwrap_or_default()) } },
    }
}

/// Reads an artifact that is no larger than what a page shows.
async fn small(target: &QueueTarget, run: &Run, name: &str) -> Result<String, CallError> {
    let mut download = target.api.artifact(run, name).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = download.next_chunk().await? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > CONSOLE_TEXT_BYTES_MAX {
            return Ok(format!(
                "This is larger than {CONSOLE_TEXT_BYTES_MAX} bytes; the list of artifacts leads to it."
            ));
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Markdown without HTML, without images, and with links to other pages of the web only.
#[expect(clippy::wildcard_enum_match_arm, reason = "everything else that Markdown has is harmless")]
fn markdown(source: &str) -> Markup {
    let is_safe = |url: &str| url.starts_with("https://") || url.starts_with("http://") || url.starts_with('#');
    let events =
        Parser::new_ext(source, Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH).map(|event| match event {
            Event::Html(text) | Event::InlineHtml(text) => Event::Text(text),
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                let dest_url = if is_safe(&dest_url) { dest_url } else { CowStr::from("#") };
                Event::Start(Tag::Link { link_type, dest_url, title, id })
            }
            // Its text stays.
            Event::Start(Tag::Image { .. }) => Event::Start(Tag::Emphasis),
            Event::End(pulldown_cmark::TagEnd::Image) => Event::End(pulldown_cmark::TagEnd::Emphasis),
            other => other,
        });
    let mut out = String::new();
    pulldown_cmark::html::push_html(&mut out, events);
    html! { div.markdown { (PreEscaped(out)) } }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Signed {
    key: String,
}

/// The content of a public artifact. What is no image is a download, in a sandbox: it comes from a task.
pub(super) async fn artifact(
    State(console): Shared,
    Path((name, task, run, artifact)): Path<(String, String, u32, String)>,
    Query(signed): Query<Signed>,
    headers: HeaderMap,
) -> Result<Response, (StatusCode, String)> {
    let plain = |PageError(status, why): PageError| (status, why);
    let (target, id) = (console.queue(&name).map_err(plain)?, parse_id(&task).map_err(plain)?);
    let run = Run { task: id, run };
    if !artifact.starts_with(PUBLIC) {
        return Err((StatusCode::FORBIDDEN, "only public artifacts are shown here\n".to_owned()));
    }
    let is_led_here = || signed.key == console.artifact_key.sign(&name, &run, &artifact);
    if console.is_private && !console.is_known(&headers) && !is_led_here() {
        return Err((StatusCode::UNAUTHORIZED, "the page of the task leads to its artifacts\n".to_owned()));
    }
    let listed = within(target.api.artifacts(&run, None)).await.map_err(plain)?.entries;
    let Some(found) = listed.iter().find(|found| text(found, "name") == artifact) else {
        return Err((StatusCode::NOT_FOUND, format!("{run} has no artifact {artifact:?}\n")));
    };
    let image = IMAGES.iter().find(|image| **image == media_type(found));
    let download = within(target.api.artifact(&run, &artifact)).await.map_err(plain)?;
    let body = Body::from_stream(try_unfold(download, async |mut download| {
        let chunk = download.next_chunk().await.map_err(|error| std::io::Error::other(error.message))?;
        Ok::<_, std::io::Error>(chunk.map(|chunk| (chunk, download)))
    }));
    let is_text = media_type(found).starts_with("text/") || media_type(found) == "application/json";
    let kind = image.copied().unwrap_or(if is_text { "text/plain; charset=utf-8" } else { "application/octet-stream" });
    let disposition = if image.is_some() || is_text { "inline" } else { "attachment" };
    let policy = "sandbox; default-src 'none'";
    Ok(([(CONTENT_TYPE, kind), (CONTENT_DISPOSITION, disposition), (CONTENT_SECURITY_POLICY, policy)], body)
        .into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_has_no_html_of_its_author() {
        let drawn = markdown(
            "# <script>a</script>\n[x](javascript:alert(1)) ![i](http://h/p.png) [y](https://h/)\n\n<b onclick=a>",
        )
        .into_string();
        assert!(
            !drawn.contains("<script")
                && !drawn.contains("javascript:")
                && !drawn.contains("<img")
                && !drawn.contains("<b "),
            "{drawn}"
        );
        assert!(drawn.contains(r##"<a href="#">x</a>"##) && drawn.contains(r#"<a href="https://h/">y</a>"#), "{drawn}");
    }

    #[test]
    fn a_result_is_markdown_or_json() {
        assert!(result(r#"{"markdown":"**b**"}"#).into_string().contains("<strong>b</strong>"));
        assert!(result(r#"{"a":"<i>"}"#).into_string().contains("&lt;i&gt;"));
    }
}
