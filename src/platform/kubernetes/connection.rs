//! Sends requests to an API server with the credentials that were valid when the connection was made.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use hyper::HeaderMap;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderValue};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Certificate, Identity, Method, Proxy, RequestBuilder};
use serde_json::Value;
use tokio::time::Instant;
use url::Url;

use super::kubeconfig::Access;
use crate::http::client::{client_builder, error_chain};
use journeyman_domain::limits::KUBERNETES_CONNECT_TIMEOUT;

pub(super) struct Connection {
    http: reqwest::Client,
    /// Without a slash at its end.
    server: String,
    headers: HeaderMap,
    /// Its credentials were good for a call.
    pub(super) was_accepted: AtomicBool,
    /// The time at which the credentials have to be read again.
    pub(super) valid_until: Option<Instant>,
}

pub(super) struct Call<'a> {
    pub(super) method: Method,
    /// After the address of the server.
    pub(super) path: String,
    pub(super) query: &'a [(&'a str, &'a str)],
    pub(super) accept: &'static str,
    pub(super) content_type: &'static str,
    pub(super) body: Option<&'a Value>,
}

impl Connection {
    pub(super) async fn open(kubeconfig: Option<&Path>) -> Result<Self, String> {
        let access = Access::read(kubeconfig).await?;
        let read_at = Instant::now();
        let mut server = Url::parse(&access.server).map_err(|error| format!("server {}: {error}", access.server))?;
        if !matches!(server.scheme(), "http" | "https") {
            return Err(format!("server {}: neither http:// nor https://", access.server));
        }
        let failed = |what: &str, error: &reqwest::Error| format!("{what} of the kubeconfig: {}", error_chain(error));
        let mut builder = client_builder().connect_timeout(KUBERNETES_CONNECT_TIMEOUT);
        if access.is_unverified {
            builder = builder.tls_danger_accept_invalid_certs(true);
        } else if let Some(ca) = &access.ca {
            let what = "certificate-authority";
            let certificates = Certificate::from_pem_bundle(ca).map_err(|error| failed(what, &error))?;
            if certificates.is_empty() {
                return Err(format!("{what} of the kubeconfig holds no certificate (PEM)"));
            }
            builder = builder.tls_certs_only(certificates);
        }
        if let Some(pem) = &access.credentials.identity {
            builder = builder.identity(Identity::from_pem(pem).map_err(|error| failed("the certificate", &error))?);
        }
        if let Some(proxy) = &access.proxy {
            builder = builder.proxy(Proxy::all(proxy).map_err(|error| failed("proxy-url", &error))?);
        }
        let mut headers = access.credentials.headers;
        if let Some(name) = &access.server_name {
            if access.proxy.is_some() {
                return Err("tls-server-name and proxy-url of the kubeconfig exclude each other".to_owned());
            }
            // The client verifies the name of the URL, so the URL has that name and leads to the server's address.
            let authority = server[url::Position::BeforeHost..url::Position::AfterPort].to_owned();
            let host = server.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            headers.insert(HOST, HeaderValue::try_from(authority).map_err(|error| error.to_string())?);
            builder = builder.dns_resolver(Arc::new(FixedHost(host)));
            let is_name = name.parse::<std::net::IpAddr>().is_err() && server.set_host(Some(name)).is_ok();
            if !is_name {
                return Err(format!("tls-server-name {name} of the kubeconfig is no host name"));
            }
        }
        let http = builder.build().map_err(|error| error_chain(&error))?;
        let valid_until = access.credentials.valid_for.map(|valid_for| read_at + valid_for);
        Ok(Self {
            http,
            server: server.as_str().trim_end_matches('/').to_owned(),
            headers,
            was_accepted: AtomicBool::default(),
            valid_until,
        })
    }

    pub(super) fn request(&self, call: &Call<'_>) -> Result<RequestBuilder, String> {
        let url = format!("{}{}", self.server, call.path);
        let url = Url::parse_with_params(&url, call.query).map_err(|error| format!("{url}: {error}"))?;
        let request = self.http.request(call.method.clone(), url).headers(self.headers.clone());
        let request = request.header(ACCEPT, call.accept);
        Ok(match call.body {
            Some(body) => request.header(CONTENT_TYPE, call.content_type).body(body.to_string()),
            None => request,
        })
    }
}

/// Resolves every name to the addresses of one host.
struct FixedHost(String);

impl Resolve for FixedHost {
    fn resolve(&self, _: Name) -> Resolving {
        let host = self.0.clone();
        Box::pin(async move {
            // The client sets the port.
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
            if found.is_empty() {
                return Err(io::Error::other(format!("{host} has no address")).into());
            }
            let found: Addrs = Box::new(found.into_iter());
            Ok(found)
        })
    }
}
