use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use journeyman::handler::artifact::{ArtifactDeclaration, ArtifactKind, Artifacts, DeclarationError, Optionality};
use journeyman::handler::artifact_collector::CollectedArtifact;
use journeyman::task::{Artifact, ArtifactBody, ArtifactErrorReason};

fn collect(artifacts: &Artifacts, workdir: &Path) -> Vec<CollectedArtifact> {
    artifacts.collect(workdir).unwrap().collect()
}

fn reason(item: &CollectedArtifact) -> ArtifactErrorReason {
    match item {
        CollectedArtifact::Missing {
            error: Some(Artifact { body: ArtifactBody::Error { reason, .. }, .. }), ..
        } => *reason,
        other => panic!("{other:?}"),
    }
}

fn content(artifact: &Artifact) -> Vec<u8> {
    let ArtifactBody::File { file, bytes, .. } = &artifact.body else { panic!("{artifact:?}") };
    let mut content = vec![0; usize::try_from(*bytes).unwrap()];
    file.read_exact_at(&mut content, 0).unwrap();
    content
}

#[test]
fn a_directory_yields_its_files_in_order_below_its_name() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("out/b/c")).unwrap();
    for file in ["out/z.json", "out/a.log", "out/b/c/deep.html"] {
        fs::write(folder.path().join(file), file).unwrap();
    }
    let artifacts = Artifacts::new();
    artifacts.directory("public/out", "out").unwrap();
    let items = collect(&artifacts, folder.path());
    let found: Vec<(String, String)> = items
        .iter()
        .map(|item| match item {
            CollectedArtifact::Found(Artifact { name, body: ArtifactBody::File { content_type, .. }, .. }, _) => {
                (name.clone(), content_type.clone())
            }
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [
        ("public/out/a.log", "text/plain; charset=utf-8"),
        ("public/out/b/c/deep.html", "text/html; charset=utf-8"),
        ("public/out/z.json", "application/json"),
    ];
    assert_eq!(found, expected.map(|(name, kind)| (name.to_owned(), kind.to_owned())));
}

#[test]
fn anything_but_a_regular_file_is_an_error_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("file"), "x").unwrap();
    symlink("/etc/passwd", at("absolute-link")).unwrap();
    symlink("/etc", at("folder-link")).unwrap();
    symlink("loop", at("loop")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    fs::File::create(at("huge")).unwrap().set_len((5 << 30) + 1).unwrap();
    for (path, expected) in [
        ("nothing", ArtifactErrorReason::Missing),
        ("nothing/below", ArtifactErrorReason::Missing),
        ("file/below", ArtifactErrorReason::Missing),
        ("folder", ArtifactErrorReason::Irregular),
        ("absolute-link", ArtifactErrorReason::Irregular),
        ("loop", ArtifactErrorReason::Irregular),
        ("pipe", ArtifactErrorReason::Irregular),
        ("socket", ArtifactErrorReason::Irregular),
        ("huge", ArtifactErrorReason::TooLarge),
    ] {
        let artifacts = Artifacts::new();
        artifacts.file("public/x", path).unwrap();
        let items = collect(&artifacts, folder.path());
        assert_eq!(reason(&items[0]), expected, "{path}");
    }
    let artifacts = Artifacts::new();
    artifacts.file("public/x", "folder-link/passwd").unwrap();
    artifacts.directory("public/y", "folder-link").unwrap();
    artifacts.directory("public/z", "file").unwrap();
    for item in collect(&artifacts, folder.path()) {
        assert!(matches!(item, CollectedArtifact::Missing { .. }), "{item:?}");
    }
}

#[test]
fn b10_a_content_type_of_a_directory_is_that_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("out/deep")).unwrap();
    fs::write(folder.path().join("out/deep/a.json"), "x").unwrap();
    let artifacts = Artifacts::new();
    let kind = ArtifactKind::Directory { path: "out".into(), content_type: Some("text/x".to_owned()) };
    artifacts.declare(ArtifactDeclaration::new("public", kind)).unwrap();
    let items = collect(&artifacts, folder.path());
    let [CollectedArtifact::Found(Artifact { body: ArtifactBody::File { content_type, .. }, .. }, _)] = &items[..]
    else {
        panic!("{items:?}")
    };
    assert_eq!(content_type, "text/x");
}

#[test]
fn b2_links_are_followed_inside_the_tasks_directory_only() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("f"), "canary").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("real/deep")).unwrap();
    fs::write(at("real/f"), "f").unwrap();
    fs::write(at("real/deep/g"), "g").unwrap();
    for (target, link) in [
        ("real/f", "relative"),
        ("relative", "twice"),
        ("real", "folder"),
        ("../f", "real/deep/up"),
        ("deep", "real/sub"),
        (at("real/f").to_str().unwrap(), "absolute"),
        (outside.path().join("f").to_str().unwrap(), "elsewhere"),
        ("../../../../../../../../etc/passwd", "climbs"),
        ("real/../../x", "climbs-later"),
        ("nothing", "dangling"),
    ] {
        symlink(target, at(link)).unwrap();
    }
    for (path, expected) in [
        ("relative", Ok("f")),
        ("twice", Ok("f")),
        ("absolute", Ok("f")),
        ("folder/f", Ok("f")),
        ("folder/sub/g", Ok("g")),
        ("real/deep/up", Ok("f")),
        ("folder/sub/up", Ok("f")),
        ("elsewhere", Err(ArtifactErrorReason::Irregular)),
        ("climbs", Err(ArtifactErrorReason::Irregular)),
        ("climbs-later", Err(ArtifactErrorReason::Irregular)),
        ("dangling", Err(ArtifactErrorReason::Missing)),
    ] {
        let artifacts = Artifacts::new();
        artifacts.file("public/x", path).unwrap();
        match (&collect(&artifacts, folder.path())[0], expected) {
            (CollectedArtifact::Found(artifact, _), Ok(text)) => {
                assert_eq!(content(artifact), text.as_bytes(), "{path}")
            }
            (item, Err(expected)) => assert_eq!(reason(item), expected, "{path}"),
            (item, Ok(_)) => panic!("{path}: {item:?}"),
        }
    }
}

#[test]
fn b2_an_entry_of_a_directory_that_cannot_be_stored_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("real/logs")).unwrap();
    for name in ["a", "bell\u{7}", "logs/live.log"] {
        fs::write(at("real").join(name), "x").unwrap();
    }
    for (target, link) in
        [("real", "d"), ("a", "real/link"), (".", "real/self"), ("/etc/passwd", "real/out"), ("no", "real/no")]
    {
        symlink(target, at(link)).unwrap();
    }
    rustix::fs::mknodat(rustix::fs::CWD, at("real/pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let artifacts = Artifacts::new();
    artifacts.directory("public", "d").unwrap();
    let (mut found, mut skipped) = (Vec::new(), Vec::new());
    for item in collect(&artifacts, folder.path()) {
        match item {
            CollectedArtifact::Found(artifact, Optionality::Required) => found.push(artifact.name),
            CollectedArtifact::Skipped { message } => skipped.push(message),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(found, ["public/a", "public/link"]);
    for name in [r"public/bell\u{7}", "public/logs/live.log", "public/no", "public/out", "public/pipe", "public/self"] {
        assert!(skipped.iter().any(|message| message.contains(name)), "{name} is not in {skipped:?}");
    }
    assert_eq!(skipped.len(), 6, "{skipped:?}");
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Pairs of an own path and a link to the outside that are exchanged.
const SWAPPED: [(&str, &str); 3] = [("file", "file-link"), ("d", "d-link"), ("deep/mid", "mid-link")];

#[test]
fn ten_thousand_swaps_yield_no_byte_from_outside() {
    const SWAPS: usize = 10_000;
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir(outside.path().join("more")).unwrap();
    for name in ["f", "more/f", "only-there"] {
        fs::write(outside.path().join(name), "canary").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for path in ["d/more", "deep/mid/more"] {
        fs::create_dir_all(at(path)).unwrap();
    }
    for name in ["file", "d/f", "d/more/f", "deep/mid/f", "deep/mid/more/f"] {
        fs::write(at(name), "public").unwrap();
    }
    symlink(outside.path().join("f"), at("file-link")).unwrap();
    symlink(outside.path(), at("d-link")).unwrap();
    symlink(outside.path(), at("mid-link")).unwrap();
    let (stop, swaps) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (mut found, mut refused, mut round) = (0, 0, 0);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        scope.spawn(|| {
            for (own, link) in SWAPPED.into_iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, at(own), rustix::fs::CWD, at(link), exchange).unwrap();
                swaps.fetch_add(1, Ordering::Relaxed);
            }
        });
        while swaps.load(Ordering::Relaxed) < SWAPS || found == 0 || refused == 0 {
            let artifacts = Artifacts::new();
            artifacts.file("public/file", "file").unwrap();
            artifacts.file("public/one", "d/more/f").unwrap();
            artifacts.directory("public/d", "d").unwrap();
            artifacts.directory("public/deep", "deep").unwrap();
            for item in collect(&artifacts, folder.path()) {
                match item {
                    CollectedArtifact::Found(artifact, _) => {
                        assert_eq!(content(&artifact), b"public", "{}", artifact.name);
                        assert!(!artifact.name.contains("only-there"), "{}", artifact.name);
                        found += 1;
                    }
                    CollectedArtifact::Missing { .. } | CollectedArtifact::Skipped { .. } => refused += 1,
                }
            }
            round += 1;
        }
    });
    println!("{} swaps, {round} collections: {found} files of the task's own, {refused} refused", swaps.into_inner());
}

#[test]
fn a_missing_optional_artifact_is_skipped_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let artifacts = Artifacts::new();
    let path = "nothing".into();
    let required = ArtifactDeclaration::new("public/x", ArtifactKind::File { path, content_type: None });
    artifacts.declare(ArtifactDeclaration { optionality: Optionality::Optional, ..required }).unwrap();
    let items = collect(&artifacts, folder.path());
    assert!(
        matches!(&items[0], CollectedArtifact::Skipped { message } if message.starts_with("artifact public/x: nothing: ")),
        "{items:?}"
    );
}

#[test]
fn b6_the_artifacts_of_a_task_that_removed_or_replaced_its_directory_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    let (artifacts, workdir) = (Artifacts::new(), folder.path().join("task"));
    artifacts.file("public/a", "a").unwrap();
    artifacts.directory("public/out", "out").unwrap();
    let reasons = || collect(&artifacts, &workdir).iter().map(reason).collect::<Vec<_>>();
    assert_eq!(reasons(), [ArtifactErrorReason::Missing; 2]);
    fs::write(&workdir, "").unwrap();
    assert_eq!(reasons(), [ArtifactErrorReason::Missing; 2]);
    fs::remove_file(&workdir).unwrap();
    symlink("/etc", &workdir).unwrap();
    assert_eq!(reasons(), [ArtifactErrorReason::Missing; 2]);
}

#[test]
fn directories_may_share_a_name_and_a_declared_file_takes_precedence() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["one", "two"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("same"), name).unwrap();
        fs::write(folder.path().join(name).join("named"), name).unwrap();
    }
    let artifacts = Artifacts::new();
    artifacts.directory("public", "one").unwrap();
    artifacts.directory("public", "two").unwrap();
    artifacts.file("public/named", "two/named").unwrap();
    let items = collect(&artifacts, folder.path());
    let found: Vec<(&str, Vec<u8>)> = items
        .iter()
        .filter_map(|item| match item {
            CollectedArtifact::Found(artifact, _) => Some((artifact.name.as_str(), content(artifact))),
            CollectedArtifact::Missing { .. } | CollectedArtifact::Skipped { .. } => None,
        })
        .collect();
    assert_eq!(found, [("public/same", b"one".to_vec()), ("public/named", b"two".to_vec())]);
    assert_eq!(items.len(), 5);
}

#[test]
fn an_invalid_name_in_a_directory_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("out")).unwrap();
    fs::write(folder.path().join("out/bell\u{7}"), "x").unwrap();
    let artifacts = Artifacts::new();
    artifacts.directory("public", "out").unwrap();
    let items = collect(&artifacts, folder.path());
    assert!(matches!(&items[0], CollectedArtifact::Skipped { .. }), "{items:?}");
}

#[test]
fn directories_that_nest_too_deep_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let deep: std::path::PathBuf = std::iter::repeat_n("d", 40).collect();
    fs::create_dir_all(folder.path().join(&deep)).unwrap();
    let artifacts = Artifacts::new();
    artifacts.directory("public", "d").unwrap();
    let items = collect(&artifacts, folder.path());
    assert!(
        matches!(&items[..], [CollectedArtifact::Skipped { message }] if message.contains("nest deeper than 32")),
        "{items:?}"
    );
}

#[test]
fn too_many_files_are_reported_and_not_collected() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..10_050 {
        fs::File::create(folder.path().join(number.to_string())).unwrap();
    }
    let artifacts = Artifacts::new();
    artifacts.directory("public", ".").unwrap();
    let items = collect(&artifacts, folder.path());
    assert!(
        matches!(&items[..], [CollectedArtifact::Missing { message, .. }] if message.contains("more than 10000")),
        "{} items",
        items.len()
    );
}

#[test]
fn declarations_are_validated_and_counted() {
    let artifacts = Artifacts::new();
    let long = "x".repeat(1025);
    let error = |result: Result<(), DeclarationError>| result.unwrap_err().to_string();
    for name in ["", "/public/x", "public/\n", "naïve", &long] {
        assert!(error(artifacts.file(name, "x")).starts_with("artifact name "), "{name}");
    }
    for path in ["", "/x", "../x", "a/../../x", "nul\0"] {
        assert!(error(artifacts.file("public/x", path)).starts_with("artifact path "), "{path}");
    }
    assert!(error(artifacts.file("public/logs/live_backing.log", "x")).contains("reserved"));
    artifacts.file("public/x", "x").unwrap();
    assert!(error(artifacts.file("public/x", "y")).contains("declared twice"));
    for number in 1..10_000 {
        artifacts.file(format!("public/n{number}"), "x").unwrap();
    }
    assert!(error(artifacts.file("public/one-more", "x")).contains("more than 10000"));
}
