//! Which types of events an endpoint wants.

use super::event::OWN_TYPES;

/// A type, or a beginning of types with `*` in place of the rest. The notifier's own types have to be named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypePattern(String);

impl TypePattern {
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn matches(&self, event_type: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(beginning) => {
                event_type.starts_with(beginning)
                    && (beginning.starts_with(OWN_TYPES) || !event_type.starts_with(OWN_TYPES))
            }
            None => self.0 == event_type,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_the_rest() {
        for (pattern, event_type, matches) in [
            ("*", "build.finished", true),
            ("build.*", "build.finished", true),
            ("build.*", "builds.finished", false),
            ("build.finished", "build.finished", true),
            ("build.finished", "build.finished.late", false),
            ("*", "notifier.endpoint.failing", false),
            ("notifier.*", "notifier.endpoint.failing", true),
            ("notifier.endpoint.failing", "notifier.endpoint.failing", true),
        ] {
            assert_eq!(TypePattern::new(pattern).matches(event_type), matches, "{pattern} {event_type}");
        }
    }
}
