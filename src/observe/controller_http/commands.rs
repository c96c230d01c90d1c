//! Commands and the poison queue over HTTP, by bearer token.

use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{HeaderValue, WWW_AUTHENTICATE};
use axum::http::{Method, Response, StatusCode};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::openapi::{COMMANDS_PATH, POISON_PATH};
use crate::control::CommandReply;
use crate::control::controller_api::{PoolCommandRequest, PoolHandles};
use crate::control::poison_api::{Inventories, PoisonActionRequest};
use crate::control::worker_api::ApiError;
use crate::controller::poison_queue::PoisonOutcome;
use crate::observe::server::{AuthRequest, AuthRoute, Operation, response};

pub trait CommandSink: Send + Sync {
    fn send_command(&self, ordered: PoolCommandRequest) -> CommandFuture<CommandReply>;
    fn inventories(&self, pool: Option<String>) -> CommandFuture<Inventories>;
    fn apply_poison_action(&self, settle: PoisonActionRequest) -> CommandFuture<PoisonOutcome>;
}

pub type CommandFuture<T> = Pin<Box<dyn Future<Output = Result<T, ApiError>> + Send>>;

impl CommandSink for PoolHandles {
    fn send_command(&self, ordered: PoolCommandRequest) -> CommandFuture<CommandReply> {
        let pools = self.clone();
        Box::pin(async move { Self::apply(&pools, ordered).await })
    }

    fn inventories(&self, pool: Option<String>) -> CommandFuture<Inventories> {
        let pools = self.clone();
        Box::pin(async move { Self::inventories(&pools, pool.as_deref()).await })
    }

    fn apply_poison_action(&self, settle: PoisonActionRequest) -> CommandFuture<PoisonOutcome> {
        let pools = self.clone();
        Box::pin(async move { Self::apply_poison_action(&pools, settle).await })
    }
}

#[derive(Clone, Copy)]
pub struct BearerToken([u8; 32]);

impl std::fmt::Debug for BearerToken {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Token")
    }
}

impl BearerToken {
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }

    // In constant time.
    fn matches(&self, shown: &str) -> bool {
        let shown: [u8; 32] = Sha256::digest(shown).into();
        let differing = self.0.iter().zip(shown).fold(0, |bits, (own, other)| black_box(bits | (own ^ other)));
        differing == 0
    }
}

#[derive(Clone)]
pub struct CommandApi {
    pub token: Option<BearerToken>,
    pub sink: Arc<dyn CommandSink>,
}

impl std::fmt::Debug for CommandApi {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Orders").field("token", &self.token).finish_non_exhaustive()
    }
}

impl CommandApi {
    pub(super) fn into_routes(self) -> Vec<AuthRoute> {
        let (orders, poison) = (self.clone(), self);
        let order = move |asked| {
            let orders = orders.clone();
            Box::pin(async move { orders.handle_command(asked).await }) as Pin<Box<dyn Future<Output = _> + Send>>
        };
        let put_aside = move |asked| {
            let poison = poison.clone();
            Box::pin(async move { poison.handle_poison(asked).await }) as Pin<Box<dyn Future<Output = _> + Send>>
        };
        vec![
            AuthRoute { path: COMMANDS_PATH, methods: &[Method::POST], handler: Box::new(order) },
            AuthRoute { path: POISON_PATH, methods: &[Method::GET, Method::POST], handler: Box::new(put_aside) },
        ]
    }

    async fn handle_command(&self, asked: AuthRequest) -> Response<Body> {
        let answered = async {
            match self.authenticate(asked)? {
                Operation::Write(body) => self.sink.send_command(PoolCommandRequest::parse(&body)?).await,
                Operation::Read(_) => Err(ApiError(StatusCode::METHOD_NOT_ALLOWED, "use POST for commands".to_owned())),
            }
        };
        json_response(answered.await)
    }

    async fn handle_poison(&self, asked: AuthRequest) -> Response<Body> {
        match self.authenticate(asked) {
            Ok(Operation::Read(query)) => {
                json_response(self.sink.inventories(query.as_deref().and_then(pool_from_query)).await)
            }
            Ok(Operation::Write(body)) => {
                let settled = async { self.sink.apply_poison_action(PoisonActionRequest::parse(&body)?).await };
                json_response(settled.await)
            }
            Err(refusal) => json_response::<CommandReply>(Err(refusal)),
        }
    }

    fn authenticate(&self, asked: AuthRequest) -> Result<Operation, ApiError> {
        let Some(token) = &self.token else {
            let text = "commands are disabled: `http.token_file` is not set; use `journeyman controller` on this host";
            return Err(ApiError(StatusCode::FORBIDDEN, text.to_owned()));
        };
        let shown = asked.authorization.as_deref().and_then(|shown| {
            let (scheme, shown) = shown.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(shown.trim())
        });
        match shown {
            Some(shown) if token.matches(shown) => Ok(asked.operation),
            Some(_) => {
                tracing::warn!("rejected a command with a wrong token");
                Err(ApiError(StatusCode::UNAUTHORIZED, "wrong token: expected that of `http.token_file`".to_owned()))
            }
            None => {
                let text = "a command needs the token of `http.token_file`: `Authorization: Bearer TOKEN`";
                Err(ApiError(StatusCode::UNAUTHORIZED, text.to_owned()))
            }
        }
    }
}

fn json_response<T: Serialize>(answered: Result<T, ApiError>) -> Response<Body> {
    let (status, text) = match answered {
        Ok(answer) => (StatusCode::OK, json(&answer)),
        Err(ApiError(status, message)) => (status, json(&CommandReply { message })),
    };
    let mut answer = response(status, "application/json", text);
    if status == StatusCode::UNAUTHORIZED {
        answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"orders\""));
    }
    answer
}

fn json(answer: &impl Serialize) -> String {
    serde_json::to_string(answer).unwrap_or_default() + "\n"
}

fn pool_from_query(query: &str) -> Option<String> {
    url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "pool").map(|(_, pool)| pool.into_owned())
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;

    use super::*;

    fn posted(authorization: Option<&str>, body: &'static str) -> AuthRequest {
        let what = Operation::Write(Bytes::from_static(body.as_bytes()));
        AuthRequest { authorization: authorization.map(str::to_owned), operation: what }
    }

    struct Obedient;

    impl CommandSink for Obedient {
        fn send_command(&self, _: PoolCommandRequest) -> CommandFuture<CommandReply> {
            Box::pin(std::future::ready(Ok(CommandReply { message: "obeyed".to_owned() })))
        }

        fn inventories(&self, pool: Option<String>) -> CommandFuture<Inventories> {
            let of = pool.map(|pool| (pool, crate::controller::poison_queue::PoisonList::default()));
            Box::pin(std::future::ready(Ok(of.into_iter().collect())))
        }

        fn apply_poison_action(&self, _: PoisonActionRequest) -> CommandFuture<PoisonOutcome> {
            Box::pin(std::future::ready(Ok(PoisonOutcome::default())))
        }
    }

    fn orders(token: Option<BearerToken>) -> CommandApi {
        CommandApi { token, sink: Arc::new(Obedient) }
    }

    #[tokio::test]
    async fn what_was_put_aside_is_for_those_who_show_the_token_also_to_look_at() {
        let with = orders(Some(BearerToken::new("t0ken-of-tests")));
        let look = |shown: Option<&str>| AuthRequest {
            authorization: shown.map(str::to_owned),
            operation: Operation::Read(Some("pool=a+b&other".to_owned())),
        };
        assert_eq!(with.handle_poison(look(None)).await.status(), 401);
        let answer = with.handle_poison(look(Some("Bearer t0ken-of-tests"))).await;
        assert_eq!(answer.status(), 200);
        let body = axum::body::to_bytes(answer.into_body(), 1 << 10).await.unwrap();
        assert_eq!(body, "{\"a b\":{\"requests\":[],\"not_scanned\":0}}\n");
        const DROP: &str = r#"{"selection":"all","action":"discard","by":"ana"}"#;
        assert_eq!(with.handle_poison(posted(None, DROP)).await.status(), 401);
        assert_eq!(with.handle_poison(posted(Some("Bearer t0ken-of-tests"), DROP)).await.status(), 200);
        assert_eq!(with.handle_poison(posted(Some("Bearer t0ken-of-tests"), "{}")).await.status(), 400);
        assert_eq!(orders(None).handle_poison(look(Some("Bearer "))).await.status(), 403);
    }

    #[tokio::test]
    async fn an_order_is_obeyed_only_from_who_shows_the_token() {
        const ORDER: &str = r#"{"command":{"resume":{}}}"#;
        let with = orders(Some(BearerToken::new("t0ken-of-tests")));
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
            assert_eq!(with.handle_command(posted(shown, ORDER)).await.status(), status, "{shown:?}");
        }
        assert_eq!(orders(None).handle_command(posted(Some("Bearer "), ORDER)).await.status(), 403);
        assert_eq!(
            with.handle_command(posted(Some("Bearer t0ken-of-tests"), r#"{"command":"stop"}"#)).await.status(),
            400
        );
    }

    #[test]
    fn a_token_is_not_shown() {
        assert_eq!(format!("{:?}", orders(Some(BearerToken::new("x")))), "Orders { token: Some(Token), .. }");
    }
}
