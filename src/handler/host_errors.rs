//! Whose fault an error of the operating system is.

use std::io;

use rustix::io::Errno;

/// What a host says that is out of something, or whose disk fails. The same call may well succeed on another host.
const HOST_ERRNOS: [Errno; 8] =
    [Errno::MFILE, Errno::NFILE, Errno::AGAIN, Errno::NOMEM, Errno::NOSPC, Errno::DQUOT, Errno::ROFS, Errno::IO];

/// Whether an error is the host's: neither the task nor the handler can help it.
#[must_use]
pub fn is_host_error(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| HOST_ERRNOS.iter().any(|errno| errno.raw_os_error() == code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_is_out_of_is_its_fault_and_a_program_that_is_not_there_is_not() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(
            is_host_error(&error(Errno::MFILE))
                && is_host_error(&error(Errno::AGAIN))
                && is_host_error(&error(Errno::NOSPC))
        );
        assert!(!is_host_error(&error(Errno::NOENT)) && !is_host_error(&error(Errno::ACCESS)));
        assert!(!is_host_error(&io::Error::other("no number")));
    }
}
