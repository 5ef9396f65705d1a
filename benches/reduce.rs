//! The sum of a combine: rows of 7168 columns, several terms a token.

mod common;

use common::{Buffer, Compared, Rng};
use criterion::{Criterion, criterion_group, criterion_main};
use ep_core::host::{Close, Reduction, Term, Values, reduce};
use ep_core::tensor::Dtype;

const COLS: usize = 7168;
const TOKENS: usize = 128;

fn sums(criterion: &mut Criterion) {
    let cases = [
        ("bf16, 2 terms", Dtype::Bf16, 2, Reduction::Chain),
        ("bf16, 4 terms", Dtype::Bf16, 4, Reduction::Chain),
        ("bf16, 8 terms", Dtype::Bf16, 8, Reduction::Chain),
        ("bf16, 8 terms by rank", Dtype::Bf16, 8, Reduction::Ranks),
        ("bf16, 8 terms by node", Dtype::Bf16, 8, Reduction::Nodes { bf16: true }),
        ("f16, 8 terms", Dtype::F16, 8, Reduction::Chain),
        ("f32, 8 terms", Dtype::F32, 8, Reduction::Chain),
    ];
    for (name, dtype, num_terms, reduction) in cases {
        let row_bytes = COLS * dtype.bytes();
        let read = TOKENS * num_terms * row_bytes;
        let (rows, out, copied) = (Buffer::new(read), Buffer::new(TOKENS * row_bytes), Buffer::new(read));
        let mut rng = Rng(2);
        let mut places: Vec<usize> = (0..TOKENS * num_terms).collect();
        for i in (1..places.len()).rev() {
            places.swap(i, rng.below(i + 1));
        }
        let term = |place: &usize| Term {
            row: rows.address().wrapping_add(place * row_bytes),
            weight: 0.125,
            close: if place.is_multiple_of(2) { Close::Rank } else { Close::Node },
            values: Values::Own,
        };
        let terms: Vec<Term> = places.iter().map(term).collect();
        let mut group = Compared::new(criterion, &format!("reduce {name}"), read);
        group.bench("limit: memcpy of the rows that are read", || {
            for row in 0..TOKENS * num_terms {
                // SAFETY: both buffers have `read` bytes.
                unsafe {
                    let at = row * row_bytes;
                    std::ptr::copy_nonoverlapping(
                        rows.address().add(at),
                        copied.address().add(at),
                        row_bytes,
                    );
                }
            }
        });
        group.bench("reduce", || {
            for (token, terms) in terms.chunks(num_terms).enumerate() {
                let out = out.address().wrapping_add(token * row_bytes);
                // SAFETY: every row has `COLS` columns, and the output as well.
                unsafe { reduce(dtype, out, COLS, [std::ptr::null(); 2], terms, reduction) };
            }
        });
    }
}

criterion_group!(benches, sums);
criterion_main!(benches);
