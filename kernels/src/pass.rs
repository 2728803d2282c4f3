//! The inputs of a forward and backward pass that differ between micro-batches of one shape.

use candle_core::Result;

/// Everything that a pass reads from the host. With equal sizes, `windows`, `buffers` and presence of `documents`, two
/// passes compute the same operations in the same memory.
#[derive(Clone, Copy, Debug)]
pub struct PassInputs<'a> {
    /// Token ids, sequence after sequence.
    pub ids: &'a [u32],
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// For each token, the index in its sequence of its document's first token.
    pub documents: Option<&'a [u32]>,
    /// The target of each token.
    pub targets: &'a [u32],
    /// dL/d(row's loss) before its weight; `None` if it is not known before the pass.
    pub seed: Option<f32>,
    /// A factor of `seed` for each row; 1 if `None`.
    pub weights: Option<&'a [f32]>,
    /// The draw of the dropout masks.
    pub draw: u64,
    /// The windows of the model's attention layers.
    pub windows: &'a [Option<usize>],
    /// Identifies weights, gradients and activations; `None` if the host reads or chooses anything during the pass.
    pub buffers: Option<u64>,
}

/// Computes a pass.
pub type PassFn<'a> = &'a mut dyn FnMut() -> Result<()>;
