//! An invariant in force is cited where the code keeps it and has a test module here.

use std::collections::BTreeSet;
use std::path::Path;

/// I18 and I19 are held on a real broker, I31 in `tests/model`; I20, I29, I30 and I32 are about what the rules do not decide.
const IN_FORCE: [u8; 27] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 21, 22, 23, 24, 25, 26, 27, 28, 33, 34];

fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).expect("a folder of the tree") {
        let path = entry.expect("an entry of it").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(&path).expect("a source file"));
        }
    }
}

/// The numbers behind an `I` that begins a word, in comments.
fn cited(text: &str) -> BTreeSet<u8> {
    let comments = text.lines().filter_map(|line| line.split_once("//")).map(|(_, comment)| comment);
    let words = comments.flat_map(|comment| comment.split(|c: char| !c.is_ascii_alphanumeric()));
    words.filter_map(|word| word.strip_prefix('I')?.parse().ok()).collect()
}

#[test]
fn i00_every_invariant_in_force_is_cited_in_the_code_and_has_a_room_of_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    sources(&root.join("src"), &mut code);
    let cited = cited(&code);
    let modules = std::fs::read_to_string(root.join("tests/rules/main.rs")).expect("this binary");
    for (number, module) in [(18, "replies"), (19, "worker_kills")] {
        assert!(cited.contains(&number), "I{number} is cited nowhere in src");
        let tests = std::fs::read_to_string(root.join(format!("tests/amqp/{module}.rs"))).expect("the module");
        assert!(tests.contains(&format!("fn i{number:02}_")), "no test in tests/amqp/{module}.rs carries the number");
    }
    for number in IN_FORCE {
        assert!(cited.contains(&number), "I{number} is cited nowhere in src");
        let module = modules.lines().find_map(|line| {
            let name = line.strip_prefix("mod ")?.strip_suffix(';')?;
            name.starts_with(&format!("i{number:02}_")).then_some(name)
        });
        let module = module.unwrap_or_else(|| panic!("I{number} has no module in tests/rules"));
        let tests = std::fs::read_to_string(root.join(format!("tests/rules/{module}.rs"))).expect("the module");
        assert!(tests.contains(&format!("fn i{number:02}_")), "no test in {module} carries the number");
    }
}

#[test]
fn i00_a_citation_is_a_number_in_a_comment_and_nothing_else() {
    let text = "let I7 = 1;\n// I12, and I3: why\n/// (I4)\n//! HI5 I6x\n";
    assert_eq!(cited(text), BTreeSet::from([3, 4, 12]));
}
