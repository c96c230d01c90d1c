//! Orders over HTTP: only from who shows the token.

use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{HeaderValue, WWW_AUTHENTICATE};
use axum::http::{Response, StatusCode};
use sha2::{Digest as _, Sha256};

use crate::control::Answer;
use crate::control::controller::Ordered;
use crate::control::server::Refusal;
use crate::observe::door::{Posted, said};

/// Tells the controller.
pub type Tell = dyn Fn(Ordered) -> Telling + Send + Sync;
/// An order that is under way.
pub type Telling = Pin<Box<dyn Future<Output = Result<Answer, Refusal>> + Send>>;

/// The token that orders need. It is not kept.
#[derive(Clone, Copy)]
pub struct Token([u8; 32]);

impl std::fmt::Debug for Token {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Token")
    }
}

impl Token {
    /// This one.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }

    /// Whether it is this one. How long that takes depends on neither.
    fn is(&self, shown: &str) -> bool {
        let shown: [u8; 32] = Sha256::digest(shown).into();
        let differing = self.0.iter().zip(shown).fold(0, |bits, (own, other)| black_box(bits | (own ^ other)));
        differing == 0
    }
}

/// Who may give orders, and to whom they go.
#[derive(Clone)]
pub struct Orders {
    /// What they need; `None` where nobody can give any.
    pub token: Option<Token>,
    /// Where they go.
    pub tell: Arc<Tell>,
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Orders").field("token", &self.token).finish_non_exhaustive()
    }
}

impl Orders {
    /// What is answered to an order.
    pub(super) async fn answer(&self, posted: Posted) -> Response<Body> {
        let answered = match self.may(&posted) {
            Ok(()) => match Ordered::read(&posted.body) {
                Ok(ordered) => (self.tell)(ordered).await,
                Err(refusal) => Err(refusal),
            },
            Err(refusal) => Err(refusal),
        };
        let (status, answer) = match answered {
            Ok(answer) => (StatusCode::OK, answer),
            Err(Refusal(status, said)) => (status, Answer { said }),
        };
        let mut answer = said(status, "application/json", json(&answer));
        if status == StatusCode::UNAUTHORIZED {
            answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"orders\""));
        }
        answer
    }

    fn may(&self, posted: &Posted) -> Result<(), Refusal> {
        let Some(token) = &self.token else {
            let text = "nobody can give orders here: `http.token_file` names no token; `journeyman controller` gives them on its host";
            return Err(Refusal(StatusCode::FORBIDDEN, text.to_owned()));
        };
        let shown = posted.authorization.as_deref().and_then(|shown| {
            let (scheme, shown) = shown.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(shown.trim())
        });
        match shown {
            Some(shown) if token.is(shown) => Ok(()),
            Some(_) => {
                tracing::warn!("an order with another token than that of `http.token_file` was refused");
                Err(Refusal(StatusCode::UNAUTHORIZED, "this is not the token of `http.token_file`".to_owned()))
            }
            None => {
                let text = "an order needs the token of `http.token_file`, as `Authorization: Bearer TOKEN`";
                Err(Refusal(StatusCode::UNAUTHORIZED, text.to_owned()))
            }
        }
    }
}

fn json(answer: &Answer) -> String {
    serde_json::to_string(answer).unwrap_or_default() + "\n"
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;

    use super::*;

    fn posted(authorization: Option<&str>, body: &'static str) -> Posted {
        Posted { authorization: authorization.map(str::to_owned), body: Bytes::from_static(body.as_bytes()) }
    }

    fn orders(token: Option<Token>) -> Orders {
        let tell: Arc<Tell> = Arc::new(|_| Box::pin(std::future::ready(Ok(Answer { said: "obeyed".to_owned() }))));
        Orders { token, tell }
    }

    #[tokio::test]
    async fn an_order_is_obeyed_only_from_who_shows_the_token() {
        const ORDER: &str = r#"{"order":{"resume":{}}}"#;
        let with = orders(Some(Token::new("t0ken-of-tests")));
        for (shown, status) in [
            (None, 401),
            (Some("Bearer "), 401),
            (Some("Bearer t0ken-of-test"), 401),
            (Some("Bearer t0ken-of-testsX"), 401),
            (Some("Basic t0ken-of-tests"), 401),
            (Some("t0ken-of-tests"), 401),
            (Some("Bearer t0ken-of-tests"), 200),
            (Some("bearer t0ken-of-tests"), 200),
        ] {
            assert_eq!(with.answer(posted(shown, ORDER)).await.status(), status, "{shown:?}");
        }
        assert_eq!(orders(None).answer(posted(Some("Bearer "), ORDER)).await.status(), 403);
        assert_eq!(with.answer(posted(Some("Bearer t0ken-of-tests"), r#"{"order":"stop"}"#)).await.status(), 400);
    }

    #[test]
    fn a_token_is_not_shown() {
        assert_eq!(format!("{:?}", orders(Some(Token::new("x")))), "Orders { token: Some(Token), .. }");
    }
}
