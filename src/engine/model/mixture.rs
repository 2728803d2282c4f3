//! Mixtures of experts: a router chooses a few of a block's MLPs for each token and adds their outputs with weights
//! (Shazeer et al., 2017).
//!
//! The experts' products have a row for each token and each of its experts. Rows are sorted by expert, so that each
//! expert computes a range of neighboring rows.

use super::family::{ConfigReader, GgufKey};
use super::hook::{Hook, HookPoint, TensorKind};
use super::layers::{Context, Linear};
use super::parameters::Parameters;
use super::spec::{LinearRole, ModelSpec, ModuleId, ModuleOp};
use super::workspace::{BlockActivations, BlockBuffers, Routing};
use crate::engine::kernels::op::{self, Embedding};
use crate::engine::kernels::route::{RouterSettings, Routes};
use crate::engine::kernels::view::to_host;
use candle_core::{Result, Tensor};
use serde_json::Value;

/// The experts of each block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// The number of experts.
    pub count: usize,
    /// How many of them a token has, and their weights.
    pub router: RouterSettings,
    /// The factor of the load-balancing loss; 0 without it.
    pub balance: f64,
}

/// The maximum number of experts of a block, and of experts of all blocks. Their parameters are listed before their
/// memory is known.
const MAX_EXPERTS: [usize; 2] = [1 << 10, 1 << 16];
/// The key of the number of a token's experts.
const TOP_K: &str = "num_experts_per_tok";
/// The key of whether the weights of a token's experts add up to one, where families differ.
pub(super) const NORMALIZED: &str = "norm_topk_prob";
/// The keys of the load-balancing loss and of its factor.
const BALANCE: [&str; 2] = ["output_router_logits", "router_aux_loss_coef"];

impl Experts {
    /// Reads the experts of a model of `layers` blocks. `count` is the key of their number and its default; `top_k` and
    /// `balance` are defaults.
    pub(super) fn read(
        keys: &ConfigReader<'_>,
        count: (&str, usize),
        top_k: usize,
        balance: f64,
        layers: usize,
        normalized: bool,
    ) -> std::result::Result<Self, String> {
        let (key, default) = count;
        let (count, top_k) = (keys.positive_usize(key, default)?, keys.positive_usize(TOP_K, top_k)?);
        if count > MAX_EXPERTS[0] || count * layers > MAX_EXPERTS[1] {
            let [each, all] = MAX_EXPERTS;
            return Err(format!(
                "`{key}` is {count} in {layers} blocks; the maximum is {each}, and {all} in all blocks"
            ));
        }
        if top_k > count {
            return Err(format!("`{TOP_K}` is {top_k}; there are {count} experts"));
        }
        let factor = keys.f64(BALANCE[1], balance)?;
        if factor < 0.0 {
            return Err(format!("`{}` is {factor}; it must not be negative", BALANCE[1]));
        }
        let balance = if keys.bool(BALANCE[0], false)? { factor } else { 0.0 };
        Ok(Self { count, router: RouterSettings { top_k, normalized }, balance })
    }

    /// Adds a model's experts to a `config.json`. `count` is the key of their number.
    pub(super) fn write(spec: &ModelSpec, json: &mut Value, count: &str) {
        let Some(Self { count: number, router, balance }) = spec.experts else { return };
        json[count] = number.into();
        json[TOP_K] = router.top_k.into();
        if balance > 0.0 {
            json[BALANCE[0]] = true.into();
            json[BALANCE[1]] = balance.into();
        }
    }

    /// The keys of GGUF files. `count` is the key of the number of experts in a `config.json`.
    pub(super) const fn gguf_keys(count: &'static str) -> [GgufKey; 2] {
        [("expert_count", count, true), ("expert_used_count", TOP_K, true)]
    }

    /// The keys of GGUF files that have the width of experts, and perhaps of other MLPs. `width` is its key in a
    /// `config.json`.
    pub(super) const fn gguf_width(width: &'static str) -> [GgufKey; 2] {
        [("feed_forward_length", "intermediate_size", false), ("expert_feed_forward_length", width, true)]
    }
}

/// The load-balancing loss of a micro-batch (Fedus et al., 2021), as transformers computes it: the number of experts
/// times Σ f · P. f is the share of all blocks' tokens that choose an expert, and P the mean of its probabilities.
/// Padding does not count.
#[derive(Debug, Default)]
pub(super) struct LoadBalance {
    /// dL/d(loss); 0 without this loss.
    seed: f64,
    /// The tokens of each row without padding; empty if there is none.
    row_lens: Vec<usize>,
    seq_len: usize,
    /// By expert: the number of tokens that chose it, and the sum of its probabilities.
    chosen: Vec<f64>,
    probabilities: Vec<f64>,
    /// Tokens of all blocks.
    tokens: f64,
}

impl LoadBalance {
    /// Begins the passes over rows of `seq_len` tokens.
    pub(super) fn begin(&mut self, seed: f64, row_lens: &[usize], seq_len: usize) {
        *self = Self { seed, row_lens: row_lens.to_vec(), seq_len, ..Self::default() };
    }

    /// Adds the decisions of a block in the forward pass.
    pub(super) fn add(&mut self, acts: &BlockActivations) -> Result<()> {
        let Some(Routing { logits, decisions, .. }) = acts.routing.as_ref().filter(|_| self.seed > 0.0) else {
            return Ok(());
        };
        let experts = logits.dim(1)?;
        let routes = &decisions.borrow().routes;
        self.chosen.resize(experts, 0.0);
        self.probabilities.resize(experts, 0.0);
        let host = to_host(logits)?.flatten_all()?.to_vec1::<f32>()?;
        let chosen = routes.experts.chunks_exact(routes.experts.len() * experts / host.len());
        for (token, (logits, chosen)) in host.chunks_exact(experts).zip(chosen).enumerate() {
            if self.counts(token) {
                self.tokens += 1.0;
                for expert in chosen {
                    self.chosen[*expert as usize] += 1.0;
                }
                self.probabilities.iter_mut().zip(softmax(logits)).for_each(|(sum, x)| *sum += x);
            }
        }
        Ok(())
    }

    /// The loss, after the forward pass.
    pub(super) fn loss(&self) -> f64 {
        let sum: f64 = self.chosen.iter().zip(&self.probabilities).map(|(chosen, sum)| chosen * sum).sum();
        if self.tokens > 0.0 { self.chosen.len() as f64 * sum / self.tokens.powi(2) } else { 0.0 }
    }

    /// The gradient of a block's logits; `None` without this loss.
    fn gradient(&self, logits: &Tensor) -> Result<Option<Tensor>> {
        if self.tokens == 0.0 {
            return Ok(None);
        }
        let host = to_host(logits)?.flatten_all()?.to_vec1::<f32>()?;
        let factor = self.seed * self.chosen.len() as f64 / self.tokens.powi(2);
        let of_token = |(token, logits): (usize, &[f32])| {
            let probabilities = softmax(logits);
            let mean: f64 = probabilities.iter().zip(&self.chosen).map(|(p, chosen)| p * chosen).sum();
            let factor = if self.counts(token) { factor } else { 0.0 };
            let gradient = |(p, chosen): (f64, &f64)| (factor * p * (chosen - mean)) as f32;
            probabilities.into_iter().zip(&self.chosen).map(gradient).collect::<Vec<_>>()
        };
        let gradient: Vec<f32> = host.chunks_exact(self.chosen.len()).enumerate().flat_map(of_token).collect();
        Tensor::from_vec(gradient, logits.dims(), logits.device()).map(Some)
    }

    /// Whether a token is not padding.
    fn counts(&self, token: usize) -> bool {
        self.row_lens.get(token / self.seq_len).is_none_or(|len| token % self.seq_len < *len)
    }
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|x| f64::from(x - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|x| x / sum).collect()
}

impl ModelSpec {
    /// The product whose result the activation takes.
    pub(super) const fn up_role(&self) -> LinearRole {
        if self.activation.is_gated() { LinearRole::GateUp } else { LinearRole::Up }
    }

    /// The rows of an MLP's products for each token.
    pub(super) fn mlp_rows(&self) -> usize {
        self.experts.map_or(1, |experts| experts.router.top_k)
    }

    /// Rejects weights of experts that llama.cpp would compute differently for this family.
    pub(super) fn check_normalized(&self, normalized: bool) -> std::result::Result<(), String> {
        match self.experts {
            Some(experts) if experts.router.normalized != normalized => {
                let found = !normalized;
                let family = self.family.model_type;
                Err(format!("llama.cpp has `{NORMALIZED}` = {normalized} for `{family}`, not {found}; export a folder"))
            }
            _ => Ok(()),
        }
    }
}

/// Keeps the sets of experts that routers choose for each token, block by block.
#[derive(Debug)]
pub struct ExpertChoices {
    top_k: usize,
    /// The sets, each in ascending order.
    pub sets: Vec<Vec<u32>>,
}

impl ExpertChoices {
    /// For routers of `experts`.
    pub const fn new(experts: Experts) -> Self {
        Self { top_k: experts.router.top_k, sets: Vec::new() }
    }
}

impl Hook for ExpertChoices {
    fn record(&mut self, point: HookPoint, logits: &Tensor) -> Result<()> {
        if (point.layer.op, point.kind) == (ModuleOp::Router, TensorKind::Output) {
            let mut routes = Routes::default();
            routes.choose(&to_host(logits)?.flatten_all()?.to_vec1::<f32>()?, logits.dim(1)?, self.top_k);
            self.sets.extend(routes.experts.chunks(self.top_k).map(<[u32]>::to_vec));
        }
        Ok(())
    }
}

/// The share of sets that differ; `None` if there is none.
pub fn differing_choices(sets: &[Vec<u32>], others: &[Vec<u32>]) -> Option<f64> {
    let count = sets.iter().zip(others).filter(|(a, b)| a != b).count();
    (!sets.is_empty()).then(|| count as f64 / sets.len() as f64)
}

/// The decisions of a router, and scratch of the sums over a token's experts.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    routes: Routes,
    order: Vec<u32>,
}

/// The router and the experts of a block.
#[derive(Debug)]
pub(super) struct ExpertMlps {
    router: Linear,
    settings: RouterSettings,
    experts: Vec<Expert>,
    /// Whether the experts' outputs are multiplied with their weights, because these have a bias; otherwise the inputs
    /// of their last products are.
    weighs_outputs: bool,
}

#[derive(Debug)]
struct Expert {
    up: Linear,
    down: Linear,
}

impl ExpertMlps {
    /// The mixture of `block`, if the model has experts.
    pub(super) fn new(spec: &ModelSpec, layout: &Parameters, block: usize) -> Result<Option<Self>> {
        let Some(experts) = spec.experts else { return Ok(None) };
        let linear = |op| Linear::new(spec, layout, ModuleId::in_block(block, op));
        let up = spec.up_role();
        let expert = |i: usize| {
            let product = |role| linear(ModuleOp::Expert(i as u16, role));
            Ok(Expert { up: product(up)?, down: product(LinearRole::Down)? })
        };
        let experts_of_block = (0..experts.count).map(expert).collect::<Result<_>>()?;
        Ok(Some(Self {
            router: linear(ModuleOp::Router)?,
            settings: experts.router,
            experts: experts_of_block,
            weighs_outputs: spec.biases.mlp,
        }))
    }

    /// Computes the activation's input, [`BlockActivations::up`], from the normalized stream `x [N, D]`.
    pub(super) fn forward_up(&self, cx: &mut Context<'_>, x: &Tensor, (acts, scratch): BlockBuffers<'_>) -> Result<()> {
        let Routing { logits, weights, decisions } = acts.routing()?;
        let rows = scratch.routed()?;
        let Decisions { routes, .. } = &mut *decisions.borrow_mut();
        self.router.forward_into_fp32(cx, x, logits)?;
        op::Route { settings: self.settings, logits, weights, routes: &mut *routes }.run(cx.kernels)?;
        gather(cx, routes, x, rows)?;
        self.for_each(cx, routes, None, |cx, expert, part| expert.up.forward(cx, &part(rows)?, &part(&acts.up)?))
    }

    /// Multiplies the activation's output with the experts' weights, unless their outputs are.
    pub(super) fn scale_activated(&self, cx: &mut Context<'_>, acts: &BlockActivations, x: &Tensor) -> Result<()> {
        if self.weighs_outputs {
            return Ok(());
        }
        op::ScaleRows { x, weights: &acts.routing()?.weights }.run(cx.kernels)
    }

    /// Computes the sums of the experts' outputs, `out [N, D]`, from the weighted activations.
    pub(super) fn forward_down(
        &self,
        cx: &mut Context<'_>,
        (acts, scratch): BlockBuffers<'_>,
        out: &Tensor,
    ) -> Result<()> {
        let rows = scratch.routed()?;
        self.outputs(cx, (acts, scratch), rows)?;
        op::Zero { x: out }.run(cx.kernels)?;
        scatter(cx, &mut acts.routing()?.decisions.borrow_mut(), rows, out)
    }

    /// Computes the weighted output of each of a token's experts.
    fn outputs(&self, cx: &mut Context<'_>, (acts, scratch): BlockBuffers<'_>, rows: &Tensor) -> Result<()> {
        let Routing { weights, decisions, .. } = acts.routing()?;
        self.for_each(cx, &decisions.borrow().routes, None, |cx, expert, part| {
            expert.down.forward(cx, &part(&scratch.activated)?, &part(rows)?)
        })?;
        if self.weighs_outputs { op::ScaleRows { x: rows, weights }.run(cx.kernels) } else { Ok(()) }
    }

    /// Backpropagates `dy [N, D]` to the activation's output,
    /// [`SublayerGrads::activated`](super::workspace::SublayerGrads), and computes the gradient of the router's logits.
    pub(super) fn backward_down(
        &self,
        cx: &mut Context<'_>,
        (acts, scratch): BlockBuffers<'_>,
        (dy, balance): (&Tensor, &LoadBalance),
    ) -> Result<()> {
        let Routing { logits, weights, decisions } = acts.routing()?;
        let rows = scratch.routed()?;
        let Decisions { routes, .. } = &*decisions.borrow();
        let x = &scratch.activated;
        let dx = &scratch.gradients()?.activated;
        let dlogits = scratch.gradients()?.router_logits()?;
        gather(cx, routes, dy, rows)?;
        if self.weighs_outputs {
            let outputs = scratch.gradients()?.routed()?;
            self.outputs(cx, (acts, scratch), outputs)?;
            op::RouteBackward { settings: self.settings, logits, weights, routes, x: outputs, dx: rows, dlogits }
                .run(cx.kernels)?;
            op::ScaleRows { x: rows, weights }.run(cx.kernels)?;
        }
        self.for_each(cx, routes, Some(|expert| &expert.down), |cx, expert, part| {
            expert.down.backward(cx, &part(x)?, &part(rows)?, &part(dx)?)
        })?;
        if !self.weighs_outputs {
            op::RouteBackward { settings: self.settings, logits, weights, routes, x, dx, dlogits }.run(cx.kernels)?;
            op::ScaleRows { x: dx, weights }.run(cx.kernels)?;
        }
        if let Some(x) = balance.gradient(logits)? {
            op::Accumulate { x: &x, out: dlogits, inner: &[] }.run(cx.kernels)?;
        }
        Ok(())
    }

    /// Backpropagates `dy`, the gradient of the activation's input, and the gradient of the router's logits to
    /// `dx [N, D]`, given the normalized stream `x`.
    pub(super) fn backward_up(
        &self,
        cx: &mut Context<'_>,
        (acts, scratch): BlockBuffers<'_>,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<()> {
        let decisions = &mut *acts.routing()?.decisions.borrow_mut();
        let (rows, gradients) = (scratch.routed()?, scratch.gradients()?);
        let drows = gradients.routed()?;
        self.router.backward(cx, x, gradients.router_logits()?, dx)?;
        gather(cx, &decisions.routes, x, rows)?;
        self.for_each(cx, &decisions.routes, Some(|expert| &expert.up), |cx, expert, part| {
            expert.up.backward(cx, &part(rows)?, &part(dy)?, &part(drows)?)
        })?;
        scatter(cx, decisions, drows, dx)
    }

    /// Recomputes the intermediate results of [`Self::forward_down`] that the backward pass reads.
    pub(super) fn recompute_down(&self, cx: &mut Context<'_>, (acts, scratch): BlockBuffers<'_>) -> Result<()> {
        self.for_each(cx, &acts.routing()?.decisions.borrow().routes, None, |cx, expert, part| {
            expert.down.recompute(cx, &part(&scratch.activated)?)
        })
    }

    /// Calls `visit` with each expert that has rows, and a function that returns its rows of a tensor. Zeroes the
    /// gradients of the product `zeroed` of each other one.
    fn for_each<'a>(
        &self,
        cx: &mut Context<'a>,
        routes: &Routes,
        zeroed: Option<fn(&Expert) -> &Linear>,
        visit: impl Fn(&mut Context<'a>, &Expert, &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<()>,
    ) -> Result<()> {
        let tokens = routes.tokens.len() / self.settings.top_k;
        for (expert, range) in self.experts.iter().zip(routes.ranges()) {
            cx.adapters.routed = Some((range.start, tokens));
            if !range.is_empty() {
                visit(cx, expert, &|tensor| tensor.narrow(0, range.start, range.len()))?;
            } else if let Some(product) = zeroed {
                product(expert).zero_gradients(cx)?;
            }
        }
        cx.adapters.routed = None;
        Ok(())
    }
}

/// The rows of `table` by the tokens of `routes`.
fn by_token<'a>(routes: &'a Routes, table: &'a Tensor) -> Embedding<'a> {
    let ids = &routes.tokens[..];
    let seq_len = routes.tokens.len();
    Embedding { table, positions: None, ids, seq_len, documents: None, scale: 1.0, dropout: None }
}

/// Copies each token's row of `x` to the rows of its experts.
fn gather(cx: &Context<'_>, routes: &Routes, x: &Tensor, rows: &Tensor) -> Result<()> {
    op::Embed { input: by_token(routes, x), out: rows }.run(cx.kernels)
}

/// Adds the rows of each token's experts to its row of `out`, in order of the experts.
fn scatter(cx: &Context<'_>, decisions: &mut Decisions, rows: &Tensor, out: &Tensor) -> Result<()> {
    let Decisions { routes, order } = decisions;
    order.resize(routes.tokens.len(), 0);
    let input = by_token(routes, out);
    op::EmbedBackward { input, dx: rows, order, dtable: Some(out), dpositions: None }.run(cx.kernels)
}
