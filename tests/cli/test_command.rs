//! `tests/run` on a host without the packages that a suite needs.
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

// Installing a package makes the commands of it.
const APT_GET: &str = r#"#!/bin/sh
[ "$1" = install ] || exit 0
for command in man systemd-analyze; do printf '#!/bin/sh\n' >"$HOME/$command"; chmod 755 "$HOME/$command"; done
"#;

fn run(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new("/bin/bash")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run"))
        .args(arguments)
        .env_remove("CI")
        .env("PATH", folder)
        .env("HOME", folder)
        .output()
        .expect("tests/run starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn e6_the_test_command_installs_what_a_suite_needs_and_names_it() {
    let folder = tempfile::tempdir().expect("a folder");
    for command in ["basename", "cat", "chmod", "dirname", "grep", "kill", "mkdir", "nproc", "rm", "sh"] {
        let found = ["/bin", "/usr/bin"].iter().map(|bin| Path::new(bin).join(command)).find(|path| path.exists());
        symlink(found.expect("coreutils are there"), folder.path().join(command)).expect("a link");
    }
    for (name, text) in [("apt-get", APT_GET), ("cargo", "#!/bin/sh\n"), ("id", "#!/bin/sh\necho 0\n")] {
        std::fs::write(folder.path().join(name), text).expect("a script");
        std::fs::set_permissions(folder.path().join(name), PermissionsExt::from_mode(0o755)).expect("its mode");
    }

    let skipped = run(folder.path(), &["--no-install", "cli"]);
    assert!(skipped.contains("2 thing(s) could not be had") && !skipped.contains("installing"), "{skipped}");
    let installed = run(folder.path(), &["cli"]);
    assert!(installed.contains("installing from Debian: man-db"), "{installed}");
    assert!(installed.contains("all of 1 suites passed"), "{installed}");
}
