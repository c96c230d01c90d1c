use std::time::Duration;

use journeyman::handler::contract_test::{ContractReport, ProgramTest, RuleOutcome, check_program};
use journeyman::handler::program::{Program, ProgramConfig};
use serde_json::json;

async fn check(script: &str, grace: Duration) -> ContractReport {
    let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
    let check = ["sh", "-c", "grep -q '\"good\":true' || exit $JOURNEYMAN_EXIT_MALFORMED"].map(str::to_owned).to_vec();
    let settings = ProgramConfig { check: Some(check), termination_grace: grace, ..ProgramConfig::new("test", argv) };
    let plan = ProgramTest {
        program: Program::new(settings).unwrap(),
        payload: Some(json!({"good": true})),
        bad_payload: Some(json!({"good": false})),
        timeout: Duration::from_secs(20),
        cancel_after: Duration::from_secs(20),
    };
    let folder = tempfile::tempdir().unwrap();
    check_program(&plan, folder.path()).await.unwrap()
}

fn broken(report: &ContractReport) -> Vec<&'static str> {
    let cases = report.rules.iter().filter(|case| matches!(case.outcome, RuleOutcome::Failed(_)));
    cases.map(|case| case.rule).collect()
}

#[tokio::test]
async fn a_program_that_keeps_the_contract_passes_all_of_it() {
    let report = check(
        "echo working; sleep 8; echo x >x; echo '{\"type\":\"artifact\",\"name\":\"x\",\"path\":\"x\"}' >&3",
        Duration::from_secs(10),
    )
    .await;
    assert!(report.passed(), "{report}");
    assert!(report.rules.iter().all(|case| case.outcome == RuleOutcome::Passed), "{report}");
    assert_eq!(report.rules.len(), 8);
    assert_eq!(report.to_string().lines().next(), Some("ok        refuses a bad payload before it is started"));
}

#[tokio::test]
async fn what_a_program_does_not_keep_is_named() {
    let report = check(
        "sleep 600 & echo nonsense >&3; echo '{\"type\":\"artifact\",\"name\":\"x\",\"path\":\"x\"}' >&3; exit 4",
        Duration::from_secs(10),
    )
    .await;
    assert!(!report.passed());
    assert_eq!(
        broken(&report),
        [
            "completes a good payload",
            "leaves no process behind",
            "says on descriptor 3 what can be understood",
            "leaves every artifact it declares"
        ],
        "{report}"
    );
}

#[tokio::test]
async fn a_program_that_ignores_the_order_to_end_is_found_out() {
    let script = "trap '' TERM; echo ready; i=0; while [ $i -lt 60 ]; do sleep 0.1; i=$((i+1)); done";
    let report = check(script, Duration::from_millis(300)).await;
    assert_eq!(broken(&report), ["ends within its grace when it is told to"], "{report}");
}

#[tokio::test]
async fn a_program_that_takes_anything_is_told_how_to_refuse() {
    let plan = ProgramTest {
        program: Program::new(ProgramConfig::new("test", vec!["true".to_owned()])).unwrap(),
        payload: None,
        bad_payload: Some(json!(1)),
        timeout: Duration::from_secs(20),
        cancel_after: Duration::from_secs(20),
    };
    let folder = tempfile::tempdir().unwrap();
    let report = check_program(&plan, folder.path()).await.unwrap();
    assert_eq!(broken(&report), ["refuses a bad payload before it is started"]);
    assert!(report.to_string().contains("schema"), "{report}");
    assert!(matches!(report.rules[1].outcome, RuleOutcome::NotTested(_)));
}
