//! Where training's memory goes: this engine's buffers, one by one, beside the textbook's estimate.

use serde::Serialize;

use super::page::{Line, Page, Role};
use crate::engine::model::{Keep, ModelSpec};
use crate::precision::PrecisionPolicy;
use crate::train::{EngineBytes, largest_batch};
use crate::{Error, Result};

/// A way to train, by its formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recipe {
    /// Everything in FP32.
    Fp32,
    /// FP16 with FP32 masters and a loss scale.
    Fp16Amp,
    /// BF16 with FP32 masters.
    Bf16Amp,
    /// FP8 products over BF16 gradients and FP32 masters; the engine has none, so the textbook alone speaks.
    Fp8,
}

/// What bytes are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// The working copy of the weights.
    Weights,
    /// FP32 master weights.
    Masters,
    /// Gradients of the parameters, and their FP32 sum over micro-batches.
    Gradients,
    /// Adam's moments.
    Adam,
    /// What the forward pass keeps for the backward pass.
    Activations,
    /// What passes through: a tile of logits, gradients of activations.
    Buffers,
    /// The program itself, its threads and libraries.
    Process,
}

/// Bytes with a purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What they are for.
    pub group: Group,
    /// How many.
    pub bytes: u64,
}

/// A recipe's memory, once reckoned for this engine, once by the textbook.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The recipe.
    pub recipe: Recipe,
    /// This engine's; `None` where it lacks the recipe.
    pub engine: Option<Vec<Item>>,
    /// The textbook's: all activations stored, as PyTorch does without checkpointing or a fused attention.
    pub textbook: Vec<Item>,
    /// The largest batches within the budget, engine's and textbook's.
    pub largest_batch: (Option<usize>, Option<usize>),
}

/// The memory of training a model, by recipe.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    /// The model's name.
    pub model: String,
    /// Its parameters.
    pub parameters: u64,
    /// Sequences in a micro-batch.
    pub batch: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// Micro-batches in a step.
    pub grad_accum: usize,
    /// Bytes that it has to fit in.
    pub budget: Option<u64>,
    /// One for each recipe.
    pub plans: Vec<Plan>,
    /// Peak memory of a real run of this shape, with its policy.
    pub measured: Option<(PrecisionPolicy, u64)>,
}

impl Recipe {
    /// Every recipe.
    pub const ALL: [Self; 4] = [Self::Fp32, Self::Fp16Amp, Self::Bf16Amp, Self::Fp8];

    const fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "FP32",
            Self::Fp16Amp => "FP16 AMP",
            Self::Bf16Amp => "BF16 AMP",
            Self::Fp8 => "FP8",
        }
    }

    /// The engine's policy of that kind.
    pub const fn policy(self) -> Option<PrecisionPolicy> {
        match self {
            Self::Fp32 => Some(PrecisionPolicy::FP32),
            Self::Fp16Amp => Some(PrecisionPolicy::FP16),
            Self::Bf16Amp => Some(PrecisionPolicy::BF16),
            Self::Fp8 => None,
        }
    }
}

impl Group {
    /// Every group, in the order of bars and tables.
    pub const ALL: [Self; 7] =
        [Self::Weights, Self::Masters, Self::Gradients, Self::Adam, Self::Activations, Self::Buffers, Self::Process];

    /// Its letter in a bar, its name, its colour.
    const fn show(self) -> (char, &'static str, Role) {
        match self {
            Self::Weights => ('w', "weights", Role::Series(0)),
            Self::Masters => ('M', "masters", Role::Series(1)),
            Self::Gradients => ('g', "gradients", Role::Series(2)),
            Self::Adam => ('A', "Adam m, v", Role::Series(3)),
            Self::Activations => ('a', "activations", Role::Mantissa),
            Self::Buffers => ('b', "buffers", Role::Dim),
            Self::Process => ('p', "program", Role::Plain),
        }
    }
}

impl Memory {
    /// Reckons every recipe for `batch` sequences of `seq_len` tokens; `process` is what the program takes by itself.
    pub fn new(
        model: &str,
        config: &ModelSpec,
        (batch, seq_len, grad_accum): (usize, usize, usize),
        budget: Option<u64>,
        process: u64,
    ) -> Result<Self> {
        let with_process = |mut items: Vec<Item>| {
            items.push(Item { group: Group::Process, bytes: process });
            items
        };
        let engine = |policy, batch| Self::engine(config, policy, batch, seq_len, grad_accum).map(with_process);
        let textbook = |recipe, batch| with_process(textbook(config, recipe, batch, seq_len));
        let plan = |recipe: Recipe| -> Result<Plan> {
            let bytes = |policy, batch| engine(policy, batch).map_or(u64::MAX, |items| total(&items));
            Ok(Plan {
                recipe,
                engine: recipe.policy().map(|policy| engine(policy, batch)).transpose()?,
                textbook: textbook(recipe, batch),
                largest_batch: (
                    recipe.policy().and_then(|policy| largest(budget, |batch| bytes(policy, batch))),
                    largest(budget, |batch| total(&textbook(recipe, batch))),
                ),
            })
        };
        Ok(Self {
            model: model.to_owned(),
            parameters: config.parameter_count(),
            batch,
            seq_len,
            grad_accum,
            budget,
            plans: Recipe::ALL.into_iter().map(plan).collect::<Result<_>>()?,
            measured: None,
        })
    }

    /// The bytes of this engine's buffers, as the types that allocate them tell.
    pub fn engine(
        config: &ModelSpec,
        policy: PrecisionPolicy,
        batch: usize,
        seq_len: usize,
        grad_accum: usize,
    ) -> Result<Vec<Item>> {
        let bytes = EngineBytes::new(config, policy, [batch, seq_len, grad_accum], Keep::All)?;
        let item = |group, bytes| Item { group, bytes };
        Ok(vec![
            item(Group::Weights, bytes.weights),
            item(Group::Masters, bytes.masters),
            item(Group::Gradients, bytes.gradients),
            item(Group::Adam, bytes.adam),
            item(Group::Activations, bytes.activations),
            item(Group::Buffers, bytes.scratch),
        ])
    }

    /// The total that was predicted for the measured run, if one was.
    pub fn predicted(&self) -> Option<u64> {
        let (policy, _) = self.measured?;
        let plan = self.plans.iter().find(|plan| plan.recipe.policy() == Some(policy))?;
        plan.engine.as_deref().map(total)
    }

    /// The report as text, `width` columns wide.
    pub fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let Self { batch, seq_len, grad_accum, .. } = self;
        let accumulated = if *grad_accum > 1 { format!(" × {grad_accum} micro-batches") } else { String::new() };
        page.push(
            Line::new()
                .with(Role::Title, format!("{}: {:.1} M parameters", self.model, self.parameters as f64 / 1e6))
                .dim(format!("   {batch} × {seq_len} tokens{accumulated}")),
        );
        let columns = self.columns();
        let scale = columns.iter().map(|(_, _, items)| total(items)).max().unwrap_or(1).max(1);
        for (recipe, who, items) in &columns {
            page.push(self.bar(&format!("{recipe:<9}{who:<9}"), items, scale, width.saturating_sub(29)));
        }
        let mut legend = Line::new();
        for (letter, name, role) in Group::ALL.map(Group::show) {
            legend = legend.with(role, format!("{letter} ")).dim(format!("{name} "));
        }
        page.push(legend);
        page.gap();
        self.table(&mut page, &columns);
        self.conclusion(&mut page);
        page
    }

    fn columns(&self) -> Vec<(&'static str, &'static str, &[Item])> {
        let of_plan = |plan: &'_ Plan| {
            let name = plan.recipe.name();
            plan.engine.is_some().then_some((name, "ours")).into_iter().chain([(name, "textbook")])
        };
        (self.plans.iter())
            .flat_map(|plan| of_plan(plan).map(move |(name, who)| (name, who, plan)))
            .map(|(name, who, plan)| {
                let items = if who == "ours" { plan.engine.as_deref().unwrap_or_default() } else { &plan.textbook };
                (name, who, items)
            })
            .collect()
    }

    fn bar(&self, label: &str, items: &[Item], scale: u64, width: usize) -> Line {
        let all = total(items);
        let (role, mark) =
            if self.budget.is_some_and(|budget| all > budget) { (Role::Bad, '✕') } else { (Role::Plain, ' ') };
        let mut line = Line::new().with(Role::Title, label).with(role, format!("{:>9}{mark}", bytes(all)));
        let column = |sum: u64| (sum as f64 / scale as f64 * width as f64).round() as usize;
        let mut sum = 0;
        for item in items {
            let cells = column(sum + item.bytes) - column(sum);
            let (letter, _, role) = item.group.show();
            line = line.with(role, letter.to_string().repeat(cells));
            sum += item.bytes;
        }
        line
    }

    fn table(&self, page: &mut Page, columns: &[(&str, &str, &[Item])]) {
        let row = |label: &str, cells: Vec<String>| {
            cells.iter().fold(format!("{label:<15}"), |row, cell| row + &format!("{cell:>9}"))
        };
        page.title(row("", columns.iter().map(|(recipe, ..)| (*recipe).to_owned()).collect()));
        page.title(row("", columns.iter().map(|(_, who, _)| (*who).to_owned()).collect()));
        for group in Group::ALL {
            let of_group =
                |items: &[Item]| items.iter().filter(|item| item.group == group).map(|item| item.bytes).sum();
            let sums: Vec<u64> = columns.iter().map(|(.., items)| of_group(items)).collect();
            if sums.iter().any(|sum| *sum > 0) {
                let cell = |sum: &u64| if *sum == 0 { "-".to_owned() } else { bytes(*sum) };
                page.push(Line::new().plain(row(group.show().1, sums.iter().map(cell).collect())));
            }
        }
        page.title(row("total", columns.iter().map(|(.., items)| bytes(total(items))).collect()));
        if let Some(budget) = self.budget {
            let batch = |largest: Option<usize>| largest.map_or_else(|| "none".to_owned(), |batch| batch.to_string());
            let batches = self.plans.iter().flat_map(|plan| {
                plan.engine.is_some().then_some(plan.largest_batch.0).into_iter().chain([plan.largest_batch.1])
            });
            page.push(Line::new().plain(row(&format!("batch {}", bytes(budget)), batches.map(batch).collect())));
        }
    }

    fn conclusion(&self, page: &mut Page) {
        if let (Some((policy, measured)), Some(predicted)) = (self.measured, self.predicted()) {
            let error = predicted as f64 / measured as f64 - 1.0;
            page.push(Line::new().plain(format!(
                "measured peak of the run ({policy}): {}, predicted {}: {:+.1} %",
                bytes(measured),
                bytes(predicted),
                error * 100.0
            )));
        }
    }
}

/// The sum of all items.
fn total(items: &[Item]) -> u64 {
    items.iter().map(|item| item.bytes).sum()
}

/// Weights, gradients, masters and Adam as in Micikevicius et al. (2018); activations by Korthikanti et al. (2022,
/// "Reducing activation recomputation in large transformer models"), `s·b·h·(34 + 5·a·s/h)` bytes a layer in half
/// precision; and FP32 logits. FP32 takes twice that; FP8 stores the inputs of the four products, 14 of the 34 bytes, in
/// half.
fn textbook(config: &ModelSpec, recipe: Recipe, batch: usize, seq_len: usize) -> Vec<Item> {
    let [b, s, h, a, layers, vocab] =
        [batch, seq_len, config.width, config.heads, config.layers, config.vocab_size].map(|dim| dim as u64);
    let parameters = config.parameter_count();
    let (weights, masters, gradients, linear) = match recipe {
        Recipe::Fp32 => (4, 0, 4, 2 * 34),
        Recipe::Fp16Amp | Recipe::Bf16Amp => (2, 4, 2, 34),
        Recipe::Fp8 => (1, 4, 2, 34 - 7),
    };
    let attention = if recipe == Recipe::Fp32 { 10 } else { 5 };
    let activations = layers * (linear * s * b * h + attention * a * s * s * b) + 4 * b * s * vocab;
    let item = |group, bytes| Item { group, bytes };
    vec![
        item(Group::Weights, weights * parameters),
        item(Group::Masters, masters * parameters),
        item(Group::Gradients, gradients * parameters),
        item(Group::Adam, 8 * parameters),
        item(Group::Activations, activations),
    ]
}

/// The largest batch whose memory is within the budget, `None` if not even one sequence is.
fn largest(budget: Option<u64>, bytes: impl Fn(usize) -> u64) -> Option<usize> {
    largest_batch(budget?, bytes)
}

/// The model that goes by `name`: one of [`ModelSpec::names`]; `7b`, GPT-3's 6.7B; or a number of parameters such as
/// `350M` or `1.3B`, which gets the depth at which a GPT-2 of width 128 × depth comes nearest.
pub fn model_named(name: &str) -> Result<ModelSpec> {
    if let Some(config) = ModelSpec::named(name) {
        return Ok(config);
    }
    let unknown = || {
        let known = ModelSpec::names().join("`, `");
        Error::config("model", format!("`{name}` is not one of `{known}`, `7b`, nor a number such as `350M`"))
    };
    let base = ModelSpec { context: 2048, ..ModelSpec::named("gpt2").ok_or_else(unknown)? };
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

/// `512 B`, `1.4 MiB`, `12.0 GiB`.
fn bytes(value: u64) -> String {
    const UNITS: [&str; 5] = ["B", "K", "M", "G", "T"];
    let mut value = value as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = usize::from(unit > 0 && value < 99.95);
    let suffix = if unit == 0 { "B".to_owned() } else { format!("{}iB", UNITS[unit]) };
    format!("{value:.decimals$} {suffix}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn distilgpt2(budget: Option<u64>) -> Memory {
        Memory::new("distilgpt2", &model_named("distilgpt2").unwrap(), (32, 32, 1), budget, 0).unwrap()
    }

    #[test]
    fn pages() {
        insta::assert_snapshot!("memory_distilgpt2", distilgpt2(Some(4 << 30)).page(80).text());
        let large = Memory::new("7b", &model_named("7b").unwrap(), (1, 2048, 8), Some(80 << 30), 0).unwrap();
        insta::assert_snapshot!("memory_7b", large.page(80).text());
    }

    /// The textbook's 16 bytes a parameter, whether in FP32 or mixed precision.
    #[test]
    fn the_static_part_is_16_bytes_a_parameter() {
        let memory = distilgpt2(None);
        for plan in &memory.plans[..3] {
            let fixed: u64 =
                plan.textbook.iter().filter(|item| item.group != Group::Activations).map(|item| item.bytes).sum();
            assert_eq!(fixed, 16 * memory.parameters, "{:?}", plan.recipe);
        }
    }

    #[test]
    fn the_largest_batch_fits_and_the_next_does_not() {
        let budget = 4 << 30;
        let config = model_named("distilgpt2").unwrap();
        let plans = distilgpt2(Some(budget)).plans;
        let batch = plans[1].largest_batch.0.unwrap();
        let bytes = |batch| total(&Memory::engine(&config, PrecisionPolicy::FP16, batch, 32, 1).unwrap());
        assert!(bytes(batch) <= budget && bytes(batch + 1) > budget);
        assert_eq!(distilgpt2(Some(1000)).plans[0].largest_batch, (None, None));
    }

    #[test]
    fn models_by_name_or_size() {
        assert_eq!(model_named("7B").unwrap().parameter_count(), 6_658_404_352);
        for (name, wanted) in [("350M", 350e6), ("1.3B", 1.3e9), ("13b", 13e9), ("175B", 175e9)] {
            let count = model_named(name).unwrap().parameter_count() as f64;
            assert!((count / wanted - 1.0).abs() < 0.15, "{name}: {count}");
        }
        for name in ["", "bert", "-1", "0", "inf", "1e99", "é"] {
            assert!(model_named(name).unwrap_err().to_string().contains("not one of"), "{name}");
        }
    }
}
