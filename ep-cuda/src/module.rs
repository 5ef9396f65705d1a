//! The embedded kernels on a device: loaded whole, when the device is opened.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction, CUfunction_attribute, CUmodule, CUresult};
use ep_core::{Error, Result, Status};

use crate::context::Context;
use crate::driver::check;
use crate::images::images_for;

/// A kernel of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    PlanCount,
    PlanPlace,
    Dispatch,
    Combine(Element, Sum),
}

/// The element type of a combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Bf16,
    F16,
    F32,
}

/// In which steps a combine adds, see `kernels/src/combine.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sum {
    Chain,
    Ranks,
    Nodes,
    NodesBf16,
}

impl Kernel {
    /// Names in the images, in the order of [`Kernel::index`].
    pub(crate) const NAMES: [&str; 15] = [
        "ep_plan_count",
        "ep_plan_place",
        "ep_dispatch",
        "ep_combine_bf16_chain",
        "ep_combine_bf16_ranks",
        "ep_combine_bf16_nodes",
        "ep_combine_bf16_nodes_bf16",
        "ep_combine_f16_chain",
        "ep_combine_f16_ranks",
        "ep_combine_f16_nodes",
        "ep_combine_f16_nodes_bf16",
        "ep_combine_f32_chain",
        "ep_combine_f32_ranks",
        "ep_combine_f32_nodes",
        "ep_combine_f32_nodes_bf16",
    ];

    fn index(self) -> usize {
        match self {
            Kernel::PlanCount => 0,
            Kernel::PlanPlace => 1,
            Kernel::Dispatch => 2,
            Kernel::Combine(element, sum) => 3 + 4 * element as usize + sum as usize,
        }
    }

    /// Its name in the images.
    pub(crate) fn name(self) -> &'static str {
        Kernel::NAMES[self.index()]
    }
}

/// A kernel that can be launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    pub(crate) raw: CUfunction,
    /// The most dynamic shared memory of a block.
    pub(crate) max_shared: usize,
}

/// All kernels of a device.
#[derive(Debug)]
pub(crate) struct Kernels {
    context: Arc<Context>,
    modules: Vec<CUmodule>,
    functions: [Option<Function>; Kernel::NAMES.len()],
}

// SAFETY: modules and functions belong to their context, and may be used by any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing changes after loading.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the images for the context's device.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if there are none for it.
    pub(crate) fn load(context: &Arc<Context>) -> Result<Kernels> {
        let major = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let shared =
            context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let images = images_for(major, minor)?;
        let _entered = context.enter()?;
        let mut kernels =
            Kernels { context: context.clone(), modules: Vec::new(), functions: [None; Kernel::NAMES.len()] };
        for image in images {
            let mut module = std::ptr::null_mut();
            // SAFETY: a context is current; the image is a whole cubin, aligned.
            let code = unsafe { sys::cuModuleLoadData(&mut module, image.bytes().as_ptr().cast()) };
            check(code, format_args!("cuModuleLoadData of {} for {}", image.source, image.arch))?;
            kernels.modules.push(module);
        }
        for (name, function) in Kernel::NAMES.into_iter().zip(&mut kernels.functions) {
            *function = find(&kernels.modules, name)?.map(|raw| prepare(raw, name, shared)).transpose()?;
        }
        Ok(kernels)
    }

    /// The function of a kernel.
    ///
    /// # Errors
    /// [`Status::Unsupported`] if the build lacks it.
    pub(crate) fn function(&self, kernel: Kernel) -> Result<Function> {
        self.functions[kernel.index()].ok_or_else(|| {
            Error::new(Status::Unsupported, format!("this build has no kernel {}", kernel.name()))
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            for module in self.modules.drain(..) {
                // SAFETY: loaded by `load`; the device is dropped after the last group on it.
                let _ = unsafe { sys::cuModuleUnload(module) };
            }
        }
    }
}

fn find(modules: &[CUmodule], kernel: &str) -> Result<Option<CUfunction>> {
    let name = CString::new(kernel).map_err(|e| Error::invalid(e.to_string()))?;
    for module in modules {
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a NUL.
        match unsafe { sys::cuModuleGetFunction(&mut function, *module, name.as_ptr()) } {
            CUresult::CUDA_ERROR_NOT_FOUND => {}
            code => {
                check(code, format_args!("cuModuleGetFunction of {kernel}"))?;
                return Ok(Some(function));
            }
        }
    }
    Ok(None)
}

/// Loads a function now, so that its first launch does not wait for the kernels that run then, and gives
/// it all the shared memory there is.
fn prepare(raw: CUfunction, kernel: &str, shared: i32) -> Result<Function> {
    // SAFETY: the function is of a loaded module of the current context.
    check(unsafe { sys::cuFuncLoad(raw) }, format_args!("cuFuncLoad of {kernel}"))?;
    let mut fixed = 0;
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: as above.
    check(unsafe { sys::cuFuncGetAttribute(&mut fixed, attribute, raw) }, "cuFuncGetAttribute")?;
    let max = (shared - fixed).max(0);
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: as above.
    let code = unsafe { sys::cuFuncSetAttribute(raw, attribute, max) };
    check(code, format_args!("cuFuncSetAttribute of {kernel} to {max} bytes"))?;
    Ok(Function { raw, max_shared: usize::try_from(max).unwrap_or(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_combine_has_the_name_of_its_element_and_sum() {
        for (element, name) in [(Element::Bf16, "bf16"), (Element::F16, "f16"), (Element::F32, "f32")] {
            let sums = [Sum::Chain, Sum::Ranks, Sum::Nodes, Sum::NodesBf16];
            for (sum, how) in sums.into_iter().zip(["chain", "ranks", "nodes", "nodes_bf16"]) {
                assert_eq!(Kernel::Combine(element, sum).name(), format!("ep_combine_{name}_{how}"));
            }
        }
    }
}
