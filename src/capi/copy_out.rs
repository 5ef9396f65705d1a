//! Where results go: checked before the work, written after it.

use std::ffi::c_char;

use ep_core::Result;

use super::copy_in::{Struct, check_pointer, struct_bytes};

/// A struct of the caller that gets a result.
pub(crate) struct StructOut<T> {
    to: *mut T,
    bytes: usize,
}

impl<T: Struct> StructOut<T> {
    /// Checks the struct by the rule for its size.
    ///
    /// # Safety
    /// `to` is null, misaligned, or the address of `struct_size` readable and writable bytes, which
    /// stay so while the value lives.
    pub(crate) unsafe fn new(to: *mut T, arg: &str) -> Result<StructOut<T>> {
        // SAFETY: passed on to the caller.
        let bytes = unsafe { struct_bytes(to, arg) }?;
        Ok(StructOut { to, bytes })
    }

    /// Writes what the caller's struct has room for, and leaves its `struct_size`.
    pub(crate) fn write(self, value: &T) {
        let known = self.bytes.min(size_of::<T>());
        let size_field = size_of::<u32>();
        // SAFETY: both structs have `known` bytes (`new` has checked that this covers the size field),
        // `Struct` has no padding, and `value` is ours, so they do not overlap.
        unsafe {
            let from = std::ptr::from_ref(value).cast::<u8>().add(size_field);
            std::ptr::copy_nonoverlapping(from, self.to.cast::<u8>().add(size_field), known - size_field);
        }
    }
}

/// A variable of the caller that gets a result.
pub(crate) struct ValueOut<T> {
    to: *mut T,
}

impl<T: Copy> ValueOut<T> {
    /// Checks the address.
    ///
    /// # Safety
    /// `to` is null, misaligned, or the address of a writable `T` that stays so while the value lives.
    pub(crate) unsafe fn new(to: *mut T, arg: &str) -> Result<ValueOut<T>> {
        check_pointer(to, arg)?;
        Ok(ValueOut { to })
    }

    pub(crate) fn write(self, value: T) {
        // SAFETY: checked and promised in `new`.
        unsafe { self.to.write(value) };
    }
}

/// A text in an array of fixed size: cut between characters where it is too long, NUL-terminated.
pub(crate) fn text<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    let end = (0..text.len().min(N - 1) + 1).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    for (to, &byte) in array.iter_mut().zip(&text.as_bytes()[..end]) {
        // A NUL inside would hide what follows.
        *to = if byte == 0 { b'?' } else { byte } as c_char;
    }
    array
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn bytes<const N: usize>(array: &[c_char; N]) -> Vec<u8> {
        // SAFETY: `text` ends its arrays with a NUL.
        unsafe { CStr::from_ptr(array.as_ptr()) }.to_bytes().to_vec()
    }

    #[test]
    fn a_text_is_cut_between_characters_and_ends_with_a_nul() {
        assert_eq!(bytes(&text::<8>("")), b"");
        assert_eq!(bytes(&text::<8>("1234567")), b"1234567");
        assert_eq!(bytes(&text::<8>("12345678")), b"1234567");
        assert_eq!(bytes(&text::<8>("123456é")), b"123456");
        assert_eq!(bytes(&text::<8>("a\0b")), b"a?b");
    }
}
