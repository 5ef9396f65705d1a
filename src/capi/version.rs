//! The version of the library, and whether a header fits it.

use ep_core::{Error, Result, Status};

const MAJOR: u32 = decimal(env!("CARGO_PKG_VERSION_MAJOR"));
const MINOR: u32 = decimal(env!("CARGO_PKG_VERSION_MINOR"));
const PATCH: u32 = decimal(env!("CARGO_PKG_VERSION_PATCH"));

/// `EP_VERSION_NUMBER` of this library.
pub(crate) const NUMBER: u32 = MAJOR * 10_000 + MINOR * 100 + PATCH;

/// `ep_version`.
#[unsafe(no_mangle)]
pub extern "C" fn ep_version() -> u32 {
    NUMBER
}

/// Refuses a program that was compiled with a header of another ABI. Within a major version the ABI
/// only grows, but for major version 0, where each minor version is an ABI of its own.
pub(crate) fn check_header(header_version: u32) -> Result<()> {
    let (major, minor, patch) = (header_version / 10_000, header_version / 100 % 100, header_version % 100);
    if major == MAJOR && (major > 0 || minor == MINOR) {
        return Ok(());
    }
    let wanted = if MAJOR == 0 { format!("{MAJOR}.{MINOR}") } else { format!("{MAJOR}") };
    Err(Error::new(
        Status::Unsupported,
        format!(
            "the program was compiled with ep.h {major}.{minor}.{patch} and runs with libep \
             {MAJOR}.{MINOR}.{PATCH}, which needs a header of version {wanted}: compile it again, or \
             install the libep that it was made for"
        ),
    ))
}

const fn decimal(text: &str) -> u32 {
    let digits = text.as_bytes();
    let (mut value, mut at) = (0, 0);
    while at < digits.len() {
        assert!(digits[at].is_ascii_digit());
        value = value * 10 + (digits[at] - b'0') as u32;
        at += 1;
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_patch_of_the_same_abi_is_accepted() {
        assert!(check_header(NUMBER).is_ok());
        assert!(check_header(MAJOR * 10_000 + MINOR * 100 + 99).is_ok());
    }

    #[test]
    fn another_abi_is_refused_naming_both_versions() {
        for other in [0, MAJOR * 10_000 + (MINOR + 1) * 100, (MAJOR + 1) * 10_000, u32::MAX] {
            let error = check_header(other).unwrap_err();
            assert_eq!(error.status, Status::Unsupported);
            let (major, minor, patch) = (other / 10_000, other / 100 % 100, other % 100);
            assert!(error.message.contains(&format!("ep.h {major}.{minor}.{patch}")), "{error}");
            assert!(error.message.contains(&format!("libep {MAJOR}.{MINOR}.{PATCH}")), "{error}");
        }
    }
}
