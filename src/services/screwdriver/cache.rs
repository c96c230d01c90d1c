//! Folders of build caches that Screwdriver asks to clear.

use std::io;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::message::CacheRequest;
use journeyman_platform::host::remove_tree::remove_tree;

/// Removes the folder of a cache. One that does not exist is a success.
///
/// # Errors
///
/// If the request names no cache, or a folder that is or may be outside of `root`; nothing is removed then. Otherwise parts of
/// it may be left.
pub(crate) fn clear(root: &Path, request: &CacheRequest) -> io::Result<()> {
    let relative = folder(request)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the message names no folder of a cache"))?;
    let root = root.canonicalize()?;
    let path = root.join(relative);
    match path.canonicalize() {
        Ok(real) if real == path => remove_tree(&path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidInput, "a symbolic link leads to the folder of the cache")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
    .map_err(|error| io::Error::new(error.kind(), format!("cannot clear {}: {error}", path.display())))
}

/// `[PREFIX/]SCOPE/PIPELINE[/ID]`, below the root.
fn folder(request: &CacheRequest) -> Option<PathBuf> {
    let CacheRequest { resource, action, scope, prefix, pipeline_id, id } = request;
    if resource != "caches" || action != "delete" {
        return None;
    }
    let mut path = PathBuf::new();
    if !prefix.is_empty() {
        path.push(name(prefix)?);
    }
    path.push(name(scope)?);
    path.push(name(&text(pipeline_id)?)?);
    let id = text(id)?;
    if scope != "pipelines" {
        path.push(name(&id)?);
    }
    Some(path)
}

/// An id is a number, or text.
fn text(id: &Value) -> Option<String> {
    id.as_u64().map(|number| number.to_string()).or_else(|| id.as_str().map(str::to_owned))
}

/// A text that is the name of one folder.
fn name(text: &str) -> Option<&str> {
    let mut parts = Path::new(text).components();
    let is_name = matches!(parts.next(), Some(Component::Normal(part)) if part == text) && parts.next().is_none();
    Some(text).filter(|text| is_name && !text.contains('\0'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(changes: Value) -> CacheRequest {
        let mut fields = json!({
            "resource": "caches", "action": "delete", "scope": "pipelines", "prefix": "", "pipelineId": 1, "id": 1,
        });
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        serde_json::from_value(fields).unwrap()
    }

    #[test]
    fn the_folder_of_a_cache_is_the_one_of_the_existing_worker() {
        for (changes, path) in [
            (json!({}), "pipelines/1"),
            (json!({ "scope": "jobs", "id": 2 }), "jobs/1/2"),
            (json!({ "scope": "jobs", "pipelineId": "5", "id": "2", "prefix": "beta-" }), "beta-/jobs/5/2"),
        ] {
            assert_eq!(folder(&request(changes)), Some(path.into()));
        }
        for odd in [
            json!({ "resource": "builds" }),
            json!({ "action": "read" }),
            json!({ "scope": "" }),
            json!({ "pipelineId": "" }),
            json!({ "pipelineId": null }),
            json!({ "pipelineId": -1 }),
            json!({ "id": "" , "scope": "jobs" }),
            json!({ "prefix": ".." }),
            json!({ "prefix": "a/b" }),
            json!({ "prefix": "/" }),
            json!({ "scope": "/etc" }),
            json!({ "scope": "." }),
            json!({ "pipelineId": "../.." }),
            json!({ "pipelineId": "1/" }),
            json!({ "scope": "jobs", "id": "./2" }),
            json!({ "scope": "jobs", "id": "a\0b" }),
        ] {
            assert_eq!(folder(&request(odd.clone())), None, "{odd}");
        }
    }

    #[test]
    fn only_the_folder_of_the_cache_is_removed_and_no_link_is_followed() {
        let home = tempfile::tempdir().unwrap();
        let (root, kept) = (home.path().join("cache"), home.path().join("kept"));
        for dir in [root.join("pipelines/1/deep"), root.join("pipelines/2"), root.join("jobs"), kept.join("2")] {
            std::fs::create_dir_all(dir).unwrap();
        }
        std::os::unix::fs::symlink(&kept, root.join("pipelines/1/deep/link")).unwrap();
        clear(&root, &request(json!({}))).unwrap();
        assert!(!root.join("pipelines/1").exists() && root.join("pipelines/2").exists() && kept.join("2").exists());
        clear(&root, &request(json!({}))).unwrap();
        for (link, changes) in
            [("pipelines/3", json!({ "pipelineId": 3 })), ("jobs/1", json!({ "scope": "jobs", "id": 2 }))]
        {
            std::os::unix::fs::symlink(&kept, root.join(link)).unwrap();
            let error = clear(&root, &request(changes)).unwrap_err().to_string();
            assert!(error.contains("a symbolic link leads to"), "{error}");
            assert!(kept.join("2").exists());
        }
        // The configured path itself may be one.
        std::os::unix::fs::symlink(&root, home.path().join("path")).unwrap();
        clear(&home.path().join("path"), &request(json!({ "pipelineId": 2 }))).unwrap();
        assert!(!root.join("pipelines/2").exists());
        assert!(clear(&home.path().join("none"), &request(json!({}))).is_err());
    }
}
