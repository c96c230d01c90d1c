use std::time::Duration;

use journeyman::config::Environment;
use journeyman::config::schema::ProgramHandler;
use journeyman::config::values::Span;
use journeyman::handler::contract_test::{ContractReport, RuleOutcome, TestPlan, check_program};
use journeyman::handler::program::Program;
use serde_json::json;

async fn check(script: &str, grace: Duration) -> ContractReport {
    let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
    let check = ["sh", "-c", "grep -q '\"good\":true' || exit $JOURNEYMAN_EXIT_MALFORMED"].map(str::to_owned).to_vec();
    let config = ProgramHandler { check, termination_grace: Span(grace), ..ProgramHandler::new(argv) };
    let program = Program::new("test", config, &Environment::default()).unwrap();
    let plan = TestPlan {
        payload: Some(json!({"good": true})),
        bad_payload: Some(json!({"good": false})),
        timeout: Duration::from_secs(20),
        cancel_after: Duration::from_secs(20),
    };
    let folder = tempfile::tempdir().unwrap();
    check_program(&program, &plan, folder.path()).await.unwrap()
}

fn failed(report: &ContractReport) -> Vec<&'static str> {
    let cases = report.rules.iter().filter(|case| matches!(case.outcome, RuleOutcome::Failed(_)));
    cases.map(|case| case.rule).collect()
}

#[tokio::test]
async fn a_program_that_follows_the_contract_passes_every_rule() {
    let report = check(
        "echo working; sleep 8; echo x >x; echo '{\"type\":\"artifact\",\"name\":\"x\",\"path\":\"x\"}' >&3",
        Duration::from_secs(10),
    )
    .await;
    assert!(report.passed(), "{report}");
    assert!(report.rules.iter().all(|case| case.outcome == RuleOutcome::Passed), "{report}");
    assert_eq!(report.rules.len(), 8);
    assert_eq!(report.to_string().lines().next(), Some("pass     rejects a bad payload before it starts"));
}

#[tokio::test]
async fn every_violated_rule_is_reported() {
    let report = check(
        "sleep 600 & echo nonsense >&3; echo '{\"type\":\"artifact\",\"name\":\"x\",\"path\":\"x\"}' >&3; exit 4",
        Duration::from_secs(10),
    )
    .await;
    assert!(!report.passed());
    assert_eq!(
        failed(&report),
        [
            "completes a good payload",
            "leaves no process behind",
            "writes only valid messages to descriptor 3",
            "produces every declared artifact"
        ],
        "{report}"
    );
}

#[tokio::test]
async fn a_program_that_ignores_sigterm_fails_the_termination_rule() {
    let script = "trap '' TERM; echo ready; i=0; while [ $i -lt 60 ]; do sleep 0.1; i=$((i+1)); done";
    let report = check(script, Duration::from_millis(300)).await;
    assert_eq!(failed(&report), ["exits within its termination grace after SIGTERM"], "{report}");
}

#[tokio::test]
async fn a_program_that_accepts_everything_fails_the_rejection_rule() {
    let config = ProgramHandler::new(vec!["true".to_owned()]);
    let program = Program::new("test", config, &Environment::default()).unwrap();
    let plan = TestPlan {
        payload: None,
        bad_payload: Some(json!(1)),
        timeout: Duration::from_secs(20),
        cancel_after: Duration::from_secs(20),
    };
    let folder = tempfile::tempdir().unwrap();
    let report = check_program(&program, &plan, folder.path()).await.unwrap();
    assert_eq!(failed(&report), ["rejects a bad payload before it starts"]);
    assert!(report.to_string().contains("schema"), "{report}");
    assert!(matches!(report.rules[1].outcome, RuleOutcome::NotTested(_)));
}
