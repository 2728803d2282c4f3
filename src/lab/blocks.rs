//! Block formats: a tensor's amax → scale → codes → error, under FP8, MXFP8, NVFP4 and INT8.
//!
//! Scales and products are FP32, as in the libraries that the codes are compared with bit for bit
//! (`tests/python/lab_figures.py`): PyTorch's casts for FP8 and INT8, torchao for MXFP8 and NVFP4.

use super::number::{percent, relative_error, short};
use crate::precision::FloatFormat;
use crate::random::{Domain, Stream};
use crate::store::mxfp4::E2M1;
use crate::ui::{Column, Line, Page, Role, plain};
use crate::{Error, Result};
use serde::Serialize;
use strum::{EnumIter, EnumString, IntoEnumIterator, VariantNames};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, EnumString, EnumIter, VariantNames)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Scheme {
    /// E4M3, one FP32 scale from the tensor's amax.
    #[strum(serialize = "fp8")]
    Fp8Current,
    /// E4M3, one FP32 scale from the amax of earlier steps.
    #[strum(serialize = "delayed")]
    Fp8Delayed,
    /// E4M3, an FP32 scale per row.
    #[strum(serialize = "rows")]
    Fp8Row,
    /// E4M3, an FP32 scale per 128 values of a row.
    #[strum(serialize = "block128")]
    Fp8Block128,
    /// E4M3, a power-of-two scale per 32 values (OCP Microscaling).
    Mxfp8,
    /// E2M1, an E4M3 scale per 16 values and an FP32 scale for the tensor.
    Nvfp4,
    /// Integers from -127 to 127, one FP32 scale.
    Int8,
}

impl Scheme {
    const fn name(self) -> &'static str {
        match self {
            Self::Fp8Current => "FP8 tensor",
            Self::Fp8Delayed => "FP8 delayed",
            Self::Fp8Row => "FP8 rows",
            Self::Fp8Block128 => "FP8 128-blocks",
            Self::Mxfp8 => "MXFP8",
            Self::Nvfp4 => "NVFP4",
            Self::Int8 => "INT8 tensor",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct QuantizedTensor {
    pub(crate) scheme: Scheme,
    /// Number of values that share a scale.
    pub(crate) block: usize,
    /// Bits per value, including scales.
    pub(crate) bits: f64,
    /// The factor from code to value for each block, in row order. For NVFP4, the E4M3 scales.
    pub(crate) scales: Vec<f32>,
    /// NVFP4's scale of the tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tensor_scale: Option<f32>,
    /// The code of each value: a pattern of FP8 or FP4, or a two's complement byte.
    pub(crate) codes: Vec<u8>,
    /// The dequantized values.
    #[serde(skip)]
    pub(crate) values: Vec<f64>,
    /// Root mean square of the error, relative to the root mean square of the values.
    pub(crate) error: f64,
    /// Share of non-zero values that became zero.
    pub(crate) flushed: f64,
    /// Number of values that saturated at the format's largest.
    pub(crate) saturated: usize,
}

/// A tensor under every scheme.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct BlockScaling {
    pub(crate) source: String,
    pub(crate) shape: [usize; 2],
    pub(crate) tensor: Vec<f32>,
    pub(crate) amax: f32,
    /// The amax that delayed scaling uses.
    pub(crate) stale_amax: f32,
    pub(crate) schemes: Vec<QuantizedTensor>,
    /// The scheme whose first block is shown.
    #[serde(skip)]
    pub(crate) shown: Scheme,
}

/// A tensor of `[rows, columns]` standard normal values, with the first of each row multiplied by `outlier`.
pub(crate) fn normal_tensor([rows, columns]: [usize; 2], outlier: f32, seed: u64) -> Vec<f32> {
    let mut values = vec![0f32; rows * columns];
    Stream::new(seed, Domain::Bench).fill_normal(4, 0, 0, &mut values);
    for row in values.chunks_mut(columns.max(1)) {
        row[0] *= outlier;
    }
    values
}

impl BlockScaling {
    /// Quantizes `tensor` with every scheme; delayed scaling uses `stale_amax` times its amax.
    pub(crate) fn new(
        source: String,
        tensor: Vec<f32>,
        shape: [usize; 2],
        stale_amax: f32,
        shown: Scheme,
    ) -> Result<Self> {
        let [rows, columns] = shape;
        if rows * columns != tensor.len() || tensor.is_empty() || columns % 128 != 0 {
            let message = "the length of the tensor's rows must be a multiple of 128, so that the blocks of all schemes are \
                 complete";
            return Err(Error::config("--columns", message));
        }
        if let Some(value) = tensor.iter().find(|value| !value.is_finite()) {
            return Err(Error::config("tensor", format!("contains {value}; a scale needs finite values")));
        }
        let amax = largest(&tensor);
        let stale_amax = amax * stale_amax;
        if amax > 0.0 && !(stale_amax > 0.0 && (448.0 / stale_amax).is_normal()) {
            let message = format!("an amax of {stale_amax:e} has no scale in FP32; use a factor nearer to 1");
            return Err(Error::config("--stale-amax", message));
        }
        let quantized = |scheme| QuantizedTensor::new(scheme, &tensor, columns, stale_amax);
        let schemes = Scheme::iter().map(quantized).collect();
        Ok(Self { source, shape, tensor, amax, stale_amax, schemes, shown })
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let [rows, columns] = self.shape;
        let title = format!("{rows} × {columns} values, amax {}", short(f64::from(self.amax)));
        page.headed(&title, &self.source, width);
        let graded = |it: &QuantizedTensor, share| (Role::graded(it.error, [0.03, 0.1]), percent(share));
        let columns: &[Column<QuantizedTensor>] = &[
            ("scheme", -15, &|it| (Role::Title, it.scheme.name().to_owned())),
            ("block", 7, &|it| plain(it.block)),
            ("bits", 7, &|it| plain(format!("{:.2}", it.bits))),
            ("scales", 8, &|it| plain(it.scales.len())),
            ("first scale", 13, &|it| plain(short(it.scales.first().map_or(0.0, |scale| f64::from(*scale))))),
            ("error %", 10, &|it| graded(it, it.error)),
            ("flushed %", 10, &|it| graded(it, it.flushed)),
            ("cut off", 8, &|it| (Role::bad_if(it.saturated > 0), it.saturated.to_string())),
        ];
        page.table(&self.schemes, columns);
        page.gap();
        if let Some(scheme) = self.schemes.iter().find(|scheme| scheme.scheme == self.shown) {
            scheme.detail(&mut page, &self.tensor, width);
        }
        page
    }
}

impl QuantizedTensor {
    fn new(scheme: Scheme, tensor: &[f32], columns: usize, stale_amax: f32) -> Self {
        let block = match scheme {
            Scheme::Fp8Current | Scheme::Fp8Delayed | Scheme::Int8 => tensor.len(),
            Scheme::Fp8Row => columns,
            Scheme::Fp8Block128 => 128,
            Scheme::Mxfp8 => 32,
            Scheme::Nvfp4 => 16,
        };
        let amax = largest(tensor);
        // Use the whole range of NVFP4's E4M3 block scales.
        let tensor_scale = (scheme == Scheme::Nvfp4).then_some(if amax > 0.0 { amax / (448.0 * 6.0) } else { 1.0 });
        let mut this = Self {
            scheme,
            block,
            bits: 0.0,
            scales: Vec::new(),
            tensor_scale,
            codes: Vec::with_capacity(tensor.len()),
            values: Vec::with_capacity(tensor.len()),
            error: 0.0,
            flushed: 0.0,
            saturated: 0,
        };
        for values in tensor.chunks(block) {
            let amax = if scheme == Scheme::Fp8Delayed { stale_amax } else { largest(values) };
            this.quantize(values, amax);
        }
        let code_bits = if scheme == Scheme::Nvfp4 { 4.0 } else { 8.0 };
        let scale_bits = if matches!(scheme, Scheme::Mxfp8 | Scheme::Nvfp4) { 8.0 } else { 32.0 };
        let tensor_scale_bits = if tensor_scale.is_some() { 32.0 } else { 0.0 };
        let count = tensor.len() as f64;
        this.bits = code_bits + (scale_bits * this.scales.len() as f64 + tensor_scale_bits) / count;
        let errors = tensor.iter().zip(&this.values).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum::<f64>();
        let energy = tensor.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        this.error = if energy > 0.0 { (errors / energy).sqrt() } else { 0.0 };
        let flushed = tensor.iter().zip(&this.values).filter(|(x, y)| **x != 0.0 && **y == 0.0).count();
        this.flushed = flushed as f64 / count;
        this
    }

    /// Adds a block's scale and codes.
    fn quantize(&mut self, values: &[f32], amax: f32) {
        let e4m3 = FloatFormat::E4M3;
        match self.scheme {
            Scheme::Mxfp8 => {
                // The exponent of amax minus that of E4M3's largest number, 448 = 1.75 × 2^8.
                let exponent = if amax > 0.0 { (floor_log2(amax) - 8).max(-127) } else { -127 };
                let scale = 2f64.powi(exponent) as f32;
                self.scales.push(scale);
                for x in values {
                    let scaled = f64::from(*x) / f64::from(scale);
                    self.push(e4m3.encode_saturating(scaled) as u8, |code| e4m3.decode(code.into()) * f64::from(scale));
                    self.saturated += usize::from(scaled.abs() > 464.0);
                }
            }
            Scheme::Nvfp4 => {
                let tensor_scale = self.tensor_scale.unwrap_or(1.0);
                let wanted = (amax / 6.0 / tensor_scale).clamp(e4m3.min_normal() as f32, 448.0);
                let scale = e4m3.round(f64::from(wanted)) as f32;
                self.scales.push(scale);
                let inverse = (1.0 / tensor_scale) / scale;
                for x in values {
                    let scaled = x * inverse;
                    self.push(e2m1(scaled), |code| {
                        f64::from(E2M1[usize::from(code)]) * f64::from(scale) * f64::from(tensor_scale)
                    });
                    self.saturated += usize::from(scaled.abs() > 7.0);
                }
            }
            Scheme::Int8 => {
                let scale = if amax > 0.0 { amax / 127.0 } else { 1.0 };
                self.scales.push(scale);
                for x in values {
                    let code = (x / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
                    self.push(code.cast_unsigned(), |code| f64::from(code.cast_signed()) * f64::from(scale));
                }
            }
            _ => {
                let factor = if amax > 0.0 { 448.0 / amax } else { 1.0 };
                self.scales.push(1.0 / factor);
                for x in values {
                    let scaled = x * factor;
                    self.push(e4m3.encode_saturating(scaled.into()) as u8, |code| {
                        e4m3.decode(code.into()) / f64::from(factor)
                    });
                    self.saturated += usize::from(scaled.abs() > 464.0);
                }
            }
        }
    }

    fn push(&mut self, code: u8, value: impl Fn(u8) -> f64) {
        self.codes.push(code);
        self.values.push(value(code));
    }

    /// The quantization of the first values of the first block: value, scaled, code, dequantized, error.
    fn detail(&self, page: &mut Page, tensor: &[f32], width: usize) {
        let count = (width.saturating_sub(10) / 9).clamp(1, 12).min(tensor.len());
        let scale = f64::from(self.scales[0]) * self.tensor_scale.map_or(1.0, f64::from);
        let of_tensor = self.tensor_scale.map(|scale| format!(" × the tensor's {}", short(f64::from(scale))));
        let first = short(f64::from(self.scales[0]));
        page.title(format!("{}: first scale {first}{}", self.scheme.name(), of_tensor.unwrap_or_default()));
        let row = |page: &mut Page, name: &str, role: Role, cell: &dyn Fn(usize) -> String| {
            let cells: Vec<_> = (0..count).map(|i| format!("{:>9}", cell(i))).collect();
            page.push(Line::new().dim(format!("{name:<10}")).with(role, cells.concat()));
        };
        let brief = |x: f64| {
            if x.abs() >= 1e4 || (x != 0.0 && x.abs() < 1e-3) { format!("{x:.1e}") } else { format!("{x:.3}") }
        };
        row(page, "value", Role::Text, &|i| brief(f64::from(tensor[i])));
        row(page, "/ scale", Role::Text, &|i| brief(f64::from(tensor[i]) / scale));
        row(page, "code", Role::Mantissa, &|i| format!("0x{:02X}", self.codes[i]));
        row(page, "back", Role::Good, &|i| brief(self.values[i]));
        row(page, "error %", Role::Warn, &|i| percent(relative_error(self.values[i], f64::from(tensor[i]))));
    }
}

/// The largest magnitude.
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// The exponent field of a positive FP32 number, unbiased.
fn floor_log2(x: f32) -> i32 {
    ((x.to_bits() >> 23) & 0xff) as i32 - 127
}

/// The code nearest to `x`, ties to even, saturating; bit 3 is the sign.
fn e2m1(x: f32) -> u8 {
    let magnitude = x.abs();
    let above = (1..8).find(|code| {
        let middle = f32::midpoint(E2M1[*code - 1], E2M1[*code]);
        // Ties go to the even code.
        magnitude < middle || (magnitude == middle && code % 2 == 1)
    });
    let code = above.map_or(7, |code| code - 1) as u8;
    code | if x.is_sign_negative() { 8 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(outlier: f32, stale_amax: f32) -> BlockScaling {
        let tensor = normal_tensor([4, 256], outlier, 0);
        BlockScaling::new("normal".into(), tensor, [4, 256], stale_amax, Scheme::Mxfp8).unwrap()
    }

    fn of(blocks: &BlockScaling, scheme: Scheme) -> &QuantizedTensor {
        blocks.schemes.iter().find(|quantized| quantized.scheme == scheme).unwrap()
    }

    #[test]
    fn fp4_rounds_to_even_and_saturates() {
        let values = [0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100.0, -0.25, -1.6];
        assert_eq!(values.map(e2m1), [0, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 8, 11]);
        assert!((0..16u8).all(|code| e2m1(E2M1[usize::from(code)]) == code));
    }

    /// An outlier costs all values that share its scale; smaller blocks limit the damage.
    #[test]
    fn an_outlier_affects_only_its_own_block() {
        let (calm, wild) = (blocks(1.0, 1.0), blocks(1e6, 1.0));
        let flushed = |blocks: &BlockScaling, scheme| of(blocks, scheme).flushed;
        assert!(flushed(&calm, Scheme::Fp8Current) < 0.01);
        let schemes = [Scheme::Fp8Current, Scheme::Fp8Block128, Scheme::Mxfp8];
        let [tensor, block, mx] = schemes.map(|scheme| flushed(&wild, scheme));
        assert!(tensor > block && block > mx && tensor > 0.5, "{tensor} {block} {mx}");
        assert!(flushed(&wild, Scheme::Int8) > 0.9);
        insta::assert_snapshot!("blocks", calm.page(80).text());
    }

    /// Delayed scaling saturates above the stale amax, and wastes range if that was larger.
    #[test]
    fn delayed_scaling_depends_on_the_stale_amax() {
        let cut = |stale_amax| of(&blocks(1.0, stale_amax), Scheme::Fp8Delayed).saturated;
        assert_eq!(cut(1.0), 0);
        assert!(cut(0.25) > 10);
        let (same, current) = (blocks(1.0, 1.0), blocks(1.0, 1.0));
        assert_eq!(of(&same, Scheme::Fp8Delayed).codes, of(&current, Scheme::Fp8Current).codes);
    }

    #[test]
    fn bits_per_value_include_the_scales() {
        let blocks = blocks(1.0, 1.0);
        let bits = [Scheme::Mxfp8, Scheme::Nvfp4, Scheme::Fp8Block128].map(|scheme| of(&blocks, scheme).bits);
        assert_eq!(bits, [8.25, 4.53125, 8.25]);
    }

    #[test]
    fn invalid_tensors_are_rejected() {
        let refused =
            |tensor: Vec<f32>, shape| BlockScaling::new(String::new(), tensor, shape, 1.0, Scheme::Int8).is_err();
        assert!(
            refused(vec![1.0; 100], [1, 100]) && refused(vec![f32::NAN; 128], [1, 128]) && refused(vec![], [0, 128])
        );
        assert!(!refused(vec![0.0; 128], [1, 128]), "zeros are fine");
        let tensor = normal_tensor([1, 128], 0.0, 0);
        // Regression: the error of a zero that is stored as zero was NaN.
        let blocks = BlockScaling::new(String::new(), tensor, [1, 128], 1.0, Scheme::Mxfp8).unwrap();
        assert!(!blocks.page(80).text().contains("NaN"), "{}", blocks.page(80).text());
    }
}
