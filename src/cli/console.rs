//! `journeyman console`: pages over the roles that it is told of, or finds on this host.

use std::collections::BTreeSet;
use std::net::AddrParseError;
use std::path::Path;
use std::sync::Arc;

use clap::Args;
use futures_util::future::{Either, select};

use super::config_args::{self, CONSOLE_LISTEN, ConfigArgs, ConsoleFlags};
use super::controller_socket::controller_socket;
use super::dev::state_file::{DevState, state_dir};
use super::exit::{Exit, ExitResult, Failure};
use super::queue_client::{QueueClientArgs, build_api_within};
use super::signals::ExitSignals;
use super::taskcluster_setup::build_credentials;
use super::worker::{control_socket, listen_http};
use crate::config::Config;
use crate::config::schema::{ConsoleTarget, TargetKind};
use crate::console::app::targets::{Address, QueueTarget, Target};
use crate::console::app::{self, Console};
use crate::control::client::ControlClient;
use journeyman_domain::limits::TOKEN_BYTES_MIN;
use journeyman_platform::http::BearerToken;
use journeyman_platform::http::client::client_builder;
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::{Listen, Secret, Url};
use journeyman_worker::source::taskcluster::ClientCredentials;

#[derive(Debug, Args)]
pub(super) struct ConsoleArgs {
    /// Address of a worker's pages, such as http://host:7070; may be repeated
    #[arg(long, value_name = "URL")]
    worker: Vec<Url>,
    /// Address of a controller's pages; may be repeated
    #[arg(long, value_name = "URL")]
    controller: Vec<Url>,
    #[command(flatten)]
    queue: QueueClientArgs,
    #[command(flatten)]
    settings: ConfigArgs<ConsoleFlags>,
}

pub(super) async fn run(arguments: ConsoleArgs, environment: &Environment) -> ExitResult {
    let loaded = arguments.settings.load(environment)?;
    log::start(&loaded.config.log, environment);
    config_args::log_warnings(&loaded);
    let mut config = loaded.config;
    let ConsoleArgs { worker, controller, queue, .. } = &arguments;
    let console = build(worker, controller, Some(queue), &config, environment)?;
    let console = Arc::new(Console { token: http_token(&config, environment)?, ..console });
    let invalid = |error: AddrParseError| Failure::new(Exit::Internal, format!("{CONSOLE_LISTEN}: {error}"));
    config.http.listen.get_or_insert(Listen(CONSOLE_LISTEN.parse().map_err(invalid)?));
    let Some(listener) = listen_http(&config, "the console").await? else {
        return Err(Failure::new(Exit::Internal, "the console has no address"));
    };
    let mut signals = ExitSignals::listen()?;
    let serving = async { tokio::join!(listener.serve(app::routes(Arc::clone(&console))), console.watch()) };
    match select(Box::pin(signals.next()), Box::pin(serving)).await {
        Either::Left(_) => Ok(Exit::Success),
        Either::Right(_) => Err(Failure::new(Exit::Internal, "the server of the console ended")),
    }
}

/// The token of orders on pages.
pub(super) fn http_token(config: &Config, environment: &Environment) -> Result<Option<BearerToken>, Failure> {
    let token = config.http.token_file.as_ref().map(|file| file.load("a token", environment)).transpose()?;
    if token.as_ref().is_some_and(|token| token.reveal().len() < TOKEN_BYTES_MIN) {
        let text = format!("the token of `http.token_file` is shorter than {TOKEN_BYTES_MIN} bytes");
        return Err(Failure::new(Exit::Config, text));
    }
    Ok(token.map(|token| BearerToken::new(token.reveal())))
}

/// What the flags and the configuration name, or else what runs on this host.
pub(super) fn build(
    workers: &[Url],
    controllers: &[Url],
    queue: Option<&QueueClientArgs>,
    config: &Config,
    environment: &Environment,
) -> Result<Console, Failure> {
    let mut console = Console::default();
    let flags = [(TargetKind::Worker, workers), (TargetKind::Controller, controllers)];
    let of_flag = |(kind, urls): (TargetKind, &[Url])| {
        (kind.as_str().to_owned(), ConsoleTarget { kind, urls: urls.to_vec(), ..ConsoleTarget::default() })
    };
    let configured = config.console.target.iter().map(|(name, target)| (name.clone(), target.clone()));
    let http = client_builder().build().map_err(|error| Failure::new(Exit::Internal, error.to_string()))?;
    let mut names = BTreeSet::new();
    for (name, target) in configured.chain(flags.into_iter().map(of_flag)) {
        let token = target.token_file.as_ref().map(|file| file.load("a token", environment)).transpose()?;
        for (index, url) in target.urls.iter().enumerate() {
            let name = if target.urls.len() == 1 { name.clone() } else { format!("{name}-{}", index + 1) };
            add(&mut console, &target, &name, url, token.clone(), &http)?;
            if !names.insert(name.clone()) {
                let text = format!("[console.target]: {name:?} names two roles; give each another name");
                return Err(Failure::new(Exit::Config, text));
            }
        }
    }
    if let Some(queue) = queue.filter(|queue| queue.is_given(environment)) {
        let name = if names.contains("queue") { "root-url" } else { "queue" };
        console.queues.push(QueueTarget { name: name.to_owned(), api: queue.build(environment)?.api });
    }
    if console.is_empty() {
        find(&mut console, config, environment);
    }
    if console.is_empty() {
        return Err(Failure::new(
            Exit::Usage,
            "there is nothing to show: no worker, controller or `journeyman dev` runs on this host; name them by --worker, --controller \
             and --root-url, or in [console.target.NAME]",
        ));
    }
    Ok(console)
}

fn add(
    console: &mut Console,
    target: &ConsoleTarget,
    name: &str,
    url: &Url,
    token: Option<Secret>,
    http: &reqwest::Client,
) -> Result<(), Failure> {
    let name = name.to_owned();
    let address = || {
        let base = format!("{}/", url.as_str().trim_end_matches('/'));
        let url = base.parse().map_err(|error| Failure::new(Exit::Config, format!("{base}: {error}")))?;
        Ok::<_, Failure>(Address { name: name.clone(), url, token: token.clone(), http: http.clone() })
    };
    match target.kind {
        TargetKind::Queue => {
            let client = target
                .client_id
                .clone()
                .zip(token.clone())
                .map(|(client_id, access_token)| ClientCredentials { client_id, access_token, certificate: None });
            let credentials = client.as_ref().map(build_credentials).transpose()?;
            let api = build_api_within(url.as_str(), credentials, target.allow_hosts.clone())?;
            console.queues.push(QueueTarget { name, api });
        }
        TargetKind::Worker => console.workers.push(Target::remote(address()?, "status.json")),
        TargetKind::Controller => console.controllers.push(Target::remote(address()?, "status.json")),
        TargetKind::Notifier => console.notifiers.push(Target::remote(address()?, "v1/status")),
    }
    Ok(())
}

/// What runs on this host: `journeyman dev`, and the worker and the controller of the configuration.
fn find(console: &mut Console, config: &Config, environment: &Environment) {
    let worker = |socket: &Path| at_socket(socket, |client| async move { client.status().await.ok() });
    if let Some(dev) = DevState::read(&state_dir(environment)) {
        console.queues.extend(dev.client().ok().map(|api| QueueTarget { name: "dev".to_owned(), api }));
        console.workers.extend(dev.socket.as_deref().and_then(worker));
    }
    console.workers.extend(worker(&control_socket(config)));
    let controller = controller_socket(config);
    let controller =
        controller.and_then(|socket| at_socket(&socket, |client| async move { client.controller_status().await.ok() }));
    console.controllers.extend(controller);
}

fn at_socket<S, F: Future<Output = Option<S>> + Send + 'static>(
    socket: &Path,
    ask: impl Fn(Arc<ControlClient>) -> F + Send + Sync + 'static,
) -> Option<Target<S>> {
    let client = Arc::new(ControlClient::new(socket).ok()?);
    Some(Target::Own(Arc::new(move || Box::pin(ask(Arc::clone(&client))))))
}
