//! Finds executables in `PATH`, with an error that says what is wrong.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Used if the environment has no `PATH`.
pub const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Finds a program as a shell would: a name in `PATH`, a relative path from `workdir`.
///
/// # Errors
///
/// `NotFound` or `PermissionDenied`, naming the program.
pub fn find_program(program: &str, env: &BTreeMap<String, String>, workdir: &Path) -> io::Result<PathBuf> {
    let candidates: Vec<PathBuf> = if program.contains('/') {
        vec![workdir.join(program)]
    } else {
        let search_path = env.get("PATH").map_or(PATH_DEFAULT, String::as_str);
        let dirs = search_path.split(':').filter(|dir| !dir.is_empty());
        dirs.map(|dir| workdir.join(dir).join(program)).collect()
    };
    let mut kind = io::ErrorKind::NotFound;
    for path in candidates {
        match check_executable(&path) {
            Ok(()) => return Ok(path),
            Err(io::ErrorKind::PermissionDenied) => kind = io::ErrorKind::PermissionDenied,
            Err(_) => {}
        }
    }
    let what = if kind == io::ErrorKind::PermissionDenied {
        "not executable"
    } else if program.contains('/') {
        "no such file"
    } else {
        "not found in PATH"
    };
    Err(io::Error::new(kind, format!("{program}: {what}")))
}

fn check_executable(path: &Path) -> Result<(), io::ErrorKind> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = std::fs::metadata(path).map_err(|error| error.kind())?;
    if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 {
        Ok(())
    } else {
        Err(io::ErrorKind::PermissionDenied)
    }
}
