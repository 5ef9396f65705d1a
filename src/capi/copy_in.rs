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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capi::copy_out::StructOut;

    /// Room for a struct and a longer one, aligned as any struct of the header.
    #[repr(C, align(16))]
    struct Room([u8; 4096]);

    impl Room {
        /// A struct of `size` bytes, of which all beyond the first word are `fill`.
        fn new(size: usize, fill: u8) -> Room {
            let mut room = Room([0xEE; 4096]);
            room.0[..size.clamp(4, 4096)].fill(fill);
            room.0[..4].copy_from_slice(&(size as u32).to_ne_bytes());
            room
        }

        fn read<T: Struct>(&self) -> Result<T> {
            // SAFETY: the room is at least as long as any size that a test gives and the rule allows.
            unsafe { copy_struct(self.0.as_ptr().cast::<T>(), "arg") }
        }
    }

    fn bytes_of<T: Struct>(value: &T) -> &[u8] {
        // SAFETY: `Struct` has no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
    }

    fn refused<T: Struct>(room: &Room, text: &str) {
        let error = room.read::<T>().err().expect("refused");
        assert_eq!(error.status, Status::UnknownField, "{error}");
        assert!(error.message.contains(text) && error.message.contains(T::NAME), "{error}");
    }

    fn an_older_struct_is_extended_with_zeros<T: Struct>() {
        for size in T::MIN_BYTES..=size_of::<T>() {
            let value: T = Room::new(size, 0).read().unwrap();
            assert_eq!(bytes_of(&value)[..4], (size as u32).to_ne_bytes());
            // Behind `size` the room is 0xEE: nothing of it may be seen.
            assert!(bytes_of(&value)[4..].iter().all(|byte| *byte == 0), "{} of {size}", T::NAME);
        }
        for size in [0, 1, 3, 4, T::MIN_BYTES - 1] {
            refused::<T>(&Room::new(size, 0), &format!("struct_size is {size}"));
        }
    }

    fn a_newer_struct_must_be_zero_behind_the_known_part<T: Struct>() {
        let known = size_of::<T>();
        for size in [known + 1, known + 8, known + 100, 4096] {
            let mut room = Room::new(size, 0);
            assert!(room.read::<T>().is_ok(), "{} of {size}", T::NAME);
            for at in [known, size - 1] {
                room.0[at] = 1;
                refused::<T>(&room, &format!("byte {at} of"));
                room.0[at] = 0;
            }
        }
        // Refused by its number alone: the room is shorter than that.
        for size in [MAX_STRUCT_BYTES + 1, u32::MAX as usize] {
            refused::<T>(&Room::new(size, 0), &format!("struct_size is {size}"));
        }
    }

    fn reserved_fields_must_be_zero<T: Struct>() {
        let error = Room::new(size_of::<T>(), 1).read::<T>();
        let zeroed: T = Room::new(size_of::<T>(), 0).read().unwrap();
        assert!(zeroed.reserved().is_none());
        // All fields are 0x01010101 now: a struct that has a reserved one is refused, naming it.
        if let Err(error) = error {
            assert_eq!(error.status, Status::UnknownField);
            assert!(error.message.contains("reserved") && error.message.contains(T::NAME), "{error}");
        }
    }

    fn null_and_misaligned_are_refused<T: Struct>() {
        let room = Room::new(size_of::<T>(), 0);
        let misaligned = room.0.as_ptr().wrapping_add(1).cast::<T>();
        for (from, text) in [(std::ptr::null(), "arg is NULL"), (misaligned, "not aligned")] {
            // SAFETY: null and misaligned addresses are allowed.
            let error = unsafe { copy_struct(from, "arg") }.err().expect("refused");
            assert_eq!(error.status, Status::InvalidArgument);
            assert!(error.message.contains(text), "{error}");
        }
    }

    fn an_output_is_written_as_far_as_it_goes<T: Struct>() {
        let full: T = {
            let mut value = MaybeUninit::<T>::uninit();
            // SAFETY: in bounds, and any bytes are a valid `T`.
            unsafe { value.as_mut_ptr().cast::<u8>().write_bytes(0x55, size_of::<T>()) };
            // SAFETY: as above.
            unsafe { value.assume_init() }
        };
        for size in [T::MIN_BYTES, size_of::<T>() - 1, size_of::<T>(), size_of::<T>() + 8] {
            let mut room = Room::new(size, 0);
            // SAFETY: the room is longer than `size`.
            unsafe { StructOut::new(room.0.as_mut_ptr().cast::<T>(), "arg") }.unwrap().write(&full);
            let written = size.min(size_of::<T>());
            assert_eq!(room.0[..4], (size as u32).to_ne_bytes());
            assert!(room.0[4..written].iter().all(|byte| *byte == 0x55));
            assert!(room.0[written..size].iter().all(|byte| *byte == 0));
            assert!(room.0[size..].iter().all(|byte| *byte == 0xEE));
        }
    }

    macro_rules! for_every_struct {
        ($($module:ident $type:ty,)*) => {$(
            mod $module {
                use super::*;

                #[test]
                fn older() {
                    an_older_struct_is_extended_with_zeros::<$type>();
                }

                #[test]
                fn newer() {
                    a_newer_struct_must_be_zero_behind_the_known_part::<$type>();
                }

                #[test]
                fn odd() {
                    reserved_fields_must_be_zero::<$type>();
                    null_and_misaligned_are_refused::<$type>();
                }

                #[test]
                fn out() {
                    an_output_is_written_as_far_as_it_goes::<$type>();
                }
            }
        )*};
    }

    for_every_struct! {
        bootstrap EpBootstrap,
        group_config EpGroupConfig,
        error_info EpErrorInfo,
        group_info EpGroupInfo,
        plan_config EpPlanConfig,
        options EpOptions,
        counts EpCounts,
        dispatch_inputs EpDispatchInputs,
        dispatch_outputs EpDispatchOutputs,
        combine_inputs EpCombineInputs,
        combine_outputs EpCombineOutputs,
    }

    #[test]
    fn options_default_to_zero() {
        // SAFETY: NULL is allowed.
        let options = unsafe { copy_options(std::ptr::null()) }.unwrap();
        assert_eq!(options, ep_core::config::Options::default());
    }

    #[test]
    fn texts_are_read_up_to_their_limit() {
        // SAFETY: literals end with a NUL.
        let read = |text: &CStr| unsafe { copy_string(text.as_ptr(), "file", 4) };
        assert_eq!(read(c"").unwrap(), "");
        assert_eq!(read(c"abcd").unwrap(), "abcd");
        assert!(read(c"abcde").unwrap_err().message.contains("file is longer than 4 bytes"));
        assert!(read(c"\xFF").unwrap_err().message.contains("not UTF-8"));
        let no_end = [b'x' as c_char; 5];
        // SAFETY: not a string; with this limit no byte behind the array is read.
        assert!(unsafe { copy_text(no_end.as_ptr(), "file", 4) }.is_err());
    }
}
