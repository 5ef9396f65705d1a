//! Element types and matrices as they cross the C ABI.

use crate::error::{Error, Result, Status};

/// An element type; the numbers are those of `include/ep.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Dtype {
    /// bfloat16.
    Bf16 = 1,
    /// IEEE binary16.
    F16 = 2,
    /// IEEE binary32.
    F32 = 3,
    /// fp8 with 4 exponent bits.
    F8E4M3 = 4,
    /// fp8 with 5 exponent bits.
    F8E5M2 = 5,
    /// One-byte power-of-two scales.
    Ue8m0 = 6,
    /// Bytes that the library does not interpret.
    Opaque = 7,
    /// 32-bit integers; also four packed UE8M0 scales.
    I32 = 8,
    /// 64-bit integers.
    I64 = 9,
}

impl Dtype {
    /// Every dtype, in ascending order of code.
    pub const ALL: [Dtype; 9] = [
        Dtype::Bf16,
        Dtype::F16,
        Dtype::F32,
        Dtype::F8E4M3,
        Dtype::F8E5M2,
        Dtype::Ue8m0,
        Dtype::Opaque,
        Dtype::I32,
        Dtype::I64,
    ];

    /// The dtype with this number.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] with the numbers that exist.
    pub fn from_code(code: i32) -> Result<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| *dtype as i32 == code).ok_or_else(|| {
            Error::invalid(format!("dtype {code} does not exist; the EP_DTYPE_ values are 1 to 9"))
        })
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::Ue8m0 | Dtype::Opaque => 1,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::I64 => 8,
        }
    }

    /// The alignment that a tensor's base address must have.
    pub const fn alignment(self) -> usize {
        match self {
            Dtype::Opaque => 16,
            _ => self.bytes(),
        }
    }

    /// The name of the dtype in `include/ep.h`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "EP_DTYPE_BF16",
            Dtype::F16 => "EP_DTYPE_F16",
            Dtype::F32 => "EP_DTYPE_F32",
            Dtype::F8E4M3 => "EP_DTYPE_F8_E4M3",
            Dtype::F8E5M2 => "EP_DTYPE_F8_E5M2",
            Dtype::Ue8m0 => "EP_DTYPE_UE8M0",
            Dtype::Opaque => "EP_DTYPE_OPAQUE",
            Dtype::I32 => "EP_DTYPE_I32",
            Dtype::I64 => "EP_DTYPE_I64",
        }
    }
}

/// `ep_tensor_t`: a matrix somewhere in memory, as the caller describes it. Not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RawTensor {
    /// Address of element (0, 0); may be null when `rows` is 0.
    pub data: *mut u8,
    /// A [`Dtype`] code.
    pub dtype: i32,
    /// Zero.
    pub reserved: u32,
    /// Number of rows.
    pub rows: i64,
    /// Number of columns.
    pub cols: i64,
    /// Elements between rows; 0 means `cols * col_stride`.
    pub row_stride: i64,
    /// Elements between columns; 0 means 1.
    pub col_stride: i64,
}

impl RawTensor {
    /// The absent tensor.
    pub const NONE: RawTensor = RawTensor {
        data: std::ptr::null_mut(),
        dtype: 0,
        reserved: 0,
        rows: 0,
        cols: 0,
        row_stride: 0,
        col_stride: 0,
    };

    /// A contiguous matrix.
    pub fn contiguous(data: *mut u8, dtype: Dtype, rows: usize, cols: usize) -> RawTensor {
        RawTensor { data, dtype: dtype as i32, rows: rows as i64, cols: cols as i64, ..RawTensor::NONE }
    }

    /// True for the all-zero tensor.
    pub fn is_none(&self) -> bool {
        *self == RawTensor::NONE
    }

    /// Checks everything that can be checked without reading the memory. `name` opens the error's text.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`] naming the field, the value and what was expected.
    pub fn check(&self, name: &str) -> Result<Tensor> {
        let dtype =
            Dtype::from_code(self.dtype).map_err(|e| Error::invalid(format!("{name}: {}", e.message)))?;
        let bad = |what: String| Err(Error::invalid(format!("{name}: {what}")));
        if self.reserved != 0 {
            return Err(Error::new(
                Status::UnknownField,
                format!("{name}: reserved is {}, expected 0", self.reserved),
            ));
        }
        if self.rows < 0 || self.rows > MAX_ROWS {
            return bad(format!("rows is {}, expected 0 to {MAX_ROWS}", self.rows));
        }
        if self.cols < 1 || self.cols > MAX_COLS {
            return bad(format!("cols is {}, expected 1 to {MAX_COLS}", self.cols));
        }
        let col_stride = if self.col_stride == 0 { 1 } else { self.col_stride };
        if !(1..=MAX_STRIDE).contains(&col_stride) {
            return bad(format!("col_stride is {}, expected 0 to {MAX_STRIDE}", self.col_stride));
        }
        let row_stride = if self.row_stride == 0 { self.cols * col_stride } else { self.row_stride };
        if !(1..=MAX_STRIDE).contains(&row_stride) {
            return bad(format!("row_stride is {}, expected 0 to {MAX_STRIDE}", self.row_stride));
        }
        let rows_apart = row_stride > (self.cols - 1) * col_stride;
        let cols_apart = self.rows == 0 || col_stride > (self.rows - 1).saturating_mul(row_stride);
        if !rows_apart && !cols_apart && self.rows > 1 {
            return bad(format!(
                "row_stride {row_stride} and col_stride {col_stride} let elements of a {} x {} matrix overlap",
                self.rows, self.cols
            ));
        }
        if dtype == Dtype::Opaque && (self.cols % 16 != 0 || col_stride != 1 || row_stride % 16 != 0) {
            return bad(format!(
                "opaque rows are a multiple of 16 bytes, 16-byte aligned and contiguous; cols is {}, \
                 row_stride {row_stride}, col_stride {col_stride}",
                self.cols
            ));
        }
        if self.rows > 0 && self.data.is_null() {
            return bad(format!("data is NULL, expected the address of {} rows", self.rows));
        }
        if self.rows > 0 && !self.data.addr().is_multiple_of(dtype.alignment()) {
            return bad(format!(
                "data {:p} is not aligned to {} bytes, as {} needs",
                self.data,
                dtype.alignment(),
                dtype.name()
            ));
        }
        let tensor = Tensor {
            data: self.data,
            dtype,
            rows: self.rows as usize,
            cols: self.cols as usize,
            row_stride: row_stride as usize,
            col_stride: col_stride as usize,
        };
        if self.data.addr().checked_add(tensor.span_bytes()).is_none_or(|end| end > isize::MAX as usize) {
            return bad("data and strides reach past the end of the address space".to_string());
        }
        Ok(tensor)
    }
}

/// The most rows of a tensor: row numbers are 31-bit on every wire.
pub const MAX_ROWS: i64 = i32::MAX as i64;
/// The most columns of a tensor.
pub const MAX_COLS: i64 = 1 << 28;
/// The largest stride, in elements.
pub const MAX_STRIDE: i64 = 1 << 40;

/// A checked matrix: dtype known, strides resolved, address aligned, extent inside the address space.
/// Whether the memory is there is the caller's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Address of element (0, 0); dangling or null when `rows` is 0.
    pub data: *mut u8,
    /// Element type.
    pub dtype: Dtype,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns, at least 1.
    pub cols: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between columns.
    pub col_stride: usize,
}

impl Tensor {
    /// Bytes of one row's elements.
    pub fn row_bytes(&self) -> usize {
        self.cols * self.dtype.bytes()
    }

    /// Bytes from one row to the next.
    pub fn row_pitch(&self) -> usize {
        self.row_stride * self.dtype.bytes()
    }

    /// Bytes from the first element to behind the last one.
    pub fn span_bytes(&self) -> usize {
        if self.rows == 0 {
            return 0;
        }
        let last = (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
        (last + 1) * self.dtype.bytes()
    }

    /// True if every row's elements lie side by side.
    pub fn rows_contiguous(&self) -> bool {
        self.col_stride == 1
    }

    /// True if rows follow each other without gaps.
    pub fn contiguous(&self) -> bool {
        self.col_stride == 1 && (self.row_stride == self.cols || self.rows <= 1)
    }
}

// SAFETY: a tensor is a description; whoever reads or writes through it says why that is sound.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(rows: i64, cols: i64) -> RawTensor {
        RawTensor { data: 64 as *mut u8, dtype: Dtype::Bf16 as i32, rows, cols, ..RawTensor::NONE }
    }

    #[test]
    fn defaults_are_contiguous() {
        let tensor = raw(3, 5).check("x").unwrap();
        assert_eq!((tensor.row_stride, tensor.col_stride), (5, 1));
        assert!(tensor.contiguous());
        assert_eq!(tensor.span_bytes(), 30);
    }

    #[test]
    fn column_major_is_allowed_and_overlap_is_not() {
        assert!(RawTensor { row_stride: 1, col_stride: 3, ..raw(3, 5) }.check("x").is_ok());
        let error = RawTensor { row_stride: 1, col_stride: 2, ..raw(3, 5) }.check("x").unwrap_err();
        assert!(error.message.contains("overlap"), "{error}");
    }

    #[test]
    fn each_mistake_is_named() {
        let cases = [
            (RawTensor { dtype: 77, ..raw(1, 1) }, "dtype 77"),
            (raw(-1, 1), "rows is -1"),
            (raw(1, 0), "cols is 0"),
            (RawTensor { data: std::ptr::null_mut(), ..raw(1, 1) }, "NULL"),
            (RawTensor { data: 65 as *mut u8, ..raw(1, 1) }, "aligned"),
            (RawTensor { row_stride: -4, ..raw(1, 1) }, "row_stride"),
            (RawTensor { reserved: 1, ..raw(1, 1) }, "reserved"),
            (RawTensor { dtype: Dtype::Opaque as i32, ..raw(1, 20) }, "multiple of 16"),
        ];
        for (tensor, text) in cases {
            let error = tensor.check("x").unwrap_err();
            assert!(error.message.contains(text), "{error} should contain {text}");
        }
        assert!(RawTensor { data: std::ptr::null_mut(), ..raw(0, 1) }.check("x").is_ok());
    }
}
