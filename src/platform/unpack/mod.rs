//! Unpacks archives that tasks name, into a directory that they cannot leave.
//!
//! Entries are created relative to descriptors of their parent directories, and no symbolic link is ever followed. Names,
//! sizes and numbers are bounded while the archive is read, and so is the memory of the decoders. Owners and extended
//! attributes are ignored. The caller runs this on a thread that may block.

mod decoders;
mod saved_image;
#[cfg(test)]
mod tests;
mod tree;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use rawzip::CompressionMethod;
use rawzip::time::{UtcDateTime, ZipDateTimeKind};
use rustix::fs::FileType;
use serde::Deserialize;
use tar::EntryType;

pub use saved_image::copy_without_names;

use crate::host::task_user::TaskUser;

use decoders::{BUFFER_BYTES, Fault, Gate, TAR_HEADERS_BYTES_MAX, broken, refused};
use tree::{Budget, Content, NAME_BYTES_MAX, Tree, copy};

/// The comment at the end of a zip file, and the record it belongs to.
const ZIP_END_BYTES_MAX: u64 = 64 * 1024 + 22;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum ArchiveFormat {
    #[serde(rename = "zip")]
    Zip,
    #[serde(rename = "tar.bz2")]
    TarBz2,
    #[serde(rename = "tar.gz")]
    TarGz,
    #[serde(rename = "tar.lz4")]
    TarLz4,
    #[serde(rename = "tar.xz")]
    TarXz,
    #[serde(rename = "tar.zst")]
    TarZst,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    Bz2,
    Gz,
    Lz4,
    Xz,
    Zst,
}

#[derive(Debug, Clone, Copy)]
pub struct UnpackLimits {
    /// Bytes of all files together.
    pub bytes_max: u64,
    pub entries_max: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("entry '{name}' of the archive is refused: {why}")]
    Entry { name: String, why: String },
    #[error("{0}")]
    Archive(String),
    #[error("cannot unpack '{name}': {source}")]
    Host { name: String, source: io::Error },
    #[error("unpacking was canceled")]
    Canceled,
}

/// Unpacks all entries, for a user if there is one. Those unpacked before an error stay.
pub fn unpack(
    archive: File,
    format: ArchiveFormat,
    into: &Path,
    user: Option<&TaskUser>,
    limits: &UnpackLimits,
    canceled: &dyn Fn() -> bool,
) -> Result<(), UnpackError> {
    let compression = match format {
        ArchiveFormat::Zip => None,
        ArchiveFormat::TarBz2 => Some(Compression::Bz2),
        ArchiveFormat::TarGz => Some(Compression::Gz),
        ArchiveFormat::TarLz4 => Some(Compression::Lz4),
        ArchiveFormat::TarXz => Some(Compression::Xz),
        ArchiveFormat::TarZst => Some(Compression::Zst),
    };
    let gate = Gate::new(canceled);
    let mut name = Vec::new();
    let unpacked = Tree::open(into, user, limits).and_then(|mut tree| {
        match compression {
            None => unpack_zip(archive, &mut tree, &gate, &mut name)?,
            Some(compression) => unpack_tar(archive, compression, &mut tree, &gate, &mut name)?,
        }
        tree.finish()
    });
    unpacked.map_err(|fault| gate.explain(fault, &name))
}

/// Copies a single file, decompressed if it is compressed, and returns its size.
pub fn decompress(
    from: File,
    compression: Option<Compression>,
    to: &mut File,
    limits: &UnpackLimits,
    canceled: &dyn Fn() -> bool,
) -> Result<u64, UnpackError> {
    let gate = Gate::new(canceled);
    let mut budget = Budget::new(limits);
    let copied = copy(&mut gate.decoded(gate.file_decoder(from, compression)), to, &mut budget);
    let check = |bytes| if compression.is_some() { gate.check_not_empty().map(|()| bytes) } else { Ok(bytes) };
    copied.and_then(check).map_err(|fault| gate.explain(fault, b""))
}

fn unpack_tar(
    archive: File,
    compression: Compression,
    tree: &mut Tree<'_>,
    gate: &Gate<'_>,
    name: &mut Vec<u8>,
) -> Result<(), Fault> {
    let mut archive = tar::Archive::new(gate.decoded(gate.file_decoder(archive, Some(compression))));
    let mut entries = archive.entries().map_err(broken)?;
    loop {
        // The tar crate reads long names and pax records whole, whatever their size.
        gate.left.set(TAR_HEADERS_BYTES_MAX);
        let Some(entry) = entries.next() else { break };
        gate.left.set(u64::MAX);
        place_tar_entry(&mut entry.map_err(broken)?, tree, name)?;
    }
    gate.left.set(TAR_HEADERS_BYTES_MAX);
    // What follows the last entry has the checksums of the compressed stream.
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(broken)?;
    gate.check_not_empty()
}

fn place_tar_entry<R: Read>(
    entry: &mut tar::Entry<'_, R>,
    tree: &mut Tree<'_>,
    name: &mut Vec<u8>,
) -> Result<(), Fault> {
    *name = entry.path_bytes().into_owned();
    let kind = entry.header().entry_type();
    if kind.is_pax_global_extensions() {
        return tree.count_entry();
    }
    if let Some(records) = entry.pax_extensions().map_err(broken)? {
        // The tar crate cannot parse values with line breaks, as those of some extended attributes.
        for record in records.flatten() {
            if record.key_bytes().starts_with(b"GNU.sparse.") {
                return refused("sparse files are not supported");
            }
        }
    }
    let target = entry.link_name_bytes().map_or_else(Vec::new, |target| target.into_owned());
    let (mode, mtime) = (entry.header().mode().map_err(broken)?, entry.header().mtime().ok());
    let size = entry.size();
    #[expect(clippy::wildcard_enum_match_arm, reason = "the enum is open")]
    let content = match kind {
        // Directories of the oldest archives are files whose names end in a slash.
        EntryType::Regular if name.ends_with(b"/") => Content::Directory,
        EntryType::Directory => Content::Directory,
        EntryType::Regular | EntryType::Continuous => Content::File { from: entry, size },
        EntryType::Symlink => Content::Symlink(target),
        EntryType::Link => Content::HardLink(target),
        EntryType::GNUSparse => return refused("sparse files are not supported"),
        EntryType::Char | EntryType::Block => return refused("it is a device"),
        EntryType::Fifo => return refused("it is a fifo"),
        _ => return refused("its kind is not supported"),
    };
    tree.place(name, content, mode, mtime.and_then(|seconds| i64::try_from(seconds).ok()))
}

fn unpack_zip(archive: File, tree: &mut Tree<'_>, gate: &Gate<'_>, name: &mut Vec<u8>) -> Result<(), Fault> {
    let mut buffer = vec![0; rawzip::MAX_CENTRAL_DIRECTORY_RECORD_SIZE];
    let locator = rawzip::ZipArchive::with_max_search_space(ZIP_END_BYTES_MAX);
    let archive = locator.locate_in_file(archive, &mut buffer).map_err(|(_, error)| Fault::of_zip(error))?;
    let mut entries = archive.entries(&mut buffer);
    let mut count: u64 = 0;
    while let Some(record) = entries.next_entry().map_err(Fault::of_zip)? {
        gate.check_canceled().map_err(broken)?;
        count += 1;
        *name = decode_zip_name(record.file_path().as_bytes());
        if record.flags().is_encrypted() {
            return refused("it is encrypted");
        }
        let entry = archive.get_entry(record.wayfinder()).map_err(Fault::of_zip)?;
        let raw: Box<dyn BufRead> = Box::new(BufReader::with_capacity(BUFFER_BYTES, gate.encoded(entry.reader())));
        let decoder: Box<dyn Read> = match record.compression_method() {
            CompressionMethod::STORE => raw,
            CompressionMethod::DEFLATE => Box::new(flate2::bufread::DeflateDecoder::new(raw)),
            CompressionMethod::BZIP2 => gate.decoder(raw, Compression::Bz2),
            CompressionMethod::XZ => gate.decoder(raw, Compression::Xz),
            CompressionMethod::ZSTD => gate.decoder(raw, Compression::Zst),
            _ => return refused("its compression method is not supported"),
        };
        let mut data = entry.verifying_reader(gate.decoded(decoder));
        let mode = record.mode().value();
        let content = match FileType::from_raw_mode(mode) {
            _ if record.is_dir() => Content::Directory,
            FileType::RegularFile | FileType::Unknown => {
                Content::File { from: &mut data, size: record.uncompressed_size_hint() }
            }
            FileType::Directory => Content::Directory,
            FileType::Symlink => {
                let mut target = Vec::new();
                data.take(NAME_BYTES_MAX as u64 + 1).read_to_end(&mut target).map_err(broken)?;
                Content::Symlink(target)
            }
            FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice => {
                return refused("it is a device, fifo or socket");
            }
        };
        // Some writers leave the mode out.
        let without = if record.is_dir() { 0o755 } else { 0o644 };
        tree.place(name, content, if mode & 0o777 == 0 { without } else { mode }, zip_mtime(record.last_modified()))?;
    }
    // Without zip64 the number has 16 bits, and some writers let it wrap.
    if count % 0x1_0000 != archive.entries_hint() % 0x1_0000 { Err(Fault::Archive) } else { Ok(()) }
}

fn decode_zip_name(name: &[u8]) -> Vec<u8> {
    const CP437: &str = "ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀\
                         αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u{a0}";
    // Writers on Unix store UTF-8 without saying so.
    if std::str::from_utf8(name).is_ok() {
        return name.to_owned();
    }
    let high = |byte: u8| CP437.chars().nth(usize::from(byte) - 0x80).unwrap_or(char::REPLACEMENT_CHARACTER);
    let decoded: String = name.iter().map(|&byte| if byte < 0x80 { char::from(byte) } else { high(byte) }).collect();
    decoded.into_bytes()
}

/// The time zone of local times is unknown; UTC is assumed.
fn zip_mtime(modified: ZipDateTimeKind) -> Option<i64> {
    match modified {
        ZipDateTimeKind::Utc(time) => Some(time.to_unix()),
        ZipDateTimeKind::Local(time) => {
            let (hour, minute, second) = (time.hour(), time.minute(), time.second());
            UtcDateTime::from_components(time.year(), time.month(), time.day(), hour, minute, second, 0)
                .map(|time| time.to_unix())
        }
    }
}
