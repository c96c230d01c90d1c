//! Scopes: what a caller may do, what a call asks for, and the words of a refusal. Pure.

use std::fmt::Write as _;

/// What a call asks of its caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScopeExpression {
    Scope(String),
    All(Vec<ScopeExpression>),
    Any(Vec<ScopeExpression>),
}

/// The words a refusal is message in; the two eras of the service differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Era {
    Legacy,
    Modern,
}

impl ScopeExpression {
    pub(crate) fn scope(text: impl Into<String>) -> Self {
        Self::Scope(text.into())
    }

    /// What of it the caller lacks; `None` where it is satisfied.
    fn missing(&self, held: &[String]) -> Option<Self> {
        match self {
            Self::Scope(wanted) => (!satisfies(held, wanted)).then(|| self.clone()),
            Self::All(parts) => {
                let lacking: Vec<_> = parts.iter().filter_map(|part| part.missing(held)).collect();
                match lacking.len() {
                    0 => None,
                    1 => lacking.into_iter().next(),
                    _ => Some(Self::All(lacking)),
                }
            }
            Self::Any(parts) => {
                let lacking: Vec<_> = parts.iter().map_while(|part| part.missing(held)).collect();
                (lacking.len() == parts.len()).then_some(Self::Any(lacking))
            }
        }
    }

    fn format_into(&self, out: &mut String, depth: usize) {
        let (name, parts) = match self {
            Self::Scope(text) => {
                // At the top a bare scope stands without quotes, as the service prints it.
                let shown = if depth == 0 { text.clone() } else { quoted(text) };
                out.push_str(&shown);
                return;
            }
            Self::All(parts) => ("AllOf", parts),
            Self::Any(parts) => ("AnyOf", parts),
        };
        let pad = "  ".repeat(depth);
        write_part(out, format_args!("{{\n{pad}  \"{name}\": ["));
        for (at, part) in parts.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write_part(out, format_args!("{comma}\n{pad}    "));
            part.format_into(out, depth + 2);
        }
        write_part(out, format_args!("\n{pad}  ]\n{pad}}}"));
    }

    fn formatted(&self) -> String {
        let mut out = String::new();
        self.format_into(&mut out, 0);
        out
    }
}

fn write_part(out: &mut String, part: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    out.write_fmt(part).unwrap_or_default();
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Whether the scopes held include the one wanted: literally, or by one that ends in `*`.
pub(crate) fn satisfies(held: &[String], wanted: &str) -> bool {
    held.iter().any(|scope| scope == wanted || scope.strip_suffix('*').is_some_and(|start| wanted.starts_with(start)))
}

/// Whether every scope wanted is held. One wanted that ends in `*` is held only by one that covers all it covers.
pub(crate) fn satisfies_all(held: &[String], wanted: &[String]) -> bool {
    wanted.iter().all(|scope| satisfies(held, scope))
}

/// Why the caller may not do what it asks for, in the words of the era; `None` where it may.
pub(crate) fn missing_scopes_message(
    asks: &ScopeExpression,
    held: &[String],
    client: Option<&str>,
    era: Era,
) -> Option<String> {
    let missing = asks.missing(held)?;
    Some(match (era, client) {
        (Era::Modern, None) => format!(
            "This request requires Taskcluster credentials that satisfy the following scope expression:\n\n\
             ```\n{}\n```",
            asks.formatted()
        ),
        (Era::Modern, Some(client)) => format!(
            "Client ID {client} does not have sufficient scopes and is missing the following scopes:\n\n\
             ```\n{}\n```\n\n\
             This request requires the client to satisfy the following scope expression:\n\n```\n{}\n```",
            missing.formatted(),
            asks.formatted()
        ),
        (Era::Legacy, client) => format!(
            "Client ID {} does not have sufficient scopes and are missing the following scopes:\n\n\
             ```\n{}\n```\n\nYou have the scopes:\n\n```\n{}\n```\n\n\
             This request requires you to satisfy this scope expression:\n\n```\n{}\n```",
            client.unwrap_or("undefined"),
            missing.formatted(),
            serde_json::to_string_pretty(held).unwrap_or_default(),
            asks.formatted()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(scopes: &[&str]) -> Vec<String> {
        scopes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_trailing_star_covers_what_starts_like_it_and_nothing_else_does() {
        assert!(satisfies(&held(&["queue:claim-work:p/*"]), "queue:claim-work:p/w"));
        assert!(satisfies(&held(&["*"]), "anything"));
        assert!(!satisfies(&held(&["queue:claim-work:p"]), "queue:claim-work:p/w"));
        assert!(!satisfies(&held(&["queue:*:p"]), "queue:claim-work:p"));
        assert!(!satisfies(&held(&["queue:a"]), "queue:*"));
        assert!(satisfies_all(&held(&["queue:*"]), &held(&["queue:a*", "queue:b"])));
    }

    #[test]
    fn one_missing_scope_of_several_is_shown_alone() {
        let asks = ScopeExpression::All(vec![ScopeExpression::scope("a"), ScopeExpression::scope("b")]);
        let message = missing_scopes_message(&asks, &held(&["a"]), Some("me"), Era::Modern).unwrap();
        assert!(message.contains("missing the following scopes:\n\n```\nb\n```\n\n"), "{message}");
        assert_eq!(missing_scopes_message(&asks, &held(&["a", "b"]), Some("me"), Era::Modern), None);
    }

    #[test]
    fn any_of_is_satisfied_by_one_of_its_parts() {
        let asks = ScopeExpression::Any(vec![
            ScopeExpression::All(vec![ScopeExpression::scope("a"), ScopeExpression::scope("b")]),
            ScopeExpression::scope("c"),
        ]);
        assert_eq!(missing_scopes_message(&asks, &held(&["c"]), None, Era::Modern), None);
        assert!(missing_scopes_message(&asks, &held(&["a"]), None, Era::Modern).is_some());
    }
}
