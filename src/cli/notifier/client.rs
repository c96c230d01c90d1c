//! Calls a running notifier.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use clap::{Args, ValueHint};
use reqwest::{RequestBuilder, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cli::config_args::{ConfigArgs, NoFlags};
use crate::cli::exit::{Exit, Failure};
use crate::config::values::{Secret, SecretFile, Url};
use crate::config::{Environment, schema};
use crate::http::client::{client_builder, read_body, root_cause};
use crate::limits::{NOTIFIER_ROWS_BYTES_MAX, NOTIFY_CALL_TIMEOUT, NOTIFY_CONNECT_TIMEOUT};

/// Where the notifier is, and the token for it.
#[derive(Debug, Args)]
pub(super) struct ClientArgs {
    /// Address of the notifier [default: that of `notifier.listen`]
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    url: Option<Url>,
    /// File with the notifier's token [default: that of `notifier.token_file`]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    token_file: Option<SecretFile>,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

impl ClientArgs {
    pub(super) fn load(self, environment: &Environment) -> Result<(reqwest::Url, Secret), Failure> {
        let config = self.settings.load(&environment.without_controller_variables())?.config.notifier;
        let url = match &self.url {
            Some(url) => url.parts().clone(),
            None => address(&config)?,
        };
        let Some(file) = self.token_file.as_ref().or(config.token_file.as_ref()) else {
            return Err(Failure::new(Exit::Config, "no token: set --token-file, or `notifier.token_file`"));
        };
        Ok((url, file.load("a token", environment)?))
    }
}

fn address(config: &schema::Notifier) -> Result<reqwest::Url, Failure> {
    format!("http://{}", local(config.listen.0)).parse().map_err(|_| {
        Failure::new(Exit::Config, "`notifier.listen` is no address that a notifier can be reached at; set --url")
    })
}

/// An address that a notifier which listens on all of them can be reached at.
const fn local(listen: SocketAddr) -> SocketAddr {
    match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), listen.port()),
        IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), listen.port()),
        IpAddr::V4(_) | IpAddr::V6(_) => listen,
    }
}

pub(super) struct Client {
    http: reqwest::Client,
    base: reqwest::Url,
    token: Secret,
}

impl Client {
    pub(super) fn new(arguments: ClientArgs, environment: &Environment) -> Result<Self, Failure> {
        let (base, token) = arguments.load(environment)?;
        Self::of(base, token)
    }

    pub(super) fn of(base: reqwest::Url, token: Secret) -> Result<Self, Failure> {
        let http = client_builder().connect_timeout(NOTIFY_CONNECT_TIMEOUT).timeout(NOTIFY_CALL_TIMEOUT).build();
        let http = http.map_err(|error| Failure::from_error(Exit::Internal, &error))?;
        Ok(Self { http, base, token })
    }

    /// Parameters without a value are left out.
    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        parameters: &[(&str, Option<String>)],
    ) -> Result<T, Failure> {
        let mut url = self.url(&[path]);
        let given = parameters.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        url.query_pairs_mut().extend_pairs(given);
        let body = self.answer(self.http.get(url)).await?;
        serde_json::from_slice(&body).map_err(|_| {
            Failure::new(
                Exit::Unreachable,
                format!("the answer of {} is not that of this version's notifier", self.origin()),
            )
        })
    }

    pub(super) async fn post(&self, path: &[&str], body: &Value) -> Result<Value, Failure> {
        let body = self.answer(self.http.post(self.url(path)).json(body)).await?;
        Ok(serde_json::from_slice(&body).unwrap_or_default())
    }

    fn url(&self, path: &[&str]) -> reqwest::Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("v1").extend(path);
        }
        url
    }

    fn origin(&self) -> String {
        self.base.origin().ascii_serialization()
    }

    async fn answer(&self, request: RequestBuilder) -> Result<Vec<u8>, Failure> {
        #[derive(Deserialize)]
        struct Refusal {
            message: String,
        }
        let unreachable = |why: &str| {
            let origin = self.origin();
            let hint = "is it running? `--url` names another address";
            Failure::new(Exit::Unreachable, format!("no answer of the notifier at {origin}: {why}; {hint}"))
        };
        let call = request.bearer_auth(self.token.reveal()).send();
        let mut answer = call.await.map_err(|error| unreachable(&root_cause(&error.without_url())))?;
        let status = answer.status();
        let body = read_body(&mut answer, NOTIFIER_ROWS_BYTES_MAX).await;
        let body = body.map_err(|_| unreachable("its answer broke off or is too long"))?;
        if status.is_success() {
            return Ok(body);
        }
        let message = serde_json::from_slice(&body).map_or_else(|_| status.to_string(), |Refusal { message }| message);
        let exit = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Exit::Denied,
            StatusCode::TOO_MANY_REQUESTS => Exit::Unreachable,
            _ if status.is_server_error() => Exit::Unreachable,
            _ => Exit::Failed,
        };
        Err(Failure::new(exit, message))
    }
}
