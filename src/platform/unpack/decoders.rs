//! Reads compressed data, bounded in memory, and keeps the first reason to stop.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use rustix::io::Errno;

use super::{Compression, UnpackError};

pub(super) const BUFFER_BYTES: usize = 64 * 1024;
/// What `zstd -d` accepts without `--long`; `xz -9` needs half of it.
pub(super) const DICTIONARY_BYTES_MAX: u32 = 128 * 1024 * 1024;
/// Headers and padding of one tar entry, with its long names and pax records.
pub(super) const TAR_HEADERS_BYTES_MAX: u64 = 1024 * 1024;
pub(super) const NAME_SHOWN_CHARS_MAX: usize = 200;

/// An error before it is known which entry it belongs to.
pub(super) enum Fault {
    Refused(String),
    /// Damaged, unless the gate knows a better reason.
    Archive,
    Host(io::Error),
}

impl Fault {
    pub(super) fn of_zip(error: rawzip::Error) -> Self {
        let kind = error.into_kind();
        if let rawzip::ErrorKind::IO(error) = kind
            && error.raw_os_error().is_some()
        {
            return Self::Host(error);
        }
        Self::Archive
    }
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        Self::Host(errno.into())
    }
}

pub(super) fn broken(error: io::Error) -> Fault {
    if error.kind() == io::ErrorKind::OutOfMemory {
        return Fault::Refused(format!("unpacking needs a dictionary of more than {DICTIONARY_BYTES_MAX} bytes"));
    }
    Fault::Archive
}

pub(super) fn refused<T>(why: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Refused(why.into()))
}

/// What the readers below and above a decoder share. Decoders wrap or hide errors, so the gate keeps the first.
pub(super) struct Gate<'a> {
    canceled: &'a dyn Fn() -> bool,
    /// How much may be read of the decoded data.
    pub(super) left: Cell<u64>,
    is_empty: Cell<bool>,
    at_end: Cell<bool>,
    stopped: Cell<Option<Stop>>,
}

enum Stop {
    Canceled,
    Headers,
    Host(io::Error),
}

impl<'a> Gate<'a> {
    pub(super) fn new(canceled: &'a dyn Fn() -> bool) -> Self {
        let (left, is_empty, at_end) = (Cell::new(u64::MAX), Cell::new(true), Cell::new(false));
        Self { canceled, left, is_empty, at_end, stopped: Cell::new(None) }
    }

    pub(super) fn encoded<R: Read>(&self, from: R) -> Encoded<'_, R> {
        Encoded { from, gate: self }
    }

    pub(super) fn decoded<'g>(&'g self, from: Box<dyn Read + 'g>) -> Decoded<'g> {
        Decoded { from, gate: self }
    }

    pub(super) fn file_decoder(&self, file: File, compression: Option<Compression>) -> Box<dyn Read + '_> {
        let from = Box::new(BufReader::with_capacity(BUFFER_BYTES, self.encoded(file)));
        match compression {
            Some(compression) => self.decoder(from, compression),
            None => from,
        }
    }

    pub(super) fn decoder<'g>(&'g self, from: Box<dyn BufRead + 'g>, compression: Compression) -> Box<dyn Read + 'g> {
        match compression {
            Compression::Bz2 => Box::new(bzip2::bufread::MultiBzDecoder::new(from)),
            Compression::Gz => Box::new(flate2::bufread::MultiGzDecoder::new(from)),
            Compression::Lz4 => {
                Box::new(Lz4Frames { frame: Some(lz4_flex::frame::FrameDecoder::new(from)), gate: self })
            }
            Compression::Xz => {
                // The decoder needs some more than its dictionary.
                let kib_max = DICTIONARY_BYTES_MAX / 1024 + 1024;
                Box::new(lzma_rust2::XzReader::new_mem_limit(from, true, kib_max))
            }
            Compression::Zst => {
                let mut frame = ruzstd::decoding::FrameDecoder::new();
                frame.set_max_window_size(DICTIONARY_BYTES_MAX.into());
                Box::new(ZstdFrames { frame, from })
            }
        }
    }

    fn stop(&self, why: Stop) -> io::Error {
        self.stopped.set(Some(why));
        io::Error::other("stopped")
    }

    pub(super) fn check_canceled(&self) -> io::Result<()> {
        if (self.canceled)() { Err(self.stop(Stop::Canceled)) } else { Ok(()) }
    }

    /// Some decoders take nothing for a complete stream.
    pub(super) fn check_not_empty(&self) -> Result<(), Fault> {
        if self.is_empty.get() { Err(Fault::Archive) } else { Ok(()) }
    }

    /// Errors of decoders may quote the archive, so they are not shown.
    pub(super) fn explain(&self, fault: Fault, name: &[u8]) -> UnpackError {
        let shown = String::from_utf8_lossy(name);
        let name: String = shown.chars().flat_map(char::escape_debug).take(NAME_SHOWN_CHARS_MAX).collect();
        match (fault, self.stopped.take()) {
            (Fault::Refused(why), _) if name.is_empty() => UnpackError::Archive(why),
            (Fault::Refused(why), _) => UnpackError::Entry { name, why },
            (Fault::Host(source), _) | (Fault::Archive, Some(Stop::Host(source))) => UnpackError::Host { name, source },
            (Fault::Archive, Some(Stop::Canceled)) => UnpackError::Canceled,
            (Fault::Archive, Some(Stop::Headers)) => UnpackError::Archive(format!(
                "the archive has more than {TAR_HEADERS_BYTES_MAX} bytes of headers or other data behind entry '{name}'"
            )),
            (Fault::Archive, None) if name.is_empty() => {
                UnpackError::Archive("the data is damaged, cut short or of another format".to_owned())
            }
            (Fault::Archive, None) => {
                UnpackError::Archive(format!("the archive is damaged or cut short at or after entry '{name}'"))
            }
        }
    }
}

/// The bytes of the archive as they are stored.
pub(super) struct Encoded<'g, R> {
    from: R,
    gate: &'g Gate<'g>,
}

impl<R: Read> Read for Encoded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.gate.check_canceled()?;
        let read = self.from.read(buffer);
        match &read {
            Ok(0) if !buffer.is_empty() => self.gate.at_end.set(true),
            Ok(_) => self.gate.is_empty.set(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted || error.raw_os_error().is_none() => {}
            Err(_) => return read.map_err(|error| self.gate.stop(Stop::Host(error))),
        }
        read
    }
}

pub(super) struct Decoded<'g> {
    from: Box<dyn Read + 'g>,
    gate: &'g Gate<'g>,
}

impl Read for Decoded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.gate.check_canceled()?;
        // The decoder of xz takes a read of nothing for the end of a block.
        if buffer.is_empty() {
            return Ok(0);
        }
        let left = self.gate.left.get();
        if left == 0 {
            return Err(self.gate.stop(Stop::Headers));
        }
        let len = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let bytes = self.from.read(&mut buffer[..len])?;
        self.gate.left.set(left - bytes as u64);
        Ok(bytes)
    }
}

/// Reads one frame after the other. [`lz4_flex`] takes the end of the file for the end of a frame.
struct Lz4Frames<'g> {
    frame: Option<lz4_flex::frame::FrameDecoder<Box<dyn BufRead + 'g>>>,
    gate: &'g Gate<'g>,
}

impl Read for Lz4Frames<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(frame) = &mut self.frame {
            let bytes = frame.read(buffer)?;
            if bytes > 0 || buffer.is_empty() {
                return Ok(bytes);
            }
            if self.gate.at_end.get() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // A decoder keeps the block size of its first frame.
            let from = self.frame.take().map(lz4_flex::frame::FrameDecoder::into_inner);
            if let Some(mut from) = from
                && !from.fill_buf()?.is_empty()
            {
                self.frame = Some(lz4_flex::frame::FrameDecoder::new(from));
            }
        }
        Ok(0)
    }
}

/// Reads one frame after the other, and skips the skippable.
struct ZstdFrames<R> {
    frame: ruzstd::decoding::FrameDecoder,
    from: R,
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        use ruzstd::decoding::BlockDecodingStrategy::UptoBlocks;
        use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
        loop {
            if self.frame.can_collect() > 0 {
                return self.frame.read(buffer);
            }
            if !self.frame.is_finished() {
                self.frame.decode_blocks(&mut self.from, UptoBlocks(1)).map_err(io::Error::other)?;
                continue;
            }
            let stored = self.frame.get_checksum_from_data();
            if stored.is_some() && stored != self.frame.get_calculated_checksum() {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if self.from.fill_buf()?.is_empty() {
                return Ok(0);
            }
            match self.frame.reset(&mut self.from) {
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let skipped = io::copy(&mut (&mut self.from).take(length.into()), &mut io::sink())?;
                    if skipped < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(FrameDecoderError::WindowSizeTooBig { .. }) => return Err(io::ErrorKind::OutOfMemory.into()),
                started => started.map_err(io::Error::other)?,
            }
        }
    }
}
