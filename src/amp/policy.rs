//! A cast table for candle models: the operand type of each operation, as under `torch.autocast`.

use candle_core::{DType, Result, Tensor};

use super::wide;

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub enum Op {
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
pub enum Class {
    /// To the policy's compute type: matrix products, which are fast in it and accumulate in FP32.
    Narrow,
    /// To FP32: nonlinear functions, sums, and losses.
    Wide,
    /// To the widest type among the operands, for operations that need a common type.
    Widest,
    /// Not at all: they run in their operands' type.
    AsTheyAre,
}

/// The cast policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    compute: DType,
}

impl Op {
    /// Every operation of the table.
    pub const ALL: [Self; 27] = [
        Self::Matmul,
        Self::Linear,
        Self::Conv,
        Self::Attention,
        Self::Softmax,
        Self::LayerNorm,
        Self::RmsNorm,
        Self::Exp,
        Self::Log,
        Self::Pow,
        Self::Sum,
        Self::Mean,
        Self::Norm,
        Self::CrossEntropy,
        Self::MseLoss,
        Self::Cat,
        Self::Stack,
        Self::Where,
        Self::IndexAdd,
        Self::ScatterAdd,
        Self::Add,
        Self::Mul,
        Self::Relu,
        Self::Gelu,
        Self::Silu,
        Self::Reshape,
        Self::Embedding,
    ];

    /// How its operands are cast.
    pub const fn class(self) -> Class {
        match self {
            Self::Matmul | Self::Linear | Self::Conv | Self::Attention => Class::Narrow,
            Self::Softmax
            | Self::LayerNorm
            | Self::RmsNorm
            | Self::Exp
            | Self::Log
            | Self::Pow
            | Self::Sum
            | Self::Mean
            | Self::Norm
            | Self::CrossEntropy
            | Self::MseLoss => Class::Wide,
            Self::Cat | Self::Stack | Self::Where | Self::IndexAdd | Self::ScatterAdd => Class::Widest,
            Self::Add | Self::Mul | Self::Relu | Self::Gelu | Self::Silu | Self::Reshape | Self::Embedding => {
                Class::AsTheyAre
            }
        }
    }
}

impl Policy {
    /// Matrix products in FP16; needs loss scaling.
    pub const FP16: Self = Self { compute: DType::F16 };
    /// Matrix products in BF16.
    pub const BF16: Self = Self { compute: DType::BF16 };
    /// Everything in FP32: casts nothing.
    pub const FP32: Self = Self { compute: DType::F32 };

    /// The type of matrix products.
    pub const fn compute(self) -> DType {
        self.compute
    }

    /// The type that `op`'s operands are cast to; `None` if they keep their own.
    pub fn dtype(self, op: Op, operands: &[DType]) -> Option<DType> {
        match op.class() {
            Class::Narrow => Some(self.compute),
            Class::Wide => operands.iter().copied().map(wide).max_by_key(DType::size_in_bytes),
            Class::Widest => {
                let widest = operands.iter().copied().max_by_key(DType::size_in_bytes)?;
                // Neither half-precision type contains the other.
                let mixed =
                    operands.iter().any(|dtype| *dtype != widest && dtype.size_in_bytes() == widest.size_in_bytes());
                Some(if mixed { DType::F32 } else { widest })
            }
            Class::AsTheyAre => None,
        }
    }

    /// `operands` cast for `op`; integers are unchanged. The cast is part of the graph, so gradients have the operand's own
    /// type.
    pub fn cast<const N: usize>(self, op: Op, operands: [&Tensor; N]) -> Result<[Tensor; N]> {
        let floats: Vec<DType> = operands.iter().map(|tensor| tensor.dtype()).filter(DType::is_float).collect();
        let dtype = self.dtype(op, &floats);
        let mut cast = operands.map(Clone::clone);
        if let Some(dtype) = dtype {
            for tensor in cast.iter_mut().filter(|tensor| tensor.dtype().is_float()) {
                *tensor = tensor.to_dtype(dtype)?;
            }
        }
        Ok(cast)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn the_table_matches_autocast() {
        use DType::{BF16, F16, F32, F64};
        for (op, operands, expected) in [
            (Op::Matmul, vec![F32, F32], Some(F16)),
            (Op::Softmax, vec![F16], Some(F32)),
            (Op::MseLoss, vec![F16, F64], Some(F64)),
            (Op::Cat, vec![F16, F32], Some(F32)),
            (Op::Cat, vec![F16, F16], Some(F16)),
            (Op::Cat, vec![F16, BF16], Some(F32)),
            (Op::Add, vec![F16, F32], None),
        ] {
            assert_eq!(Policy::FP16.dtype(op, &operands), expected, "{op:?}");
        }
        assert_eq!(Op::ALL.iter().filter(|op| op.class() == Class::Narrow).count(), 4);
        assert_eq!(Op::ALL.iter().collect::<std::collections::HashSet<_>>().len(), Op::ALL.len());
    }

    #[test]
    fn gradients_have_the_parameters_type() {
        let weight = candle_core::Var::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
        let x = Tensor::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
        let [x, w] = Policy::BF16.cast(Op::Matmul, [&x, weight.as_tensor()]).unwrap();
        let product = x.matmul(&w).unwrap();
        let [logits] = Policy::BF16.cast(Op::Sum, [&product]).unwrap();
        assert_eq!((product.dtype(), logits.dtype()), (DType::BF16, DType::F32));
        let grads = logits.sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&weight).unwrap().dtype(), DType::F32);
        let indices = Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap();
        assert_eq!(Policy::FP16.cast(Op::Matmul, [&indices]).unwrap()[0].dtype(), DType::U32);
    }
}
