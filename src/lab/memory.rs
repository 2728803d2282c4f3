//! Training's memory by purpose: this engine's buffers next to the textbook estimate.

use crate::engine::kernels::{CandleKernels, Fused, Kernels};
use crate::engine::model::{ALL_LINEAR, Checkpointing, Lora, ModelSpec};
use crate::engine::optim::OptimizerKind;
use crate::precision::{Dtype, PrecisionPolicy};
use crate::train::{DistributedLayout, MemoryEstimate, MemoryExtras, MemoryInputs, largest_batch};
use crate::ui::format::bytes;
use crate::ui::{Line, Page, Role};
use crate::{Error, Result};
use serde::Serialize;
use std::collections::BTreeSet;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Recipe {
    Fp32,
    /// FP16 with FP32 masters and a loss scale.
    Fp16Amp,
    /// BF16 with FP32 masters.
    Bf16Amp,
    /// FP8 matrix products, BF16 gradients and FP32 masters.
    Fp8,
    /// BF16 weights, gradients and moments, without masters.
    Bf16Pure,
    /// BF16 with FP32 masters and 8-bit moments, with an FP32 scale per 256 of them.
    Adam8bit,
    /// BF16 with FP32 masters; a layer keeps only its input and repeats its forward pass in the backward pass.
    Checkpointing,
    /// Frozen BF16 weights; FP32 low-rank adapters at every linear layer of the blocks.
    Lora,
    /// LoRA over weights in blocks. This engine does it with a GGUF file's; the textbook has NF4 with double
    /// quantization, and embeddings and head in BF16.
    Qlora,
}

/// The purpose of memory, in the order of bars and tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryCategory {
    /// The working copy of the weights, and a reference model.
    Weights,
    /// FP32 master weights.
    Masters,
    /// Gradients of the parameters, and their FP32 sums over micro-batches.
    Gradients,
    /// Adam's moments.
    Adam,
    /// Activations that the forward pass keeps for the backward pass.
    Activations,
    /// Temporary buffers: a tile of logits, gradients of activations, packed operands, keys and values of text samples
    /// and completions.
    Buffers,
    /// The FP32 probe's activations and gradients.
    Probe,
    /// The program itself, its threads and libraries.
    Process,
}

/// Bytes with a purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryItem {
    /// The purpose.
    pub group: MemoryCategory,
    /// The number of bytes.
    pub bytes: u64,
}

/// A recipe's memory in this engine and by the textbook.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct BatchPlan {
    pub(crate) recipe: Recipe,
    /// This engine's memory; `None` if it does not support the recipe.
    pub(crate) engine: Option<Vec<MemoryItem>>,
    /// The textbook estimate: all activations stored, as in PyTorch without checkpointing or fused attention.
    pub(crate) textbook: Vec<MemoryItem>,
    /// The largest batches within the budget: engine and textbook.
    pub(crate) largest_batch: (Option<usize>, Option<usize>),
    /// Bytes that the budget leaves for activations, engine and textbook; negative if the rest alone exceeds it.
    pub(crate) for_activations: (Option<i64>, Option<i64>),
}

/// A run's measured memory, and the prediction for its settings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MeasuredRun {
    pub(crate) policy: PrecisionPolicy,
    /// Its recipe as text; empty for full fine-tuning with AdamW.
    pub(crate) recipe: String,
    pub(crate) peak: u64,
    pub(crate) engine: Vec<MemoryItem>,
}

/// The memory of training a model, by recipe.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MemoryPlan {
    pub(crate) model: String,
    pub(crate) parameters: u64,
    /// Sequences in a micro-batch.
    pub(crate) batch: usize,
    pub(crate) seq_len: usize,
    pub(crate) grad_accum: usize,
    pub(crate) processes: usize,
    /// The memory budget in bytes.
    pub(crate) budget: Option<u64>,
    pub(crate) plans: Vec<BatchPlan>,
    /// Rank of the adapters.
    pub(crate) rank: usize,
    /// Their weights.
    pub(crate) adapters: u64,
    /// Bytes of a KV cache of these sequences, by format.
    pub(crate) kv_cache: Vec<(&'static str, u64)>,
    pub(crate) measured: Option<MeasuredRun>,
}

impl Recipe {
    /// Every recipe, in the order of the variants: its name, and the engine's policy of that kind.
    const ALL: [(Self, &str, Option<PrecisionPolicy>); 9] = [
        (Self::Fp32, "FP32", Some(PrecisionPolicy::FP32)),
        (Self::Fp16Amp, "FP16 AMP", Some(PrecisionPolicy::FP16)),
        (Self::Bf16Amp, "BF16 AMP", Some(PrecisionPolicy::BF16)),
        (Self::Fp8, "FP8", None),
        (Self::Bf16Pure, "pureBF16", Some(PrecisionPolicy { params: Dtype::BF16, ..PrecisionPolicy::BF16 })),
        (Self::Adam8bit, "Adam8bit", Some(PrecisionPolicy::BF16)),
        (Self::Checkpointing, "recomp.", Some(PrecisionPolicy::BF16)),
        (Self::Lora, "LoRA", Some(PrecisionPolicy::BF16)),
        (Self::Qlora, "QLoRA", Some(PrecisionPolicy::BF16)),
    ];

    /// The engine's policy for a model: only one that is quantized can stay in its blocks.
    fn policy_for(self, spec: &ModelSpec) -> Option<PrecisionPolicy> {
        Self::ALL[self as usize].2.filter(|_| self != Self::Qlora || !spec.quantized.is_empty())
    }

    /// This engine's memory; `None` if it does not support the recipe for the model.
    fn engine(self, spec: &ModelSpec, setup: TrainSetup<'_>) -> Result<Option<Vec<MemoryItem>>> {
        let Some(policy) = self.policy_for(spec) else { return Ok(None) };
        let keep = if self == Self::Checkpointing { Checkpointing::PerBlock } else { setup.keep };
        let kind = if self == Self::Adam8bit { OptimizerKind::AdamW8bit } else { OptimizerKind::AdamW };
        TrainSetup { keep, ..setup }.engine(&self.model(spec, setup.rank)?, policy, kind).map(Some)
    }

    /// The model as the recipe trains it: with its adapters, and quantized only for QLoRA.
    fn model(self, spec: &ModelSpec, rank: usize) -> Result<ModelSpec> {
        let adapters = |targets| Lora {
            r: rank,
            alpha: rank as f64,
            dropout: 0.0,
            rslora: false,
            dora: false,
            targets,
            modules_to_save: BTreeSet::new(),
        };
        let is_adapted = matches!(self, Self::Lora | Self::Qlora);
        let lora = is_adapted.then(|| Lora::targets(spec, &[ALL_LINEAR]).map(adapters)).transpose()?;
        let mut spec = ModelSpec { lora, ..spec.clone() };
        if self != Self::Qlora {
            spec.quantized.clear();
        }
        Ok(spec)
    }
}

impl MemoryCategory {
    /// The letter in bars, the name and the color of each group, in the order of the variants.
    const ALL: [(char, &'static str, Role); 8] = [
        ('w', "weights", Role::Series(0)),
        ('M', "masters", Role::Series(1)),
        ('g', "grads", Role::Series(2)),
        ('A', "Adam", Role::Series(3)),
        ('a', "activations", Role::Mantissa),
        ('b', "buffers", Role::Dim),
        ('P', "probe", Role::Warn),
        ('p', "program", Role::Text),
    ];
}

/// The training setup.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TrainSetup<'a> {
    /// Sequences in a micro-batch, tokens in a sequence, micro-batches in a step.
    pub shape: [usize; 3],
    /// The memory budget in bytes.
    pub budget: Option<u64>,
    /// Rank of the adapters.
    pub rank: usize,
    /// The processes; all figures are of one of them.
    pub layout: DistributedLayout,
    /// The activations that the forward pass keeps.
    pub keep: Checkpointing,
    /// The work in addition to the steps.
    pub extras: MemoryExtras<'a>,
    /// The memory of the program itself with its tokenizer, in bytes.
    pub process: u64,
}

impl TrainSetup<'_> {
    /// This engine's memory, the program's own included. `spec` has the adapters, if there are any.
    pub fn engine(&self, spec: &ModelSpec, policy: PrecisionPolicy, kind: OptimizerKind) -> Result<Vec<MemoryItem>> {
        let kernels: &dyn Kernels = if self.layout.on_gpu { &CandleKernels } else { &Fused };
        let Self { layout, shape, keep, extras, .. } = *self;
        let inputs = MemoryInputs { layout, spec, policy, shape, keep, optimizer: kind, kernels };
        Ok(items(inputs.estimate(extras)?, self.process))
    }
}

impl BatchPlan {
    /// The engine's memory, or else the textbook's.
    fn shown(&self) -> &[MemoryItem] {
        self.engine.as_deref().unwrap_or(&self.textbook)
    }

    fn new(recipe: Recipe, spec: &ModelSpec, setup: TrainSetup<'_>, adapters: u64) -> Result<Self> {
        let TrainSetup { shape: [batch, seq_len, grad_accum], budget, .. } = setup;
        let engine = |batch| recipe.engine(spec, TrainSetup { shape: [batch, seq_len, grad_accum], ..setup });
        let textbook = |batch| {
            let mut items = textbook(spec, recipe, [batch, seq_len], adapters);
            items.push(MemoryItem { group: MemoryCategory::Process, bytes: setup.process });
            items
        };
        let left = |items: &[MemoryItem]| {
            let fixed = items.iter().filter(|item| item.group != MemoryCategory::Activations).map(|item| item.bytes);
            let left = i128::from(budget?) - fixed.map(i128::from).sum::<i128>();
            Some(i64::try_from(left).unwrap_or(i64::MIN))
        };
        // A batch whose size cannot be computed does not fit.
        let bytes = |batch| engine(batch).ok().flatten().map_or(u64::MAX, |items| total(&items));
        let too_large = |error: Error| Error::config("--batch", error.to_string());
        let (ours, theirs) = (engine(batch).map_err(too_large)?, textbook(batch));
        Ok(Self {
            recipe,
            for_activations: (ours.as_deref().and_then(left), left(&theirs)),
            largest_batch: (
                budget.filter(|_| ours.is_some()).and_then(|all| largest_batch(all, bytes)),
                budget.and_then(|all| largest_batch(all, |batch| total(&textbook(batch)))),
            ),
            engine: ours,
            textbook: theirs,
        })
    }
}

impl MemoryPlan {
    pub(crate) fn new(model: &str, spec: &ModelSpec, setup: TrainSetup<'_>) -> Result<Self> {
        let TrainSetup { shape: [batch, seq_len, grad_accum], budget, rank, .. } = setup;
        let adapters = Recipe::Lora.model(spec, rank)?.trained_count();
        let plans = Recipe::ALL.into_iter().map(|(recipe, ..)| BatchPlan::new(recipe, spec, setup, adapters));
        // Keys and values of every layer and token.
        let shape = [2, spec.attention_layers(), spec.kv_heads, spec.head_dim, batch, seq_len];
        let cached = |bytes: u64| shape.iter().fold(bytes, |bytes, dim| bytes.saturating_mul(*dim as u64));
        Ok(Self {
            model: model.to_owned(),
            parameters: spec.parameter_count(),
            batch,
            seq_len,
            grad_accum,
            processes: setup.layout.world_size,
            budget,
            plans: plans.collect::<Result<_>>()?,
            rank,
            adapters,
            kv_cache: vec![("FP32", cached(4)), ("FP16 or BF16", cached(2)), ("FP8 or INT8", cached(1))],
            measured: None,
        })
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let Self { batch, seq_len, grad_accum, processes, .. } = self;
        let accumulated = if *grad_accum > 1 { format!(" × {grad_accum} micro-batches") } else { String::new() };
        let shared = if *processes > 1 { format!(", each of {processes} processes") } else { String::new() };
        page.push(
            Line::new()
                .with(Role::Title, format!("{}: {:.1} M parameters", self.model, self.parameters as f64 / 1e6))
                .dim(format!("   {batch} × {seq_len} tokens{accumulated}{shared}")),
        );
        let caches = self.kv_cache.iter().map(|(format, size)| format!("{format} {}", bytes(*size)));
        page.push(Line::new().with(Role::Title, "KV cache ").plain(caches.collect::<Vec<_>>().join(", ")));
        let adapters = self.adapters as f64 / 1e6;
        page.push(
            Line::new().with(Role::Title, "LoRA ").plain(format!("{adapters:.1} M weights of rank {}", self.rank)),
        );
        self.bars(&mut page, width);
        self.conclusion(&mut page);
        page.gap();
        self.table(&mut page);
        page
    }

    /// The figures of each recipe, by this engine, if it supports it, and by the textbook.
    fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.plans.iter().flat_map(|plan| {
            let BatchPlan { recipe, engine, textbook, largest_batch, for_activations } = plan;
            let name = Recipe::ALL[*recipe as usize].1;
            let ours = engine.as_deref().map(|items| Row {
                label: format!("{:<15}", format!("{name} (ours)")),
                items,
                batch: largest_batch.0,
                left: for_activations.0,
            });
            let textbook =
                Row { label: format!("{name:<15}"), items: textbook, batch: largest_batch.1, left: for_activations.1 };
            ours.into_iter().chain([textbook])
        })
    }

    fn fits(&self, bytes: u64) -> bool {
        self.budget.is_none_or(|budget| bytes <= budget)
    }

    fn role(&self, bytes: u64) -> Role {
        if self.fits(bytes) { Role::Good } else { Role::Bad }
    }

    /// Each recipe's totals and its bar: this program's if it supports the recipe, else the textbook's.
    fn bars(&self, page: &mut Page, width: usize) {
        const TOTALS: usize = 29;
        let scale = self.plans.iter().map(|plan| total(plan.shown())).max().unwrap_or(1).max(1);
        let budget = self.budget.map_or_else(String::new, |budget| format!("of {}", bytes(budget)));
        page.title(format!("{:<10}{:>7}{:>9}  {budget}", "recipe", "ours", "textbook"));
        for plan in &self.plans {
            let all = total(&plan.textbook);
            let ours = plan.engine.as_deref().map(total);
            let line = Line::new().with(Role::Title, format!("{:<10}", Recipe::ALL[plan.recipe as usize].1));
            let cell = ours.map_or_else(|| "–".to_owned(), |ours| compact(ours as f64));
            let line = line.with(self.role(ours.unwrap_or(0)), format!("{cell:>7}"));
            let line = line.with(self.role(all), format!("{:>9}", compact(all as f64)));
            page.push(self.bar(line, plan.shown(), scale, width.saturating_sub(TOTALS)));
        }
        let mut legend = Line::new();
        for (letter, name, role) in MemoryCategory::ALL {
            legend = legend.with(role, format!("{letter} ")).dim(format!("{name} "));
        }
        page.push(legend);
    }

    /// Adds a bar to a line, after a cross if it exceeds the budget.
    fn bar(&self, line: Line, items: &[MemoryItem], scale: u64, width: usize) -> Line {
        let (role, mark) = if self.fits(total(items)) { (Role::Text, "   ") } else { (Role::Bad, " ✕ ") };
        let mut line = line.with(role, mark);
        let column = |sum: u64| (sum as f64 / scale as f64 * width as f64).round() as usize;
        let mut sum = 0u64;
        for item in items {
            let start = column(sum);
            sum = sum.saturating_add(item.bytes);
            let (letter, _, role) = MemoryCategory::ALL[item.group as usize];
            line = line.with(role, letter.to_string().repeat(column(sum) - start));
        }
        line
    }

    fn table(&self, page: &mut Page) {
        const OWN: [MemoryCategory; 5] = [
            MemoryCategory::Weights,
            MemoryCategory::Masters,
            MemoryCategory::Gradients,
            MemoryCategory::Adam,
            MemoryCategory::Activations,
        ];
        let cell = |bytes: u64| format!("{:>7}", if bytes == 0 { "–".to_owned() } else { compact(bytes as f64) });
        let budget = self.budget.map(|_| ["room", "batch"]).into_iter().flatten();
        let head = ["weight", "master", "grad", "Adam", "activ.", "other", "total"].into_iter().chain(budget);
        page.title(head.fold(format!("{:<15}", "recipe"), |line, name| line + &format!("{name:>7}")));
        for Row { label, items, batch, left } in self.rows() {
            // The last one is the sum of all other categories.
            let mut sums = [0; OWN.len() + 1];
            for item in items {
                sums[OWN.iter().position(|own| *own == item.group).unwrap_or(OWN.len())] += item.bytes;
            }
            let all = total(items);
            let line = Line::new().with(Role::Title, label).plain(sums.map(cell).concat());
            let mut line = line.with(self.role(all), format!("{:>7}", compact(all as f64)));
            if let Some(left) = left {
                let role = if left > 0 { Role::Text } else { Role::Bad };
                let batch = batch.map_or_else(|| "none".to_owned(), |batch| batch.to_string());
                line = line.with(role, format!("{:>7}{batch:>7}", compact(left as f64)));
            }
            page.push(line);
        }
        if self.budget.is_some() {
            page.push(Line::new().dim("room: memory left for activations; batch: the largest batch that fits"));
        }
    }

    fn conclusion(&self, page: &mut Page) {
        let Some(MeasuredRun { policy, recipe, peak, engine }) = &self.measured else { return };
        let predicted = total(engine);
        page.push(Line::new().plain(format!("measured peak of the run ({policy}{recipe}): {}", bytes(*peak))));
        let error = (predicted as f64 / *peak as f64 - 1.0) * 100.0;
        page.push(Line::new().plain(format!("predicted: {}, {error:+.1} %", bytes(predicted))));
    }
}

/// A recipe's figures, by this engine or by the textbook.
struct Row<'a> {
    label: String,
    items: &'a [MemoryItem],
    /// The largest batch.
    batch: Option<usize>,
    /// Bytes left for activations.
    left: Option<i64>,
}

/// The engine's bytes by group, and those of the program itself.
fn items(bytes: MemoryEstimate, process: u64) -> Vec<MemoryItem> {
    let item = |group, bytes| MemoryItem { group, bytes };
    let probe = (bytes.probe > 0).then(|| item(MemoryCategory::Probe, bytes.probe));
    let step = [
        item(MemoryCategory::Weights, bytes.weights),
        item(MemoryCategory::Masters, bytes.masters),
        item(MemoryCategory::Gradients, bytes.gradients),
        item(MemoryCategory::Adam, bytes.adam),
        item(MemoryCategory::Activations, bytes.activations),
        item(MemoryCategory::Buffers, bytes.scratch + bytes.scores),
    ];
    step.into_iter().chain(probe).chain([item(MemoryCategory::Process, process)]).collect()
}

/// The sum of all items; at most `u64::MAX`.
fn total(items: &[MemoryItem]) -> u64 {
    items.iter().fold(0, |sum, item| sum.saturating_add(item.bytes))
}

/// Weights, gradients, masters and Adam as in Micikevicius et al. (2018); activations by Korthikanti et al. (2022,
/// "Reducing activation recomputation in large transformer models"), `s·b·h·(34 + 5·a·s/h)` bytes per layer in half
/// precision; and FP32 logits. FP32 doubles them except the masks of dropout, 2 of the 34 bytes and 1 of the 5; FP8
/// halves the inputs of the four matmuls, 14 of the 34. 8-bit Adam (Dettmers et al., 2022) has an FP32 scale per 256
/// values, as in bitsandbytes; NF4 takes 4.127 bits per weight (Dettmers et al., 2023).
fn textbook(spec: &ModelSpec, recipe: Recipe, [batch, seq_len]: [usize; 2], adapters: u64) -> Vec<MemoryItem> {
    let [b, s, h, a, layers, vocab] =
        [batch, seq_len, spec.hidden_size, spec.heads, spec.num_layers, spec.vocab_size].map(|dim| dim as u128);
    let [parameters, adapters] = [spec.parameter_count(), adapters].map(u128::from);
    let positions = if spec.learned_positions { spec.max_position_embeddings as u128 } else { 0 };
    let head = if spec.tie_word_embeddings { 0 } else { vocab };
    let dense = (vocab + positions + head) * h;
    let nf4 = (parameters.saturating_sub(dense) as f64 * 4.127 / 8.0) as u128 + 2 * dense;
    let (weights, masters, gradients, adam) = match recipe {
        Recipe::Fp32 => (4 * parameters, 0, 4 * parameters, 8 * parameters),
        Recipe::Fp16Amp | Recipe::Bf16Amp | Recipe::Checkpointing => {
            (2 * parameters, 4 * parameters, 2 * parameters, 8 * parameters)
        }
        Recipe::Fp8 => (parameters, 4 * parameters, 2 * parameters, 8 * parameters),
        Recipe::Bf16Pure => (2 * parameters, 0, 2 * parameters, 4 * parameters),
        Recipe::Adam8bit => (2 * parameters, 4 * parameters, 2 * parameters, 2 * parameters + parameters / 32),
        Recipe::Lora => (2 * parameters + 4 * adapters, 0, 4 * adapters, 8 * adapters),
        Recipe::Qlora => (nf4 + 4 * adapters, 0, 4 * adapters, 8 * adapters),
    };
    let (linear, attention) = match recipe {
        Recipe::Fp32 => (2 * 32 + 2, 2 * 4 + 1),
        Recipe::Fp8 => (34 - 7, 5),
        _ => (34, 5),
    };
    let layer = linear * s * b * h + attention * a * s * s * b;
    let kept = if recipe == Recipe::Checkpointing { layers * 2 * s * b * h + layer } else { layers * layer };
    let item = |group, bytes: u128| MemoryItem { group, bytes: u64::try_from(bytes).unwrap_or(u64::MAX) };
    vec![
        item(MemoryCategory::Weights, weights),
        item(MemoryCategory::Masters, masters),
        item(MemoryCategory::Gradients, gradients),
        item(MemoryCategory::Adam, adam),
        item(MemoryCategory::Activations, kept + 4 * b * s * vocab),
    ]
}

/// The model called `name`: one of [`ModelSpec::names`]; `7b`, GPT-3's 6.7B; or a number of parameters such as `350M`
/// or `1.3B`, for the nearest GPT-2 of width 128 × depth.
pub(crate) fn model_named(name: &str) -> Result<ModelSpec> {
    if let Some(spec) = ModelSpec::named(name) {
        return Ok(spec);
    }
    let unknown = || {
        let known = ModelSpec::names().join("`, `");
        Error::config("--model", format!("`{name}` is not one of `{known}`, `7b`, nor a number such as `350M`"))
    };
    let base = ModelSpec { max_position_embeddings: 2048, ..ModelSpec::named("gpt2").ok_or_else(unknown)? };
    let shape = |layers: usize| base.clone().resized(layers, 128 * layers, layers);
    if name.eq_ignore_ascii_case("7b") {
        return Ok(shape(32));
    }
    let (digits, unit) = match name.char_indices().last().ok_or_else(unknown)? {
        (at, 'k' | 'K') => (&name[..at], 1e3),
        (at, 'm' | 'M') => (&name[..at], 1e6),
        (at, 'b' | 'B' | 'g' | 'G') => (&name[..at], 1e9),
        _ => (name, 1.0),
    };
    let wanted = digits.parse::<f64>().map_err(|_| unknown())? * unit;
    if !(1.0..=1e15).contains(&wanted) {
        return Err(unknown());
    }
    let distance = |layers: &usize| (shape(*layers).parameter_count() as f64 - wanted).abs();
    let nearest = (1..=1000).min_by(|a, b| distance(a).total_cmp(&distance(b)));
    Ok(shape(nearest.unwrap_or(1)))
}

/// `512`, `1.4M`, `-12.0G`: decimal units in six columns.
fn compact(value: f64) -> String {
    let text = bytes(value.abs() as u64);
    let (number, unit) = text.split_once(' ').unwrap_or((&text, ""));
    let number = match number.parse::<f64>() {
        Ok(value) if number.len() > 4 => format!("{value:.0}"),
        _ => number.to_owned(),
    };
    format!("{}{number}{}", if value < 0.0 { "-" } else { "" }, unit.trim_end_matches('B').to_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{ObjectiveKind, ObjectiveSection, sample_bytes};

    fn setup(shape: [usize; 3], budget: Option<u64>) -> TrainSetup<'static> {
        TrainSetup { shape, budget, rank: 16, ..TrainSetup::default() }
    }

    /// This engine's bytes in FP16.
    fn engine_bytes(spec: &ModelSpec, setup: TrainSetup<'_>) -> u64 {
        total(&setup.engine(spec, PrecisionPolicy::FP16, OptimizerKind::AdamW).unwrap())
    }

    fn distilgpt2(budget: Option<u64>) -> MemoryPlan {
        MemoryPlan::new("distilgpt2", &model_named("distilgpt2").unwrap(), setup([32, 32, 1], budget)).unwrap()
    }

    #[test]
    fn pages() {
        insta::assert_snapshot!("memory_distilgpt2", distilgpt2(Some(4_000_000_000)).page(80).text());
        let large =
            MemoryPlan::new("7b", &model_named("7b").unwrap(), setup([1, 2048, 8], Some(80_000_000_000))).unwrap();
        insta::assert_snapshot!("memory_7b", large.page(80).text());
    }

    /// With candle's operations. Eight matrices of 4 heads × 256² scores for each of 8 sequences, in FP32.
    #[test]
    fn a_gpus_stored_scores_are_counted() {
        let spec = ModelSpec { heads: 4, vocab_size: 1000, ..model_named("distilgpt2").unwrap() };
        let bytes = |on_gpu| {
            let layout = DistributedLayout { on_gpu, ..DistributedLayout::default() };
            engine_bytes(&spec, TrainSetup { layout, ..setup([8, 256, 1], None) })
        };
        assert_eq!(bytes(true) - bytes(false), 8 * 8 * 4 * 256 * 256 * 4);
    }

    /// Each completion of a batch has a KV cache, and the weights are in memory a second time.
    #[test]
    fn rollouts_are_counted() {
        let spec = model_named("distilgpt2").unwrap();
        let grpo = ObjectiveSection { kind: ObjectiveKind::Grpo, ..ObjectiveSection::default() };
        let bytes = |objective| {
            let extras = MemoryExtras { objective, ..MemoryExtras::default() };
            engine_bytes(&spec, TrainSetup { extras, ..setup([8, 256, 1], None) })
        };
        let caches = 32 * sample_bytes(&spec, PrecisionPolicy::FP16, 256, 0);
        assert_eq!(bytes(Some(&grpo)) - bytes(None), caches + 2 * spec.parameter_count());
    }

    /// The textbook's 16 bytes per parameter, both in FP32 and in mixed precision.
    #[test]
    fn the_static_part_is_16_bytes_per_parameter() {
        let memory = distilgpt2(None);
        for plan in &memory.plans[..3] {
            let fixed: u64 = plan
                .textbook
                .iter()
                .filter(|item| item.group != MemoryCategory::Activations)
                .map(|item| item.bytes)
                .sum();
            assert_eq!(fixed, 16 * memory.parameters, "{:?}", plan.recipe);
        }
    }

    /// Figures from the papers and by hand for a 7B model: a KV cache of 10 × 2048 tokens takes 10.7 GB, not 80;
    /// training in BF16 with Adam does not fit 80 GB, and `QLoRA`'s weights are a quarter of BF16's.
    #[test]
    fn recipes_of_a_7b_model() {
        let spec = model_named("7b").unwrap();
        let memory = MemoryPlan::new("7b", &spec, setup([10, 2048, 1], Some(80_000_000_000))).unwrap();
        assert_eq!(memory.kv_cache[1].1, 2 * 32 * 4096 * 2 * 10 * 2048);
        assert_eq!((memory.kv_cache[1].1 as f64 / 1e8).round(), 107.0);
        assert_eq!(memory.adapters, 32 * 16 * 16 * 4096);
        let group = |recipe: Recipe, group| {
            let items = memory.plans[recipe as usize].textbook.iter().filter(|item| item.group == group);
            items.map(|item| item.bytes).sum::<u64>() as f64
        };
        let p = memory.parameters as f64;
        let states = |recipe| {
            [MemoryCategory::Weights, MemoryCategory::Masters, MemoryCategory::Gradients, MemoryCategory::Adam]
                .map(|g| group(recipe, g))
                .iter()
                .sum::<f64>()
                / p
        };
        assert_eq!([Recipe::Bf16Amp, Recipe::Bf16Pure].map(states), [16.0, 8.0]);
        assert!((states(Recipe::Adam8bit) - 10.03).abs() < 0.01 && states(Recipe::Bf16Amp) * p > 80e9);
        assert!((states(Recipe::Lora) - 2.08).abs() < 0.03 && (states(Recipe::Qlora) - 0.64).abs() < 0.03);
        let kept = |recipe| group(recipe, MemoryCategory::Activations);
        assert!(kept(Recipe::Checkpointing) < 0.15 * kept(Recipe::Bf16Amp));
        assert!(memory.plans[2].for_activations.1.unwrap() < 0);
        // The scenario `7B on 80 GB`.
        let short = MemoryPlan::new("7b", &spec, setup([1, 2048, 1], Some(80_000_000_000))).unwrap();
        let fits = |plan: &BatchPlan| total(plan.engine.as_ref().unwrap_or(&plan.textbook)) <= 80_000_000_000;
        let fitting: Vec<_> = short.plans.iter().filter(|plan| fits(plan)).map(|plan| plan.recipe).collect();
        assert_eq!(fitting, [Recipe::Adam8bit, Recipe::Lora, Recipe::Qlora]);
    }

    /// A block of a Llama has seven linear layers: four from 32 to 32 features, three between 32 and 64.
    #[test]
    fn every_linear_layer_has_an_adapter() {
        let config = br#"{"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 4}"#;
        let spec = ModelSpec::from_json(config, "the model").unwrap();
        let plan = MemoryPlan::new("llama", &spec, TrainSetup { rank: 2, ..setup([1, 8, 1], None) }).unwrap();
        assert_eq!(plan.adapters, 3 * 2 * (4 * (32 + 32) + 3 * (32 + 64)));
    }

    /// 4096 sequences of 2^20 tokens have more than 2^64 bytes of scores. An untied head stays in BF16 under QLoRA.
    #[test]
    fn the_textbook_has_no_overflow_and_a_dense_head() {
        let tied = model_named("7b").unwrap();
        let activations = textbook(&tied, Recipe::Bf16Amp, [4096, 1 << 20], 0);
        assert_eq!((activations.last().unwrap().bytes, total(&activations)), (u64::MAX, u64::MAX));
        let untied = ModelSpec { tie_word_embeddings: false, ..tied.clone() };
        let weights = |spec: &ModelSpec| textbook(spec, Recipe::Qlora, [1, 1], 0)[0].bytes;
        assert_eq!(weights(&untied) - weights(&tied), 2 * 50_257 * 4096);
    }

    #[test]
    fn the_largest_batch_fits_and_the_next_does_not() {
        let budget = 4 << 30;
        let spec = model_named("distilgpt2").unwrap();
        let plans = distilgpt2(Some(budget)).plans;
        let batch = plans[1].largest_batch.0.unwrap();
        let bytes = |batch| engine_bytes(&spec, setup([batch, 32, 1], None));
        assert!(bytes(batch) <= budget && bytes(batch + 1) > budget);
        assert_eq!(distilgpt2(Some(1000)).plans[0].largest_batch, (None, None));
    }

    /// A plan that takes the whole budget fits; one with nothing left for activations has no room.
    #[test]
    fn the_budget_decides_marks_and_colors() {
        let items = distilgpt2(None).plans[0].engine.clone().unwrap();
        let activations = items.iter().find(|item| item.group == MemoryCategory::Activations).unwrap().bytes;
        let roles = |budget| {
            let page = distilgpt2(Some(budget)).page(80);
            let begins = |line: &&Line, label| line.spans.first().is_some_and(|span| span.text.trim_end() == label);
            let line = |label| page.lines.iter().find(|line| begins(line, label)).unwrap();
            let (bar, row) = (line("FP32"), line("FP32 (ours)"));
            (bar.spans[1].role, bar.spans[3].text.clone(), row.spans[2].role, row.spans[3].role)
        };
        let need = total(&items);
        assert_eq!(roles(need), (Role::Good, "   ".to_owned(), Role::Good, Role::Text));
        assert_eq!(roles(need - 1), (Role::Bad, " ✕ ".to_owned(), Role::Bad, Role::Text));
        assert_eq!([1, 0].map(|left| roles(need - activations + left).3), [Role::Text, Role::Bad]);
    }

    #[test]
    fn models_by_name_or_size() {
        assert_eq!(model_named("7B").unwrap().parameter_count(), 6_658_404_352);
        for (name, wanted) in [("350M", 350e6), ("1.3B", 1.3e9), ("13b", 13e9), ("175B", 175e9)] {
            let count = model_named(name).unwrap().parameter_count() as f64;
            assert!((count / wanted - 1.0).abs() < 0.15, "{name}: {count}");
        }
    }
}
