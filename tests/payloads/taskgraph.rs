//! The programs that taskgraph puts into tasks, unmodified.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::payloads::deployment::Deployment;
use crate::support::needs;

/// The folder of `run-task` and `fetch-content`.
fn programs(python: &str) -> PathBuf {
    let find = "import taskgraph, pathlib; print(pathlib.Path(taskgraph.__file__).parent / 'run-task')";
    let found = Command::new(python).args(["-c", find]).output().expect("python runs");
    PathBuf::from(String::from_utf8(found.stdout).expect("text").trim())
}

fn git(folder: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new("git");
    let identity = ["-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "init.defaultBranch=main"];
    let output = command.current_dir(folder).args(identity).args(arguments).output().expect("git runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

/// A repository with one commit, and the commit.
fn repository(folder: &Path) -> (String, String) {
    let path = folder.join("repository");
    std::fs::create_dir(&path).expect("created");
    git(&path, &["init", "-q"]);
    std::fs::write(path.join("build.sh"), "echo built from the checkout\ncat \"$MOZ_FETCHES_DIR/data\"\n")
        .expect("written");
    git(&path, &["add", "."]);
    git(&path, &["commit", "-qm", "first"]);
    (format!("file://{}", path.display()), git(&path, &["rev-parse", "HEAD"]))
}

#[tokio::test]
async fn run_task_and_fetch_content_check_out_fetch_and_build() {
    let Some(python) = needs("JOURNEYMAN_TEST_PAYLOADS_PYTHON") else { return };
    let deployment = Deployment::start().await;
    let artifacts = json!([{ "type": "file", "path": "data", "name": "private/data" }]);
    let made = deployment.create("echo fetched >data", json!({ "artifacts": artifacts }), |_| {}).await;
    deployment.run(&[&made]).await.remove(0).completed();
    let (repository, revision) = repository(deployment.folder.path());
    let programs = programs(&python);
    let program = |name: &str| {
        let content = std::fs::read_to_string(programs.join(name)).expect("it is there");
        json!({ "file": name, "content": { "raw": content } })
    };
    let user = if rustix::process::geteuid().is_root() { "--user=root --group=root" } else { "" };
    let command = format!("python3 run-task {user} --src-checkout=checkouts/src -- sh checkouts/src/build.sh");
    let keys = json!({
        "command": [["chmod", "+x", "run-task", "fetch-content"], ["sh", "-c", command]],
        "mounts": [program("run-task"), program("fetch-content"), { "cacheName": "checkouts", "directory": "checkouts" }],
        "features": { "taskclusterProxy": true },
        "env": {
            "REPOSITORIES": r#"{"src": "Sources"}"#,
            "SRC_REPOSITORY_TYPE": "git",
            "SRC_BASE_REPOSITORY": repository,
            "SRC_HEAD_REPOSITORY": repository,
            "SRC_HEAD_REF": "main",
            "SRC_HEAD_REV": revision,
            "MOZ_FETCHES_DIR": "fetches",
            "MOZ_FETCHES": json!([{ "artifact": "private/data", "extract": false, "task": made.as_str() }]).to_string(),
        },
    });
    let change = |definition: &mut Value| {
        definition["dependencies"] = json!([made.as_str()]);
        definition["scopes"] = json!(["generic-worker:cache:checkouts", "queue:get-artifact:private/*"]);
    };
    for found in ["new", "kept from an earlier task"] {
        let log = deployment.run_one("", keys.clone(), change).await.completed();
        assert!(log.contains(&format!("cache checkouts at checkouts: {found}")), "{log}");
        assert!(log.contains("built from the checkout") && log.contains("fetched\n"), "{log}");
    }
}
