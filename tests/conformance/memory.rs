//! Memory that knows what it must contain: poisoned before a call, compared byte by byte after it.

use std::ffi::c_void;

use ep::capi::{EP_BACKEND_HOST, EpTensor, ep_stream_create, ep_stream_destroy, ep_stream_synchronize};
use ep_core::tensor::Dtype;

use crate::abi::expect_ok;

/// Where a cell's tensors live and its calls run. Addresses are the device's.
pub trait Device: Send + Sync {
    /// Memory aligned to 64 bytes.
    fn allocate(&self, bytes: usize) -> *mut u8;
    /// Frees what `allocate` gave.
    fn free(&self, data: *mut u8, bytes: usize);
    /// Writes device memory.
    fn upload(&self, to: *mut u8, from: &[u8]);
    /// Reads device memory.
    fn download(&self, from: *const u8, to: &mut [u8]);
    /// A stream for collective calls.
    fn stream_create(&self) -> *mut c_void;
    /// Waits for the stream.
    fn stream_synchronize(&self, stream: *mut c_void) -> Result<(), String>;
    /// Ends the stream.
    fn stream_destroy(&self, stream: *mut c_void);
    /// `EP_BACKEND_` of the groups.
    fn backend(&self) -> i32;
    /// What the backend does not do, and the jobs go without.
    fn lacks(&self) -> Lacks;
}

/// What a backend does not do yet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lacks {
    /// Counting rows and bytes in `ep_group_stats`.
    pub stats: bool,
}

/// Ordinary memory and `ep_stream_t`.
pub struct Host;

fn host_layout(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes.max(64), 64).expect("test buffers are small")
}

impl Device for Host {
    fn allocate(&self, bytes: usize) -> *mut u8 {
        // SAFETY: the layout is not empty.
        let data = unsafe { std::alloc::alloc(host_layout(bytes)) };
        assert!(!data.is_null(), "no memory for {bytes} bytes");
        data
    }

    fn free(&self, data: *mut u8, bytes: usize) {
        // SAFETY: `data` came from `allocate` with the same size.
        unsafe { std::alloc::dealloc(data, host_layout(bytes)) }
    }

    fn upload(&self, to: *mut u8, from: &[u8]) {
        // SAFETY: regions write inside their own allocation, while no call is in progress on it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    fn download(&self, from: *const u8, to: &mut [u8]) {
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    fn stream_create(&self) -> *mut c_void {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is a place for one handle.
        expect_ok(unsafe { ep_stream_create(&mut stream) }, "ep_stream_create").expect("a stream");
        stream.cast()
    }

    fn stream_synchronize(&self, stream: *mut c_void) -> Result<(), String> {
        if stream.is_null() {
            // Calls without a stream are done when they return.
            return Ok(());
        }
        // SAFETY: the stream is alive until `stream_destroy`.
        expect_ok(unsafe { ep_stream_synchronize(stream.cast(), 60_000) }, "ep_stream_synchronize")
    }

    fn stream_destroy(&self, stream: *mut c_void) {
        // SAFETY: nobody uses the stream afterwards.
        expect_ok(unsafe { ep_stream_destroy(stream.cast()) }, "ep_stream_destroy").expect("a live stream");
    }

    fn backend(&self) -> i32 {
        EP_BACKEND_HOST
    }

    fn lacks(&self) -> Lacks {
        Lacks::default()
    }
}

/// Untouchable bytes on each side of a region's matrix.
pub const GUARD: usize = 64;

/// A matrix inside a region, at `GUARD + offset`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
    pub col_stride: usize,
    pub offset: usize,
}

impl Matrix {
    /// Rows one after the other.
    pub fn contiguous(dtype: Dtype, rows: usize, cols: usize) -> Matrix {
        Matrix { dtype, rows, cols, row_stride: cols, col_stride: 1, offset: 0 }
    }

    /// Bytes of one row's elements.
    pub fn row_bytes(&self) -> usize {
        self.cols * self.dtype.bytes()
    }

    /// Bytes of the region that holds it, guards included.
    pub fn region_bytes(&self) -> usize {
        let last = match self.rows {
            0 => 0,
            rows => (rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1,
        };
        (GUARD + self.offset + last * self.dtype.bytes() + GUARD).next_multiple_of(64)
    }

    fn place(&self, row: usize, col: usize) -> usize {
        GUARD + self.offset + (row * self.row_stride + col * self.col_stride) * self.dtype.bytes()
    }

    /// Stores the packed bytes of rows `first..` into a region's image.
    pub fn store(&self, image: &mut [u8], first: usize, packed: &[u8]) {
        let size = self.dtype.bytes();
        assert_eq!(packed.len() % self.row_bytes(), 0, "whole rows");
        for (row, bytes) in packed.chunks_exact(self.row_bytes()).enumerate() {
            let row = first + row;
            assert!(row < self.rows, "row {row} of {}", self.rows);
            if self.col_stride == 1 {
                image[self.place(row, 0)..][..bytes.len()].copy_from_slice(bytes);
                continue;
            }
            for (col, element) in bytes.chunks_exact(size).enumerate() {
                image[self.place(row, col)..][..size].copy_from_slice(element);
            }
        }
    }

    /// The row and column of the element with this byte of the region, if it is in an element.
    fn element_at(&self, byte: usize) -> Option<(usize, usize)> {
        let element = byte.checked_sub(GUARD + self.offset)? / self.dtype.bytes();
        let (row, col) = if self.row_stride >= self.col_stride {
            (element / self.row_stride, element % self.row_stride / self.col_stride)
        } else {
            (element % self.col_stride / self.row_stride, element / self.col_stride)
        };
        let exact = row * self.row_stride + col * self.col_stride == element;
        (exact && row < self.rows && col < self.cols).then_some((row, col))
    }

    fn has(&self, byte: usize) -> bool {
        self.element_at(byte).is_some()
    }

    fn locate(&self, byte: usize) -> String {
        match self.element_at(byte) {
            Some((row, col)) => format!("row {row}, col {col}"),
            None => format!("byte {byte}, outside the elements"),
        }
    }
}

/// Matrices somewhere in a device's memory, and what that memory must contain.
pub struct Region<'d> {
    device: &'d dyn Device,
    /// Name and place of each; none overlap, but they may lie between each other's rows.
    parts: Vec<(String, Matrix)>,
    base: *mut u8,
    image: Vec<u8>,
    owned: bool,
}

impl<'d> Region<'d> {
    /// Poisons the memory of a matrix: at `place` if given, which has `matrix.region_bytes()`.
    pub fn new(device: &'d dyn Device, name: &str, matrix: Matrix, place: Option<*mut u8>) -> Region<'d> {
        Region::of_parts(device, vec![(name.to_string(), matrix)], place)
    }

    /// The same for several matrices.
    pub fn of_parts(
        device: &'d dyn Device,
        parts: Vec<(String, Matrix)>,
        place: Option<*mut u8>,
    ) -> Region<'d> {
        let bytes = parts.iter().map(|(_, matrix)| matrix.region_bytes()).max().unwrap_or(0);
        let base = place.unwrap_or_else(|| device.allocate(bytes));
        // Neighbouring bytes differ, so that a copy of poison from elsewhere is found too.
        let image: Vec<u8> = (0..bytes).map(|at| 0xA5 ^ (at.wrapping_mul(29) >> 2) as u8).collect();
        device.upload(base, &image);
        Region { device, parts, base, image, owned: place.is_none() }
    }

    /// Fills the rows of an input.
    pub fn fill(mut self, packed: &[u8]) -> Region<'d> {
        self.fill_part(0, packed);
        self
    }

    /// Fills the rows of one of several inputs.
    pub fn fill_part(&mut self, part: usize, packed: &[u8]) {
        self.expect_part(part, packed);
        self.device.upload(self.base, &self.image);
    }

    /// Says what the first rows of an output must become; the others stay poison.
    pub fn expect(mut self, packed: &[u8]) -> Region<'d> {
        self.expect_part(0, packed);
        self
    }

    /// Says it of one of several outputs.
    pub fn expect_part(&mut self, part: usize, packed: &[u8]) {
        self.parts[part].1.store(&mut self.image, 0, packed);
    }

    /// The tensor for the call.
    pub fn tensor(&self) -> EpTensor {
        self.tensor_of_part(0)
    }

    /// The tensor of one of several matrices.
    pub fn tensor_of_part(&self, part: usize) -> EpTensor {
        let Matrix { dtype, rows, cols, row_stride, col_stride, offset } = self.parts[part].1;
        EpTensor {
            data: self.base.wrapping_add(GUARD + offset),
            dtype: dtype as i32,
            reserved: 0,
            rows: rows as i64,
            cols: cols as i64,
            // Zero where that means the same, so that both spellings are used.
            row_stride: if row_stride == cols * col_stride { 0 } else { row_stride as i64 },
            col_stride: if col_stride == 1 { 0 } else { col_stride as i64 },
        }
    }

    /// The address of the first element.
    pub fn data(&self) -> *mut u8 {
        self.tensor().data
    }

    /// Compares the bytes before and behind the matrix, of which the rows are the library's.
    pub fn check_guards(&mut self) -> Result<(), String> {
        let matrix = self.parts[0].1;
        let rows = GUARD + matrix.offset..GUARD + matrix.offset + matrix.rows;
        assert_eq!((matrix.row_bytes(), matrix.row_stride), (1, 1), "plain bytes");
        let mut found = vec![0; self.image.len()];
        self.device.download(self.base, &mut found);
        self.image[rows.clone()].copy_from_slice(&found[rows]);
        self.check()
    }

    /// Compares every byte.
    pub fn check(&self) -> Result<(), String> {
        let mut found = vec![0; self.image.len()];
        self.device.download(self.base, &mut found);
        if found == self.image {
            return Ok(());
        }
        let wrong = |at: &usize| found[*at] != self.image[*at];
        let at = (0..found.len()).find(wrong).unwrap_or(0);
        let count = (0..found.len()).filter(wrong).count();
        // The part that has the byte, or the first.
        let part = self.parts.iter().find(|(_, matrix)| matrix.has(at));
        let (name, matrix) = part.unwrap_or(&self.parts[0]);
        let size = matrix.dtype.bytes();
        let at = at - at % size;
        Err(format!(
            "{name}: {}: found {:02x?}, expected {:02x?}; {count} of {} bytes differ, {matrix:?}",
            matrix.locate(at),
            &found[at..][..size],
            &self.image[at..][..size],
            found.len(),
        ))
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        if self.owned {
            self.device.free(self.base, self.image.len());
        }
    }
}

const _: () = assert!(GUARD.is_multiple_of(64), "regions keep the alignment of their memory");

#[cfg(test)]
mod tests {
    use super::*;

    fn poke(region: &Region, at: usize, byte: u8) {
        Host.upload(region.base.wrapping_add(at), &[byte]);
    }

    #[test]
    fn a_region_is_as_expected_only_if_every_byte_is() {
        let matrix = Matrix { row_stride: 3, offset: 4, ..Matrix::contiguous(Dtype::Bf16, 2, 2) };
        let region = Region::new(&Host, "x", matrix, None).expect(&[1, 2, 3, 4]);
        assert!(region.check().unwrap_err().contains("row 0, col 0"), "not written yet");
        for (byte, value) in [(0, 1), (1, 2), (2, 3), (3, 4)] {
            poke(&region, GUARD + 4 + byte, value);
        }
        region.check().expect("row 0 is written, row 1 is poison");
        for (at, place) in
            [(0, "outside"), (GUARD + 3, "outside"), (GUARD + 8, "outside"), (GUARD + 10, "row 1, col 0")]
        {
            let mut old = [0];
            Host.download(region.base.wrapping_add(at), &mut old);
            poke(&region, at, old[0] ^ 1);
            assert!(region.check().unwrap_err().contains(place), "{at}: {:?}", region.check());
            poke(&region, at, old[0]);
        }
        region.check().expect("as before");
    }

    #[test]
    fn columns_may_lie_side_by_side() {
        let matrix = Matrix { row_stride: 1, col_stride: 3, ..Matrix::contiguous(Dtype::Ue8m0, 2, 2) };
        let region = Region::new(&Host, "x", matrix, None).fill(&[1, 2, 3, 4]);
        let mut found = [0; 5];
        Host.download(region.data(), &mut found);
        assert_eq!((found[..2].to_vec(), found[3..].to_vec()), (vec![1, 3], vec![2, 4]));
        assert!(region.tensor().check("x").is_ok());
    }

    #[test]
    fn guards_are_looked_at_without_the_matrix() {
        let mut region = Region::new(&Host, "x", Matrix::contiguous(Dtype::Ue8m0, 100, 1), None);
        poke(&region, GUARD + 50, 7);
        region.check_guards().expect("the matrix is the library's");
        poke(&region, GUARD + 100, 7);
        region.check_guards().expect_err("behind it");
    }
}
