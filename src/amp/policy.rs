//! A cast table for candle models: the operand type of each operation, as under `torch.autocast`.

use super::wide;
use candle_core::{DType, Result, Tensor};
use strum::VariantArray;

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, VariantArray)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub enum AutocastOp {
    Matmul,
    Linear,
    Conv,
    Attention,
    Softmax,
    LayerNorm,
    RmsNorm,
    Exp,
    Log,
    Pow,
    Sum,
    Mean,
    Norm,
    CrossEntropy,
    MseLoss,
    Cat,
    Stack,
    Where,
    IndexAdd,
    ScatterAdd,
    Add,
    Mul,
    Relu,
    Gelu,
    Silu,
    Reshape,
    Embedding,
}

/// How an operation's operands are cast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CastRule {
    /// To the low-precision compute type: matrix products, which are fast in it and accumulate in FP32.
    LowPrecision,
    /// To FP32: nonlinear functions, sums, and losses.
    Fp32,
    /// To the widest type among the operands, for operations that need a common type.
    Promote,
    /// Not at all: they run in their operands' type.
    Keep,
}

/// Casts operands as `torch.autocast` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Autocast {
    compute: DType,
}

impl AutocastOp {
    /// Every operation of the table.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// How its operands are cast.
    pub const fn cast_rule(self) -> CastRule {
        match self {
            Self::Matmul | Self::Linear | Self::Conv | Self::Attention => CastRule::LowPrecision,
            Self::Softmax
            | Self::LayerNorm
            | Self::RmsNorm
            | Self::Exp
            | Self::Log
            | Self::Pow
            | Self::Sum
            | Self::Norm
            | Self::CrossEntropy
            | Self::MseLoss => CastRule::Fp32,
            Self::Cat | Self::Stack | Self::Where | Self::ScatterAdd => CastRule::Promote,
            Self::Mean
            | Self::IndexAdd
            | Self::Add
            | Self::Mul
            | Self::Relu
            | Self::Gelu
            | Self::Silu
            | Self::Reshape
            | Self::Embedding => CastRule::Keep,
        }
    }
}

impl Autocast {
    /// Matrix products in FP16; needs loss scaling.
    pub const FP16: Self = Self { compute: DType::F16 };
    /// Matrix products in BF16.
    pub const BF16: Self = Self { compute: DType::BF16 };
    /// Matrix products in FP32.
    pub const FP32: Self = Self { compute: DType::F32 };

    /// The type of matrix products.
    pub const fn compute(self) -> DType {
        self.compute
    }

    /// The type that `op`'s operands are cast to; `None` if they keep their own.
    pub fn dtype(self, op: AutocastOp, operands: &[DType]) -> Option<DType> {
        match op.cast_rule() {
            CastRule::LowPrecision => Some(self.compute),
            CastRule::Fp32 => operands.iter().copied().map(wide).max_by_key(DType::size_in_bytes),
            CastRule::Promote => {
                let widest = operands.iter().copied().max_by_key(DType::size_in_bytes)?;
                // Neither half-precision type contains the other.
                let mixed =
                    operands.iter().any(|dtype| *dtype != widest && dtype.size_in_bytes() == widest.size_in_bytes());
                Some(if mixed { DType::F32 } else { widest })
            }
            CastRule::Keep => None,
        }
    }

    /// `operands` cast for `op`; integers and FP64 are unchanged. The cast is part of the graph, so gradients have the
    /// operand's own type.
    pub fn cast<const N: usize>(self, op: AutocastOp, operands: [&Tensor; N]) -> Result<[Tensor; N]> {
        let floats: Vec<DType> = operands.iter().map(|tensor| tensor.dtype()).filter(DType::is_float).collect();
        let dtype = self.dtype(op, &floats);
        let mut cast = operands.map(Clone::clone);
        if let Some(dtype) = dtype {
            for tensor in cast.iter_mut().filter(|tensor| tensor.dtype().is_float() && tensor.dtype() != DType::F64) {
                *tensor = tensor.to_dtype(dtype)?;
            }
        }
        Ok(cast)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_table_matches_autocast() {
        use DType::{BF16, F16, F32, F64};
        for (op, operands, expected) in [
            (AutocastOp::Matmul, vec![F32, F32], Some(F16)),
            (AutocastOp::Softmax, vec![F16], Some(F32)),
            (AutocastOp::MseLoss, vec![F16, F64], Some(F64)),
            (AutocastOp::Cat, vec![F16, F32], Some(F32)),
            (AutocastOp::Cat, vec![F16, F16], Some(F16)),
            (AutocastOp::Cat, vec![F16, BF16], Some(F32)),
            (AutocastOp::Add, vec![F16, F32], None),
            (AutocastOp::Mean, vec![F16], None),
            (AutocastOp::IndexAdd, vec![F16, F32], None),
        ] {
            assert_eq!(Autocast::FP16.dtype(op, &operands), expected, "{op:?}");
        }
        assert_eq!(AutocastOp::ALL.iter().filter(|op| op.cast_rule() == CastRule::LowPrecision).count(), 4);
    }

    #[test]
    fn gradients_have_the_parameters_type() {
        let weight = candle_core::Var::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
        let x = Tensor::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
        let [x, w] = Autocast::BF16.cast(AutocastOp::Matmul, [&x, weight.as_tensor()]).unwrap();
        let product = x.matmul(&w).unwrap();
        let [logits] = Autocast::BF16.cast(AutocastOp::Sum, [&product]).unwrap();
        assert_eq!((product.dtype(), logits.dtype()), (DType::BF16, DType::F32));
        let grads = logits.sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&weight).unwrap().dtype(), DType::F32);
        let indices = Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap();
        assert_eq!(Autocast::FP16.cast(AutocastOp::Matmul, [&indices]).unwrap()[0].dtype(), DType::U32);
        let exact = Tensor::zeros(2, DType::F64, &Device::Cpu).unwrap();
        assert_eq!(Autocast::FP16.cast(AutocastOp::Matmul, [&exact]).unwrap()[0].dtype(), DType::F64);
    }
}
