//! Memory that knows what it must contain: poisoned before a call, compared byte by byte after it.

use std::ffi::c_void;

use ep::capi::{EpTensor, ep_stream_create, ep_stream_destroy, ep_stream_synchronize};
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
        // SAFETY: the stream is alive until `stream_destroy`.
        expect_ok(unsafe { ep_stream_synchronize(stream.cast(), 60_000) }, "ep_stream_synchronize")
    }

    fn stream_destroy(&self, stream: *mut c_void) {
        // SAFETY: nobody uses the stream afterwards.
        expect_ok(unsafe { ep_stream_destroy(stream.cast()) }, "ep_stream_destroy").expect("a live stream");
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

    /// Which element has this byte of the region.
    fn locate(&self, byte: usize) -> String {
        let Some(at) = byte.checked_sub(GUARD + self.offset) else { return "guard in front".to_string() };
        let element = at / self.dtype.bytes();
        let (row, col) = if self.row_stride >= self.col_stride {
            (element / self.row_stride, element % self.row_stride / self.col_stride)
        } else {
            (element % self.col_stride / self.row_stride, element / self.col_stride)
        };
        if row >= self.rows || col >= self.cols {
            return format!("outside the matrix, near row {row}, col {col}");
        }
        format!("row {row}, col {col}")
    }
}

/// A matrix somewhere in a device's memory, and what that memory must contain.
pub struct Region<'d> {
    device: &'d dyn Device,
    name: String,
    matrix: Matrix,
    base: *mut u8,
    image: Vec<u8>,
    owned: bool,
}

impl<'d> Region<'d> {
    /// Poisons the memory of a matrix: at `place` if given, which has `matrix.region_bytes()`.
    pub fn new(device: &'d dyn Device, name: &str, matrix: Matrix, place: Option<*mut u8>) -> Region<'d> {
        let bytes = matrix.region_bytes();
        let base = place.unwrap_or_else(|| device.allocate(bytes));
        // Neighbouring bytes differ, so that a copy of poison from elsewhere is found too.
        let image: Vec<u8> = (0..bytes).map(|at| 0xA5 ^ (at.wrapping_mul(29) >> 2) as u8).collect();
        device.upload(base, &image);
        Region { device, name: name.to_string(), matrix, base, image, owned: place.is_none() }
    }

    /// Fills the rows of an input.
    pub fn fill(mut self, packed: &[u8]) -> Region<'d> {
        self.matrix.store(&mut self.image, 0, packed);
        self.device.upload(self.base, &self.image);
        self
    }

    /// Says what the first rows of an output must become; the others stay poison.
    pub fn expect(mut self, packed: &[u8]) -> Region<'d> {
        self.matrix.store(&mut self.image, 0, packed);
        self
    }

    /// The tensor for the call.
    pub fn tensor(&self) -> EpTensor {
        let Matrix { dtype, rows, cols, row_stride, col_stride, .. } = self.matrix;
        EpTensor {
            data: self.data(),
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
        self.base.wrapping_add(GUARD + self.matrix.offset)
    }

    /// Compares the bytes before and behind the matrix, of which the rows are the library's.
    pub fn check_guards(&mut self) -> Result<(), String> {
        let rows = GUARD + self.matrix.offset..GUARD + self.matrix.offset + self.matrix.rows;
        assert_eq!((self.matrix.row_bytes(), self.matrix.row_stride), (1, 1), "plain bytes");
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
        let Some(at) = (0..found.len()).find(wrong) else { return Ok(()) };
        let count = (0..found.len()).filter(wrong).count();
        let size = self.matrix.dtype.bytes();
        let at = at - at % size;
        Err(format!(
            "{}: {}: found {:02x?}, expected {:02x?}; {count} of {} bytes differ, matrix {:?}",
            self.name,
            self.matrix.locate(at),
            &found[at..][..size],
            &self.image[at..][..size],
            found.len(),
            self.matrix,
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
            [(0, "guard"), (GUARD + 3, "guard"), (GUARD + 8, "outside"), (GUARD + 10, "row 1, col 0")]
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
