//! Scopes: what a caller has and what a call requires. Pure.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScopeExpression {
    Scope(String),
    All(Vec<ScopeExpression>),
    Any(Vec<ScopeExpression>),
}

impl ScopeExpression {
    pub(crate) fn scope(text: impl Into<String>) -> Self {
        Self::Scope(text.into())
    }

    /// The part that `held` does not satisfy, if any.
    pub(crate) fn missing(&self, held: &[String]) -> Option<Self> {
        match self {
            Self::Scope(wanted) => (!satisfies(held, wanted)).then(|| self.clone()),
            Self::All(parts) => {
                let missing: Vec<_> = parts.iter().filter_map(|part| part.missing(held)).collect();
                (!missing.is_empty()).then_some(Self::All(missing))
            }
            Self::Any(parts) => {
                let missing: Vec<_> = parts.iter().map_while(|part| part.missing(held)).collect();
                (missing.len() == parts.len()).then_some(Self::Any(missing))
            }
        }
    }
}

impl fmt::Display for ScopeExpression {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, parts) = match self {
            Self::Scope(text) => return out.write_str(text),
            Self::All(parts) => ("all of", parts),
            Self::Any(parts) => ("one of", parts),
        };
        let parts: Vec<_> = parts.iter().map(ToString::to_string).collect();
        match parts.as_slice() {
            [part] => out.write_str(part),
            parts => write!(out, "{name} ({})", parts.join(", ")),
        }
    }
}

/// Whether a scope is held literally or by a scope that ends in `*`.
pub(crate) fn satisfies(held: &[String], wanted: &str) -> bool {
    held.iter().any(|scope| scope == wanted || scope.strip_suffix('*').is_some_and(|start| wanted.starts_with(start)))
}

/// A wanted scope that ends in `*` must be covered as a whole.
pub(crate) fn satisfies_all(held: &[String], wanted: &[String]) -> bool {
    wanted.iter().all(|scope| satisfies(held, scope))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(scopes: &[&str]) -> Vec<String> {
        scopes.iter().map(ToString::to_string).collect()
    }

    fn missing(expression: &ScopeExpression, scopes: &[&str]) -> Option<String> {
        expression.missing(&held(scopes)).map(|missing| missing.to_string())
    }

    #[test]
    fn a_trailing_star_covers_every_scope_with_that_prefix() {
        assert!(satisfies(&held(&["queue:claim-work:p/*"]), "queue:claim-work:p/w"));
        assert!(satisfies(&held(&["*"]), "anything"));
        assert!(!satisfies(&held(&["queue:claim-work:p"]), "queue:claim-work:p/w"));
        assert!(!satisfies(&held(&["queue:*:p"]), "queue:claim-work:p"));
        assert!(!satisfies(&held(&["queue:a"]), "queue:*"));
        assert!(satisfies_all(&held(&["queue:*"]), &held(&["queue:a*", "queue:b"])));
    }

    #[test]
    fn only_missing_scopes_are_named() {
        let both = ScopeExpression::All(vec![ScopeExpression::scope("a"), ScopeExpression::scope("b")]);
        assert_eq!(missing(&both, &["a"]).unwrap(), "b");
        assert_eq!(missing(&both, &[]).unwrap(), "all of (a, b)");
        assert_eq!(missing(&both, &["a", "b"]), None);
        let any = ScopeExpression::Any(vec![both, ScopeExpression::scope("c")]);
        assert_eq!(missing(&any, &["c"]), None);
        assert_eq!(missing(&any, &["a"]).unwrap(), "one of (b, c)");
    }
}
