//! Images as `docker save` writes them.

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write as _};
use std::path::Component;

use serde_json::Value;

use super::decoders::{Gate, TAR_HEADERS_BYTES_MAX};

/// The files that have the names of images, in any directory: one may be a link to another.
const WITH_NAMES: [&str; 3] = ["manifest.json", "index.json", "repositories"];
const NAMES_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Copies a saved image without the names that it would have once it is loaded. Blocks.
///
/// # Errors
///
/// It is not a saved image, `canceled` says so, or the copy cannot be written.
pub fn copy_without_names(from: File, to: &mut File, canceled: &dyn Fn() -> bool) -> io::Result<()> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let gate = Gate::new(canceled);
    let mut archive = tar::Archive::new(gate.decoded(gate.file_decoder(from, None)));
    let mut copy = tar::Builder::new(BufWriter::new(to));
    let mut entries = archive.entries()?;
    loop {
        // The tar crate reads long names whole, whatever their size.
        gate.left.set(TAR_HEADERS_BYTES_MAX);
        let Some(entry) = entries.next() else { break };
        gate.left.set(u64::MAX);
        let mut entry = entry?;
        let (mut header, path) = (entry.header().clone(), entry.path()?.into_owned());
        if path.components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir)) {
            return Err(invalid("a path in it leads out of it"));
        }
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if WITH_NAMES.contains(&name.to_ascii_lowercase().as_str()) {
            if !header.entry_type().is_file() {
                return Err(invalid("the list of its images is not a file"));
            }
            let mut document: Value = serde_json::from_reader((&mut entry).take(NAMES_BYTES_MAX))?;
            remove_names(&mut document);
            let text = document.to_string();
            header.set_size(text.len() as u64);
            copy.append_data(&mut header, &path, text.as_bytes())?;
        } else if let Some(target) = entry.link_name()? {
            copy.append_link(&mut header, &path, target)?;
        } else {
            copy.append_data(&mut header, &path, entry)?;
        }
    }
    copy.into_inner()?.flush()
}

/// `manifest.json` is a list of images, `index.json` has one; `repositories` has nothing but names.
fn remove_names(document: &mut Value) {
    if document.is_object() && document.get("manifests").is_none() {
        *document = Value::Object(serde_json::Map::new());
    }
    let is_list = document.is_array();
    let images = if is_list { Some(document) } else { document.get_mut("manifests") };
    let images = images.and_then(Value::as_array_mut).into_iter().flatten();
    for image in images.filter_map(Value::as_object_mut) {
        image.retain(|key, _| key != "RepoTags" && key != "annotations");
    }
}
