#![expect(clippy::cast_possible_truncation, reason = "small numbers")]

use std::fs;
use std::io::{Seek as _, Write};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use super::decoders::NAME_SHOWN_CHARS_MAX;
use super::*;

const LIMITS: UnpackLimits = UnpackLimits { bytes_max: 1 << 20, entries_max: 100 };
const GO_ON: &dyn Fn() -> bool = &|| false;
const MTIME: u64 = 1_500_000_000;
const TAR_FORMATS: [(ArchiveFormat, Compression); 5] = [
    (ArchiveFormat::TarBz2, Compression::Bz2),
    (ArchiveFormat::TarGz, Compression::Gz),
    (ArchiveFormat::TarLz4, Compression::Lz4),
    (ArchiveFormat::TarXz, Compression::Xz),
    (ArchiveFormat::TarZst, Compression::Zst),
];

/// A directory with nothing but the root that archives are unpacked into.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        fs::create_dir(place.root()).unwrap();
        place
    }

    fn root(&self) -> std::path::PathBuf {
        self.0.path().join("root")
    }

    fn unpack(&self, archive: &[u8], format: ArchiveFormat) -> Result<(), UnpackError> {
        let unpacked = unpack(file(archive), format, &self.root(), None, &LIMITS, GO_ON);
        let beside: Vec<_> = fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(beside, ["root"]);
        unpacked
    }

    fn unpack_tar(&self, tar: &Tar) -> Result<(), UnpackError> {
        self.unpack(&compress(&tar.clone().end(), Compression::Gz), ArchiveFormat::TarGz)
    }
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}

#[derive(Clone, Default)]
struct Tar(Vec<u8>);

impl Tar {
    /// The tar crate's writer refuses hostile names.
    fn add(mut self, kind: EntryType, name: &[u8], link: &[u8], mode: u32, content: &[u8]) -> Self {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(MTIME);
        header.set_size(content.len() as u64);
        if let Some(gnu) = header.as_gnu_mut().filter(|_| kind == EntryType::GNUSparse) {
            gnu.set_real_size(content.len() as u64);
        }
        header.set_cksum();
        self.0.extend(header.as_bytes());
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, content: &[u8]) -> Self {
        self.add(EntryType::Regular, name.as_bytes(), b"", 0o644, content)
    }

    fn symlink(self, name: &str, target: &str) -> Self {
        self.add(EntryType::Symlink, name.as_bytes(), target.as_bytes(), 0o777, b"")
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }
}

fn sample() -> Tar {
    Tar::default()
        .add(EntryType::Directory, b"./", b"", 0o700, b"")
        .add(EntryType::Directory, b"./sealed/", b"", 0o555, b"")
        .add(EntryType::Regular, b"./sealed/run", b"", 0o6751, b"#!/bin/sh\n")
        .file("deep/er/text", &b"words ".repeat(20_000))
        .symlink("deep/link", "../sealed/run")
        .add(EntryType::Link, b"hard", b"sealed/run", 0o644, b"")
}

fn check_sample(root: &Path) {
    assert_eq!(fs::read(root.join("deep/er/text")).unwrap(), b"words ".repeat(20_000));
    assert_eq!(fs::read(root.join("deep/link")).unwrap(), b"#!/bin/sh\n");
    let run = fs::metadata(root.join("sealed/run")).unwrap();
    assert_eq!((run.mode() & 0o7777, run.mtime()), (0o751, MTIME.cast_signed()));
    assert_eq!(run.ino(), fs::metadata(root.join("hard")).unwrap().ino());
    let sealed = fs::metadata(root.join("sealed")).unwrap();
    assert_eq!((sealed.mode() & 0o7777, sealed.mtime()), (0o555, MTIME.cast_signed()));
    fs::set_permissions(root.join("sealed"), fs::Permissions::from_mode(0o755)).unwrap();
}

fn compress(bytes: &[u8], compression: Compression) -> Vec<u8> {
    match compression {
        Compression::Bz2 => {
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Gz => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Lz4 => {
            let mut encoder = lz4_flex::frame::FrameEncoder::new(Vec::new());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Xz => store_xz(bytes, 16),
        Compression::Zst => ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest),
    }
}

/// An xz stream of one block whose chunks are not compressed; the crate's encoder is not built.
fn store_xz(bytes: &[u8], dictionary: u8) -> Vec<u8> {
    fn crc(bytes: &[u8]) -> [u8; 4] {
        let mut crc = flate2::Crc::new();
        crc.update(bytes);
        crc.sum().to_le_bytes()
    }
    fn number(mut value: usize, to: &mut Vec<u8>) {
        while value >= 0x80 {
            to.push((value % 0x80) as u8 | 0x80);
            value /= 0x80;
        }
        to.push(value as u8);
    }
    let mut block = vec![2, 0, 0x21, 1, dictionary, 0, 0, 0];
    block.extend(crc(&block));
    for (index, chunk) in bytes.chunks(0x1_0000).enumerate() {
        block.push(if index == 0 { 1 } else { 2 });
        block.extend(((chunk.len() - 1) as u16).to_be_bytes());
        block.extend(chunk);
    }
    block.push(0);
    let unpadded = block.len() + 4;
    block.resize(block.len().next_multiple_of(4), 0);
    block.extend(crc(bytes));
    let mut index = vec![0, 1];
    number(unpadded, &mut index);
    number(bytes.len(), &mut index);
    index.resize(index.len().next_multiple_of(4), 0);
    index.extend(crc(&index));
    let mut footer = ((index.len() / 4 - 1) as u32).to_le_bytes().to_vec();
    footer.extend([0, 1]);
    let mut stream = [b"\xfd7zXZ\0\0\x01".as_slice(), &crc(&[0, 1]), &block, &index, &crc(&footer)].concat();
    stream.extend(footer);
    stream.extend(b"YZ");
    stream
}

fn zip(entries: &[(&[u8], u32, &[u8])]) -> Vec<u8> {
    let mut archive = rawzip::ZipArchiveWriter::new(Vec::new());
    for &(name, mode, content) in entries {
        let builder = archive.new_file(rawzip::path::EntryPath::verbatim(name)).unix_permissions(mode);
        let time = UtcDateTime::from_unix(MTIME.cast_signed());
        let builder = builder.last_modified(time).compression_method(CompressionMethod::DEFLATE);
        let (mut entry, config) = builder.start().unwrap();
        let encoder = flate2::write::DeflateEncoder::new(&mut entry, flate2::Compression::fast());
        let mut writer = config.wrap(encoder);
        writer.write_all(content).unwrap();
        let (encoder, descriptor) = writer.finish().unwrap();
        encoder.finish().unwrap();
        entry.finish(descriptor).unwrap();
    }
    archive.finish().unwrap()
}

fn sample_zip() -> Vec<u8> {
    zip(&[
        (b"sealed/", 0o40555, b""),
        (b"sealed/run", 0o106751, b"#!/bin/sh\n"),
        (b"deep/er/text", 0o100644, &b"words ".repeat(20_000)),
        (b"deep/link", 0o120777, b"../sealed/run"),
        (b"caf\x82", 0o100000, b"cp437"),
        ("grün".as_bytes(), 0o100600, b"utf-8"),
    ])
}

fn decompress_all(bytes: &[u8], compression: Compression) -> Result<Vec<u8>, UnpackError> {
    let mut to = tempfile::tempfile().unwrap();
    let size = decompress(file(bytes), Some(compression), &mut to, &LIMITS, GO_ON)?;
    let mut decompressed = Vec::new();
    to.rewind().unwrap();
    to.read_to_end(&mut decompressed).unwrap();
    assert_eq!(size, decompressed.len() as u64);
    Ok(decompressed)
}

fn assert_refused(unpacked: Result<(), UnpackError>, entry: &str, reason: &str) {
    match unpacked {
        Err(UnpackError::Entry { name, why }) => assert!(name == entry && why.contains(reason), "{name}: {why}"),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn tar_archives_of_each_compression_are_unpacked() {
    for (format, compression) in TAR_FORMATS {
        let place = Place::new();
        place.unpack(&compress(&sample().end(), compression), format).unwrap();
        check_sample(&place.root());
    }
}

#[test]
fn zip_archives_are_unpacked() {
    let place = Place::new();
    place.unpack(&sample_zip(), ArchiveFormat::Zip).unwrap();
    assert_eq!(fs::metadata(place.root().join("café")).unwrap().mode() & 0o777, 0o644);
    assert_eq!(fs::read(place.root().join("grün")).unwrap(), b"utf-8");
    fs::hard_link(place.root().join("sealed/run"), place.root().join("hard")).unwrap();
    check_sample(&place.root());
}

#[test]
fn files_of_several_members_are_read_whole() {
    for (_, compression) in TAR_FORMATS {
        let long = b"long ".repeat(30_000);
        let members = [compress(b"short", compression), compress(&long, compression), compress(b"", compression)];
        let decompressed = decompress_all(&members.concat(), compression).unwrap();
        assert!(decompressed == [b"short".as_slice(), &long].concat(), "{compression:?}");
    }
}

#[test]
fn skippable_frames_of_zstd_are_skipped() {
    let skippable = b"\x50\x2a\x4d\x18\x03\0\0\0xyz";
    let content = compress(b"content", Compression::Zst);
    let frames = [skippable, content.as_slice(), skippable].concat();
    assert_eq!(decompress_all(&frames, Compression::Zst).unwrap(), b"content");
}

#[test]
fn truncated_archives_are_errors_of_the_archive() {
    let mut archives: Vec<_> =
        TAR_FORMATS.map(|(format, compression)| (format, compress(&sample().end(), compression))).into();
    archives.push((ArchiveFormat::Zip, sample_zip()));
    for (format, archive) in archives {
        for cut in (0..archive.len()).step_by(archive.len() / 20).chain([archive.len() - 1]) {
            let place = Place::new();
            let unpacked = place.unpack(&archive[..cut], format);
            assert!(matches!(unpacked, Err(UnpackError::Archive(_))), "{format:?} {cut}: {unpacked:?}");
        }
    }
}

#[test]
fn truncated_files_are_errors_of_the_archive() {
    for (_, compression) in TAR_FORMATS {
        let compressed = compress(&b"0123456789".repeat(20), compression);
        for cut in 0..compressed.len() {
            let decompressed = decompress_all(&compressed[..cut], compression);
            assert!(matches!(decompressed, Err(UnpackError::Archive(_))), "{compression:?} {cut}: {decompressed:?}");
        }
    }
}

#[test]
fn names_that_lead_outside_are_refused() {
    for (name, reason) in [("/abs", "absolute"), ("../up", "'..'"), ("a/../../up", "'..'"), ("a/..", "'..'")] {
        assert_refused(Place::new().unpack_tar(&Tar::default().file(name, b"x")), name, reason);
        let zip = zip(&[(name.as_bytes(), 0o100644, b"x")]);
        assert_refused(Place::new().unpack(&zip, ArchiveFormat::Zip), name, reason);
    }
    let nul = zip(&[(b"a\0b", 0o100644, b"x")]);
    assert_refused(Place::new().unpack(&nul, ArchiveFormat::Zip), "a\\0b", "NUL");
}

#[test]
fn long_and_deep_names_are_refused() {
    for name in [vec![b'n'; 256], b"d/".repeat(129), b"dir/".repeat(1100)] {
        let tar = Tar::default().add(EntryType::GNULongName, b"././@LongLink", b"", 0, &name).file("x", b"x");
        let Err(UnpackError::Entry { name: shown, why }) = Place::new().unpack_tar(&tar) else { panic!() };
        assert!(why.contains("too long") && shown.len() <= NAME_SHOWN_CHARS_MAX, "{shown}: {why}");
    }
    let name = format!("{}/x", "d".repeat(250));
    let tar = Tar::default().add(EntryType::GNULongName, b"././@LongLink", b"", 0, name.as_bytes());
    Place::new().unpack_tar(&tar.file("x", b"x")).unwrap();
}

#[test]
fn headers_of_any_length_are_not_read_into_memory() {
    for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader, EntryType::XGlobalHeader] {
        let tar = Tar::default().file("before", b"x").add(kind, b"long", b"", 0, &vec![b'a'; 2 << 20]);
        let unpacked = Place::new().unpack_tar(&tar.file("x", b"x"));
        let Err(UnpackError::Archive(why)) = unpacked else { panic!("{unpacked:?}") };
        assert!(why.contains("headers"), "{why}");
    }
}

#[test]
fn entries_below_links_and_files_are_refused() {
    for below in ["link/x", "link/deeper/x"] {
        let tar = Tar::default().symlink("link", "real").add(EntryType::Directory, b"real", b"", 0o755, b"");
        assert_refused(Place::new().unpack_tar(&tar.file(below, b"x")), below, "through a link");
    }
    let tar = Tar::default().file("file", b"x").file("file/x", b"x");
    assert_refused(Place::new().unpack_tar(&tar), "file/x", "through a link or a file");
    let tar = Tar::default().symlink("link", ".").add(EntryType::Link, b"hard", b"link/x", 0, b"");
    assert_refused(Place::new().unpack_tar(&tar), "hard", "through a link");
}

#[test]
fn entries_below_a_link_that_was_there_before_are_refused() {
    let place = Place::new();
    std::os::unix::fs::symlink("/tmp", place.root().join("link")).unwrap();
    assert_refused(place.unpack_tar(&Tar::default().file("link/x", b"x")), "link/x", "through a link");
}

#[test]
fn symbolic_links_that_may_lead_outside_are_refused() {
    for target in ["/etc", "..", "../x", "a/../../x", "a/../x", ""] {
        assert_refused(Place::new().unpack_tar(&Tar::default().symlink("link", target)), "link", "link");
        let zip = zip(&[(b"link", 0o120777, target.as_bytes())]);
        assert_refused(Place::new().unpack(&zip, ArchiveFormat::Zip), "link", "link");
    }
    let place = Place::new();
    place.unpack_tar(&Tar::default().symlink("a/b/link", "../.././x").file("x", b"x")).unwrap();
    assert_eq!(fs::read(place.root().join("a/b/link")).unwrap(), b"x");
}

#[test]
fn hard_links_to_anything_but_files_of_the_archive_are_refused() {
    let hard = |tar: Tar, target: &str| tar.add(EntryType::Link, b"hard", target.as_bytes(), 0, b"");
    for (target, reason) in [("/etc/passwd", "absolute"), ("../x", "'..'"), ("no", "not exist"), ("no/x", "not exist")]
    {
        assert_refused(Place::new().unpack_tar(&hard(Tar::default(), target)), "hard", reason);
    }
    let tar = Tar::default().symlink("d/link", "../x");
    assert_refused(Place::new().unpack_tar(&hard(tar, "d/link")), "hard", "something else");
    Place::new().unpack_tar(&hard(Tar::default().file("hard", b"x"), "./hard")).unwrap();
}

#[test]
fn devices_fifos_and_sparse_files_are_refused() {
    for kind in [EntryType::Char, EntryType::Block, EntryType::Fifo, EntryType::new(b'V')] {
        assert_refused(Place::new().unpack_tar(&Tar::default().add(kind, b"odd", b"", 0o644, b"")), "odd", "it");
    }
    assert_refused(
        Place::new().unpack_tar(&Tar::default().add(EntryType::GNUSparse, b"odd", b"", 0o644, b"")),
        "odd",
        "sparse",
    );
    let tar = Tar::default().add(EntryType::XHeader, b"pax", b"", 0, b"22 GNU.sparse.major=1\n");
    assert_refused(Place::new().unpack_tar(&tar.file("odd", b"x")), "odd", "sparse");
    for mode in [0o010644, 0o020644, 0o060644, 0o140644] {
        let zip = zip(&[(b"odd", mode, b"")]);
        assert_refused(Place::new().unpack(&zip, ArchiveFormat::Zip), "odd", "device");
    }
}

#[test]
fn extended_attributes_with_line_breaks_are_ignored() {
    let tar = Tar::default().add(EntryType::XHeader, b"pax", b"", 0, b"25 SCHILY.xattr.user.a=\n\n\n");
    Place::new().unpack_tar(&tar.file("x", b"x")).unwrap();
}

#[test]
fn encrypted_entries_are_refused() {
    let mut archive = zip(&[(b"secret", 0o100644, b"x")]);
    let record = archive.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
    archive[record + 8] |= 1;
    assert_refused(Place::new().unpack(&archive, ArchiveFormat::Zip), "secret", "encrypted");
}

#[test]
fn bombs_are_refused() {
    let large = vec![0; 2 << 20];
    let tar = Tar::default().file("small", b"x").file("bomb", &large);
    for (format, compression) in TAR_FORMATS {
        let place = Place::new();
        assert_refused(place.unpack(&compress(&tar.clone().end(), compression), format), "bomb", "1048576");
        assert!(fs::metadata(place.root().join("bomb")).unwrap().len() < LIMITS.bytes_max);
        let decompressed = decompress_all(&compress(&large, compression), compression);
        assert!(matches!(&decompressed, Err(UnpackError::Archive(why)) if why.contains("1048576")));
    }
    let zip = zip(&[(b"bomb", 0o100644, &large)]);
    assert_refused(Place::new().unpack(&zip, ArchiveFormat::Zip), "bomb", "1048576");
}

#[test]
fn too_many_entries_are_refused() {
    let names: Vec<String> = (0..=LIMITS.entries_max).map(|number| format!("f{number}")).collect();
    let tar = names.iter().fold(Tar::default(), |tar, name| tar.file(name, b""));
    assert_refused(Place::new().unpack_tar(&tar), "f100", "100 entries");
    let entries: Vec<_> = names.iter().map(|name| (name.as_bytes(), 0o100644, b"".as_slice())).collect();
    assert_refused(Place::new().unpack(&zip(&entries), ArchiveFormat::Zip), "f100", "100 entries");
}

#[test]
fn dictionaries_are_bounded() {
    // 192 MiB in the notation of xz.
    let xz = store_xz(b"content", 33);
    let decompressed = decompress_all(&xz, Compression::Xz);
    assert!(matches!(&decompressed, Err(UnpackError::Archive(why)) if why.contains("dictionary")));
    // A frame whose window has 256 MiB, with one block of one byte.
    let zst = b"\x28\xb5\x2f\xfd\0\x90\x09\0\0x";
    let decompressed = decompress_all(zst, Compression::Zst);
    assert!(matches!(&decompressed, Err(UnpackError::Archive(why)) if why.contains("dictionary")));
    let zst = b"\x28\xb5\x2f\xfd\0\x88\x09\0\0x";
    assert_eq!(decompress_all(zst, Compression::Zst).unwrap(), b"x");
}

#[test]
fn a_later_entry_replaces_an_earlier_one_but_never_follows_a_link() {
    let place = Place::new();
    let tar = Tar::default().file("real", b"real").symlink("x", "real").file("x", b"new");
    let tar = tar.file("d", b"x").add(EntryType::Directory, b"d", b"", 0o755, b"").file("d/y", b"y");
    let tar = tar.add(EntryType::Link, b"hard", b"real", 0, b"").file("hard", b"other").symlink("d/y", "../x");
    place.unpack_tar(&tar).unwrap();
    assert_eq!(fs::read(place.root().join("real")).unwrap(), b"real");
    assert_eq!(fs::read(place.root().join("x")).unwrap(), b"new");
    assert_eq!(fs::read(place.root().join("d/y")).unwrap(), b"new");
    assert_refused(place.unpack_tar(&Tar::default().file("d", b"x")), "d", "a directory has the same name");
}

#[test]
fn errors_show_no_control_characters_and_no_content() {
    let tar = Tar::default().file("../\u{1b}[2J\u{202e}\n", b"x");
    assert_refused(Place::new().unpack_tar(&tar), "../\\u{1b}[2J\\u{202e}\\n", "'..'");
    let mut tar = Tar::default().file("plain", b"x").end();
    tar[100..107].copy_from_slice(b"secret!");
    let unpacked = Place::new().unpack(&compress(&tar, Compression::Gz), ArchiveFormat::TarGz);
    assert!(!unpacked.unwrap_err().to_string().contains("secret"));
}

#[test]
fn canceling_stops_within_a_mebibyte() {
    let tar = Tar::default().file("large", &vec![7; 4 << 20]).end();
    let limits = UnpackLimits { bytes_max: u64::MAX, ..LIMITS };
    let large_zip = zip(&[(b"large", 0o100644, &vec![7; 4 << 20])]);
    let archives = TAR_FORMATS.map(|(format, compression)| (format, compress(&tar, compression)));
    for (format, archive) in archives.into_iter().chain([(ArchiveFormat::Zip, large_zip)]) {
        let place = Place::new();
        let written = || fs::metadata(place.root().join("large")).map_or(0, |metadata| metadata.len());
        let canceled = || written() >= 1 << 20;
        let unpacked = unpack(file(&archive), format, &place.root(), None, &limits, &canceled);
        assert!(matches!(unpacked, Err(UnpackError::Canceled)), "{format:?}: {unpacked:?}");
        assert!(written() <= 2 << 20, "{format:?}: {}", written());
    }
}

#[test]
fn errors_of_the_host_are_told_apart() {
    let place = Place::new();
    let folder = File::open(place.0.path()).unwrap();
    let unpacked = unpack(folder, ArchiveFormat::TarGz, &place.root(), None, &LIMITS, GO_ON);
    assert!(matches!(unpacked, Err(UnpackError::Host { .. })), "{unpacked:?}");
    let missing = unpack(file(b""), ArchiveFormat::TarGz, &place.root().join("no"), None, &LIMITS, GO_ON);
    assert!(matches!(missing, Err(UnpackError::Host { .. })), "{missing:?}");
}

#[test]
fn changed_bytes_never_panic_or_write_outside() {
    const ROUNDS: usize = 100;
    let tar = Tar::default().file("a/file", b"content").symlink("a/link", "file").file("b", &[b'b'; 600]).end();
    let zip = zip(&[(b"a/file", 0o100644, b"content"), (b"link", 0o120777, b"a/file"), (b"d/", 0o40755, b"")]);
    let mut archives = vec![(ArchiveFormat::Zip, None, zip)];
    for (format, compression) in TAR_FORMATS {
        archives.push((format, None, compress(&tar, compression)));
    }
    // Changes behind the checksums of the compression.
    archives.push((ArchiveFormat::TarGz, Some(Compression::Gz), tar));
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    for _ in 0..ROUNDS {
        for (format, compression, archive) in &archives {
            let mut changed = archive.clone();
            for _ in 0..=next(4) {
                let at = next(changed.len());
                changed[at] = if next(2) == 0 { next(256) as u8 } else { changed[at] ^ (1 << next(8)) };
            }
            if let Some(compression) = compression {
                for header in (0..changed.len()).step_by(512).filter(|_| next(2) == 0).collect::<Vec<_>>() {
                    let mut fixed = tar::Header::from_byte_slice(&changed[header..header + 512]).clone();
                    fixed.set_cksum();
                    changed[header..header + 512].copy_from_slice(fixed.as_bytes());
                }
                changed = compress(&changed, *compression);
            }
            drop(Place::new().unpack(&changed, *format));
        }
    }
}

fn image(entries: &[(&str, &str)]) -> File {
    let mut tar = tar::Builder::new(tempfile::tempfile().unwrap());
    for (path, text) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        tar.append_data(&mut header, path, text.as_bytes()).unwrap();
    }
    let mut file = tar.into_inner().unwrap();
    file.rewind().unwrap();
    file
}

#[test]
fn a_saved_image_keeps_its_layers_and_loses_its_names() {
    let saved = image(&[
        ("manifest.json", r#"[{"Config":"c.json","RepoTags":["debian:12"],"Layers":["l/layer.tar"]}]"#),
        ("l/layer.tar", "layer"),
        ("index.json", r#"{"manifests":[{"digest":"d","annotations":{"io.containerd.image.name":"debian:12"}}]}"#),
        ("repositories", r#"{"debian":{"12":"l"}}"#),
    ]);
    let mut to = tempfile::tempfile().unwrap();
    copy_without_names(saved, &mut to, GO_ON).unwrap();
    to.rewind().unwrap();
    let mut text = Vec::new();
    to.read_to_end(&mut text).unwrap();
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("layer.tar") && text.contains("c.json") && text.contains(r#""digest":"d""#));
    assert!(!text.contains("debian"));
}

#[test]
fn a_saved_image_whose_names_cannot_be_removed_is_refused() {
    let mut tar = tar::Builder::new(tempfile::tempfile().unwrap());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(EntryType::Symlink);
    header.set_size(0);
    tar.append_link(&mut header, "manifest.json", "other.json").unwrap();
    let mut linked = tar.into_inner().unwrap();
    linked.rewind().unwrap();
    // The archive has a header of 2 MiB.
    let long_name = image(&[(&"n/".repeat(1 << 20), "")]);
    for saved in [linked, image(&[("manifest.json", "no JSON")]), long_name] {
        copy_without_names(saved, &mut tempfile::tempfile().unwrap(), GO_ON).unwrap_err();
    }
}
