//! Views of a workspace's buffers for fewer or shorter sequences, so that the work of a batch depends on its size.

use super::{
    BlockActivations, CrossEntropyWorkspace, LayerScratch, NormOutput, PostNorm, QkNorms, ResidualGrad, Routing,
    SublayerGrads, Workspace,
};
use candle_core::{Result, Tensor, bail};
use std::cell::RefCell;

/// The first rows of a buffer.
type TakeRows<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

impl Workspace {
    /// These buffers for `batch` sequences of `seq_len` tokens: unchanged, or as views stored in `narrow`.
    pub fn for_shape<'a>(
        &'a mut self,
        (batch, seq_len): (usize, usize),
        narrow: &'a mut Option<Self>,
    ) -> Result<&'a mut Self> {
        if (batch, seq_len) == (self.batch, self.seq_len) {
            return Ok(self);
        }
        Ok(narrow.insert(self.narrow((batch, seq_len))?))
    }

    /// Views of the first rows of these buffers, for `batch` sequences of `seq_len` tokens: no more than they hold.
    pub fn narrow(&self, (batch, seq_len): (usize, usize)) -> Result<Self> {
        if !(1..=self.batch).contains(&batch) || !(1..=self.seq_len).contains(&seq_len) {
            bail!("{batch} sequences of {seq_len} tokens in buffers for {} × {}", self.batch, self.seq_len);
        }
        let [all, taken] = [self.batch * self.seq_len, batch * seq_len];
        let rows: TakeRows<'_> = &|buffer| buffer.narrow(0, 0, buffer.dim(0)? / all * taken);
        let CrossEntropyWorkspace { logits, weight_sum, losses } = &self.head;
        Ok(Self {
            policy: self.policy,
            purpose: self.purpose,
            batch,
            seq_len,
            documents: Vec::new(),
            short_ropes: false,
            balance: RefCell::default(),
            compute: self.compute.clone(),
            stream: self.stream.iter().map(rows).collect::<Result<_>>()?,
            blocks: self.blocks.iter().map(|block| activations(block, rows)).collect::<Result<_>>()?,
            final_norm: normed(&self.final_norm, rows)?,
            head: CrossEntropyWorkspace {
                logits: logits.clone(),
                weight_sum: weight_sum.clone(),
                losses: rows(losses)?,
            },
            backward: optional(self.backward.as_ref(), |backward| {
                Ok(ResidualGrad { stream: rows(&backward.stream)?, order: Vec::new() })
            })?,
            scratch: self.scratch.iter().map(|scratch| narrowed_scratch(scratch, rows)).collect::<Result<_>>()?,
            rope_caches: self.rope_caches.clone(),
            short_rope_caches: self.short_rope_caches.clone(),
        })
    }
}

fn optional<T>(value: Option<&T>, narrow: impl FnOnce(&T) -> Result<T>) -> Result<Option<T>> {
    value.map(narrow).transpose()
}

fn normed(normed: &NormOutput, rows: TakeRows<'_>) -> Result<NormOutput> {
    let NormOutput { out, mean, rstd } = normed;
    Ok(NormOutput { out: rows(out)?, mean: optional(mean.as_ref(), rows)?, rstd: rows(rstd)? })
}

fn activations(block: &BlockActivations, rows: TakeRows<'_>) -> Result<BlockActivations> {
    let branch =
        |norm: &PostNorm| -> Result<PostNorm> { Ok(PostNorm { input: rows(&norm.input)?, rstd: rows(&norm.rstd)? }) };
    let heads = |heads: &QkNorms| -> Result<QkNorms> {
        let [queries, keys] = &heads.rstd;
        let without_gates = optional(heads.queries.as_ref(), rows)?;
        Ok(QkNorms { queries: without_gates, out: rows(&heads.out)?, rstd: [rows(queries)?, rows(keys)?] })
    };
    let routing = |Routing { logits, weights, .. }: &Routing| -> Result<Routing> {
        Ok(Routing { logits: rows(logits)?, weights: rows(weights)?, decisions: RefCell::default() })
    };
    Ok(BlockActivations {
        attention_norm: normed(&block.attention_norm, rows)?,
        qkv: rows(&block.qkv)?,
        heads: optional(block.heads.as_ref(), heads)?,
        attended: rows(&block.attended)?,
        gated: optional(block.gated.as_ref(), rows)?,
        lse: rows(&block.lse)?,
        post_attention: optional(block.post_attention.as_ref(), branch)?,
        middle: rows(&block.middle)?,
        mlp_norm: normed(&block.mlp_norm, rows)?,
        routing: optional(block.routing.as_ref(), routing)?,
        up: rows(&block.up)?,
        post_mlp: optional(block.post_mlp.as_ref(), branch)?,
        a_out: optional(block.a_out.as_ref(), rows)?,
    })
}

fn narrowed_scratch(scratch: &LayerScratch, rows: TakeRows<'_>) -> Result<LayerScratch> {
    let gradients = |buffers: &SublayerGrads| -> Result<SublayerGrads> {
        Ok(SublayerGrads {
            normed: rows(&buffers.normed)?,
            branch: optional(buffers.branch.as_ref(), rows)?,
            query_key: optional(buffers.query_key.as_ref(), rows)?,
            attended: optional(buffers.attended.as_ref(), rows)?,
            qkv: rows(&buffers.qkv)?,
            activated: rows(&buffers.activated)?,
            up: optional(buffers.up.as_ref(), rows)?,
            routed: optional(buffers.routed.as_ref(), rows)?,
            router_logits: optional(buffers.router_logits.as_ref(), rows)?,
        })
    };
    Ok(LayerScratch {
        compute: scratch.compute,
        branch: rows(&scratch.branch)?,
        activated: rows(&scratch.activated)?,
        routed: optional(scratch.routed.as_ref(), rows)?,
        gradients: optional(scratch.gradients.as_ref(), gradients)?,
        // They take as much of their buffers as they need.
        adapter: scratch.adapter.clone(),
        block: optional(scratch.block.as_ref(), |block| activations(block, rows))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::ModelSpec;
    use crate::precision::PrecisionPolicy;
    use candle_core::Device;
    use serde_json::json;

    /// transformers chooses the frequencies of `LongRoPE` and of a dynamic base by the length of the batch.
    #[test]
    fn short_batches_have_the_rotary_embeddings_of_short_sequences() {
        let longrope = json!({"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]});
        let dynamic = json!({"type": "dynamic", "factor": 2.0});
        for (model_type, context, rope) in [("phi3", 16, longrope), ("llama", 8, dynamic)] {
            let config = json!({"model_type": model_type, "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1,
                "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": context,
                "original_max_position_embeddings": 8, "rope_scaling": rope});
            let spec = ModelSpec::from_json(config.to_string().as_bytes(), "config.json").unwrap();
            let of_length =
                |seq_len| Workspace::for_evaluation(&spec, PrecisionPolicy::FP32, (1, seq_len), &Device::Cpu).unwrap();
            let table = |mut workspace: Workspace, documents: Option<&[u32]>| {
                workspace.set_documents(documents);
                let cos = &workspace.rope_caches().full.as_ref().unwrap().cos;
                cos.narrow(0, 0, workspace.seq_len).unwrap().to_vec2::<f32>().unwrap()
            };
            let long = of_length(16);
            // A dynamic base grows with the longest sequence so far.
            let lengths = if model_type == "llama" { vec![1, 8] } else { vec![1, 8, 9, 15] };
            for seq_len in lengths {
                let narrow = long.narrow((1, seq_len)).unwrap();
                assert_eq!(table(narrow, None), table(of_length(seq_len), None), "{seq_len} tokens");
            }
            let short = table(of_length(8), None);
            assert_ne!(short, table(long, None)[..8]);
            for (starts, is_short) in [([0, 8], true), ([0, 7], false)] {
                let documents: Vec<u32> = (0..16).map(|row| starts[usize::from(row >= starts[1])]).collect();
                let packed = table(of_length(16), Some(&documents));
                assert_eq!((packed[..8] == short, packed.len()), (is_short, 16), "{starts:?}");
            }
        }
    }
}
