//! Enums whose values have one name in JSON, texts and metrics.

/// Declares an enum whose values have a name each, and `ALL` and `as_str`.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* $vis:vis enum $enum:ident { $($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        $vis enum $enum { $($(#[$doc])* #[serde(rename = $name)] $variant),+ }

        impl $enum {
            /// All values, in the order of their declaration.
            $vis const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// The name in JSON, texts and metrics.
            $vis const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }
    };
}
