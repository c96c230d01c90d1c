//! What imports what in `src`. A re-export is no import.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::i00_architecture::rust_files;

type Arrows = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

/// The paths from `crate`, `super` or `self` in a text, with those in the braces of an import.
fn paths(text: &str) -> Vec<String> {
    let (mut found, mut prefixes, mut word) = (Vec::new(), Vec::new(), String::new());
    let text = text.split("\nmod tests {").next().unwrap_or_default();
    let is_read = |line: &&str| !["//", "pub use ", "pub(in "].iter().any(|start| line.trim().starts_with(start));
    for c in text.lines().filter(is_read).flat_map(|line| line.chars().chain(['\n'])) {
        if c.is_alphanumeric() || c == '_' || c == ':' {
            word.push(c);
            continue;
        }
        let path = prefixes.last().map_or_else(String::new, String::clone) + &word;
        match c {
            '{' => prefixes.push(if word.ends_with("::") { path } else { String::new() }),
            _ => {
                found.extend(["crate::", "super::", "self::"].iter().any(|root| path.starts_with(root)).then_some(path))
            }
        }
        if c == '}' {
            prefixes.pop();
        }
        word.clear();
    }
    found
}

/// The sets of more than `max` that reach each other.
fn circles(arrows: &Arrows, max: usize) -> BTreeSet<BTreeSet<&PathBuf>> {
    let reached = |from| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(next) = open.pop() {
            open.extend(arrows.get(next).into_iter().flatten().filter(|to| seen.insert(*to)));
        }
        seen
    };
    let all: BTreeMap<_, _> = arrows.keys().map(|from| (from, reached(from))).collect();
    let back = |from, to| all.get(to).is_some_and(|reached: &BTreeSet<_>| reached.contains(from));
    let circles = all.iter().map(|(from, to)| to.iter().copied().filter(|to| back(*from, *to)).collect());
    circles.filter(|circle: &BTreeSet<_>| circle.len() > max).collect()
}

#[test]
fn no_circle_of_imports_is_between_folders_or_of_more_than_three_files() {
    let (mut files, mut folders) = (Arrows::new(), Arrows::new());
    let sources = rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src").canonicalize().expect("src"));
    let module = |file: &PathBuf| match file.with_extension("") {
        module if module.ends_with("mod") || module.ends_with("lib") => module.parent().map(Path::to_path_buf),
        module => (!module.to_string_lossy().ends_with("tests")).then_some(module),
    };
    let modules: BTreeMap<_, _> = sources.iter().filter_map(|file| Some((module(file)?, file))).collect();
    for (from, file) in &modules {
        for path in paths(&std::fs::read_to_string(file).expect("a source file")) {
            let mut to = from.clone();
            for name in path.split("::") {
                match name {
                    "crate" => {
                        to = from.ancestors().find(|folder| folder.join("lib.rs").exists()).expect("a crate").into()
                    }
                    "super" => _ = to.pop(),
                    _ if modules.contains_key(&to.join(name)) => to.push(name),
                    _ => {}
                }
            }
            let fork = from.iter().zip(&to).take_while(|(one, other)| one == other).count() + 1;
            let [one, other] = [from, &to].map(|module| module.iter().take(fork).collect::<PathBuf>());
            if one != other && one.is_dir() && other.is_dir() {
                folders.entry(one).or_default().insert(other);
            }
            files.entry(from.clone()).or_default().insert(to);
        }
    }
    assert!(files.len() > 300, "only {} files import something", files.len());
    assert_eq!(circles(&files, 3), BTreeSet::new(), "circles of more than three files");
    assert_eq!(circles(&folders, 1), BTreeSet::new(), "circles between folders");
}
