//! The kernels that the build embedded.

use ep_core::{Error, Result, Status};

/// One source file compiled for one architecture.
#[derive(Debug)]
pub struct Image {
    /// Stem of the file.
    pub source: &'static str,
    /// Such as `sm_90a`.
    pub arch: &'static str,
    bytes: &'static Aligned<[u8]>,
}

impl Image {
    /// The cubin, aligned as the driver reads it.
    pub fn bytes(&self) -> &'static [u8] {
        &self.bytes.0
    }
}

/// Bytes at the alignment of an ELF file in memory.
#[derive(Debug)]
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The embedded kernels; None: built without.
pub fn kernels() -> Option<&'static [Image]> {
    (!IMAGES.is_empty()).then_some(&IMAGES[..])
}

/// The oldest driver that loads the embedded kernels, as the driver counts: 13000 is CUDA 13.0.
///
/// # Errors
/// [`Status::Unsupported`] if there are none.
pub(crate) fn needed_driver() -> Result<u32> {
    if kernels().is_none() {
        return Err(Error::new(Status::Unsupported, format!("built without CUDA kernels ({WHY_NONE})")));
    }
    // Machine code of one major version runs on every driver of it, the first one included.
    Ok(TOOLKIT_VERSION / 1000 * 1000)
}

/// The images for a device of this compute capability.
///
/// # Errors
/// [`Status::Unsupported`] naming the architectures there are.
pub(crate) fn images_for(major: i32, minor: i32) -> Result<Vec<&'static Image>> {
    // Exact machine code first, then code that every device of the major version runs.
    let wanted = [format!("sm_{major}{minor}a"), format!("sm_{major}{minor}"), format!("sm_{major}0")];
    for arch in &wanted {
        let images: Vec<&Image> = IMAGES.iter().filter(|image| image.arch == arch).collect();
        if !images.is_empty() {
            return Ok(images);
        }
    }
    let mut archs: Vec<&str> = IMAGES.iter().map(|image| image.arch).collect();
    archs.sort_unstable();
    archs.dedup();
    Err(Error::new(
        Status::Unsupported,
        format!(
            "the device has compute capability {major}.{minor}, and the kernels were built for {}",
            archs.join(", ")
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one kernel uses on one architecture.
    #[derive(Debug, PartialEq)]
    struct Use<'a> {
        kernel: &'a str,
        arch: &'a str,
        registers: u64,
        spilled: u64,
        shared: u64,
    }

    /// The number before `unit` in a line of ptxas.
    fn number(line: &str, unit: &str) -> u64 {
        let before = line.split(unit).next().filter(|before| before.len() < line.len());
        let digits = before.and_then(|before| before.split_whitespace().next_back());
        digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
    }

    /// Reads the output of `ptxas -v`.
    fn parse(text: &str) -> Vec<Use<'_>> {
        let (mut uses, mut arch, mut kernel, mut spilled) = (Vec::new(), "", "", 0);
        for line in text.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let mut parts = rest.split('\'');
                (kernel, arch) = (parts.next().unwrap_or(""), parts.nth(1).unwrap_or(""));
            } else if line.contains("bytes spill stores") {
                spilled = number(line, " bytes spill stores") + number(line, " bytes spill loads");
            } else if line.contains("Used ") && line.contains(" registers") {
                let shared = number(line, " bytes smem");
                uses.push(Use { kernel, arch, registers: number(line, " registers"), spilled, shared });
            }
        }
        uses
    }

    const BUDGET: &str = include_str!("../kernels.budget");

    fn budget<'a>() -> Vec<Use<'a>> {
        let line = |line: &'a str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| fields[at].parse().expect("a number");
            let (registers, spilled, shared) = (number(2), number(3), number(4));
            Use { kernel: fields[0], arch: fields[1], registers, spilled, shared }
        };
        BUDGET.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()).map(line).collect()
    }

    /// A `*` at the end of a pattern stands for anything.
    fn fits(pattern: &str, name: &str) -> bool {
        pattern.strip_suffix('*').map_or(pattern == name, |prefix| name.starts_with(prefix))
    }

    #[test]
    fn every_kernel_is_there_and_within_its_budget() {
        let Some(images) = kernels() else {
            // CI builds with EP_REQUIRE_KERNELS=1, so it cannot get here.
            println!("skipped: built without kernels ({WHY_NONE})");
            return;
        };
        let (uses, budget) = (parse(RESOURCES), budget());
        let mut archs: Vec<&str> = images.iter().map(|image| image.arch).collect();
        archs.sort_unstable();
        archs.dedup();
        let mut over = Vec::new();
        for arch in archs {
            for kernel in crate::module::Kernel::NAMES {
                let used = uses.iter().find(|used| used.kernel == kernel && used.arch == arch);
                let used = used.unwrap_or_else(|| panic!("no {kernel} for {arch}"));
                let limit = budget.iter().find(|limit| fits(limit.kernel, kernel) && fits(limit.arch, arch));
                let limit = limit.unwrap_or_else(|| panic!("no budget for {kernel} on {arch}"));
                if used.registers > limit.registers
                    || used.spilled > limit.spilled
                    || used.shared > limit.shared
                {
                    over.push(format!("{used:?} is over {limit:?}"));
                }
            }
        }
        assert!(over.is_empty(), "{}", over.join("\n"));
    }

    #[test]
    fn ptxas_is_understood() {
        let text = "\
            ptxas info    : Compiling entry function 'ep_x' for 'sm_90a'\n\
            ptxas info    : Function properties for ep_x\n    \
            8 bytes stack frame, 266 bytes spill stores, 820 bytes spill loads\n\
            ptxas info    : Used 85 registers, used 16 barriers, 1536 bytes smem, 2040 bytes cmem[0]\n";
        let expected = Use { kernel: "ep_x", arch: "sm_90a", registers: 85, spilled: 1086, shared: 1536 };
        assert_eq!(parse(text), [expected]);
    }

    #[test]
    fn images_are_aligned_elf_files() {
        for image in kernels().unwrap_or_default() {
            assert!(image.bytes().starts_with(b"\x7fELF"), "{image:?}");
            assert!(image.bytes().as_ptr().addr().is_multiple_of(64));
        }
    }
}
