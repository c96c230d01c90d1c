//! Lines of logs: colours and progress.

use maud::{Markup, html};

/// A number of percent in a text of progress, as a bar.
pub(super) fn progress_bar(text: &str) -> Markup {
    let before = text.split('%').next().filter(|before| before.len() < text.len());
    let digits = before.map(|before| {
        before.trim_end().rsplit(|char: char| !(char.is_ascii_digit() || char == '.')).next().unwrap_or_default()
    });
    let percent =
        digits.and_then(|digits| digits.parse::<f64>().ok()).filter(|percent| (0.0..=100.0).contains(percent));
    html! { p { @if let Some(percent) = percent { progress max="100" value=(percent) {} " " } (text) } }
}

/// What an escape sequence says, and the text behind it.
fn escape(rest: &str) -> (Option<&str>, &str) {
    let mut chars = rest.chars();
    match chars.next() {
        Some('[') => {
            let end = rest[1..].find(|char: char| ('@'..='~').contains(&char)).map(|end| end + 1);
            let Some(end) = end else { return (None, "") };
            (rest[end..].starts_with('m').then_some(&rest[1..end]), &rest[end + 1..])
        }
        // Of a title or a link, to its end; ESC \ is the beginning of the next piece.
        Some(']' | 'P' | '^' | '_') => (None, rest.split_once('\x07').map_or("", |(_, text)| text)),
        Some('(' | ')' | '*' | '+' | '#' | '%') => (None, rest.get(2..).unwrap_or_default()),
        Some(_) => (None, chars.as_str()),
        None => (None, ""),
    }
}

/// The parts of a line, each with the class of its colour.
fn parts(line: &str) -> Vec<(String, String)> {
    let mut parts = Vec::new();
    let (mut color, mut bold) = (None::<u32>, false);
    for (index, piece) in line.split('\x1b').enumerate() {
        let (style, text) = if index > 0 { escape(piece) } else { (None, piece) };
        let mut codes = style.into_iter().flat_map(|style| style.split(';')).map(|code| code.parse().unwrap_or(0));
        while let Some(code) = codes.next() {
            match code {
                0 => (color, bold) = (None, false),
                1 => bold = true,
                22 => bold = false,
                30..=37 => color = Some(code - 30),
                39 => color = None,
                // One of 256 colours, or of all: its arguments are no codes.
                38 | 48 => {
                    let arguments = if codes.next() == Some(5) { 1 } else { 3 };
                    codes.by_ref().take(arguments).for_each(drop);
                }
                90..=97 => color = Some(code - 82),
                _ => {}
            }
        }
        if !text.is_empty() {
            let color = color.map(|color| format!("c{color}")).unwrap_or_default();
            let class = format!("{color}{}", if bold { " bold" } else { "" });
            parts.push((class.trim().to_owned(), text.to_owned()));
        }
    }
    parts
}

pub(super) fn strip(line: &str) -> String {
    parts(line).into_iter().map(|(_, text)| text).collect()
}

pub(super) fn colored(line: &str) -> Markup {
    html! { @for (class, text) in parts(line) { @if class.is_empty() { (text) } @else { span class=(class) { (text) } } } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_become_classes_and_other_sequences_go() {
        let part = |class: &str, text: &str| (class.to_owned(), text.to_owned());
        let line = "a\x1b[1;31mred\x1b[0m\x1b[2Kb\x1b[96mc\x1b]0;title";
        assert_eq!(parts(line), [part("", "a"), part("c1 bold", "red"), part("", "b"), part("c14", "c")]);
        for (line, text) in [
            ("\x1b[38;5;200mx\x1b[", "x"),
            ("\x1b]8;;http://x\x1b\\LINK\x1b]8;;\x1b\\ tail", "LINK tail"),
            ("\x1b]0;title\x07after", "after"),
            ("\x1b(Bplain\x1b=x", "plainx"),
        ] {
            assert_eq!(strip(line), text, "{line:?}");
        }
        assert_eq!(parts("\x1b[38;5;1mx"), [part("", "x")]);
        assert!(colored("<b>").into_string().contains("&lt;b&gt;"));
    }
}
