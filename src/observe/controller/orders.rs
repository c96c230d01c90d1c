//! Orders over HTTP, and what was put aside: only for who shows the token.

use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{HeaderValue, WWW_AUTHENTICATE};
use axum::http::{Method, Response, StatusCode};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::openapi::{ORDERS, POISON};
use crate::control::Answer;
use crate::control::controller::{Ordered, Pools};
use crate::control::poison::{Inventories, Settle};
use crate::control::server::Refusal;
use crate::controller::inventory::Settled;
use crate::observe::door::{Asked, Guarded, Wanted, said};

/// Who orders go to.
pub trait Obeys: Send + Sync {
    /// Gives an order.
    fn order(&self, ordered: Ordered) -> Telling<Answer>;
    /// Looks at what was put aside in the pool of this name, or in all of them.
    fn inventories(&self, pool: Option<String>) -> Telling<Inventories>;
    /// Has requests tried once more, or dropped.
    fn settle(&self, settle: Settle) -> Telling<Settled>;
}

/// What is said to it, which is under way.
pub type Telling<T> = Pin<Box<dyn Future<Output = Result<T, Refusal>> + Send>>;

impl Obeys for Pools {
    fn order(&self, ordered: Ordered) -> Telling<Answer> {
        let pools = self.clone();
        Box::pin(async move { Self::order(&pools, ordered).await })
    }

    fn inventories(&self, pool: Option<String>) -> Telling<Inventories> {
        let pools = self.clone();
        Box::pin(async move { Self::inventories(&pools, pool.as_deref()).await })
    }

    fn settle(&self, settle: Settle) -> Telling<Settled> {
        let pools = self.clone();
        Box::pin(async move { Self::settle(&pools, settle).await })
    }
}

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
    pub to: Arc<dyn Obeys>,
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Orders").field("token", &self.token).finish_non_exhaustive()
    }
}

impl Orders {
    /// What is behind the door for those who have the token.
    pub(super) fn guarded(self) -> Vec<Guarded> {
        let (orders, poison) = (self.clone(), self);
        let order = move |asked| {
            let orders = orders.clone();
            Box::pin(async move { orders.answer(asked).await }) as Pin<Box<dyn Future<Output = _> + Send>>
        };
        let put_aside = move |asked| {
            let poison = poison.clone();
            Box::pin(async move { poison.put_aside(asked).await }) as Pin<Box<dyn Future<Output = _> + Send>>
        };
        vec![
            Guarded { path: ORDERS, methods: &[Method::POST], answer: Box::new(order) },
            Guarded { path: POISON, methods: &[Method::GET, Method::POST], answer: Box::new(put_aside) },
        ]
    }

    /// What is answered to an order.
    async fn answer(&self, asked: Asked) -> Response<Body> {
        let answered = async {
            match self.may(asked)? {
                Wanted::Do(body) => self.to.order(Ordered::read(&body)?).await,
                Wanted::Look(_) => Err(Refusal(StatusCode::METHOD_NOT_ALLOWED, "orders are posted here".to_owned())),
            }
        };
        shown(answered.await)
    }

    /// What is answered about what was put aside.
    async fn put_aside(&self, asked: Asked) -> Response<Body> {
        match self.may(asked) {
            Ok(Wanted::Look(query)) => shown(self.to.inventories(query.as_deref().and_then(pool)).await),
            Ok(Wanted::Do(body)) => {
                let settled = async { self.to.settle(Settle::read(&body)?).await };
                shown(settled.await)
            }
            Err(refusal) => shown::<Answer>(Err(refusal)),
        }
    }

    fn may(&self, asked: Asked) -> Result<Wanted, Refusal> {
        let Some(token) = &self.token else {
            let text = "nobody can give orders here: `http.token_file` names no token; `journeyman controller` gives them on its host";
            return Err(Refusal(StatusCode::FORBIDDEN, text.to_owned()));
        };
        let shown = asked.authorization.as_deref().and_then(|shown| {
            let (scheme, shown) = shown.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(shown.trim())
        });
        match shown {
            Some(shown) if token.is(shown) => Ok(asked.what),
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

fn shown<T: Serialize>(answered: Result<T, Refusal>) -> Response<Body> {
    let (status, text) = match answered {
        Ok(answer) => (StatusCode::OK, json(&answer)),
        Err(Refusal(status, said)) => (status, json(&Answer { said })),
    };
    let mut answer = said(status, "application/json", text);
    if status == StatusCode::UNAUTHORIZED {
        answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"orders\""));
    }
    answer
}

fn json(answer: &impl Serialize) -> String {
    serde_json::to_string(answer).unwrap_or_default() + "\n"
}

/// The pool that a query names.
fn pool(query: &str) -> Option<String> {
    url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "pool").map(|(_, pool)| pool.into_owned())
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;

    use super::*;

    fn posted(authorization: Option<&str>, body: &'static str) -> Asked {
        let what = Wanted::Do(Bytes::from_static(body.as_bytes()));
        Asked { authorization: authorization.map(str::to_owned), what }
    }

    struct Obedient;

    impl Obeys for Obedient {
        fn order(&self, _: Ordered) -> Telling<Answer> {
            Box::pin(std::future::ready(Ok(Answer { said: "obeyed".to_owned() })))
        }

        fn inventories(&self, pool: Option<String>) -> Telling<Inventories> {
            let of = pool.map(|pool| (pool, crate::controller::inventory::Inventory::default()));
            Box::pin(std::future::ready(Ok(of.into_iter().collect())))
        }

        fn settle(&self, _: Settle) -> Telling<Settled> {
            Box::pin(std::future::ready(Ok(Settled::default())))
        }
    }

    fn orders(token: Option<Token>) -> Orders {
        Orders { token, to: Arc::new(Obedient) }
    }

    #[tokio::test]
    async fn what_was_put_aside_is_for_those_who_show_the_token_also_to_look_at() {
        let with = orders(Some(Token::new("t0ken-of-tests")));
        let look = |shown: Option<&str>| Asked {
            authorization: shown.map(str::to_owned),
            what: Wanted::Look(Some("pool=a+b&more".to_owned())),
        };
        assert_eq!(with.put_aside(look(None)).await.status(), 401);
        let answer = with.put_aside(look(Some("Bearer t0ken-of-tests"))).await;
        assert_eq!(answer.status(), 200);
        let body = axum::body::to_bytes(answer.into_body(), 1 << 10).await.unwrap();
        assert_eq!(body, "{\"a b\":{\"requests\":[],\"more\":0}}\n");
        const DROP: &str = r#"{"which":"all","fate":"drop","by":"ana"}"#;
        assert_eq!(with.put_aside(posted(None, DROP)).await.status(), 401);
        assert_eq!(with.put_aside(posted(Some("Bearer t0ken-of-tests"), DROP)).await.status(), 200);
        assert_eq!(with.put_aside(posted(Some("Bearer t0ken-of-tests"), "{}")).await.status(), 400);
        assert_eq!(orders(None).put_aside(look(Some("Bearer "))).await.status(), 403);
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
