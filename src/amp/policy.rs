//! A cast table for candle models: which operation takes its operands in which type, as under `torch.autocast`.

use candle_core::{DType, Result, Tensor};

use super::wide;

/// An operation, as far as casting is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the names say it")]
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

/// What an operation's operands are cast to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// The policy's compute type: products, whose units are fast in it and sum in FP32.
    Narrow,
    /// FP32: what is not linear, sums, and losses.
    Wide,
    /// The widest type among the operands, for operations that need one type.
    Widest,
    /// Nothing: they run in the type that they meet.
    AsTheyAre,
}

/// Which type operands are cast to.
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

    /// What its operands are cast to.
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
    /// Products in FP16, under a loss scale.
    pub const FP16: Self = Self { compute: DType::F16 };
    /// Products in BF16.
    pub const BF16: Self = Self { compute: DType::BF16 };
    /// Everything in FP32: casts nothing.
    pub const FP32: Self = Self { compute: DType::F32 };

    /// The type of products.
    pub const fn compute(self) -> DType {
        self.compute
    }

    /// The type that `op` takes operands of these types in; `None` where each keeps its own.
    pub fn dtype(self, op: Op, operands: &[DType]) -> Option<DType> {
        match op.class() {
            Class::Narrow => Some(self.compute),
            Class::Wide => operands.iter().copied().map(wide).max_by_key(DType::size_in_bytes),
            Class::Widest => {
                let widest = operands.iter().copied().max_by_key(DType::size_in_bytes)?;
                // Neither half-precision type holds the other.
                let mixed =
                    operands.iter().any(|dtype| *dtype != widest && dtype.size_in_bytes() == widest.size_in_bytes());
                Some(if mixed { DType::F32 } else { widest })
            }
            Class::AsTheyAre => None,
        }
    }

    /// `operands` in the type that `op` takes them in; indices and other whole numbers stay what they are. The cast is
    /// part of the graph: a gradient comes back in the operand's own type.
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
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use candle_core::Device;

    use super::*;

    #[test]
    fn the_table_is_autocasts() {
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
    fn gradients_come_back_in_the_parameters_type() {
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
