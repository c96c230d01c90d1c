//! Results and artifacts of a task: Markdown and images are shown, everything else is offered.

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::try_unfold;
use maud::{Markup, PreEscaped, html};
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag};
use serde_json::Value as Json;

use super::listing::{parse_id, path};
use super::targets::QueueTarget;
use super::{PageError, Shared, within};
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

fn address(target: &QueueTarget, run: &Run, name: &str) -> String {
    let name = name.split('/').map(urlencoding::encode).collect::<Vec<_>>().join("/");
    format!("{}/{}/{name}", path(target, run.task.as_str()), run.run)
}

pub(super) fn table(target: &QueueTarget, run: &Run, artifacts: &[Json]) -> Markup {
    let rows = artifacts.iter().map(|artifact| {
        let name = text(artifact, "name").to_owned();
        let href = address(target, run, &name);
        let shown = if name.starts_with(PUBLIC) { Value::Link { text: name, href } } else { Value::Text(name) };
        vec![cell(shown), cell(text(artifact, "contentType"))]
    });
    page::table(&Table::new(format!("artifacts of run {}", run.run), &["name", "type"], rows).or("None."))
}

/// The result, Markdown and images of a run.
pub(super) async fn shown(target: &QueueTarget, run: &Run, artifacts: &[Json]) -> Markup {
    let public = || artifacts.iter().filter(|artifact| text(artifact, "name").starts_with(PUBLIC));
    let images = public().filter(|artifact| IMAGES.contains(&media_type(artifact))).take(CONSOLE_IMAGES_MAX);
    let mut texts = Vec::new();
    for artifact in public() {
        let name = text(artifact, "name");
        let is_markdown = media_type(artifact) == "text/markdown" || name.ends_with(".md");
        if is_markdown || name == "public/result.json" {
            let read = within(small(target, run, name)).await;
            texts.push((name, is_markdown, read));
        }
        if texts.len() == CONSOLE_IMAGES_MAX {
            break;
        }
    }
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
            figure { img src=(address(target, run, name)) alt=(name) loading="lazy"; figcaption { (name) } }
        }
    }
}

/// A result with Markdown in it, as annotations of a build have, or any other.
fn result(text: &str) -> Markup {
    let value = serde_json::from_str::<Json>(text).unwrap_or(Json::Null);
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

/// The content of a public artifact. What is no image is a download, in a sandbox: it comes from a task.
pub(super) async fn artifact(
    State(console): Shared,
    Path((name, task, run, artifact)): Path<(String, String, u32, String)>,
) -> Result<Response, PageError> {
    let (target, id) = (console.queue(&name)?, parse_id(&task)?);
    if !artifact.starts_with(PUBLIC) {
        return Err(PageError(StatusCode::FORBIDDEN, "only public artifacts are shown here".to_owned()));
    }
    let run = Run { task: id, run };
    let listed = within(target.api.artifacts(&run, None)).await?.entries;
    let Some(found) = listed.iter().find(|found| text(found, "name") == artifact) else {
        return Err(PageError::not_found(format!("{run} has no artifact {artifact:?}")));
    };
    let image = IMAGES.iter().find(|image| **image == media_type(found));
    let download = within(target.api.artifact(&run, &artifact)).await?;
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
