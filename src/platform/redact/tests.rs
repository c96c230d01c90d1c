//! Tests the filter against a brute-force definition, and each pattern.

use proptest::prelude::*;

use super::*;

const SECRETS: [&str; 6] =
    ["hunter2-hunter2", "aaaaaa", "p@ss w/\"o'$", "multi line\nsecret value\nof three", "abcabcabd", "ähnlich%41+b"];

fn set(secrets: &[&str]) -> SecretSet {
    let mut set = SecretSet::default();
    for secret in secrets {
        set.add(secret);
    }
    set
}

/// The expected output by definition: each run of covered bytes becomes one replacement.
fn defined(text: &[u8], secrets: &[&str]) -> Vec<u8> {
    let mut covered = vec![false; text.len()];
    for variant in secrets.iter().flat_map(|secret| encodings::of(secret)) {
        for at in 0..text.len() {
            if text[at..].starts_with(&variant) {
                covered[at..at + variant.len()].fill(true);
            }
        }
    }
    let mut out = Vec::new();
    for (at, byte) in text.iter().enumerate() {
        if !covered[at] {
            out.push(*byte);
        } else if at == 0 || !covered[at - 1] {
            out.extend_from_slice(REPLACEMENT.as_bytes());
        }
    }
    out
}

/// Filters a text in pieces, and checks the bound on bytes held back.
fn filtered(set: &[&SecretSet], text: &[u8], cuts: &[usize]) -> Vec<u8> {
    let (mut filter, mut out, mut rest) = (RedactFilter::default(), Vec::new(), text);
    for cut in cuts {
        let (piece, after) = rest.split_at((*cut).min(rest.len()));
        filter.push(set, piece, &mut out);
        let most = journeyman_domain::limits::REDACT_PIECE_BYTES_MAX
            .max(journeyman_domain::limits::REDACT_PATTERN_BYTES_MAX + 64);
        assert!(filter.held_back() < most);
        rest = after;
    }
    filter.push(set, rest, &mut out);
    filter.finish(set, &mut out);
    out
}

/// Encodings of secrets, parts of them, and noise.
fn part() -> impl Strategy<Value = Vec<u8>> {
    let variants: Vec<Vec<u8>> =
        SECRETS.iter().flat_map(|secret| encodings::of(secret)).map(|variant| variant.to_vec()).collect();
    let some = prop::sample::select(variants);
    prop_oneof![
        3 => some.clone(),
        3 => (some.clone(), any::<prop::sample::Index>()).prop_map(|(v, cut)| v[..cut.index(v.len())].to_vec()),
        2 => (some, any::<prop::sample::Index>()).prop_map(|(v, cut)| v[cut.index(v.len())..].to_vec()),
        2 => prop::collection::vec(prop::sample::select(b"abcd=% \n\"'\\a".to_vec()), 0..12),
        1 => prop::collection::vec(any::<u8>(), 0..20),
    ]
}

fn shaped() -> impl Strategy<Value = Vec<u8>> {
    let shapes = SHAPED.iter().map(|(text, _)| text.as_bytes().to_vec()).collect::<Vec<_>>();
    let some = prop::sample::select(shapes);
    prop_oneof![
        2 => some.clone(),
        2 => (some, any::<prop::sample::Index>()).prop_map(|(v, cut)| v[..cut.index(v.len())].to_vec()),
        3 => part(),
    ]
}

fn text_of(part: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![Just(vec![1; 400]), prop::collection::vec(0..40_usize, 0..40)]
}

proptest! {
    #[test]
    fn every_encoding_is_replaced_at_any_split_and_no_other_byte_is(text in text_of(part()), cuts in cuts()) {
        let set = set(&SECRETS);
        prop_assert_eq!(filtered(&[&set], &text, &cuts), defined(&text, &SECRETS));
    }

    #[test]
    fn secrets_of_two_sets_are_replaced(text in text_of(part()), cuts in cuts()) {
        let (one, other) = (set(&SECRETS[..3]), set(&SECRETS[3..]));
        prop_assert_eq!(filtered(&[&one, &other], &text, &cuts), defined(&text, &SECRETS));
    }

    #[test]
    fn patterns_do_not_depend_on_the_split(text in text_of(shaped()), cuts in cuts()) {
        let set = set(&SECRETS);
        let out = filtered(&[&set], &text, &cuts);
        prop_assert_eq!(&out, &filtered(&[&set], &text, &[]));
        for variant in SECRETS.iter().flat_map(|secret| encodings::of(secret)) {
            prop_assert!(!out.windows(variant.len()).any(|part| part == variant.as_slice()));
        }
    }

    #[test]
    fn a_flush_duplicates_and_drops_nothing(text in text_of(part()), cuts in cuts()) {
        // A flush may emit the beginning of a secret, but never a whole one.
        let set = set(&SECRETS);
        let (mut filter, mut out, mut rest) = (RedactFilter::default(), Vec::new(), &text[..]);
        for cut in cuts {
            let (piece, after) = rest.split_at(cut.min(rest.len()));
            filter.push(&[&set], piece, &mut out);
            filter.flush(&mut out);
            prop_assert_eq!(filter.held_back(), 0);
            rest = after;
        }
        filter.push(&[&set], rest, &mut out);
        filter.finish(&[&set], &mut out);
        let bare = |text: &[u8]| String::from_utf8_lossy(text).replace(REPLACEMENT, "");
        let (out, least) = (bare(&out), bare(&defined(&text, &SECRETS)));
        prop_assert!(out.len() >= least.len() && out.len() <= text.len().max(String::from_utf8_lossy(&text).len()));
    }

    #[test]
    fn text_without_secrets_passes_unchanged(text in "[ a-zA-Z0-9:;,.()\n-]{0,400}", cuts in cuts()) {
        let set = set(&["correct horse battery", "Zz0-Zz1-Zz2"]);
        prop_assume!(!text.contains("Zz0") && !text.contains("eyJ"));
        prop_assert_eq!(filtered(&[&set], text.as_bytes(), &cuts), text.as_bytes());
    }
}

#[test]
fn a_set_may_change_during_a_stream() {
    let mut set = SecretSet::default();
    let (mut filter, mut out) = (RedactFilter::default(), Vec::new());
    let first = set.add("first-secret");
    filter.push(&[&set], b"first-secret second-secret first-", &mut out);
    set.add("second-secret");
    set.remove(&[first]);
    filter.push(&[&set], b"secret second-", &mut out);
    filter.push(&[&set], b"secret first-secret", &mut out);
    filter.finish(&[&set], &mut out);
    assert_eq!(String::from_utf8(out).unwrap(), "[redacted] second-secret first-secret [redacted] first-secret");
}

#[test]
fn a_set_is_empty_after_all_secrets_are_removed() {
    let mut set = SecretSet::default();
    let empty = set.content();
    let ids = ["first-secret", "first-other-secret", "aaaaaaaaaaaa", "first-secret"].map(|secret| set.add(secret));
    for id in ids {
        assert_ne!(set.content(), empty);
        set.remove(&[id]);
    }
    assert_eq!(set.content(), empty);
}

#[test]
fn the_rest_of_a_flushed_secret_is_replaced() {
    let set = set(&["first-secret"]);
    let (mut filter, mut out) = (RedactFilter::default(), Vec::new());
    filter.push(&[&set], b"a first-", &mut out);
    assert_eq!((out.as_slice(), filter.held_back()), (b"a ".as_slice(), 6));
    filter.flush(&mut out);
    filter.push(&[&set], b"secret.\n", &mut out);
    assert_eq!(String::from_utf8(out).unwrap(), "a first-[redacted].\n");
}

#[test]
fn an_ordinary_line_is_never_held_back() {
    let set = set(&SECRETS);
    let (mut filter, mut out) = (RedactFilter::default(), Vec::new());
    let line = "see https://example.com/a?b=c, at 12:00 (BEGIN of AIza, ghp_x)\n";
    filter.push(&[&set], line.as_bytes(), &mut out);
    assert_eq!((String::from_utf8(out).unwrap().as_str(), filter.held_back()), (line, 0));
    for last in b'a'..=b'z' {
        let line = format!("a word, {}\n", char::from(last));
        filter.push(&[&set], line.as_bytes(), &mut Vec::new());
        assert_eq!(filter.held_back(), 0, "{line}");
    }
}

/// Texts and their redacted form.
const SHAPED: [(&str, &str); 49] = [
    ("t=ghp_0123456789abcdefghijklmnopqrstuvwxyzAB;", "t=[redacted];"),
    ("ghp_short", "ghp_short"),
    ("xghp_0123456789abcdefghijklmnopqrstuvwxyzAB", "xghp_0123456789abcdefghijklmnopqrstuvwxyzAB"),
    ("github_pat_0123456789_0123456789_0123456789_0123456789 x", "[redacted] x"),
    ("glpat-0123456789-abcdefghij\n", "[redacted]\n"),
    ("npm_config_registry=https://r", "npm_config_registry=https://r"),
    ("(xoxb-0123456789-0123456789-abcdef)", "([redacted])"),
    ("AIzaSyA0123456789012345678901234567890123", "[redacted]"),
    ("hvs.CAESIJ0123456789012345678901 ok", "[redacted] ok"),
    ("sk_live_0123456789012345678901234", "[redacted]"),
    ("AGE-SECRET-KEY-10123456789012345678901234567890123456789012345678901234 x", "[redacted] x"),
    ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl end", "jwt [redacted] end"),
    ("eyJhbGciOiJIUzI1NiJ9 alone", "eyJhbGciOiJIUzI1NiJ9 alone"),
    ("eyJ.eyJ.x", "eyJ.eyJ.x"),
    ("Authorization: Bearer abc.def-123\r\nHost: x", "Authorization: [redacted]\r\nHost: x"),
    ("authorization: Basic dXNlcjpwYXNz\nx", "authorization: [redacted]\nx"),
    ("AUTHORIZATION:a-token-without-a-scheme next", "AUTHORIZATION:[redacted] next"),
    ("Authorization: abc", "Authorization: [redacted]"),
    ("Authorization: Basic", "Authorization: [redacted]"),
    ("Authorization: basic   abc next", "Authorization: [redacted] next"),
    ("Authorization: Hawk id=\"a\", mac=\"b\"\nx", "Authorization: [redacted]\nx"),
    ("curl -H \"Authorization: Bearer abc\" https://h/", "curl -H \"Authorization: [redacted]\" https://h/"),
    ("{\"authorization\":\"Hawk id=\\\"a\\\"\",\"b\":1}", "{\"authorization\":\"[redacted]\",\"b\":1}"),
    ("{\\\"Authorization\\\": \\\"Bearer abc\\\", x", "{\\\"Authorization\\\": \\\"[redacted]\\\", x"),
    ("headers['Authorization'] = 'Bearer abc'", "headers['Authorization'] = 'Bearer abc'"),
    ("'Authorization': 'Bearer abc'}", "'Authorization': '[redacted]'}"),
    ("Authorization failed: no such user", "Authorization failed: no such user"),
    ("Proxy-Authorization: Basic abc\n", "Proxy-Authorization: [redacted]\n"),
    ("Authorization:\nnext", "Authorization:\nnext"),
    ("https://user:pa@ss@host/path@x", "https://[redacted]@host/path@x"),
    ("git clone https://x-access-token:abc@github.com/a/b", "git clone https://[redacted]@github.com/a/b"),
    ("ssh://git@github.com/a", "ssh://git@github.com/a"),
    ("https://0123456789abcdef0123@github.com", "https://[redacted]@github.com"),
    ("postgres://u:p@db:5432/x", "postgres://[redacted]@db:5432/x"),
    ("https://host/a:b@c", "https://host/a:b@c"),
    (
        "https://a.queue.core.windows.net/q/messages?sv=1&sig=a%2Fb%2Bc%3D&x=1",
        "https://a.queue.core.windows.net/q/messages?sv=1&sig=[redacted]&x=1",
    ),
    ("?X-Amz-Signature=0123abc&X-Amz-Date=1", "?X-Amz-Signature=[redacted]&X-Amz-Date=1"),
    ("&X-Amz-Security-Token=abc%2F\"", "&X-Amz-Security-Token=[redacted]\""),
    ("?bewit=aWQ%5C123", "?bewit=[redacted]"),
    ("u\\u0026sig=abc\\u0026x", "u\\u0026sig=[redacted]\\u0026x"),
    ("&amp;sig=abc&amp;x", "&amp;sig=[redacted]&amp;x"),
    ("to=https%3A%2F%2Fh%3Fsig%3Dabc&y", "to=https%3A%2F%2Fh%3Fsig%3D[redacted]&y"),
    ("Signature=abc without a URL", "Signature=abc without a URL"),
    ("design=1&sign=2&signal=3", "design=1&sign=2&signal=3"),
    (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE+/=\nabc\n-----END RSA PRIVATE KEY-----\nx",
        "-----BEGIN RSA PRIVATE KEY-----[redacted]\nx",
    ),
    (
        "\"-----BEGIN PRIVATE KEY-----\\nMIIE\\n-----END PRIVATE KEY-----\\n\"",
        "\"-----BEGIN PRIVATE KEY-----[redacted]\\n\"",
    ),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl", "-----BEGIN OPENSSH PRIVATE KEY-----[redacted]"),
    (
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nx\n-----END PGP PRIVATE KEY BLOCK-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----[redacted]",
    ),
    (
        "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----",
        "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----",
    ),
];

#[test]
fn each_pattern_is_replaced_and_similar_text_is_not() {
    let set = SecretSet::default();
    for (text, redacted) in SHAPED {
        for cuts in [vec![], vec![1; text.len()]] {
            let out = filtered(&[&set], text.as_bytes(), &cuts);
            assert_eq!(String::from_utf8(out).unwrap(), redacted, "{text}");
        }
    }
}

#[test]
fn an_unterminated_private_key_does_not_hide_the_rest_of_a_log() {
    let set = SecretSet::default();
    let rest = "an ordinary line\n".repeat(1000);
    let out = filtered(&[&set], format!("-----BEGIN PRIVATE KEY-----\n{rest}").as_bytes(), &[100; 100]);
    let hidden = journeyman_domain::limits::REDACT_KEY_BLOCK_BYTES_MAX - 1;
    assert_eq!(String::from_utf8(out).unwrap(), format!("-----BEGIN PRIVATE KEY-----[redacted]{}", &rest[hidden..]));
}

#[test]
fn hostile_text_costs_no_more_than_its_length() {
    // Each text may start a match at nearly every byte. Following each candidate to its end would take minutes.
    let mut set = SecretSet::default();
    set.add(&"a".repeat(4000));
    for text in ["eyJa-", "ghp_", "a://", "a", "-----BEGIN ", "Authorization", "&sig=", "?sig%", "YWFh", "\n"] {
        let text = text.repeat((1 << 18) / text.len());
        let out = filtered(&[&set], text.as_bytes(), &[16 << 10; 64]);
        assert!(out.len() <= text.len() * 2, "{}", out.len());
    }
}

#[test]
fn a_secret_is_redacted_while_its_guard_lives() {
    let hidden = hide(["only-here-8a6f"]);
    assert_eq!(text("a only-here-8a6f b"), "a [redacted] b");
    drop(hidden);
    assert_eq!(text("a only-here-8a6f b"), "a only-here-8a6f b");
}

#[test]
fn variable_names_are_matched_against_the_patterns() {
    let patterns = ["*_TOKEN", "*_KEY", "SECRET*X"].map(str::to_owned);
    for name in ["GITHUB_TOKEN", "_TOKEN", "api_key", "SECRETX", "SECRET_ANYTHING_X"] {
        assert!(is_secret_name(name, &patterns), "{name}");
    }
    for name in ["TOKEN", "TOKENS", "GITHUB_TOKEN_FILE", "KEYBOARD", "SECRET", "WORKER_KEY"] {
        assert!(!is_secret_name(name, &patterns), "{name}");
    }
    assert!(is_secret_name("WORKER_KEY", &["WORKER_KEY".to_owned()]), "who says so means it");
}
