//! Scopes: which held scopes cover a wanted one. Pure.

/// True if a scope is held literally or by a scope that ends in `*`.
pub fn satisfies(held: &[String], wanted: &str) -> bool {
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

    #[test]
    fn a_trailing_star_covers_every_scope_with_that_prefix() {
        assert!(satisfies(&held(&["queue:claim-work:p/*"]), "queue:claim-work:p/w"));
        assert!(satisfies(&held(&["*"]), "anything"));
        assert!(!satisfies(&held(&["queue:claim-work:p"]), "queue:claim-work:p/w"));
        assert!(!satisfies(&held(&["queue:*:p"]), "queue:claim-work:p"));
        assert!(!satisfies(&held(&["queue:claim-work:p/*"]), "queue:claim-work:q/w"));
        assert!(!satisfies(&held(&["queue:a"]), "queue:*"));
        assert!(satisfies_all(&held(&["queue:*"]), &held(&["queue:a*", "queue:b"])));
    }
}
