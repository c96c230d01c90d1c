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

/// The parts of a line, each with the class of its colour.
fn parts(line: &str) -> Vec<(String, String)> {
    let mut parts = Vec::new();
    let (mut color, mut bold) = (None::<u32>, false);
    for (index, piece) in line.split('\x1b').enumerate() {
        let mut text = piece;
        if index > 0 {
            text = piece.strip_prefix('[').map_or("", |rest| {
                let end = rest.find(|char: char| ('@'..='~').contains(&char));
                let Some(end) = end else { return "" };
                if rest[end..].starts_with('m') {
                    for code in rest[..end].split(';').map(|code| code.parse().unwrap_or(0)) {
                        match code {
                            0 => (color, bold) = (None, false),
                            1 => bold = true,
                            22 => bold = false,
                            30..=37 => color = Some(code - 30),
                            39 => color = None,
                            90..=97 => color = Some(code - 82),
                            _ => {}
                        }
                    }
                }
                &rest[end + 1..]
            });
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
        assert_eq!(strip("\x1b[38;5;200mx\x1b["), "x");
        assert!(colored("<b>").into_string().contains("&lt;b&gt;"));
    }
}
