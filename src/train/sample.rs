//! Text samples during training.

use crate::data::Tokenizer;
use crate::model::{Gpt2, Mode, Parameters, Tokens, Workspace};
use crate::precision::PrecisionPolicy;
use crate::{Error, Result};
use candle_core::{DType, Device};
use candle_transformers::generation::{LogitsProcessor, Sampling};

/// Buffers for generating text of a fixed length from a fixed prompt.
#[derive(Debug)]
pub struct Sampler {
    prompt: Vec<u32>,
    tokens: usize,
    temperature: f64,
    workspace: Workspace,
}

impl Sampler {
    /// For `tokens` tokens after `prompt`, as many as fit the model's context. An empty prompt is the end-of-text token.
    pub fn new(
        model: &Gpt2,
        policy: PrecisionPolicy,
        tokenizer: &Tokenizer,
        prompt: &str,
        tokens: usize,
        temperature: f64,
    ) -> Result<Self> {
        let mut prompt_ids = tokenizer.encode(prompt)?;
        if prompt_ids.is_empty() {
            prompt_ids.push(tokenizer.eos_id().unwrap_or(0));
        }
        let context = model.config().n_positions;
        if prompt_ids.len() >= context {
            let message = format!("its {} tokens fill the context of {context}", prompt_ids.len());
            return Err(Error::config("train.prompt", message));
        }
        let tokens = tokens.min(context - prompt_ids.len());
        let workspace = Workspace::new(model.config(), policy, 1, prompt_ids.len() + tokens, false, &Device::Cpu)?;
        Ok(Self { prompt: prompt_ids, tokens, temperature, workspace })
    }

    /// Generates a text; equal weights and seeds give equal texts. Stops early at the end-of-text token.
    pub fn generate(&mut self, model: &Gpt2, weights: &Parameters, tokenizer: &Tokenizer, seed: u64) -> Result<String> {
        let sampling = match self.temperature {
            0.0 => Sampling::ArgMax,
            temperature => Sampling::All { temperature },
        };
        let mut processor = LogitsProcessor::from_sampling(seed, sampling);
        let length = self.workspace.seq_len();
        let mut ids = vec![0; length];
        ids[..self.prompt.len()].copy_from_slice(&self.prompt);
        let mut filled = self.prompt.len();
        while filled < self.prompt.len() + self.tokens {
            let tokens = Tokens { ids: &ids, seq_len: length };
            model.forward(weights, tokens, Mode::Eval, &mut self.workspace)?;
            let hidden = self.workspace.hidden().narrow(0, filled - 1, 1)?;
            let logits = model.logits(weights, &hidden)?.to_dtype(DType::F32)?.squeeze(0)?;
            let Ok(next) = processor.sample(&logits) else { break };
            if Some(next) == tokenizer.eos_id() {
                break;
            }
            ids[filled] = next;
            filled += 1;
        }
        tokenizer.decode(&ids[self.prompt.len()..filled])
    }
}
