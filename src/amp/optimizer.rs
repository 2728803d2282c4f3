//! The optimizer interface of the scaler, and its implementation for candle's own optimizers.

use candle_core::{Result, Var, backprop::GradStore};
use candle_nn::Optimizer;
use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies an optimizer; unique in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OptimizerId(u64);

impl OptimizerId {
    /// A new unique id.
    #[expect(clippy::new_without_default, reason = "every call returns another value")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// An optimizer with an id and a list of its variables, which candle's trait lacks.
pub trait ScaledOptimizer: Optimizer {
    /// The id under which the scaler tracks the optimizer's stage.
    fn id(&self) -> OptimizerId;

    /// The variables it updates.
    fn vars(&self) -> &[Var];
}

/// Wraps any candle optimizer with its variables: `WithVars::<SGD>::new(vars, 0.1)`.
///
/// Variables must be FP32 or FP64: these optimizers compute in the variable's own type, and in half precision most
/// updates would be lost. Cast in the forward pass (`var.to_dtype(DType::F16)`), or use [`AdamW`](super::AdamW).
#[derive(Debug)]
pub struct WithVars<O> {
    id: OptimizerId,
    vars: Vec<Var>,
    optimizer: O,
}

impl<O> WithVars<O> {
    /// The wrapped optimizer.
    pub const fn inner(&self) -> &O {
        &self.optimizer
    }
}

impl<O: Optimizer> Optimizer for WithVars<O> {
    type Config = O::Config;

    /// An error if a variable is in half precision.
    fn new(vars: Vec<Var>, config: O::Config) -> Result<Self> {
        if let Some(var) = vars.iter().find(|var| super::wide(var.dtype()) != var.dtype()) {
            candle_core::bail!(
                "a variable of {:?} would lose most of this optimizer's updates; keep it in F32 and cast it in the \
                 forward pass, or use `amp::AdamW`, which has FP32 masters",
                var.dtype()
            );
        }
        Ok(Self { id: OptimizerId::new(), optimizer: O::new(vars.clone(), config)?, vars })
    }

    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.optimizer.step(grads)
    }

    fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.optimizer.set_learning_rate(lr);
    }
}

impl<O: Optimizer> ScaledOptimizer for WithVars<O> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn vars(&self) -> &[Var] {
        &self.vars
    }
}
