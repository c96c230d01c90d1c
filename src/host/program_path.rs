//! Where programs are.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// The `PATH` of whoever has none.
pub const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Finds a program as a shell would: a name in its `PATH`, a path from the folder it starts in.
///
/// # Errors
///
/// `NotFound` or `PermissionDenied`, naming the program and where it was looked for.
pub fn find_program(program: &str, env: &BTreeMap<String, String>, workdir: &Path) -> io::Result<PathBuf> {
    let places: Vec<PathBuf> = if program.contains('/') {
        vec![workdir.join(program)]
    } else {
        let path = env.get("PATH").map_or(PATH_DEFAULT, String::as_str);
        let folders = path.split(':').filter(|folder| !folder.is_empty());
        folders.map(|folder| workdir.join(folder).join(program)).collect()
    };
    let mut kind = io::ErrorKind::NotFound;
    for place in places {
        match check_executable(&place) {
            Ok(()) => return Ok(place),
            Err(io::ErrorKind::PermissionDenied) => kind = io::ErrorKind::PermissionDenied,
            Err(_) => {}
        }
    }
    let what = match (kind, program.contains('/')) {
        (io::ErrorKind::PermissionDenied, _) => {
            format!("{program}: it is there, but cannot be executed")
        }
        (_, true) => format!("{program}: there is no such file"),
        (_, false) => format!("{program}: there is no such program in PATH"),
    };
    Err(io::Error::new(kind, what))
}

fn check_executable(place: &Path) -> Result<(), io::ErrorKind> {
    use std::os::unix::fs::PermissionsExt;
    let about = std::fs::metadata(place).map_err(|error| error.kind())?;
    if about.is_file() && about.permissions().mode() & 0o111 != 0 {
        Ok(())
    } else {
        Err(io::ErrorKind::PermissionDenied)
    }
}
