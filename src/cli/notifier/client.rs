//! Calls a running notifier.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use clap::{Args, ValueHint};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cli::config_args::{ConfigArgs, NoFlags};
use crate::cli::exit::{Exit, Failure};
use crate::config::schema;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::{SecretFile, Url};
use journeyman_worker::notify::{CallError, NotifierClient};

/// The address of the notifier, and the token for it.
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
    pub(super) fn client(self, environment: &Environment) -> Result<NotifierClient, Failure> {
        let config = self.settings.load(&environment.without_controller_variables())?.config.notifier;
        let url = match &self.url {
            Some(url) => url.parts().clone(),
            None => address(&config)?,
        };
        let Some(file) = self.token_file.as_ref().or(config.token_file.as_ref()) else {
            return Err(Failure::new(Exit::Config, "no token: set --token-file, or `notifier.token_file`"));
        };
        let token = file.load("a token", environment)?;
        NotifierClient::new(url, token).map_err(|error| Failure::from_error(Exit::Internal, &error))
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

pub(super) struct Client(NotifierClient);

impl Client {
    pub(super) fn new(arguments: ClientArgs, environment: &Environment) -> Result<Self, Failure> {
        arguments.client(environment).map(Self)
    }

    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        path: &[&str],
        parameters: &[(&str, Option<String>)],
    ) -> Result<T, Failure> {
        let body = self.0.get(path, parameters).await.map_err(failure)?;
        let other = |_| failure(self.0.unavailable("its answer is not that of this version's notifier"));
        serde_json::from_slice(&body).map_err(other)
    }

    pub(super) async fn post(&self, path: &[&str], body: &Value) -> Result<Value, Failure> {
        let body = self.0.post(path, body).await.map_err(failure)?;
        Ok(serde_json::from_slice(&body).unwrap_or_default())
    }
}

pub(super) fn failure(error: CallError) -> Failure {
    let exit = match &error {
        CallError::Denied(_) => Exit::Denied,
        CallError::Refused(_) => Exit::Failed,
        CallError::Unavailable { .. } => Exit::Unreachable,
    };
    Failure::new(exit, error.to_string())
}
