//! Replaces invalid UTF-8 from the broker before lapin parses it.
//!
//! RabbitMQ accepts any bytes as routing keys and header names, and lapin closes the connection over names that are not UTF-8; the
//! redelivered message would close the next one too. Each invalid byte is replaced by [`REPLACEMENT_CHAR`]; lengths do not change.
//! The release that the broker names is read here as well, which lapin does not show.

use std::sync::Arc;

use parking_lot::Mutex;

/// Replaces an invalid byte: ASCII's SUB.
pub const REPLACEMENT_CHAR: char = '\u{1a}';

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// Type, channel and size.
const FRAME_HEAD: usize = 7;
const CONNECTION_START: [u8; 4] = [0, 10, 0, 10];
/// The largest frame of these kinds: RabbitMQ negotiates 128 KiB.
const FRAME_BYTES_MAX: usize = 1 << 20;
/// How deep nested tables are parsed.
const DEPTH_MAX: u32 = 16;

/// The release of a broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    pub major: u16,
    pub minor: u16,
}

impl Release {
    fn parse(version: &[u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(version).ok()?.split('.').map(str::parse);
        Some(Self { major: parts.next()?.ok()?, minor: parts.next()?.ok()? })
    }
}

/// A parser of AMQP frames.
#[derive(Debug, Default)]
pub(super) struct Utf8Sanitizer {
    release: Arc<Mutex<Option<Release>>>,
    /// Bytes that pass unchanged: the rest of a frame, or everything that is not known as AMQP.
    rest: usize,
}

impl Utf8Sanitizer {
    /// Stores the release that the broker names in `release`.
    pub(super) const fn new(release: Arc<Mutex<Option<Release>>>) -> Self {
        Self { release, rest: 0 }
    }

    /// Sanitizes input in place as far as it is complete, and returns how much that is. The next input begins with what is left.
    pub(super) fn sanitize(&mut self, input: &mut [u8]) -> usize {
        let mut done = 0;
        loop {
            let passed = self.rest.min(input.len() - done);
            self.rest -= passed;
            done += passed;
            let frame = input.get_mut(done..).unwrap_or_default();
            let Some([kind, _, _, size @ ..]) = frame.first_chunk::<FRAME_HEAD>().copied() else { return done };
            let size = usize::try_from(u32::from_be_bytes(size)).unwrap_or(usize::MAX - FRAME_HEAD - 1);
            self.rest = match kind {
                METHOD | HEADER if size <= FRAME_BYTES_MAX => {
                    // Its end mark stays with it.
                    let Some(payload) = frame.get_mut(FRAME_HEAD..=FRAME_HEAD + size) else { return done };
                    self.sanitize_payload(kind, payload);
                    FRAME_HEAD + size + 1
                }
                BODY | HEARTBEAT => FRAME_HEAD + size + 1,
                _ => usize::MAX,
            };
        }
    }

    fn sanitize_payload(&mut self, kind: u8, payload: &mut [u8]) {
        if kind == METHOD && payload.starts_with(&CONNECTION_START) {
            *self.release.lock() = Names { left: &mut *payload }.release_of_start();
        }
        let mut names = Names { left: payload };
        // An unreadable frame passes unchanged.
        let _read = if kind == METHOD { names.of_method() } else { names.of_header() };
    }
}

/// A cursor over a payload that replaces names.
struct Names<'a> {
    left: &'a mut [u8],
}

impl Names<'_> {
    fn take(&mut self, count: usize) -> Option<&mut [u8]> {
        let (taken, later) = std::mem::take(&mut self.left).split_at_mut_checked(count)?;
        self.left = later;
        Some(taken)
    }

    fn number<const BYTES: usize>(&mut self) -> Option<usize> {
        Some(self.take(BYTES)?.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    fn name(&mut self) -> Option<()> {
        let length = self.number::<1>()?;
        replace_invalid(self.take(length)?);
        Some(())
    }

    /// `connection.start`: class and method, protocol version, a table with properties of the server.
    fn release_of_start(&mut self) -> Option<Release> {
        self.take(6)?;
        let length = self.number::<4>()?;
        let mut table = Names { left: self.take(length)? };
        loop {
            let name = table.number::<1>()?;
            if table.take(name)? == b"version" {
                table.take(1)?;
                let length = table.number::<4>()?;
                return Release::parse(table.take(length)?);
            }
            table.value(DEPTH_MAX)?;
        }
    }

    fn of_method(&mut self) -> Option<()> {
        let names = match (self.number::<2>()?, self.number::<2>()?) {
            // basic.deliver: consumer tag, delivery tag, redelivered; exchange, routing key
            (60, 60) => {
                self.name()?;
                self.take(9)?;
                2
            }
            // basic.get-ok: delivery tag, redelivered; exchange, routing key
            (60, 71) => {
                self.take(9)?;
                2
            }
            // basic.return: reply code; reply text, exchange, routing key
            (60, 50) => {
                self.take(2)?;
                3
            }
            // connection.close and channel.close: reply code; a reply text that RabbitMQ cuts without regard to characters
            (10, 50) | (20, 40) => {
                self.take(2)?;
                1
            }
            _ => 0,
        };
        (0..names).try_for_each(|_| self.name())
    }

    fn of_header(&mut self) -> Option<()> {
        // Class, weight, body size.
        self.take(12)?;
        let flags = self.number::<2>()?;
        for bit in (2..16).rev().filter(|bit| flags & 1 << bit != 0) {
            match bit {
                13 => self.values(b'F', DEPTH_MAX)?,
                // Delivery mode, priority; timestamp.
                12 | 11 => drop(self.take(1)?),
                6 => drop(self.take(8)?),
                _ => self.name()?,
            }
        }
        Some(())
    }

    /// A table (`F`) or an array.
    fn values(&mut self, kind: u8, depth: u32) -> Option<()> {
        let length = self.number::<4>()?;
        let mut inner = Names { left: self.take(length)? };
        while !inner.left.is_empty() {
            if kind == b'F' {
                inner.name()?;
            }
            inner.value(depth)?;
        }
        Some(())
    }

    fn value(&mut self, depth: u32) -> Option<()> {
        let kind = self.take(1)?.first_mut()?;
        // lapin would overflow its stack on deeper tables, so their type becomes byte array, which has a length as well.
        if depth == 0 && matches!(kind, b'F' | b'A') {
            *kind = b'x';
        }
        let length = match *kind {
            b'V' => 0,
            b't' | b'b' | b'B' => 1,
            b's' | b'U' | b'u' => 2,
            b'I' | b'i' | b'f' => 4,
            b'D' => 5,
            b'L' | b'l' | b'd' | b'T' => 8,
            b'S' | b'x' => self.number::<4>()?,
            kind @ (b'F' | b'A') => return self.values(kind, depth - 1),
            _ => return None,
        };
        self.take(length).map(drop)
    }
}

/// Replaces invalid UTF-8 in a name.
fn replace_invalid(name: &mut [u8]) {
    let mut from = 0;
    while let Some(Err(error)) = name.get(from..).map(std::str::from_utf8) {
        let start = from + error.valid_up_to();
        let end = error.error_len().map_or(name.len(), |length| start + length);
        let Some(invalid) = name.get_mut(start..end) else { return };
        invalid.fill(REPLACEMENT_CHAR as u8);
        from = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&[kind, 0, 1], &size[..], payload, &[0xCE]].concat()
    }

    fn name(bytes: &[u8]) -> Vec<u8> {
        [&[u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }

    fn deliver(key: &[u8]) -> Vec<u8> {
        frame(METHOD, &[&[0, 60, 0, 60][..], &name(b"tag"), &[0; 9], &name(b"core-req-xchg"), &name(key)].concat())
    }

    /// Headers with a table in a list in a table, and a correlation id.
    fn header(odd: &[u8]) -> Vec<u8> {
        let long =
            |kind: u8, bytes: &[u8]| [&[kind][..], &u32::try_from(bytes.len()).unwrap().to_be_bytes(), bytes].concat();
        let inner = long(b'F', &[name(odd), vec![b't', 1]].concat());
        let entries = [
            [name(b"x-rpc-path"), long(b'x', odd)].concat(),
            [name(odd), long(b'A', &[inner, long(b'S', odd), vec![b'l', 0, 0, 0, 0, 0, 0, 0, 1]].concat())].concat(),
        ]
        .concat();
        let table = [&u32::try_from(entries.len()).unwrap().to_be_bytes(), &entries[..]].concat();
        let flags = (1_u16 << 13 | 1 << 12 | 1 << 10 | 1 << 6 | 1 << 3).to_be_bytes();
        let rest = [&[0, 60, 0, 0][..], &[0; 8], &flags, &table, &[2], &name(odd), &[0; 8], &name(odd)].concat();
        frame(HEADER, &rest)
    }

    fn passed(bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut sanitizer, mut unread, mut out) = (Utf8Sanitizer::default(), Vec::new(), Vec::new());
        for piece in bytes.chunks(piece.max(1)) {
            unread.extend_from_slice(piece);
            let ready = sanitizer.sanitize(&mut unread);
            out.extend(unread.drain(..ready));
        }
        [out, unread].concat()
    }

    #[test]
    fn only_names_that_are_not_utf_8_change_however_the_input_is_split() {
        let odd = b"a\xff\xc3";
        let all = |name: &[u8]| [deliver(name), header(name), frame(BODY, odd), frame(HEARTBEAT, b"")].concat();
        for piece in 1..80 {
            let seen = passed(&all(odd), piece);
            // Values and bodies are bytes.
            let expected: Vec<u8> = all(b"a\x1a\x1a");
            assert_eq!(seen.len(), expected.len());
            let changed = seen.iter().zip(all(odd)).filter(|(one, other)| **one != *other).count();
            assert_eq!(changed, 2 * 5, "the key, two names in tables, an id and a name: {piece}");
            assert!(seen.windows(3).filter(|three| *three == b"a\x1a\x1a").count() == 5);
            assert_eq!(passed(&all("a\u{fc}".as_bytes()), piece), all("a\u{fc}".as_bytes()));
        }
    }

    #[test]
    fn a_cut_close_text_becomes_utf_8() {
        for (class, method) in [(10, 50), (20, 40)] {
            let close =
                |text: &[u8]| frame(METHOD, &[&[0, class, 0, method, 1, 0x96][..], &name(text), &[0; 4]].concat());
            assert_eq!(passed(&close(b"it is '\xc3"), 7), close(b"it is '\x1a"));
        }
    }

    #[test]
    fn too_deep_tables_become_byte_arrays_and_the_rest_is_still_replaced() {
        let nested = |kind: u8, depth: usize| {
            (0..depth).fold(Vec::new(), |inside, _| {
                [&[kind][..], &u32::try_from(inside.len()).unwrap().to_be_bytes(), &inside].concat()
            })
        };
        let header = |deep: &[u8], id: &[u8]| {
            let entries = [name(b"deep"), deep.to_vec()].concat();
            let table = [&u32::try_from(entries.len()).unwrap().to_be_bytes(), &entries[..]].concat();
            let flags = (1_u16 << 13 | 1 << 10).to_be_bytes();
            frame(HEADER, &[&[0, 60, 0, 0][..], &[0; 8], &flags, &table, &name(id)].concat())
        };
        let depth = usize::try_from(DEPTH_MAX).unwrap();
        let most = nested(b'A', depth);
        assert_eq!(passed(&header(&most, b"\xff"), 100), header(&most, b"\x1a"), "as deep as it may be");
        let deeper = nested(b'A', 20_000);
        let mut cut = deeper.clone();
        cut[depth * 5] = b'x';
        assert_eq!(passed(&header(&deeper, b"\xff"), 1_000), header(&cut, b"\x1a"));
    }

    #[test]
    fn unknown_protocols_pass_unchanged() {
        let other = b"AMQP\x00\x00\x09\x01 and \xff more";
        assert_eq!(passed(other, 5), other);
        let short = frame(METHOD, &[0, 60, 0, 60, 200]);
        assert_eq!(passed(&short, 3), short);
        let huge = [&[HEADER, 0, 1, 0xff, 0xff, 0xff, 0xff][..], b"\xff"].concat();
        assert_eq!(passed(&huge, 4), huge);
        assert_eq!(passed(&deliver(b"k")[..9], 4), &deliver(b"k")[..9], "it ended in the middle");
    }

    proptest! {
        #[test]
        fn any_input_keeps_its_length(bytes in proptest::collection::vec(any::<u8>(), 0..400), piece in 1..50_usize) {
            prop_assert_eq!(passed(&bytes, piece).len(), bytes.len());
            let framed = [deliver(&bytes[..bytes.len().min(255)]), frame(HEADER, &bytes), deliver(b"k")].concat();
            let seen = passed(&framed, piece);
            prop_assert_eq!(seen.len(), framed.len());
            prop_assert!(seen.ends_with(&deliver(b"k")));
        }
    }
}
