//! Where matrices lie: addresses and strides as a caller might have them.

use ep_core::tensor::Dtype;

use crate::case::PayloadSpec;
use crate::memory::Matrix;
use crate::rng::Rng;

/// A base address that is aligned to the element and no more, now and then.
fn offset(rng: &mut Rng, dtype: Dtype) -> usize {
    if rng.once_in(2) { 0 } else { rng.below(64 / dtype.alignment()) * dtype.alignment() }
}

/// Rows of elements side by side, perhaps with gaps between the rows.
pub fn row_strides(rng: &mut Rng, dtype: Dtype, rows: usize, cols: usize) -> Matrix {
    let unit = dtype.alignment() / dtype.bytes();
    let gap = if rng.once_in(2) { 0 } else { unit * rng.pick(&[1, 3, 8, 16]) };
    Matrix { dtype, rows, cols, row_stride: cols + gap, col_stride: 1, offset: offset(rng, dtype) }
}

/// Any strides, columns side by side among them.
pub fn any_strides(rng: &mut Rng, dtype: Dtype, rows: usize, cols: usize) -> Matrix {
    let mut matrix = row_strides(rng, dtype, rows, cols);
    match rng.below(4) {
        0 => {
            matrix.col_stride = rng.within(2..=3);
            matrix.row_stride = cols * matrix.col_stride + rng.below(4);
        }
        1 => {
            matrix.row_stride = rng.within(1..=2);
            matrix.col_stride = rows.max(1) * matrix.row_stride + rng.below(4);
        }
        _ => {}
    }
    matrix
}

/// The strides of a payload: as its spec says, with more or less room.
pub fn payload_strides(rng: &mut Rng, spec: &PayloadSpec, rows: usize) -> Matrix {
    if spec.column_major {
        let (col_stride, offset) =
            (rows.next_multiple_of(4).max(1) + 4 * rng.below(3), offset(rng, spec.dtype));
        return Matrix { dtype: spec.dtype, rows, cols: spec.cols, row_stride: 1, col_stride, offset };
    }
    if spec.dtype != Dtype::Opaque && rng.once_in(8) {
        return any_strides(rng, spec.dtype, rows, spec.cols);
    }
    row_strides(rng, spec.dtype, rows, spec.cols)
}

/// Payloads side by side in one record per row, such as values with their scales, if they can be.
pub fn records(rng: &mut Rng, specs: &[PayloadSpec], rows: usize) -> Option<Vec<Matrix>> {
    if specs.len() < 2 || specs.iter().any(|spec| spec.column_major) {
        return None;
    }
    let mut offsets = Vec::new();
    let mut record: usize = 0;
    for spec in specs {
        record = record.next_multiple_of(spec.dtype.alignment());
        offsets.push(record);
        record += spec.row_bytes();
    }
    let record = record.next_multiple_of(16) + 16 * rng.below(2);
    let matrix = |(spec, offset): (&PayloadSpec, usize)| Matrix {
        dtype: spec.dtype,
        rows,
        cols: spec.cols,
        row_stride: record / spec.dtype.bytes(),
        col_stride: 1,
        offset,
    };
    Some(specs.iter().zip(offsets).map(matrix).collect())
}
