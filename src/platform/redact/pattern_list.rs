//! The patterns of [`super::patterns`]. The build script compiles them.

/// Which bytes of a match are covered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Covers {
    /// All but the byte before.
    Token,
    /// The secret begins with the byte that completes the shortest match.
    Value,
    /// Between `://` and the `@` that ends the match.
    UserInfo,
    /// As `Value`, but at most `REDACT_KEY_BLOCK_BYTES_MAX`: a block may be unterminated.
    PrivateKey,
}

/// The first one that matches decides. `authorization` may be in HTTP, in JSON or on a command line: a quoted value ends at
/// the quote, another one after the word that follows a known scheme, or at the end of the line.
pub(super) const PATTERNS: [(Covers, &str); 11] = [
    (Covers::Token, r"[^A-Za-z0-9](?:gh[pousr]_|github_pat_|bkua_|npm_|dop_v1_)[A-Za-z0-9_]{36,}"),
    (Covers::Token, r"[^A-Za-z0-9](?:sk_live_|rk_live_|sk_test_|shpat_)[A-Za-z0-9_]{20,}"),
    (Covers::Token, r"[^A-Za-z0-9](?:gl(?:pat|rt|dt|cbt|ptt)-|dckr_pat_|tskey-)[A-Za-z0-9_-]{20,}"),
    (Covers::Token, r"[^A-Za-z0-9](?:xox[bpars]-|xapp-|sk-ant-|sk-proj-)[A-Za-z0-9_-]{20,}"),
    (Covers::Token, r"[^A-Za-z0-9](?:pypi-|AGE-SECRET-KEY-1|AIza)[A-Za-z0-9_-]{35,}"),
    (Covers::Token, r"[^A-Za-z0-9](?:hv[sb]\.|ya29\.)[A-Za-z0-9_.-]{20,}"),
    (Covers::Token, r"[^A-Za-z0-9_.-]eyJ[A-Za-z0-9_-]{9,}\.[A-Za-z0-9_-]{4,}[A-Za-z0-9_.-]*"),
    (
        Covers::PrivateKey,
        r"(?x) -----BEGIN\ [A-Z\ ]* PRIVATE\ KEY [A-Z\ ]*-----
            [^-] (?:-{0,4}[^-])* (?: -----+ (?: [^-] (?:-{0,4}[^-])* (?: ----- | -{1,4} )? )? | -{1,4} )?",
    ),
    (
        Covers::UserInfo,
        r#"(?x) [A-Za-z0-9_-] :// (?:
            [^\x00-\x20\x7f/?\#"<>\\^`{|}]* : [^\x00-\x20\x7f/?\#"<>\\^`{|}]+ | [^\x00-\x20\x7f/?\#"<>\\^`{|}]{16,}
        ) @"#,
    ),
    (
        Covers::Value,
        r"(?x) (?: (?:[?&;]|u0026|%26|%3[Ff]) (?i:sig|bewit|signature|security-token) | -(?i:signature|security-token) )
            (?:=|%3[Dd]) [A-Za-z0-9%+/=_.~:$*!-]+",
    ),
    (
        Covers::Value,
        r#"(?x) [^A-Za-z0-9] (?i:authorization) ["'\\\ \t]* [:=] [\ \t]* (?:
              "  ["'\\\ \t]* [^"'\\\ \t\r\n] (?: [^"\\\r\n] | \\[^\r\n]? )*
            | '  ["'\\\ \t]* [^"'\\\ \t\r\n] (?: [^'\\\r\n] | \\[^\r\n]? )*
            | \\ ["'\\\ \t]* [^"'\\\ \t\r\n] [^\\\r\n]*
            | (?i: bearer|basic|token|negotiate|apikey) [\ \t]+ [^\ \t"',\\\r\n]*
            | [^\ \t"',\\\r\n]{21,}
            | [^\ \t"',\\\r\n]{1,20} [\ \t]+ [^\r\n]+
            | [^\ \t"',\\\r\n]{1,20}
        )"#,
    ),
];
