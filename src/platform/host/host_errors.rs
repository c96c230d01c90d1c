//! Classifies errors of the operating system as the host's fault.

use std::io;

use rustix::io::Errno;

/// Exhausted resources and failing disks: the same call may succeed on another host.
const HOST_ERRNOS: [Errno; 8] =
    [Errno::MFILE, Errno::NFILE, Errno::AGAIN, Errno::NOMEM, Errno::NOSPC, Errno::DQUOT, Errno::ROFS, Errno::IO];

pub fn is_host_error(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| HOST_ERRNOS.iter().any(|errno| errno.raw_os_error() == code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_resources_are_host_errors_and_a_missing_program_is_not() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(
            is_host_error(&error(Errno::MFILE))
                && is_host_error(&error(Errno::AGAIN))
                && is_host_error(&error(Errno::NOSPC))
        );
        assert!(!is_host_error(&error(Errno::NOENT)) && !is_host_error(&error(Errno::ACCESS)));
        assert!(!is_host_error(&io::Error::other("no errno")));
    }
}
