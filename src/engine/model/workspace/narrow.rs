//! A workspace for shorter sequences in the buffers of one for longer ones, so that a batch of short samples takes no more work
//! than it has tokens.

use super::{
    Activations, BranchGradients, BranchNorm, HeadNorms, HeadWorkspace, Normed, Rotations, Scratch, StreamGradient,
    Workspace,
};
use candle_core::{Result, Tensor, bail};

/// The first rows of a buffer.
type Rows<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

impl Workspace {
    /// These buffers for sequences of `seq_len` tokens: unchanged, or as views stored in `narrow`.
    pub fn fitted<'a>(&'a mut self, seq_len: usize, narrow: &'a mut Option<Self>) -> Result<&'a mut Self> {
        if seq_len == self.seq_len {
            return Ok(self);
        }
        Ok(narrow.insert(self.narrowed(seq_len)?))
    }

    /// Views of the first rows of these buffers, for the same number of sequences of `seq_len` tokens or fewer.
    pub fn narrowed(&self, seq_len: usize) -> Result<Self> {
        if seq_len == 0 || seq_len > self.seq_len {
            bail!("sequences of {seq_len} tokens in buffers for {}", self.seq_len);
        }
        let rows: Rows<'_> = &|buffer| buffer.narrow(0, 0, buffer.dim(0)? / self.seq_len * seq_len);
        let HeadWorkspace { logits, weight_sum, losses } = &self.head;
        let Rotations { full, sliding } = &self.rotations;
        Ok(Self {
            policy: self.policy,
            keep: self.keep,
            train: self.train,
            batch: self.batch,
            seq_len,
            documents: Vec::new(),
            compute: self.compute.clone(),
            stream: self.stream.iter().map(rows).collect::<Result<_>>()?,
            blocks: self.blocks.iter().map(|block| activations(block, rows)).collect::<Result<_>>()?,
            final_norm: normed(&self.final_norm, rows)?,
            head: HeadWorkspace { logits: logits.clone(), weight_sum: weight_sum.clone(), losses: rows(losses)? },
            backward: optional(self.backward.as_ref(), |backward| {
                Ok(StreamGradient { stream: rows(&backward.stream)?, order: Vec::new() })
            })?,
            scratch: self.scratch.iter().map(|scratch| narrowed_scratch(scratch, rows)).collect::<Result<_>>()?,
            rotations: Rotations { full: full.clone(), sliding: sliding.clone() },
        })
    }
}

fn optional<T>(value: Option<&T>, narrow: impl FnOnce(&T) -> Result<T>) -> Result<Option<T>> {
    value.map(narrow).transpose()
}

fn normed(normed: &Normed, rows: Rows<'_>) -> Result<Normed> {
    let Normed { out, mean, rstd } = normed;
    Ok(Normed { out: rows(out)?, mean: optional(mean.as_ref(), rows)?, rstd: rows(rstd)? })
}

fn activations(block: &Activations, rows: Rows<'_>) -> Result<Activations> {
    let branch = |norm: &BranchNorm| -> Result<BranchNorm> {
        Ok(BranchNorm { input: rows(&norm.input)?, rstd: rows(&norm.rstd)? })
    };
    let heads = |heads: &HeadNorms| -> Result<HeadNorms> {
        let [queries, keys] = &heads.rstd;
        Ok(HeadNorms { out: rows(&heads.out)?, rstd: [rows(queries)?, rows(keys)?] })
    };
    Ok(Activations {
        attention_norm: normed(&block.attention_norm, rows)?,
        qkv: rows(&block.qkv)?,
        heads: optional(block.heads.as_ref(), heads)?,
        attended: rows(&block.attended)?,
        lse: rows(&block.lse)?,
        attention_branch: optional(block.attention_branch.as_ref(), branch)?,
        middle: rows(&block.middle)?,
        mlp_norm: normed(&block.mlp_norm, rows)?,
        up: rows(&block.up)?,
        mlp_branch: optional(block.mlp_branch.as_ref(), branch)?,
        low: optional(block.low.as_ref(), rows)?,
    })
}

fn narrowed_scratch(scratch: &Scratch, rows: Rows<'_>) -> Result<Scratch> {
    let gradients = |buffers: &BranchGradients| -> Result<BranchGradients> {
        Ok(BranchGradients {
            normed: rows(&buffers.normed)?,
            branch: optional(buffers.branch.as_ref(), rows)?,
            query_key: optional(buffers.query_key.as_ref(), rows)?,
            attended: optional(buffers.attended.as_ref(), rows)?,
            qkv: rows(&buffers.qkv)?,
            activated: rows(&buffers.activated)?,
            up: optional(buffers.up.as_ref(), rows)?,
        })
    };
    Ok(Scratch {
        compute: scratch.compute,
        branch: rows(&scratch.branch)?,
        activated: rows(&scratch.activated)?,
        gradients: optional(scratch.gradients.as_ref(), gradients)?,
        // They take as much of their buffers as they need.
        adapter: scratch.adapter.clone(),
        block: optional(scratch.block.as_ref(), |block| activations(block, rows))?,
    })
}
