//! What the configuration's errors look like, and that its parts agree with one another.

use std::path::Path;

use crate::cli::host::Host;
use crate::cli::support::{Said, beside, golden, journeyman, run};

const CONFIG_INVALID: i32 = 30;

fn check(arguments: &[&str], environment: &[(&str, &str)], input: &str) -> Said {
    let mut command = journeyman(&beside("config"));
    command.args(["config", "check"]).args(arguments).envs(environment.iter().copied());
    run(&mut command, input)
}

#[test]
fn each_bad_file_is_rejected_with_place_and_hint() {
    let folder = beside("config");
    let mut cases: Vec<_> = std::fs::read_dir(&folder)
        .expect("the cases are there")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    cases.sort();
    assert!(cases.len() >= 8, "only {} cases were found", cases.len());
    for case in cases {
        let name = case.file_name().and_then(|name| name.to_str()).expect("case names are UTF-8");
        let said = check(&[name], &[], "");
        assert_eq!((said.code, said.out.as_str()), (CONFIG_INVALID, ""), "{name}");
        golden(&case.with_extension("txt"), &said.err);
    }
}

#[test]
fn e4_files_beside_the_configuration_complete_it_in_the_order_of_their_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("it is written");
    std::fs::create_dir(folder.path().join("worker.conf.d")).expect("a folder");
    write("worker.toml", "[worker]\ncapacity = 1\nid = \"one\"\n[log]\nlevel = \"info\"");
    write("worker.conf.d/20-more.toml", "[worker]\ncapacity = 3\n");
    write("worker.conf.d/10-first.toml", "[worker]\ncapacity = 2\ngroup = \"g\"\n");
    write("worker.conf.d/ignored.txt", "not TOML");
    let show = |arguments: &[&str]| run(journeyman(folder.path()).args(["config"]).args(arguments), "");
    let said = show(&["show", "--origin", "worker.toml"]);
    for line in [
        ("capacity = 3", "worker.conf.d/20-more.toml:2:12"),
        ("group = \"g\"", "worker.conf.d/10-first.toml:3:9"),
        ("id = \"one\"", "worker.toml:3:6"),
    ] {
        assert!(
            said.out.lines().any(|shown| shown.starts_with(line.0) && shown.contains(line.1)),
            "{line:?}: {}",
            said.out
        );
    }
    write("worker.conf.d/20-more.toml", "\n[worker]\ncapcity = 3\n");
    let said = show(&["check", "worker.toml"]);
    assert_eq!(said.code, CONFIG_INVALID);
    assert!(said.err.contains("worker.conf.d/20-more.toml:3:1"), "{}", said.err);
    let said = show(&["check", "-o", "json", "worker.toml"]);
    let checked: serde_json::Value = serde_json::from_str(&said.out).expect("JSON");
    assert_eq!((said.code, said.err.as_str(), &checked["usable"]), (CONFIG_INVALID, "", &serde_json::json!(false)));
    let problem = &checked["problems"][0];
    assert_eq!((problem["line"].as_u64(), problem["severity"].as_str()), (Some(3), Some("error")), "{problem}");
    assert_eq!(problem["file"], "worker.conf.d/20-more.toml");
    write("worker.conf.d/20-more.toml", "[worker\n");
    let said = show(&["check", "worker.toml"]);
    assert!(said.err.contains("worker.conf.d/20-more.toml:1:"), "{}", said.err);
}

#[test]
fn e4_names_that_amqp_has_no_room_for_are_rejected() {
    let long = "x".repeat(250);
    let source = "[source.requests]\nkind = \"amqp\"\nhandler = \"command\"\n";
    for (environment, file, words) in [
        (vec![("WORKER_KEY", long.as_str())], source.to_owned(), "request queue has 259 bytes"),
        (vec![], format!("{source}requests_queue = \"{long}123456\"\n"), "request queue has 256 bytes"),
        (vec![("WORKER_KEY", "1")], format!("{source}poison_queue = \"{long}123456\"\n"), "poison queue has 256 bytes"),
        (
            vec![("WORKER_KEY", "1"), ("WORKER_REQUESTS_QUEUE", "q"), ("WORKER_POOL", &long)],
            source.to_owned(),
            "activity exchange has 264 bytes",
        ),
    ] {
        let said = check(&["-"], &environment, &file);
        assert_eq!(said.code, CONFIG_INVALID, "{words}: {}", said.out);
        assert!(said.err.contains(words), "{words}: {}", said.err);
    }
}

const HANDLER: &str = "[handler.a]\nexec = [\"/bin/true\"]\n";

#[test]
fn b13_a_configuration_that_runs_nothing_is_refused_with_what_to_add() {
    for file in ["", "# later\n", "[worker]\ncapacity = 4\n[log]\nlevel = \"debug\"\n", "[source]\n", "[queue]\n"] {
        let said = check(&["-"], &[], file);
        assert_eq!((said.code, said.out.as_str()), (CONFIG_INVALID, ""), "{file:?}");
        assert!(
            said.err.contains("runs nothing") && said.err.contains("add a [source.NAME]"),
            "{file:?}: {}",
            said.err
        );
        let said = run(journeyman(&beside("config")).args(["worker", "-c", "-"]), file);
        assert!(said.code == CONFIG_INVALID && said.err.contains("no [source.NAME]"), "{file:?}: {}", said.err);
    }
    for role in
        [HANDLER, "[pool.core]\ncommand = [\"/bin/true\"]\n", "[notifier]\ndb = \"a\"\n", "[queue]\ndb = \"a\"\n"]
    {
        let said = check(&["-"], &[], role);
        assert_eq!((said.code, said.err.as_str()), (0, ""), "{role}");
    }
}

#[test]
fn no_files_skips_the_checks_of_this_host() {
    let said = check(&["--no-files", "not-there.toml"], &[], "");
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    assert!(said.out.contains("not-there.toml can be used: 2 sources, 2 handlers"), "{}", said.out);
}

#[test]
fn a_world_readable_secret_is_a_warning_that_does_not_show_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "amqp://me:hunter2@host\n").expect("the file can be written");
    std::fs::write(folder.path().join("certificate"), "").expect("the file can be written");
    for (key, file) in [
        ("queue.clients.me.access_token_file", "[queue.clients.me]\naccess_token_file = \"secret\"\n"),
        ("amqp.uri_file", "[amqp]\nuri_file = \"secret\"\n[pool.core]\n"),
        ("amqp.key_file", "[amqp]\nkey_file = \"secret\"\ncertificate_file = \"certificate\"\n[pool.core]\n"),
    ] {
        for (mode, warned) in [(0o600, false), (0o640, false), (0o604, true)] {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(&secret, mode).expect("the file is ours");
            let said = run(journeyman(folder.path()).args(["config", "check", "-"]), file);
            assert_eq!(said.code, 0, "{key}: {}", said.err);
            assert_eq!(said.err.contains(&format!("warning[file]: `{key}`")), warned, "{}", said.err);
            assert_eq!(said.err.contains("standard input:2:") && said.err.contains("chmod 600 secret"), warned);
            assert!(!said.err.contains("hunter2") && !said.out.contains("hunter2"), "{}", said.err);
        }
    }
}

#[test]
fn a_worker_may_share_the_configuration_of_its_controller() {
    let file = "[pool.core]\n[handler.echo]\nkind = \"program\"\nexec = [\"/bin/true\"]\n";
    let uri = ("WORKER_AMQP_URI", "amqp://host");
    for (variables, sources) in [
        ([uri].as_slice(), "0 sources"),
        (&[uri, ("WORKER_KEY", "42")], "1 source,"),
        (&[uri, ("WORKER_REQUESTS_QUEUE", "core-req-42")], "1 source,"),
    ] {
        let said = check(&["-"], variables, file);
        assert!(said.code == 0 && said.out.contains(sources), "{variables:?}: {}{}", said.out, said.err);
    }
    let said = check(&["-"], &[uri, ("WORKER_KEY", "42")], "[pool.core]\n");
    assert_eq!(said.code, CONFIG_INVALID);
    assert!(said.err.contains("it has no handler for its requests"), "{}", said.err);
}

#[test]
fn a_variable_with_single_underscores_is_a_warning() {
    let variables = [("JOURNEYMAN_WORKER_CAPACITY", "4"), ("JOURNEYMAN_TEST_ROOT_URL", "x"), ("JOURNEYMAN_CONFIG", "")];
    let said = check(&["-"], &variables, HANDLER);
    assert_eq!((said.code, said.out.as_str()), (0, "standard input can be used: 0 sources, 1 handler, capacity 1\n"));
    golden(&beside("config/unheeded.txt"), &said.err);

    let said = check(&["-"], &variables, "[worker]\ncapacity = 0\n");
    assert_eq!(said.code, CONFIG_INVALID);
    let (error, warning) = (said.err.find("error["), said.err.find("warning["));
    assert!(error == Some(0) && warning > error && said.err.contains("\n1 problem in"), "{}", said.err);
}

#[test]
fn b4_a_worker_type_that_a_taskcluster_refuses_is_a_warning() {
    let source = |queue: &str| {
        format!(
            "[source.ci]\nkind = \"taskcluster\"\nroot_url = \"https://tc.example.com\"\ntask_queue = \"{queue}\"\n"
        )
    };
    for (queue, is_accepted) in
        [("a_B/linux-2", true), ("a/2linux", false), ("a/Linux", false), ("a/l_x", false), ("a/l-", false)]
    {
        let said = check(&["-"], &[], &source(queue));
        assert_eq!(said.code, 0, "{}", said.err);
        assert_eq!(said.err.contains("a Taskcluster refuses the worker type"), !is_accepted, "{queue}: {}", said.err);
    }
    let azure = check(&["-"], &[], &(source("a/2linux") + "dialect = \"azure\"\n"));
    assert!(!azure.err.contains("refuses"), "{}", azure.err);
}

#[test]
fn addresses_that_others_reach_are_accepted_where_they_are_meant() {
    let said = check(
        &["-"],
        &[],
        "[handler.a]
exec = [\"/bin/true\"]
[http]
listen = \"0.0.0.0:7080\"
allow_remote = true
\
        [worker]
live_log = \"0.0.0.0:60098\"
live_log_url = \"https://logs.example.com/host7\"
",
    );
    assert_eq!((said.code, said.err.as_str()), (0, ""));
}

#[test]
fn an_error_in_the_environment_names_the_variable() {
    let environment = [
        ("JOURNEYMAN__WORKER__CAPACITTY", "4"),
        ("JOURNEYMAN__LOG__FORMAT", "jsn"),
        ("JOURNEYMAN__WORKER__CAPACITY", "four"),
        ("JOURNEYMAN__WORKER", "4"),
        ("JOURNEYMAN__LOG__LEVEL__DEEP", "info"),
        ("JOURNEYMAN__WORKER__MAX_TASKS", "\"4\""),
        ("JOURNEYMAN__WORKER__DRAIN_DEADLINE", "\"1h\""),
        ("JOURNEYMAN__HTTP__ALLOW_REMOTE", "'true'"),
        ("JOURNEYMAN__QUEUE__AUTH", "\"open\""),
    ];
    let said = check(&["-"], &environment, "");
    assert_eq!(said.code, CONFIG_INVALID);
    golden(&beside("config/environment.txt"), &said.err);
}

#[test]
fn an_error_in_a_flag_names_the_flag() {
    let said = check(&["-", "--set", "queue.listn=1", "--set", "worker.capacity=0", "--set", "x"], &[], "");
    assert_eq!(said.code, 2, "a flag that is no KEY=VALUE is a usage error: {}", said.err);
    let flags =
        ["-", "--set", "queue.listn=1", "--set", "worker.capacity=0", "--set", "source.ci.access_token=hunter2"];
    let said = check(&flags, &[], "");
    assert_eq!(said.code, CONFIG_INVALID);
    golden(&beside("config/flags.txt"), &said.err);
}

#[test]
fn a_secret_is_never_repeated_by_an_error() {
    for file in [
        "[source.ci]\naccess_token = \"hunter2\"",
        "[source.ci]\nacces_token = \"hunter2\"",
        "[source]\nci = { access_token = \"hunter2\" }",
        "[source.ci]\naccess_token = hunter2",
        "[source.ci]\naccess_token = [\"hunter2\"]",
        "[queue.clients.a]\naccess_token = \"hunter2\"",
        "[source.ci]\nroot_url = \"https://me:hunter2@tc.example.com\"",
        "[source.ci]\nrooturl = \"https://me:hunter2@tc.example.com\"",
        "[notifier.endpoint.a]\nurl = \"https://me@example.com/hunter2\"",
        "[notifier.endpoint.a]\nurl = \"example.com/hunter2\"",
        "[notifier.endpoint.a]\nurl = \"https://example.com/hunter2\"\nurl_file = \"b\"",
        "[notifier]\nendpoint = { a = { url = \"ftp://example.com/hunter2\" } }",
        "[notifier.endpoint]\na.url = \"ftp://example.com/hunter2\"",
    ] {
        let said = check(&["-"], &[("JOURNEYMAN__SOURCE__CI__ACCES_TOKEN", "hunter2")], file);
        assert_eq!(said.code, CONFIG_INVALID, "{file}");
        assert!(!said.err.contains("hunter2") && !said.out.contains("hunter2"), "{file}\n{}", said.err);
    }
}

#[test]
fn the_template_is_valid_with_and_without_its_comments() {
    let empty = tempfile::tempdir().expect("a folder");
    let template = run(journeyman(empty.path()).args(["config", "init"]), "").out;
    let said = check(&["-"], &[], &template);
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    let is_setting = |line: &str| {
        line.strip_prefix("# ").is_some_and(|rest| {
            rest.starts_with('[') || rest.split_once(" = ").is_some_and(|(key, _)| !key.contains([' ', '`']))
        })
    };
    let bare: String = template
        .lines()
        .map(|line| if is_setting(line) { line.trim_start_matches("# ") } else { line })
        .flat_map(|line| [line, "\n"])
        .collect();
    let said = check(&["--no-files", "-"], &[], &bare);
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{bare}");
}

#[test]
fn init_never_overwrites_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = run(journeyman(folder.path()).args(["config", "init", "journeyman.toml"]), "");
    assert_eq!(first.code, 0, "{}", first.err);
    std::fs::write(folder.path().join("journeyman.toml"), "# mine").expect("the file can be written");
    let second = run(journeyman(folder.path()).args(["config", "init", "journeyman.toml"]), "");
    assert_eq!(second.code, 21);
    assert!(second.err.contains("already there"), "{}", second.err);
    assert_eq!(std::fs::read_to_string(folder.path().join("journeyman.toml")).expect("it is there"), "# mine");
}

#[test]
fn a_flag_wins_over_the_environment_and_the_environment_over_the_file() {
    let file = "[worker]\nid = \"file\"\ngroup = \"file\"\ncapacity = 2\n[source.Ci-1]\nkind = \"taskcluster\"\n\
                root_url = \"http://a.example\"\ntask_queue = \"a/b\"\n";
    let mut command = journeyman(&beside("config"));
    command
        .args(["config", "show", "-c", "-", "--origin", "--set", "worker.id=flag"])
        .env("JOURNEYMAN__WORKER__ID", "env")
        .env("JOURNEYMAN__WORKER__GROUP", "env")
        .env("JOURNEYMAN__SOURCE__CI_1__CLIENT_ID", "me")
        .env("JOURNEYMAN__SOURCE__CI_1__ACCESS_TOKEN_FILE", "env:TOKEN")
        .env("JOURNEYMAN__HANDLER__NEW__KIND", "program")
        .env("JOURNEYMAN__HANDLER__NEW__EXEC", "a,b")
        .env("JOURNEYMAN__HANDLER__OLD__KIND", "program")
        .env("JOURNEYMAN__HANDLER__OLD__EXEC", "[\"with, comma\"]");
    let said = run(&mut command, file);
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    golden(&beside("config/origins.txt"), &said.out);
}

#[test]
fn the_guide_lists_every_key_of_the_schema() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/guide/configuration.md");
    let readme = std::fs::read_to_string(&path).expect("configuration.md");
    let (begin, end) = ("<!-- configuration: begin -->\n", "<!-- configuration: end -->");
    let (head, rest) = readme.split_once(begin).expect("the marker of the table's begin");
    let (table, tail) = rest.split_once(end).expect("the marker of the table's end");
    let expected = journeyman::config::reference::markdown();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, format!("{head}{begin}{expected}{end}{tail}")).expect("it can be written");
        return;
    }
    assert_eq!(table, expected, "configuration.md differs; UPDATE_GOLDEN=1 writes it anew");
}

#[test]
fn the_guide_shows_every_exit_code() {
    let guide = include_str!("../../src/guide/configuration.md");
    for (exit, _) in journeyman::cli::exit::Exit::ALL {
        let row = format!("| {} | {} |", exit.code(), exit.description());
        assert!(guide.contains(&row), "configuration.md misses: {row}");
    }
}

#[test]
fn a_key_is_explained_with_what_it_is_set_to() {
    let host = Host::new();
    host.write("journeyman.toml", "[worker]\ncapacity = 3\n\n[source.ci]\nkind = \"taskcluster\"\n");
    let explain = |key: &str| host.run(&["config", "explain", key]);
    let said = explain("worker.drain_deadline").out;
    for part in ["How long running tasks", "time with unit", "default   \"1h\"", "JOURNEYMAN__WORKER__DRAIN_DEADLINE"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // A configuration that cannot be used is no obstacle.
    assert!(explain("source.ci.task_queue").out.contains("none, it has to be set"));
    host.write("journeyman.toml", "[worker]\ncapacity = 3\n");
    assert!(explain("worker.capacity").out.contains("set to    3 (journeyman.toml:2:12)"));
    assert!(explain("http").out.contains("http.allow_remote\n"), "a section has its keys explained");
    let unknown = explain("wroker.capacity");
    assert!(unknown.code == 2 && unknown.err.contains("did you mean `worker.capacity`?"), "{}", unknown.err);
}

#[test]
fn each_code_of_a_problem_is_in_the_guide() {
    let page = journeyman::guide::PAGES.iter().find(|page| page.name == "configuration").expect("the page");
    for code in journeyman_platform::settings::problem::Code::ALL {
        assert!(page.text.contains(&format!("| `{}` |", code.as_str())), "{} is not explained", code.as_str());
    }
}

#[test]
fn a_bundle_has_what_a_bug_report_needs_and_no_secret() {
    let host = Host::new();
    host.write("token", "bundle-canary-71");
    host.write(
        "journeyman.toml",
        "[worker]\nwork_dir = \"work\"\n[source.ci]\nkind = \"taskcluster\"\nroot_url = \"http://127.0.0.1:9\"\ntask_queue = \"a/b\"\n\
         client_id = \"me\"\naccess_token_file = \"token\"\n",
    );
    let mut command = host.journeyman(&["bundle", "report.txt", "--unit", "no-such-unit"]);
    let said = run(command.env("MY_TOKEN", "bundle-canary-72"), "");
    assert!(said.code == 0 && said.out.contains("wrote report.txt; look through it"), "{}{}", said.out, said.err);
    let text = host.read("report.txt");
    for part in
        ["== versions\njourneyman ", "task_queue = \"a/b\"", "== doctor", "== status\nnothing is listening", "== log\n"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("bundle-canary"), "{text}");
    let again = host.run(&["bundle", "report.txt"]);
    assert!(again.code == 21 && again.err.contains("File exists"), "{}", again.err);
    // A configuration that cannot be used is what a report may be about.
    host.write("journeyman.toml", "[wroker]\n");
    assert!(host.run(&["bundle", "-"]).out.contains("error[unknown-key]"));
}
