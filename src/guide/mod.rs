//! The user guide. `journeyman guide` prints its pages, and they are part of the crate's documentation, so that they match the
//! installed version.

/// A page of the guide.
#[derive(Debug, Clone, Copy)]
pub struct GuidePage {
    /// One lower-case word.
    pub name: &'static str,
    /// Markdown. The first line is the title.
    pub text: &'static str,
}

impl GuidePage {
    /// The text of the first line.
    pub fn title(&self) -> &'static str {
        self.text.lines().next().unwrap_or(self.name).trim_start_matches("# ")
    }
}

macro_rules! pages {
    ($($name:ident)*) => {
        $(#[doc = include_str!(concat!(stringify!($name), ".md"))] pub mod $name {})*

        /// Every page.
        pub const PAGES: &[GuidePage] = &[
            $(GuidePage { name: stringify!($name), text: include_str!(concat!(stringify!($name), ".md")) },)*
        ];
    };
}

pages! { handlers staged kubernetes taskcluster generic_worker payloads requests zookeeper screwdriver notifier bridge controller drivers hosts watching console secrets queue scale configuration figures why }
