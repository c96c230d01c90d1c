//! Text from tasks, clients and services without the characters that a terminal interprets or that reorder what is shown.

use anstream::adapter::StripBytes;

/// Control characters (C0, DEL, C1), line separators, and the directional characters that reorder the text around them.
pub(crate) fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Replaces unsafe characters by spaces; keeps the lines.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|char| if is_unsafe(char) && !matches!(char, '\n' | '\t') { ' ' } else { char }).collect()
}

/// Filters a stream of bytes, such as a log. Escape sequences and unsafe characters are removed, carriage returns end a
/// line, invalid UTF-8 is replaced.
#[derive(Debug, Default)]
pub(crate) struct TextFilter {
    strip: StripBytes,
    /// The beginning of a character whose other bytes are yet to come.
    partial: Vec<u8>,
    after_carriage_return: bool,
}

impl TextFilter {
    pub(crate) fn push(&mut self, piece: &[u8]) -> String {
        let mut bytes = std::mem::take(&mut self.partial);
        self.strip.strip_next(piece).for_each(|part| bytes.extend_from_slice(part));
        let mut text = String::new();
        let mut rest = bytes.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            let Some(invalid) = error.error_len() else {
                self.partial = after.to_vec();
                rest = &[];
                break;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = after.get(invalid..).unwrap_or_default();
        }
        text.push_str(&String::from_utf8_lossy(rest));
        text.chars().filter_map(|character| self.filter(character)).collect()
    }

    fn filter(&mut self, character: char) -> Option<char> {
        let ends_carriage_return = std::mem::replace(&mut self.after_carriage_return, character == '\r');
        match character {
            '\r' => Some('\n'),
            '\n' if ends_carriage_return => None,
            '\n' | '\t' => Some(character),
            _ if is_unsafe(character) => None,
            _ => Some(character),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d1_what_a_terminal_would_interpret_is_removed_however_the_text_is_split() {
        let text = b"a\x1b[2Jb\x07\x08\x1b]0;name\x07c\x1b[31md\x1b[0m\n\xc3\xa9\xc2\x9b31m\xc2\x90x\xe2\x80\xaey\xe2\x81\xa6\x9bz\x7f\
            \r\nok\r10%\r20%\n\tend\x1bPq\x1b\\";
        for cut in 0..text.len() {
            let mut filter = TextFilter::default();
            let shown = [&text[..cut], &text[cut..]].map(|piece| filter.push(piece)).concat();
            assert_eq!(shown, "abcd\n\u{e9}31mxyz\nok\n10%\n20%\n\tend", "cut at {cut}");
        }
    }

    #[test]
    fn d1_lists_have_no_control_and_no_directional_characters() {
        assert_eq!(clean("a\u{9b}2Jb\u{202e}c\x1b\u{2066}d\u{200f}\ne\tf"), "a 2Jb c  d \ne\tf");
    }
}
