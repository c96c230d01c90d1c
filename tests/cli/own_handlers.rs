//! Programs with handlers of their own.

use std::path::Path;
use std::process::Command;

use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError};
use journeyman::worker::ExitReason;
use serde_json::Value;

use crate::cli::host::{Host, TOKEN};
use crate::cli::server::{Server, get};
use crate::cli::support::run;

/// The example of this name, which cargo has built beside the tests.
fn example(name: &str, folder: &Path) -> Command {
    let tests = std::env::current_exe().expect("the path of the tests");
    let program = tests.ancestors().nth(2).expect("the target directory").join("examples").join(name);
    assert!(program.exists(), "{} was not built", program.display());
    let mut command = Command::new(program);
    command.env_clear().env("HOME", folder).env("TMPDIR", folder).env("NO_COLOR", "1").current_dir(folder);
    command
}

#[test]
fn a_program_with_a_handler_of_its_own_has_the_whole_command_line() {
    let host = Host::new();
    let greet = |arguments: &[&str]| {
        let mut command = example("greet", host.path());
        command.args(arguments);
        run(&mut command, "")
    };
    let mut dev = example("greet", host.path());
    let mut dev = Server::start(dev.args(["dev", "--log-format", "json"]));
    let page: Value = serde_json::from_str(&dev.logs("status page")).expect("a line of JSON");
    dev.prints("Ctrl-C");
    let created = greet(&["task", "create", "--wait", "--queue", "dev/greet", "--payload", r#"{"name":"Ada"}"#]);
    assert_eq!(created.code, 0, "{}{}", created.out, created.err);
    let task = created.out.split_whitespace().next().expect("an id").to_owned();
    assert_eq!(greet(&["task", "log", &task]).out, "hello Ada\n");
    let status: Value = serde_json::from_str(&greet(&["status", "-o", "json"]).out).expect("JSON");
    assert!(status["sources"].as_array().expect("a list").iter().any(|source| source["name"] == "greet"), "{status}");
    assert_eq!(status["recent_results"][0]["outcome"], "completed", "{status}");
    let address = page["address"].as_str().expect("the address of the page");
    let shown = get(address, "/");
    assert!(shown.contains("greet"), "{shown}");
    let bad = greet(&["task", "create", "--wait", "--queue", "dev/greet", "--payload", r#"{"nam":"Ada"}"#]);
    assert!(
        bad.code == 1 && bad.out.contains("why    the payload is malformed; no task code was run: "),
        "{}",
        bad.out
    );
    assert!(bad.out.contains("'nam' was unexpected"), "{}", bad.out);
    dev.quit();
    let schema: Value =
        serde_json::from_str(&greet(&["handler", "schema", "greet", "--set", "handler.greet.kind=greet"]).out)
            .expect("JSON");
    assert_eq!(schema["required"][0], "name");
    let tested = greet(&["handler", "test", "--payload", r#"{"name":"x"}"#, "--bad-payload", "{}", "greet"]);
    assert_eq!(tested.code, 0, "{}{}", tested.out, tested.err);
    assert!(tested.out.contains("pass     rejects") && tested.out.contains("pass     completes"), "{}", tested.out);
    let accepted = greet(&["handler", "test", "--bad-payload", r#"{"name":"x"}"#, "greet"]);
    assert!(accepted.code == 1 && accepted.out.contains("FAIL     rejects a bad payload"), "{}", accepted.out);
}

#[test]
fn settings_of_a_kind_are_checked_with_their_place() {
    let host = Host::new();
    let check = |text: &str, arguments: &[&str]| {
        host.write("journeyman.toml", text);
        let mut command = example("settings", host.path());
        run(command.args(arguments), "")
    };
    let good = "[handler.loud]\nkind = \"shout\"\nending = \"!\"\ntimes = 2\n";
    let shown = check(good, &["config", "show", "--origin"]);
    assert!(shown.out.contains("ending = \"!\""), "{}{}", shown.out, shown.err);
    assert!(shown.out.contains("kind = \"shout\""), "{}", shown.out);
    for (text, words) in [
        (
            "[handler.loud]\nkind = \"shout\"\nending = \"!\"\ntime = 2\n",
            ["4:1", "unknown key `time`", "did you mean `times`?"],
        ),
        (
            "[handler.loud]\nkind = \"shout\"\nending = 7\n",
            ["3:10", "`handler.loud.ending` cannot be 7", "a text in quotes"],
        ),
        ("[handler.loud]\nkind = \"shuot\"\n", ["2:8", "or \"kubernetes\" or \"shout\"", "did you mean \"shout\"?"]),
        ("[handler.loud]\nkind = \"shout\"\n", ["1:1", "[handler.loud] needs `ending`", "add `ending"]),
        (
            "[handler.loud]\nkind = \"shout\"\nending = \"!\"\ntimes = 101\n",
            ["1:", "[handler.loud] cannot be used: ", "`times` is at most 100"],
        ),
    ] {
        let said = check(text, &["config", "check"]);
        assert_eq!(said.code, 30, "{}{}", said.out, said.err);
        words.iter().for_each(|word| assert!(said.err.contains(word), "{word}: {}", said.err));
    }
    let nested = "[handler.loud]\nkind = \"shout\"\nending = \"https://u:canary-pass@h/\"\n";
    let shown = check(nested, &["config", "show"]).out;
    assert!(shown.contains("ending = \"***\"") && !shown.contains("canary-pass"), "{shown}");
    let said = check("[[handler.shout]]\nending = \"!\"\n", &["config", "check"]);
    assert!(said.code == 30 && said.err.contains("expected a table"), "{}{}", said.out, said.err);
    // Without a file, `dev` says what the kind needs.
    host.write("journeyman.toml", "");
    let said = run(example("settings", host.path()).arg("dev"), "");
    assert!(said.code == 30 && said.err.contains("[handler.shout] needs `ending`"), "{}", said.err);
    host.write("journeyman.toml", "[handler.loud]\nkind = \"shout\"\nending = \"!\"\n");
    let tested = run(example("settings", host.path()).args(["handler", "test", "--payload", "\"a\"", "shout"]), "");
    assert_eq!(tested.code, 0, "the section of this kind is used: {}{}", tested.out, tested.err);
    host.write("journeyman.toml", "");
    // A section of the kind's name needs no `kind`, nor does a variable.
    let mut shown = example("settings", host.path());
    let shown = run(shown.env("JOURNEYMAN__HANDLER__SHOUT__ENDING", "?").args(["config", "show"]), "");
    assert!(shown.out.contains("[handler.shout]") && shown.out.contains("ending = \"?\""), "{}", shown.out);
}

struct Echo;

impl PayloadHandler for Echo {
    type Payload = Value;
    type Prepared = Value;

    async fn prepare(&self, payload: Value, _: &Context) -> Result<Value, PrepareError> {
        Ok(payload)
    }

    async fn execute(&self, payload: Value, context: &Context) -> Result<(), ExecuteError> {
        context.log().write_line(&payload.to_string());
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_three_lines_runs_the_tasks_of_a_taskcluster() {
    let host = Host::with_queue();
    host.write("token", TOKEN);
    let path = |name: &str| host.join(name).display().to_string();
    let worker = journeyman::serve("echo", Echo)
        .taskcluster(host.root(), "build/linux", "me", &path("token"))
        .set("worker.work_dir", &path("work"))
        .set("worker.max_tasks", "1")
        .set("host.metadata_service", "off")
        .build()
        .expect("the configuration is good");
    let task = host.create(&["--payload", r#"{"say":"hello"}"#]);
    assert_eq!(worker.run().await.expect("it runs"), ExitReason::LimitReached);
    assert_eq!(host.task(&["log", &task]).out, "{\"say\":\"hello\"}\n");
    assert_eq!(host.task(&["wait", &task]).code, 0);
}

#[test]
fn what_is_wrong_with_a_worker_is_said_when_it_is_built() {
    let built = journeyman::serve("echo", Echo).taskcluster("no-url", "build/linux", "me", "token").build();
    let said = built.err().expect("the address is none").to_string();
    assert!(
        said.contains("`source.queue.root_url` cannot be") && said.contains("set(\"source.queue.root_url\""),
        "{said}"
    );
}
