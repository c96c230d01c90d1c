//! An invariant in force is cited where the code keeps it and has a test that carries its number.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// I20, I29, I30 and I32 are about what the rules do not decide.
const IN_FORCE: [u8; 30] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27, 28, 31, 33, 34];

/// The files of Rust in a folder and those below it.
pub(super) fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder of the tree");
    let paths = entries.map(|entry| entry.expect("an entry of it").path());
    let files = paths.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

fn sources(folder: &Path) -> String {
    rust_files(folder).iter().map(|path| std::fs::read_to_string(path).expect("a source file")).collect()
}

/// The numbers behind an `I` that begins a word, in comments.
fn cited(text: &str) -> BTreeSet<u8> {
    let comments = text.lines().filter_map(|line| line.split_once("//")).map(|(_, comment)| comment);
    let words = comments.flat_map(|comment| comment.split(|c: char| !c.is_ascii_alphanumeric()));
    words.filter_map(|word| word.strip_prefix('I')?.parse().ok()).collect()
}

#[test]
fn i00_every_invariant_in_force_is_cited_in_the_code_and_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (code, tests) = (sources(&root.join("src")), sources(&root.join("tests")));
    let cited = cited(&code);
    for number in IN_FORCE {
        assert!(cited.contains(&number), "I{number} is cited nowhere in src");
        assert!(tests.contains(&format!("fn i{number:02}_")), "no test carries the number of I{number}");
    }
}
