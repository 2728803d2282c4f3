//! The sections of a configuration file with their defaults. `finetune config --explain` prints the fields' comments.

use crate::data::{LossOn, SampleKind};
use crate::engine::model::{ALL_LINEAR, ModelSpec};
use crate::engine::optim::{OptimizerKind, ScheduleKind, Sharding};
use crate::settings::Heading::{Along, Text, Training};
use crate::settings::{Interval, MAX_COUNT, changed_keys, settings};
use crate::store::checkpoint::CheckpointKind;
use crate::train::objective::ObjectiveKind;
use crate::train::reward::{OnRewardError, Reward};
use crate::{Error, Result};
use std::path::PathBuf;

settings! {
    /// Batches, length of the run, evaluation and samples.
    #[derive(Clone, Debug, PartialEq)]
    pub struct TrainSection {
        /// Sequences in a micro-batch.
        batch_size: usize = 8, within(1.0, MAX_COUNT), flag("batch-size", Training, 0, "N"), short('b');
        /// Tokens in a sequence; at most the model's context.
        seq_len: usize = 128, fixed(), within(1.0, MAX_COUNT), flag("seq-len", Training, 0, "N"), short('l'),
            help("Tokens in a sequence");
        /// Micro-batches in a step.
        grad_accum: usize = 1, within(1.0, MAX_COUNT), flag("grad-accum", Training, 1, "N");
        /// Whether to keep only the input of each block for the backward pass, which computes the rest again. The
        /// numbers are the same; a step needs less memory and takes about a third longer.
        gradient_checkpointing: bool = false, flag("gradient-checkpointing", Training, 0, ""),
            help("Keep only the input of each block for the backward pass, which computes the rest again");
        /// The turns of a chat, or the parts of a prompt with an answer, that count in the loss: `answers`,
        /// `last_answer`, or `all`.
        loss_on: LossOn = LossOn::Answers, fixed(), flag("loss-on", Text, 2, "PART"),
            help("Which turns of a chat count in the loss: `answers`, `last_answer` or `all`");
        /// Whether to pack several short documents into a row. Attention stays within each document, and positions
        /// restart in each.
        packing: bool = false, fixed(), flag("packing", Training, 0, ""),
            help("Pack several short documents into a row, with separate attention and positions");
        /// Whether to split a batch that does not fit into memory into smaller micro-batches, with gradient
        /// checkpointing if needed. The run's configuration records the choice.
        auto_batch: bool = false, flag("auto-batch", Training, 0, ""),
            help("Split a batch that does not fit into memory into micro-batches, with gradient checkpointing if \
                  needed");
        /// How Adam's moments are stored: `adamw` in FP32, `adamw8bit` in 8 bits with one scale per block of 256.
        optimizer: OptimizerKind = OptimizerKind::AdamW, fixed(), flag("optimizer", Training, 4, "KIND"),
            help("How Adam's moments are stored: adamw (FP32) or adamw8bit");
        /// The state that is split among several processes: `optimizer` for masters and Adam's moments (`ZeRO` stage
        /// 1), or `gradients` for these and the sums of gradients (stage 2). The numbers are the same.
        shard: Sharding = Sharding::Optimizer, flag("shard", Training, 4, "PART"), help(Sharding::HELP);
        /// Passes over the training text, instead of `steps`; 1 if neither is given.
        epochs: Option<f64> = None, within(0.0, 1e9), flag("epochs", Training, 1, "X"),
            help("Passes over the training text [default: 1]");
        /// Number of steps, instead of `epochs`.
        steps: Option<u64> = None, flag("steps", Training, 1, "N"), help("Number of steps, instead of `--epochs`");
        /// Steps between validations, or `epoch`; 0 for one at the end.
        eval_every: Interval = Interval::Steps(100), flag("eval-every", Along, 0, "N"),
            help("Steps between validations, or `epoch`");
        /// Maximum number of validation batches; 0 for all.
        eval_batches: u64 = 16;
        /// Steps between text samples, or `epoch`; 0 for one at the end.
        sample_every: Interval = Interval::Steps(0), flag("sample-every", Along, 0, "N"),
            help("Steps between text samples, or `epoch`; 0 samples only at the end");
        /// Maximum number of tokens per sample.
        sample_tokens: usize = 64;
        /// Sampling temperature; 0 takes the likeliest token.
        temperature: f64 = 0.8, within(0.0, 100.0);
        /// The prompt of a sample.
        prompt: String = String::new(), flag("prompt", Along, 0, "TEXT"), help("Prompt of the text samples");
        /// Modules that are not trained, such as `h.0-3,wte`: names as they are printed, with ranges of blocks. They
        /// are stored once, in the compute dtype, and have no masters, moments or gradients.
        freeze: Option<String> = None, fixed(), flag("freeze", Training, 3, "MODULES"),
            help("Modules that are not trained, such as `h.0-3,wte`");
        /// Stop after this many evaluations without a new best validation loss; 0 for never.
        early_stopping: u64 = 0, flag("early-stopping", Training, 5, "N");
    }
}

settings! {
    /// LoRA adapters, trained instead of the model's weights. The base model is frozen and stored once, in the compute
    /// dtype. Names are PEFT's.
    #[derive(Clone, Debug, PartialEq)]
    pub struct LoraSection {
        /// The rank; without it the full model is trained.
        r: Option<usize> = None, fixed();
        /// The adapters' output is multiplied by `alpha / r`; twice the rank by default.
        alpha: Option<f64> = None, fixed();
        /// Dropout of the adapters' input.
        dropout: f64 = 0.0;
        /// Whether to divide `alpha` by the square root of the rank instead (rsLoRA).
        use_rslora: bool = false, fixed();
        /// Whether to train the magnitude of each output's weights too (DoRA).
        use_dora: bool = false, fixed();
        /// The linear layers that get an adapter, by the ends of their names; `all-linear` for all layers of the
        /// blocks. Routers and experts have the names of transformers' parameters, such as `experts.down_proj`.
        target_modules: Vec<String> = vec![ALL_LINEAR.to_owned()], fixed();
        /// Additional modules that are trained in full.
        modules_to_save: Vec<String> = Vec::new(), fixed();
    }
}

impl LoraSection {
    /// The error for a setting of adapters without a rank.
    pub(super) fn without_rank(key: &str) -> Error {
        Error::config("lora.r", format!("is missing, but `{key}` needs it; set the rank, for example 16"))
    }

    pub(super) fn validate(&self) -> Result<()> {
        const LARGEST: usize = 1 << 16;
        let changed = changed_keys(self);
        if self.r.is_none()
            && let Some(first) = Self::settings().iter().find(|setting| changed.contains(&setting.key))
        {
            return Err(Self::without_rank(&format!("lora.{}", first.key)));
        }
        match (self.r, self.alpha) {
            (Some(r), _) if r == 0 || r > LARGEST => {
                return Err(Error::config("lora.r", format!("`{r}` is not a rank from 1 to {LARGEST}")));
            }
            (_, Some(alpha)) if !(alpha > 0.0 && alpha <= 1e6) => {
                return Err(Error::config("lora.alpha", format!("`{alpha}` is not a number above 0 and up to 1e6")));
            }
            _ => {}
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::config("lora.dropout", format!("`{}` is not a probability in [0, 1)", self.dropout)));
        }
        if self.target_modules.is_empty() {
            let message = format!("is empty; list names such as `q_proj`, or use `{ALL_LINEAR}`");
            return Err(Error::config("lora.target_modules", message));
        }
        Ok(())
    }
}

settings! {
    /// The training signal. Names and defaults are TRL's.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ObjectiveSection {
        /// `sft` for the cross-entropy of the targets; for pairs of a chosen and a rejected answer `dpo`, `ipo`,
        /// `hinge`, `robust`, `orpo` or `simpo`; for single answers with labels `kto`; for completions that it samples
        /// and rewards `grpo`, `dr_grpo` or `dapo`.
        kind: ObjectiveKind = ObjectiveKind::Sft, fixed(), flag("objective", Training, 0, "NAME"),
            help("Training signal: sft; dpo, ipo, hinge, robust, orpo or simpo (pairs); kto (labelled answers); grpo, \
                  dr_grpo or dapo (rewards)");
        /// The factor of log-probabilities, ORPO's weight of the odds ratio, GRPO's weight of the divergence from the
        /// reference; by default 0.1, 2 for `simpo`, and 0 for `grpo`, `dr_grpo` and `dapo`.
        beta: Option<f64> = None, fixed(), within(0.0, 1e6), flag("beta", Training, 0, "X"),
            help("The objective's factor of log-probabilities, or of the divergence [default: 0.1; 2 for simpo; 0 for \
                  grpo]");
        /// The model to compare log-probabilities with, instead of the model before training.
        reference: Option<String> = None, fixed(), flag("reference", Training, 0, "NAME|PATH"),
            help("Model to compare log-probabilities with [default: the model before training]");
        /// The share of pairs that `dpo`, `robust` or `simpo` expect to be swapped.
        label_smoothing: f64 = 0.0, fixed(), within(0.0, 0.5);
        /// SimPO's target margin of rewards.
        simpo_gamma: f64 = 0.5, fixed(), within(0.0, 1e6);
        /// Whether a validation's loss is minus the reward margin, which the best checkpoint and early stopping then
        /// follow.
        validate_margin: bool = false, fixed();
        /// KTO's weight of answers that are labelled good.
        desirable_weight: f64 = 1.0, fixed(), within(0.0, 1e6);
        /// KTO's weight of answers that are labelled bad.
        undesirable_weight: f64 = 1.0, fixed(), within(0.0, 1e6);
        /// The reward of a completion: `exact` (1 if it equals the row's answer), `regex:PATTERN` (1 if it matches),
        /// `length:N` (1 at N tokens, less with the distance), or a program that reads lines of JSON and writes a
        /// number for each.
        reward: Option<String> = None, fixed(), flag("reward", Training, 0, "RULE|PROGRAM"),
            help("Reward of a completion: exact, regex:PATTERN, length:N, or a program, which reads lines of JSON with \
                  `prompt`, `completion` and `answer` and writes a number for each");
        /// Seconds that the program may take for a completion.
        reward_timeout_s: f64 = 60.0, within(0.001, 1e6);
        /// The consequence of a completion for which the program failed twice: `stop` the run, or `drop` the
        /// completion.
        on_reward_error: OnRewardError = OnRewardError::Stop;
        /// Completions of a prompt, which form a group.
        num_generations: usize = 8, fixed(), within(2.0, 1024.0), flag("num-generations", Training, 0, "N");
        /// Maximum number of tokens of a completion; with its prompt it also has to fit `train.seq_len`.
        max_completion_length: usize = 512, fixed(), within(1.0, MAX_COUNT),
            flag("max-completion-length", Training, 0, "N"),
            help("Maximum number of tokens of a sampled completion");
        /// Steps with the completions of one sampling.
        num_iterations: usize = 1, fixed(), within(1.0, 1024.0);
        /// Ratios of probabilities are clipped to `1 - epsilon` and `1 + epsilon_high`.
        epsilon: f64 = 0.2, fixed(), within(0.0, 1.0);
        /// `epsilon` by default, and 0.28 for `dapo`.
        epsilon_high: Option<f64> = None, fixed(), within(0.0, 1e6);
        /// Whether to divide a group's advantages by the standard deviation of its rewards; by default yes, except for
        /// `dr_grpo`.
        scale_rewards: Option<bool> = None, fixed();
        /// A completion is left out if its probability in training is more than this many times the sampler's, which
        /// differs on a GPU.
        importance_sampling_cap: f64 = 3.0, fixed(), within(0.0, 1e6);
    }
}

impl ObjectiveSection {
    /// The factor of log-probabilities.
    pub fn beta(&self) -> f64 {
        self.beta.unwrap_or(match self.kind {
            ObjectiveKind::SimPo => 2.0,
            kind if kind.samples_completions() => 0.0,
            _ => 0.1,
        })
    }

    /// The upper distance of clipping from a ratio of 1.
    pub fn epsilon_high(&self) -> f64 {
        self.epsilon_high.unwrap_or(if self.kind == ObjectiveKind::Dapo { 0.28 } else { self.epsilon })
    }

    /// Whether advantages are divided by the standard deviation of the rewards.
    pub fn scale_rewards(&self) -> bool {
        self.scale_rewards.unwrap_or(self.kind != ObjectiveKind::DrGrpo)
    }

    /// Whether it compares log-probabilities with those of a reference model.
    pub fn needs_reference(&self) -> bool {
        match self.kind {
            ObjectiveKind::Sft | ObjectiveKind::Orpo | ObjectiveKind::SimPo => false,
            kind => !kind.samples_completions() || self.beta() > 0.0,
        }
    }

    /// Whether the reference is not the frozen base of the adapters of `spec`.
    pub(in crate::train) fn has_separate_reference(&self, spec: &ModelSpec) -> bool {
        let has_base = spec.lora.as_ref().is_some_and(|lora| lora.modules_to_save.is_empty());
        self.needs_reference() && (self.reference.is_some() || !has_base)
    }

    /// Whether a run that trains `spec` loads a second model as its reference.
    pub(in crate::train) fn loads_reference(&self, spec: &ModelSpec) -> bool {
        self.has_separate_reference(spec) && (self.reference.is_some() || self.kind.samples_completions())
    }

    /// The rows of `samples` samples in a batch.
    pub fn rows(&self, samples: usize) -> usize {
        match self.kind.samples() {
            SampleKind::Preference => 2 * samples,
            SampleKind::Prompt => self.num_generations * samples,
            SampleKind::Plain | SampleKind::UnpairedPreference => samples,
        }
    }

    /// Steps per batch of data.
    pub fn iterations(&self) -> u64 {
        if self.kind.samples_completions() { self.num_iterations as u64 } else { 1 }
    }

    /// Rejects settings that do not fit the objective and `batch_size`.
    pub(in crate::train) fn validate(&self, batch_size: usize) -> Result<()> {
        if self.kind == ObjectiveKind::Robust && self.label_smoothing >= 0.5 {
            let message =
                "must be below 0.5 for `robust`, because pairs that are swapped half of the time teach nothing";
            return Err(Error::config("objective.label_smoothing", message));
        }
        if self.kind == ObjectiveKind::Kto && batch_size < 2 {
            let message = "must be at least 2 for `kto`, which compares each answer with another one of the batch";
            return Err(Error::config("train.batch_size", message));
        }
        let samples = self.kind.samples_completions();
        let has_margin = !samples && self.kind != ObjectiveKind::Sft;
        let smooths = matches!(self.kind, ObjectiveKind::Dpo | ObjectiveKind::Robust | ObjectiveKind::SimPo);
        let is_kto = self.kind == ObjectiveKind::Kto;
        let read: [(&[&str], bool, &str); 7] = [
            (
                &["beta"],
                self.kind != ObjectiveKind::Sft,
                "plain fine-tuning has no such factor; remove it, or set `--objective`",
            ),
            (&["simpo_gamma"], self.kind == ObjectiveKind::SimPo, "only `simpo` has a target margin; remove it"),
            (&["desirable_weight", "undesirable_weight"], is_kto, "only `kto` has labels; remove it"),
            (
                &["reference"],
                self.needs_reference(),
                "this objective compares with no reference; remove it, or set `--beta`",
            ),
            (&["validate_margin"], has_margin, "this objective has no margin; remove it"),
            (&["label_smoothing"], smooths, "only `dpo`, `robust` and `simpo` smooth their labels; remove it"),
            (
                &[
                    "num_generations",
                    "max_completion_length",
                    "num_iterations",
                    "epsilon",
                    "epsilon_high",
                    "scale_rewards",
                    "importance_sampling_cap",
                ],
                samples,
                "this objective samples no completions; remove it",
            ),
        ];
        let changed = changed_keys(self);
        for (keys, is_read, reason) in read {
            if let Some(key) = keys.iter().find(|key| !is_read && changed.contains(**key)) {
                return Err(Error::config(format!("objective.{key}"), format!("has no use: {reason}")));
            }
        }
        if self.beta() == 0.0 && !samples {
            return Err(Error::config("objective.beta", "0 would teach nothing; use a number above 0"));
        }
        match &self.reward {
            None if samples => {
                let message = "is missing; use `--reward exact`, `regex:PATTERN`, `length:N`, or a program";
                Err(Error::config("objective.reward", message))
            }
            Some(_) if !samples => {
                let message = "needs an objective that samples completions: `--objective grpo`, `dr_grpo` or `dapo`";
                Err(Error::config("objective.reward", message))
            }
            reward => reward.as_deref().map_or(Ok(()), |rule| Reward::new(rule, None).map(drop)),
        }
    }
}

settings! {
    /// AdamW and clipping.
    #[derive(Clone, Debug, PartialEq)]
    pub struct OptimizerSection {
        /// The highest learning rate.
        lr: f64 = 5e-5, within(0.0, 10.0), flag("lr", Training, 2, "X");
        /// Decay rates of Adam's moments (beta1, beta2).
        betas: [f64; 2] = [0.9, 0.95], within(0.0, 1.0 - 1e-9);
        /// Adam's epsilon above 0, added to the root of the second moment.
        eps: f64 = 1e-8, within(0.0, 1.0);
        /// Decoupled weight decay of parameters with two or more dimensions.
        weight_decay: f64 = 0.01, within(0.0, 100.0), flag("weight-decay", Training, 2, "X"),
            help("Decoupled weight decay");
        /// Clip gradients to this global norm; 0 for no clipping.
        max_grad_norm: f64 = 1.0, within(0.0, 1e9), flag("max-grad-norm", Training, 2, "X"),
            help("Clip gradients to this global norm; 0 to disable");
    }
}

settings! {
    /// The learning rate over time.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ScheduleSection {
        /// `constant`, `linear` or `cosine`.
        kind: ScheduleKind = ScheduleKind::Cosine, flag("schedule", Training, 4, "KIND"),
            help("Learning-rate schedule: constant, linear or cosine");
        /// Warm-up steps as a fraction of the run's steps.
        warmup_ratio: f64 = 0.05, within(0.0, 1.0);
        /// Number of warm-up steps N, instead of `warmup_ratio`: update n has n/N of the highest rate. (transformers
        /// starts at 0.)
        warmup_steps: Option<u64> = None, flag("warmup-steps", Training, 4, "N"),
            help("Warm-up updates [default: 5 % of the run]");
        /// The final learning rate as a fraction of the highest.
        min_lr_ratio: f64 = 0.1, within(0.0, 1.0);
    }
}

settings! {
    /// Checkpoints: folder, interval, and number to keep.
    #[derive(Clone, Debug, PartialEq)]
    pub struct CheckpointSection {
        /// The folder of all runs.
        dir: PathBuf = "checkpoints".into(), flag("checkpoint-dir", Along, 1, "FOLDER");
        /// The name of the run's folder; by default the model, the dtype and a number.
        run: Option<String> = None, flag("run", Along, 1, "NAME"),
            help("The run's name [default: model, dtype and a number]");
        /// Steps between checkpoints, or `epoch`; 0 for one at the end.
        save_every: Interval = Interval::Steps(500), flag("save-every", Along, 0, "N"),
            help("Steps between checkpoints, or `epoch`");
        /// Number of checkpoints to keep; older ones are removed when a newer one is complete.
        keep_last: usize = 2, within(1.0, MAX_COUNT), flag("keep-last", Along, 0, "N"),
            help("Full checkpoints to keep in addition to the best one");
        /// Whether to also keep the checkpoint with the best validation loss.
        keep_best: bool = true;
        /// Steps between weights-only checkpoints, or `epoch`; they are small but cannot be resumed. 0 for none.
        save_weights_every: Interval = Interval::Steps(0);
        /// Number of weights-only checkpoints to keep, in addition to the best one with `keep_best`.
        keep_last_weights: usize = 2, within(1.0, MAX_COUNT);
        /// Seconds to retry the last checkpoint of a run if it fails, before saving only the weights.
        final_save_retry_s: u64 = 60;
    }
}

/// The most bytes of a file's name on usual file systems.
const MAX_RUN_NAME: usize = 255;

impl CheckpointSection {
    /// Rejects a run's name that no folder can have, or that commands would take for a flag.
    pub(super) fn validate(&self) -> Result<()> {
        let run = self.run.as_deref().unwrap_or("run");
        let has_path = run.contains(|c: char| c == '/' || c == '\\' || c.is_control());
        if run.is_empty() || run.starts_with(['.', '-']) || has_path {
            let message = format!("`{run}` is not a folder name, or begins with `.` or `-`; choose another name");
            return Err(Error::config("checkpoint.run", message));
        }
        if CheckpointKind::parse_directory(run).is_some() {
            let message = format!("`{run}` is the name of a checkpoint; choose another name");
            return Err(Error::config("checkpoint.run", message));
        }
        if run.len() > MAX_RUN_NAME {
            let message = format!("{} bytes are too long for a folder's name; use at most {MAX_RUN_NAME}", run.len());
            return Err(Error::config("checkpoint.run", message));
        }
        Ok(())
    }
}

settings! {
    /// Measurements and logs, and their intervals.
    #[derive(Clone, Debug, PartialEq)]
    pub struct TelemetrySection {
        /// Steps between printed lines without a dashboard.
        log_every: u64 = 128, flag("log-every", Along, 0, "N"),
            help("Steps between printed lines; slow steps print one every 10 s");
        /// Steps between tables of per-tensor gradient statistics; every overflow has one too.
        grad_stats_every: u64 = 16;
        /// Steps between histograms of gradient exponents. On a GPU, candle's operations copy all gradients to the host
        /// for one; the custom kernels do not.
        grad_histogram_every: u64 = 1;
        /// Steps between FP32 probes; 0 for none.
        probe_every: u64 = 0;
        /// Steps between measurements of each layer's gradient variance; 0 for none.
        grad_variance_every: u64 = 0;
        /// Steps between counts of the updates that change FP32 masters but not the 16-bit weights; 0 for none.
        lost_updates_every: u64 = 0;
        /// Steps between records of each layer's largest gradient; 0 for none.
        grad_max_every: u64 = 0;
        /// Whether to repeat the passes of an overflowing step to find the first non-finite tensor.
        trace_overflows: bool = true;
        /// Whether to also write TensorBoard scalars and histograms, into `tensorboard` in the run's folder.
        tensorboard: bool = false;
    }
}
