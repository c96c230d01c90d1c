//! Signed URLs of Azure queues: one parameter is appended, two placeholders are substituted, and no other byte
//! changes.
//!
//! The signature covers the URL as issued, so everything here works on the text. A parser only checks that the
//! request will have exactly that text and the same target.

use url::{Position, Url};

const MESSAGE_ID: &str = "{{messageId}}";
const POP_RECEIPT: &str = "{{popReceipt}}";

/// No `Debug`: the URLs are credentials.
pub(super) struct SignedUrls {
    poll: String,
    delete: String,
    /// The delete URL with harmless values, to compare others with.
    delete_example: Url,
}

impl SignedUrls {
    pub(super) fn new(poll: String, delete: String) -> Result<Self, String> {
        let poll_url = parse_exact(&poll).map_err(|what| format!("its signedPollUrl {what}"))?;
        if poll_url.query().is_none() {
            // Without a query, an appended parameter would become part of the path.
            return Err("its signedPollUrl has no signature".into());
        }
        let once = |placeholder| delete.matches(placeholder).count() == 1;
        if !once(MESSAGE_ID) || !once(POP_RECEIPT) {
            return Err(format!("its signedDeleteUrl does not contain {MESSAGE_ID} and {POP_RECEIPT} exactly once"));
        }
        let delete_example =
            parse_exact(&substitute(&delete, "x", "x")).map_err(|what| format!("its signedDeleteUrl {what}"))?;
        Ok(Self { poll, delete, delete_example })
    }

    pub(super) fn target_urls(&self) -> Result<[Url; 2], String> {
        Ok([parse_exact(&self.poll)?, self.delete_example.clone()])
    }

    pub(super) fn poll(&self, max: u8) -> Result<Url, String> {
        parse_exact(&format!("{}&numofmessages={max}", self.poll))
    }

    /// The URL that deletes one reception of a message (I13).
    pub(super) fn delete(&self, id: &str, receipt: &str) -> Result<Url, String> {
        if id.is_empty() || receipt.is_empty() {
            return Err("cannot be built: the message has no id or no receipt".into());
        }
        let id = urlencoding::encode(id);
        let url = parse_exact(&substitute(&self.delete, &id, &urlencoding::encode(receipt)))?;
        let keys = |url: &Url| -> Vec<String> { url.query_pairs().map(|(key, _)| key.into_owned()).collect() };
        let segments = |url: &Url| url.path().split('/').count();
        let same_target = url.origin() == self.delete_example.origin()
            && segments(&url) == segments(&self.delete_example)
            && keys(&url) == keys(&self.delete_example);
        if same_target { Ok(url) } else { Err("would have another target with this message's id or receipt".into()) }
    }
}

fn substitute(template: &str, id: &str, receipt: &str) -> String {
    // Neither value can contain a placeholder: braces are percent-encoded.
    template.replacen(MESSAGE_ID, id, 1).replacen(POP_RECEIPT, receipt, 1)
}

/// Parses a URL that will be sent byte for byte as written.
fn parse_exact(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("is not a URL: {error}"))?;
    let plain = matches!(url.scheme(), "http" | "https")
        && url.has_host()
        && url.username().is_empty()
        && url.password().is_none()
        && url.fragment().is_none();
    if !plain {
        return Err("is not a plain http or https URL".into());
    }
    let rest = text.split_once("://").map_or("", |(_, rest)| rest);
    let path_and_query = rest.find('/').map_or("", |start| &rest[start..]);
    if &url[Position::BeforePath..] == path_and_query {
        Ok(url)
    } else {
        Err("contains characters that cannot be sent unchanged, which would break its signature".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: &str = "https://a.queue.core.windows.net/q/messages?visibilitytimeout=300&sig=a%2Fb%2Bc%3D";
    const DELETE: &str =
        "https://a.queue.core.windows.net/q/messages/{{messageId}}?popreceipt={{popReceipt}}&sv=1&sig=a%2Fb%2Bc%3D";

    fn signed() -> SignedUrls {
        SignedUrls::new(POLL.into(), DELETE.into()).ok().unwrap()
    }

    #[test]
    fn the_count_is_appended_and_nothing_else_changes() {
        let url = signed().poll(7).unwrap();
        assert_eq!(url.as_str(), format!("{POLL}&numofmessages=7"));
    }

    #[test]
    fn the_receipt_is_encoded_and_no_other_byte_is_touched() {
        let url = signed().delete("7790fece-964b", "Ag+A/A==").unwrap();
        let expected = DELETE.replace(MESSAGE_ID, "7790fece-964b").replace(POP_RECEIPT, "Ag%2BA%2FA%3D%3D");
        assert_eq!(url.as_str(), expected);
        let url = signed().delete("A", "𝕊").unwrap();
        assert_eq!(url.as_str(), DELETE.replace(MESSAGE_ID, "A").replace(POP_RECEIPT, "%F0%9D%95%8A"));
    }

    #[test]
    fn a_placeholder_inside_a_value_is_not_substituted() {
        let url = signed().delete(POP_RECEIPT, MESSAGE_ID).unwrap();
        let expected =
            DELETE.replace(POP_RECEIPT, "%7B%7BmessageId%7D%7D").replace(MESSAGE_ID, "%7B%7BpopReceipt%7D%7D");
        assert_eq!(url.as_str(), expected);
    }

    #[test]
    fn hostile_ids_and_receipts_lead_nowhere_else() {
        for id in ["..", ".", "../../other/messages/1", "a?b=c", "a#b", "%2e%2e", "a\nb", "\\..\\x", ""] {
            for receipt in ["x&sig=other", "x#y", "/../", "é", " ", "%00", "\0"] {
                let Ok(url) = signed().delete(id, receipt) else {
                    continue;
                };
                assert_eq!(url.host_str(), Some("a.queue.core.windows.net"));
                assert!(url.path().starts_with("/q/messages/"), "{url}");
                assert_eq!(url.path().split('/').count(), 4, "{url}");
                let keys: Vec<_> = url.query_pairs().map(|pair| pair.0.into_owned()).collect();
                assert_eq!(keys, ["popreceipt", "sv", "sig"], "{url}");
            }
        }
        assert!(signed().delete("..", "r").is_err());
        assert!(signed().delete("a", "").is_err());
    }

    #[test]
    fn urls_that_would_not_be_sent_as_they_are_get_refused() {
        let with = |poll: &str| SignedUrls::new(poll.into(), DELETE.into()).err();
        assert!(with("https://h/a/../b?sig=x").unwrap().contains("signature"));
        assert!(with("https://h/q?sig=a b").unwrap().contains("signature"));
        assert!(with("https://h/q?x#y").unwrap().contains("plain"));
        assert!(with("https://u:p@h/q?x").unwrap().contains("plain"));
        assert!(with("file:///etc/passwd").unwrap().contains("plain"));
        assert!(with("https://h:443/q?sig=x").is_none());
        assert!(with("https://h/q/messages").unwrap().contains("no signature"));
        let twice = DELETE.replace("sv=1", POP_RECEIPT);
        assert!(SignedUrls::new(POLL.into(), twice).is_err());
        assert!(SignedUrls::new(POLL.into(), POLL.into()).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_id_and_receipt_keep_the_place_and_come_back_by_decoding(id in "\\PC{1,20}", receipt in "\\PC{1,40}") {
            if let Ok(url) = signed().delete(&id, &receipt) {
                let last = url.path().rsplit('/').next().unwrap_or_default();
                proptest::prop_assert_eq!(urlencoding::decode(last).unwrap(), id);
                let sent = url.query_pairs().find(|pair| pair.0 == "popreceipt").unwrap().1.into_owned();
                proptest::prop_assert_eq!(sent, receipt);
                proptest::prop_assert!(url.as_str().ends_with("&sv=1&sig=a%2Fb%2Bc%3D"));
            } else {
                proptest::prop_assert!(id == "." || id == "..");
            }
        }
    }
}
