//! Checks that a cluster answers, and that this host may list its pods.

use crate::cli::checks::Check;
use journeyman_platform::kubernetes::{KubernetesClient, KubernetesError, PODS, Pod};
use journeyman_platform::settings::values::File;

pub(super) async fn check(name: String, kubeconfig: Option<&File>, namespace: &str) -> Check {
    let part = format!("{name}: cluster");
    let client = KubernetesClient::new(kubeconfig.map(|file| file.0.clone()), namespace.to_owned());
    let listing = client.list::<Pod>(&PODS, ("the pods of namespace", namespace), &[("limit", "1")]);
    let fix = match listing.await {
        Ok(_) => return Check::ok(part, format!("the pods of namespace {namespace} can be listed")),
        Err(error @ (KubernetesError::Denied(_) | KubernetesError::Unauthorized(_))) => (
            error,
            "does the kubeconfig have a user, and its user the role of examples/kubernetes, worker-role.yaml or screwdriver-role.yaml?",
        ),
        Err(error) => (error, "is the server of the kubeconfig reachable from here, and does the namespace exist?"),
    };
    Check::failed(part, fix.0.to_string(), fix.1)
}
