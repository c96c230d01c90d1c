//! An artifact as a handler produces it and a source uploads it.

use super::file::TaskFile;

/// An artifact to upload.
#[derive(Debug)]
pub struct Artifact {
    /// Printable ASCII, such as `public/build/target.tar.gz`.
    pub name: String,
    /// RFC 3339; `None` is the task's expiry.
    pub expires: Option<String>,
    /// The content.
    pub body: ArtifactBody,
}

/// The content of an artifact.
#[derive(Debug, Clone)]
pub enum ArtifactBody {
    /// An open regular file, from offset 0, read with positioned reads.
    File {
        /// The file.
        file: TaskFile,
        /// Bytes to send.
        bytes: u64,
        /// The media type.
        content_type: String,
        /// How the content is, or is to be, compressed.
        encoding: ContentEncoding,
    },
    /// Another artifact of the same run.
    Link {
        /// The name of that artifact.
        target: String,
        /// The media type.
        content_type: String,
    },
    /// Content that is served elsewhere. Another reference, or a link, may replace it.
    Reference {
        /// The address that serves it.
        url: String,
        /// The media type.
        content_type: String,
    },
    /// An artifact that could not be created.
    Error {
        /// The reason.
        reason: ArtifactErrorReason,
        /// A message for the author of the task.
        message: String,
    },
}

/// How content is compressed in transfer and where it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ContentEncoding {
    /// Not at all.
    #[default]
    Identity,
    /// The queue stores it with gzip, if it can, and says so to readers.
    Gzip,
}

/// Why an artifact could not be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArtifactErrorReason {
    /// The file does not exist.
    Missing,
    /// The path is not a regular file, or goes through a symbolic link.
    Irregular,
    /// The file is larger than [`journeyman_domain::limits::ARTIFACT_BYTES_MAX`].
    TooLarge,
    /// The worker cannot read the file.
    Unreadable,
}
