//! Jute, the encoding of ZooKeeper's records: integers in network order, and a length before text, bytes and lists.

use bytes::BufMut as _;

/// A record of a server that is not what its kind says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed record")]
pub(super) struct Malformed;

/// The rest of a record.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) const fn new(record: &'a [u8]) -> Self {
        Self(record)
    }

    #[cfg(test)]
    const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn int(&mut self) -> Result<i32, Malformed> {
        self.array().map(i32::from_be_bytes)
    }

    pub(super) fn long(&mut self) -> Result<i64, Malformed> {
        self.array().map(i64::from_be_bytes)
    }

    pub(super) fn flag(&mut self) -> Result<bool, Malformed> {
        Ok(self.array()? != [0])
    }

    /// A length; that of nothing is -1.
    fn length(&mut self) -> Result<usize, Malformed> {
        match self.int()? {
            -1 => Ok(0),
            length => usize::try_from(length).map_err(|_| Malformed),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.length()?;
        let (head, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    pub(super) fn text(&mut self) -> Result<String, Malformed> {
        std::str::from_utf8(self.bytes()?).map(str::to_owned).map_err(|_| Malformed)
    }

    /// Allocates as it reads: the length is the server's word.
    pub(super) fn texts(&mut self) -> Result<Vec<String>, Malformed> {
        let mut texts = Vec::new();
        for _ in 0..self.length()? {
            texts.push(self.text()?);
        }
        Ok(texts)
    }
}

/// The length of what is longer makes its frame too long to be sent.
pub(super) fn put_length(out: &mut Vec<u8>, length: usize) {
    out.put_i32(i32::try_from(length).unwrap_or(i32::MAX));
}

pub(super) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_length(out, bytes.len());
    out.put_slice(bytes);
}

pub(super) fn put_flag(out: &mut Vec<u8>, flag: bool) {
    out.put_u8(flag.into());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut record = Vec::new();
        record.put_i32(-7);
        record.put_i64(i64::MIN);
        put_flag(&mut record, true);
        put_bytes(&mut record, b"data");
        put_length(&mut record, 2);
        put_bytes(&mut record, "größe".as_bytes());
        put_bytes(&mut record, b"");
        let mut reader = Reader::new(&record);
        assert_eq!((reader.int(), reader.long(), reader.flag()), (Ok(-7), Ok(i64::MIN), Ok(true)));
        assert_eq!(reader.bytes(), Ok(&b"data"[..]));
        assert_eq!(reader.texts(), Ok(vec!["größe".to_owned(), String::new()]));
        assert!(reader.is_empty());
    }

    #[test]
    fn a_length_that_no_record_has_is_an_error() {
        for length in [-2, i32::MIN, 5, i32::MAX] {
            let mut record = length.to_be_bytes().to_vec();
            record.put_i32(0);
            assert_eq!(Reader::new(&record).bytes(), Err(Malformed), "{length}");
            assert_eq!(Reader::new(&record).texts(), Err(Malformed), "{length}");
        }
        assert_eq!(Reader::new(&(-1_i32).to_be_bytes()).bytes(), Ok(&[][..]));
        assert_eq!(Reader::new(&[0, 0, 0, 1, 0xff]).text(), Err(Malformed));
    }

    proptest! {
        #[test]
        fn no_record_is_read_beyond_its_end(record: Vec<u8>) {
            let mut reader = Reader::new(&record);
            while !reader.is_empty() && reader.texts().is_ok() {}
        }
    }
}
