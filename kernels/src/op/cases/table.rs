//! The table of cases.

use super::{Case, Documents, Operation};
use crate::attention::AttentionShape;
use crate::columns::WriteMode;
use crate::gated_delta::DeltaHeads;
use crate::rope::Direction;
use crate::route::RouterSettings;
use crate::{Activation, NormKind, WeightLayout};
use candle_core::DType;

/// The types that kernels store.
pub(crate) const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Types of the residual stream and of the products, or of gradients and working copies.
pub(crate) const PAIRS: [[DType; 2]; 5] = [
    [DType::F32, DType::F32],
    [DType::F32, DType::F16],
    [DType::F16, DType::F16],
    [DType::F32, DType::BF16],
    [DType::BF16, DType::BF16],
];
const LAYOUTS: [WeightLayout; 2] = [WeightLayout::InOut, WeightLayout::OutIn];
const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut cases = Cases::default();
    cases.with_cuda_kernels();
    cases.attention();
    cases.norm();
    cases.on_a_cpu();
    cases.0
}

#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    fn add(&mut self, family: &'static str, operations: impl IntoIterator<Item = Operation>) {
        self.0.extend(operations.into_iter().map(|operation| Case { family, operation }));
    }

    fn with_cuda_kernels(&mut self) {
        // Each pair of types has whole packs and a part of one. Then come a single pack and a single element.
        let lengths = PAIRS.into_iter().zip([5003, 70_001, 1003, 20_003, 130]);
        let lengths = lengths.chain([(PAIRS[2], 8), (PAIRS[3], 1)]);
        for (counts, quantized) in [(false, false), (true, false), (false, true), (true, true)] {
            let pairs = lengths.clone().filter(|(types, _)| !counts || types[1] != DType::F32);
            self.add("adamw", pairs.map(|(types, len)| Operation::AdamW { len, types, counts, quantized }));
        }
        // Rows of the first size do not fit into shared memory.
        let rows =
            [[2, 51_000, 51_000], [5, 5003, 5003], [2, 5003, 5008], [3, 97, 104], [3, 97, 97], [4, 64, 64], [5, 3, 3]];
        for sizes in rows {
            self.add("cross_entropy", TYPES.map(|dtype| Operation::CrossEntropy { sizes, softcap: None, dtype }));
        }
        for activation in [Activation::Gelu, Activation::SwiGlu, Activation::GeGlu] {
            for sizes in [[37, 72], [64, 192]] {
                self.add("elementwise", TYPES.map(|dtype| Operation::Activate { activation, sizes, dtype }));
            }
        }
        let wider = [[DType::F16, DType::F32], [DType::BF16, DType::F32]];
        for drops in [false, true] {
            self.add("elementwise", lengths.clone().map(|(types, len)| Operation::Sums { len, types, drops }));
            for types in PAIRS.into_iter().chain(wider) {
                let embed =
                    |backward| [true, false].map(|positions| Operation::Embed { backward, positions, types, drops });
                self.add("embedding", [embed(false), embed(true)].concat());
            }
        }
        // The long sides are cut for cuBLAS if they are no multiple of 8.
        for sizes @ [rows, inner, width] in [[33, 72, 40], [5, 300, 96], [64, 64, 8], [5, 4099, 24], [9, 24, 4101]] {
            for dtype in TYPES {
                // There is no CUDA kernel for a bias with a different width.
                let biased: &[bool] = if width % 8 == 0 { &[false, true] } else { &[false] };
                for (layout, biased) in LAYOUTS.into_iter().flat_map(|layout| biased.iter().map(move |b| (layout, *b)))
                {
                    self.add("product", [Operation::Linear { layout, sizes, biased, rank: 0, dtype }]);
                }
                let sizes = [inner, rows, width];
                let transposed = [true, false];
                let sums = [[dtype; 2], [dtype, DType::F32]];
                self.add("product", sums.map(|types| Operation::Product { sizes, transposed, types }));
            }
        }
        for (dtype, direction) in TYPES.into_iter().flat_map(|dtype| DIRECTIONS.map(|to| (dtype, to))) {
            let (seq_len, heads, half, past) = (33, 2, 32, 2);
            let apply_rope = |documents| Operation::Rotate { seq_len, heads, half, past, documents, dtype, direction };
            self.add("rope", [false, true].map(apply_rope));
        }
        for (len, broken) in [(70_001, false), (3001, true), (8, false)] {
            for (dtype, factor) in TYPES.map(|dtype| (dtype, None)) {
                let summary = |exponents| Operation::Summarize { len, factor, broken, dtype, exponents };
                self.add("summary", [false, true].map(summary));
            }
        }
    }

    fn attention(&mut self) {
        const TWO: Documents = &[&[19], &[19]];
        // Within a tile, over its end, and with heads of every size that there are CUDA kernels for.
        let plain = [(2, 33, 3, 32, 3), (1, 130, 4, 64, 2), (2, 40, 2, 80, 2), (1, 70, 3, 128, 1), (1, 65, 2, 20, 1)];
        let capped = [128, 256].map(|head_size| ((1, 70, 2, head_size, 1), Some(0.7)));
        let shapes = plain.map(|shape| (shape, None)).into_iter().chain(capped);
        for (i, ((batch, seq_len, heads, head_size, kv_heads), softcap)) in shapes.enumerate() {
            let shape = AttentionShape { kv_heads, softcap, ..AttentionShape::new(batch, seq_len, heads, head_size) };
            // A window over which tiles are skipped.
            let windowed = AttentionShape { window: Some(seq_len / 3), ..shape };
            let drops = i % 2 == 0;
            let packed = kv_heads == heads;
            for dtype in TYPES {
                let attention = |(shape, documents)| {
                    let sinks = false;
                    Operation::Attention { shape, documents, dtype, drops, packed, sinks }
                };
                let documents = &TWO[..batch];
                self.add("attention", [(shape, &[][..]), (windowed, &[]), (shape, documents)].map(attention));
            }
        }
        // Shapes that differ in one way each, then in all.
        let packed = |batch, seq_len| AttentionShape::new(batch, seq_len, 3, 8);
        let grouped =
            |batch, seq_len| AttentionShape { kv_heads: 2, scale: 1.2, ..AttentionShape::new(batch, seq_len, 4, 10) };
        let windowed = |batch, seq_len, window| AttentionShape { window: Some(window), ..grouped(batch, seq_len) };
        let capped = |shape, cap| AttentionShape { softcap: Some(cap), ..shape };
        let shapes = [
            packed(1, 1),
            packed(2, 11),
            AttentionShape::new(1, 131, 1, 64),
            grouped(1, 1),
            grouped(2, 33),
            AttentionShape { kv_heads: 1, scale: 1.2, ..AttentionShape::new(2, 19, 3, 64) },
            windowed(2, 50, 1),
            windowed(1, 131, 21),
            windowed(1, 40, 100),
            capped(grouped(2, 33), 0.7),
        ];
        let cut: Documents = &[&[5, 6, 30], &[17]];
        let cut = [(grouped(2, 37), cut), (capped(windowed(2, 37, 9), 0.5), cut)];
        // Sinks with one key or all keys in a window, with documents, and with dropout.
        let with_sinks = [(packed(1, 1), &[][..]), (windowed(2, 50, 1), &[]), (windowed(2, 37, 9), cut[0].1)];
        let alone = shapes.map(|shape| (shape, &[][..])).into_iter().chain(cut).map(|case| (case, false));
        for ((shape, documents), sinks) in alone.chain(with_sinks.map(|case| (case, true))) {
            for dtype in TYPES {
                let attention = |packed: bool| {
                    let drops = sinks && !packed;
                    Operation::Attention { shape, documents, dtype, drops, packed, sinks }
                };
                self.add(Case::CPU, [true, false].map(attention));
                if documents.is_empty() {
                    let shape = AttentionShape { batch: 1, ..shape };
                    self.add(Case::CPU, [Operation::Decode { shape, dtype, sinks }]);
                }
            }
        }
    }

    fn norm(&mut self) {
        let formulas = [NormKind::Layer, NormKind::Rms { unit_offset: false }, NormKind::Rms { unit_offset: true }];
        let (add, overwrite) = (WriteMode::Accumulate, WriteMode::Overwrite);
        for (types, norm) in PAIRS.into_iter().flat_map(|types| formulas.map(|norm| (types, norm))) {
            let shapes = [([70, 768], add), ([9, 1000], overwrite), ([33, 65], add), ([3, 5], add), ([1, 8], add)];
            let more = [([7, 24], overwrite), ([3, 771], add), ([300, 12], add), ([1100, 8], overwrite)];
            for (sizes, mode) in shapes.into_iter().chain(more) {
                self.add("norm", [Operation::Norm { norm, sizes, place: [0, sizes[1], sizes[1]], types, mode }]);
            }
        }
        // With more rows, or an RMS norm, results cancel and have no digits to compare.
        let norm = NormKind::Layer;
        let sizes = [1, 1];
        let place = [0, 1, 1];
        self.add("norm", PAIRS.map(|types| Operation::Norm { norm, sizes, place, types, mode: add }));
        // Several rows for each block that has wide ones.
        for (norm, sizes, types) in [
            (NormKind::Layer, [140, 3072], PAIRS[3]),
            (formulas[1], [270, 3072], PAIRS[4]),
            (NormKind::Layer, [140, 3001], PAIRS[0]),
        ] {
            self.add("norm", [Operation::Norm { norm, sizes, place: [0, sizes[1], sizes[1]], types, mode: add }]);
        }
        // Heads in some columns of wider rows.
        let heads = [("norm", [70, 3, 64]), ("norm", [5, 3, 8]), ("norm", [9, 4, 128])];
        for (family, [rows, heads, width]) in
            heads.into_iter().chain([(Case::CPU, [40, 3, 10]), (Case::CPU, [9, 4, 130])])
        {
            let norm = NormKind::Rms { unit_offset: true };
            let columns = heads * width;
            let sizes = [rows, columns];
            let place = [16, width, columns + 40];
            let norm = |dtype| Operation::Norm { norm, sizes, place, types: [dtype; 2], mode: overwrite };
            self.add(family, TYPES.map(norm));
        }
    }

    /// Operations and sizes that there are no CUDA kernels for.
    fn on_a_cpu(&mut self) {
        const CUT: Documents = &[&[1, 3, 30], &[21]];
        // The second document goes over several chunks, and others are within one.
        const LONG: Documents = &[&[5, 129], &[60, 70, 128]];
        for dtype in TYPES {
            for sizes in [[5, 300, 300], [3, 97, 104]] {
                self.add(Case::CPU, [Operation::CrossEntropy { sizes, softcap: Some(5.0), dtype }]);
            }
            for sizes in [[1, 1, 1], [5, 24, 72], [33, 64, 17], [70, 130, 96]] {
                for (layout, biased) in LAYOUTS.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
                    self.add(Case::CPU, [Operation::Linear { layout, sizes, biased, rank: 0, dtype }]);
                }
            }
            for (sizes, rank) in [([1, 24, 72], 4), ([5, 24, 72], 3), ([70, 130, 96], 20)] {
                self.add(
                    Case::CPU,
                    LAYOUTS.map(|layout| Operation::Linear { layout, sizes, biased: true, rank, dtype }),
                );
            }
            for transposed in [[false, false], [false, true], [true, true]] {
                let types = [dtype, dtype];
                self.add(Case::CPU, [Operation::Product { sizes: [33, 70, 17], transposed, types }]);
            }
            for activation in [Activation::Gelu, Activation::SwiGlu, Activation::GeGlu, Activation::ClampedSwiGlu] {
                let sizes = [[1, 3], [9, 31], [9, 1100]];
                self.add(Case::CPU, sizes.map(|sizes| Operation::Activate { activation, sizes, dtype }));
            }
            for (heads, half, past, documents) in
                [(1, 1, 0, false), (3, 5, 0, false), (2, 32, 6, false), (2, 5, 0, true)]
            {
                let apply_rope =
                    |direction| Operation::Rotate { seq_len: 7, heads, half, past, documents, dtype, direction };
                self.add(Case::CPU, DIRECTIONS.map(apply_rope));
            }
            for (sizes, top_k) in [([1, 1, 1], 1), ([9, 8, 31], 2), ([70, 5, 24], 5), ([300, 64, 130], 8)] {
                let settings = [true, false].map(|normalized| RouterSettings { top_k, normalized });
                self.add(Case::CPU, settings.map(|settings| Operation::Route { sizes, settings, dtype }));
            }
            for (sizes, documents) in [([1, 1, 1], &[][..]), ([2, 8, 4], &[]), ([70, 130, 3], &[]), ([33, 40, 3], CUT)]
            {
                self.add(Case::CPU, [Operation::ShortConv { sizes, documents, dtype }]);
            }
            for (sizes, [key_heads, value_heads, key_dim, value_dim], documents) in [
                ([1, 1], [1, 1, 3, 2], &[][..]),
                ([9, 4], [2, 2, 4, 5], &[]),
                ([70, 4], [2, 4, 9, 70], &[]),
                ([33, 3], [1, 3, 5, 7], CUT),
                ([131, 4], [1, 2, 8, 16], LONG),
            ] {
                let heads = DeltaHeads { key_heads, value_heads, key_dim, value_dim };
                self.add(Case::CPU, [Operation::GatedDelta { heads, sizes, documents, dtype }]);
            }
            for sizes in [[1, 1, 1], [9, 3, 5], [70, 2, 130]] {
                self.add(Case::CPU, [Operation::GateHeads { sizes, dtype }]);
            }
            for (len, factor) in [(1, 1.0), (10, 1.0), (1024, 1e-30), (5000, 1.0), (70_000, 1e25)] {
                let summary =
                    |broken| Operation::Summarize { len, factor: Some(factor), broken, dtype, exponents: false };
                self.add(Case::CPU, [false, true].map(summary));
                // Larger numbers are infinite in FP16.
                let factor = if dtype == DType::F16 { factor.min(1.0) } else { factor };
                self.add(Case::CPU, [Operation::Sum { len, factor, dtype }]);
            }
        }
    }
}
