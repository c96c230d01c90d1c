//! The pages for people who use journeyman, one a task. The README leads to them, `journeyman guide` prints them, and they
//! are part of the documentation: so they have the version of what they speak of.

/// A page.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// Its name: one lower-case word.
    pub name: &'static str,
    /// Its text, in Markdown. The first line is its title.
    pub text: &'static str,
}

impl Page {
    /// What it is about, in a few words.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.text.lines().next().unwrap_or(self.name).trim_start_matches("# ")
    }
}

macro_rules! pages {
    ($($name:ident)*) => {
        $(#[doc = include_str!(concat!(stringify!($name), ".md"))] pub mod $name {})*

        /// Every page.
        pub const PAGES: &[Page] = &[
            $(Page { name: stringify!($name), text: include_str!(concat!(stringify!($name), ".md")) },)*
        ];
    };
}

pages! { handlers taskcluster requests bridge controller drivers hosts watching secrets queue configuration figures }
