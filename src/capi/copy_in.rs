//! Structs, arrays and strings of the caller, copied before anything else looks at them.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

use ep_core::{Error, Result, Status};

use super::types::*;

/// A `struct_size` above this is garbage, not a newer header.
const MAX_STRUCT_BYTES: usize = 64 << 10;

/// A struct of the header that begins with `struct_size`.
///
/// # Safety
/// `repr(C)`, begins with a `u32` size, has no padding, and all its bit patterns and all-zero are valid.
pub(crate) unsafe trait Struct: Copy {
    /// The name in the header.
    const NAME: &'static str;
    /// Through the last field without which the struct makes no sense: no version was ever shorter.
    const MIN_BYTES: usize;

    /// A reserved field that is not zero, with its value.
    fn reserved(&self) -> Option<(&'static str, u32)> {
        None
    }
}

/// Implements [`Struct`]: name in the header, last mandatory field, reserved fields.
macro_rules! structs {
    ($($type:ident $name:literal to $last:ident : $last_type:ty, reserved [$($reserved:ident)*];)*) => {$(
        // SAFETY: plain integers, pointers and arrays of them, in an order without padding (tests/abi
        // compares every offset with the header).
        unsafe impl Struct for $type {
            const NAME: &'static str = $name;
            const MIN_BYTES: usize = std::mem::offset_of!($type, $last) + size_of::<$last_type>();

            fn reserved(&self) -> Option<(&'static str, u32)> {
                let fields: &[(&'static str, u32)] = &[$((stringify!($reserved), self.$reserved)),*];
                fields.iter().copied().find(|(_, value)| *value != 0)
            }
        }
    )*};
}

structs! {
    EpBootstrap "ep_bootstrap_t" to file: *const c_char, reserved [reserved_flags reserved];
    EpGroupConfig "ep_group_config_t" to reserved_flags: u32, reserved [reserved_flags];
    EpErrorInfo "ep_error_info_t" to status: i32, reserved [];
    EpGroupInfo "ep_group_info_t" to num_ranks: i32, reserved [];
    EpPlanConfig "ep_plan_config_t" to num_experts: u32, reserved [reserved_flags];
    EpOptions "ep_options_t" to reserved_flags: u32, reserved [reserved_flags];
    EpCounts "ep_counts_t" to num_rows: i64, reserved [reserved];
    EpDispatchInputs "ep_dispatch_inputs_t" to payloads: [EpTensor; 4], reserved [];
    EpDispatchOutputs "ep_dispatch_outputs_t" to payloads: [EpTensor; 4], reserved [];
    EpCombineInputs "ep_combine_inputs_t" to rows: EpTensor, reserved [reserved_flags];
    EpCombineOutputs "ep_combine_outputs_t" to combined: EpTensor, reserved [reserved_flags];
}

/// Copies a struct: a shorter one is extended with zeros, a longer one must be zero where this library
/// does not know it, and so must be the reserved fields.
///
/// # Safety
/// `from` is null, misaligned, or the address of `struct_size` readable bytes.
pub(crate) unsafe fn copy_struct<T: Struct>(from: *const T, arg: &str) -> Result<T> {
    // SAFETY: passed on to the caller.
    let bytes = unsafe { struct_bytes(from, arg) }?;
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `from` has `bytes` bytes, `value` has `size_of::<T>()`, and they do not overlap.
    unsafe {
        let known = bytes.min(size_of::<T>());
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known);
    }
    // SAFETY: all bytes are set, and `Struct` promises that any bytes will do.
    let value = unsafe { value.assume_init() };
    match value.reserved() {
        None => Ok(value),
        Some((field, value)) => Err(Error::new(
            Status::UnknownField,
            format!("{arg}: {field} of {} is {value}, expected 0", T::NAME),
        )),
    }
}

/// As [`copy_struct`], where NULL means the defaults.
///
/// # Safety
/// As of [`copy_struct`].
pub(crate) unsafe fn copy_options(from: *const EpOptions) -> Result<ep_core::config::Options> {
    if from.is_null() {
        return Ok(ep_core::config::Options::default());
    }
    // SAFETY: passed on to the caller.
    let EpOptions { struct_size: _, reserved_flags: _, timeout_ms, num_sms, reduce_order, wire_dtype } =
        unsafe { copy_struct(from, "options") }?;
    Ok(ep_core::config::Options { timeout_ms, num_sms, reduce_order, wire_dtype })
}

/// Checks address and size of a struct, and that its unknown tail is zero; returns `struct_size`.
///
/// # Safety
/// As of [`copy_struct`].
pub(crate) unsafe fn struct_bytes<T: Struct>(from: *const T, arg: &str) -> Result<usize> {
    check_pointer(from, arg)?;
    // SAFETY: not null, aligned, and by contract at least its first word is readable.
    let bytes = unsafe { from.cast::<u32>().read() } as usize;
    let (name, min) = (T::NAME, T::MIN_BYTES);
    if !(min..=MAX_STRUCT_BYTES).contains(&bytes) {
        return Err(Error::new(
            Status::UnknownField,
            format!(
                "{arg}: struct_size is {bytes}, expected sizeof({name}), which is {} here and never was \
                 below {min}; begin with its _INIT value",
                size_of::<T>()
            ),
        ));
    }
    for at in size_of::<T>()..bytes {
        // SAFETY: below `struct_size`, so readable by contract.
        if unsafe { from.cast::<u8>().add(at).read() } != 0 {
            return Err(Error::new(
                Status::UnknownField,
                format!(
                    "{arg}: byte {at} of the {bytes} of {name} is not zero, and this library knows the \
                     first {} only: the header is newer than libep",
                    size_of::<T>()
                ),
            ));
        }
    }
    Ok(bytes)
}

/// Copies a value that has no `struct_size`.
///
/// # Safety
/// `from` is null, misaligned, or the address of a readable `T`, of which any bytes are valid.
pub(crate) unsafe fn copy_value<T: Copy>(from: *const T, arg: &str) -> Result<T> {
    check_pointer(from, arg)?;
    // SAFETY: not null, aligned, readable by contract.
    Ok(unsafe { from.read() })
}

/// Copies a text of at most `max_bytes` bytes.
///
/// # Safety
/// `from` is null or the address of a NUL-terminated string.
pub(crate) unsafe fn copy_text(from: *const c_char, arg: &str, max_bytes: usize) -> Result<Vec<u8>> {
    check_pointer(from, arg)?;
    // Looks no farther than the limit, so that a missing NUL is found before it costs much.
    for length in 0..=max_bytes {
        // SAFETY: no NUL came before this byte, so it is part of the string.
        if unsafe { from.add(length).read() } == 0 {
            // SAFETY: the NUL was just seen.
            return Ok(unsafe { CStr::from_ptr(from) }.to_bytes().to_vec());
        }
    }
    Err(Error::invalid(format!("{arg} is longer than {max_bytes} bytes, or has no NUL at its end")))
}

/// As [`copy_text`], for texts that must be UTF-8.
///
/// # Safety
/// As of [`copy_text`].
pub(crate) unsafe fn copy_string(from: *const c_char, arg: &str, max_bytes: usize) -> Result<String> {
    // SAFETY: passed on to the caller.
    let bytes = unsafe { copy_text(from, arg, max_bytes) }?;
    String::from_utf8(bytes).map_err(|_| Error::invalid(format!("{arg} is not UTF-8")))
}

/// Refuses NULL and addresses that a `T` cannot have.
pub(crate) fn check_pointer<T>(pointer: *const T, arg: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::invalid(format!("{arg} is NULL")));
    }
    check_alignment(pointer, arg)
}

/// Refuses addresses that a `T` cannot have.
pub(crate) fn check_alignment<T>(pointer: *const T, arg: &str) -> Result<()> {
    if pointer.is_aligned() {
        return Ok(());
    }
    Err(Error::invalid(format!("{arg} is {pointer:p}, which is not aligned to {} bytes", align_of::<T>())))
}
