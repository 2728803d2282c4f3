//! The router of a mixture of experts (Shazeer et al., 2017): it chooses a token's experts by their logits, and weighs
//! their outputs by a softmax.
//!
//! The experts' products have a row for each token and each of its experts, sorted by expert and then by token. A row's
//! weight is multiplied with the input of the expert's last product.

use crate::math::exp;
use crate::rows::{Rows, WORK, dot, for_each_part_with_scratch, max, scale, with_scratch, write_rows};
use crate::view::{read, write, write_f32};
use candle_core::{DType, Result, Tensor};

/// How a router chooses and weighs experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterSettings {
    /// Experts of a token.
    pub top_k: usize,
    /// Whether the softmax is over the chosen experts, so that a token's weights add up to 1; otherwise it is over all.
    pub normalized: bool,
}

/// The rows of the experts' products.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    /// The experts of each token, in ascending order.
    pub experts: Vec<u32>,
    /// The row of each of `experts`.
    pub rows: Vec<u32>,
    /// The token of each row.
    pub tokens: Vec<u32>,
    /// The first row of each expert, and the number of rows.
    pub starts: Vec<u32>,
}

/// Chooses the experts of each token: those with the largest logits, and of equal ones the first.
#[derive(Debug)]
pub struct Route<'a> {
    /// The number of experts, and the softmax.
    pub settings: RouterSettings,
    /// `[N, E]`, FP32.
    pub logits: &'a Tensor,
    /// `[N · top_k]`, FP32: the weight of each row.
    pub weights: &'a Tensor,
    /// Overwritten.
    pub routes: &'a mut Routes,
}

/// The gradient of the logits of a [`Route`].
#[derive(Debug)]
pub struct RouteBackward<'a> {
    /// The number of experts, and the softmax.
    pub settings: RouterSettings,
    /// The logits of the forward pass.
    pub logits: &'a Tensor,
    /// The weights of the forward pass.
    pub weights: &'a Tensor,
    /// The routes of the forward pass.
    pub routes: &'a Routes,
    /// `[N · top_k, F]`, the rows after they were multiplied with their weights.
    pub x: &'a Tensor,
    /// The gradient of `x`.
    pub dx: &'a Tensor,
    /// `[N, E]`, overwritten.
    pub dlogits: &'a Tensor,
}

/// Multiplies each row of a matrix with its weight.
#[derive(Debug)]
pub struct ScaleRows<'a> {
    /// `[N, D]`.
    pub x: &'a Tensor,
    /// `[N]`, FP32.
    pub weights: &'a Tensor,
}

fn are_weights(weights: &Tensor, rows: usize) -> bool {
    weights.dtype() == DType::F32 && weights.dims() == [rows]
}

impl Route<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        let (tokens, experts) = self.logits.dims2()?;
        let RouterSettings { top_k, .. } = self.settings;
        let sizes = (1..=experts).contains(&top_k) && are_weights(self.weights, tokens * top_k);
        Ok(sizes && self.logits.dtype() == DType::F32)
    }
}

impl RouteBackward<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        let (rows, _) = self.x.dims2()?;
        let (tokens, experts) = self.logits.dims2()?;
        let routes = self.routes.starts.len() == experts + 1 && self.routes.rows.len() == rows;
        let sizes = rows == tokens * self.settings.top_k && are_weights(self.weights, rows);
        Ok(routes && sizes && self.dx.dims() == self.x.dims() && self.dlogits.dims() == self.logits.dims())
    }
}

impl ScaleRows<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        Ok(are_weights(self.weights, self.x.dims2()?.0))
    }
}

impl Routes {
    /// Chooses `top_k` of `experts` for each row of `logits`.
    pub fn choose(&mut self, logits: &[f32], experts: usize, top_k: usize) {
        self.experts.clear();
        for logits in logits.chunks_exact(experts) {
            let first = self.experts.len();
            for _ in 0..top_k {
                let free = |expert: &u32| !self.experts[first..].contains(expert);
                let logit = |expert: u32| logits[expert as usize];
                // The last of equal ones is the first expert.
                let all = (0..experts as u32).rev().filter(free);
                let best = all.max_by(|a, b| logit(*a).total_cmp(&logit(*b)));
                self.experts.extend(best);
            }
            self.experts[first..].sort_unstable();
        }
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for expert in &self.experts {
            self.starts[*expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.tokens.resize(self.experts.len(), 0);
        self.rows.clear();
        for (i, expert) in self.experts.iter().enumerate() {
            let next = &mut self.starts[*expert as usize];
            self.tokens[*next as usize] = (i / top_k) as u32;
            self.rows.push(*next);
            *next += 1;
        }
        // Each expert's start has become that of the next one.
        self.starts.rotate_right(1);
        self.starts[0] = 0;
    }

    /// Each expert's rows, in order of the experts.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.starts.windows(2).map(|ends| ends[0] as usize..ends[1] as usize)
    }
}

pub(crate) fn forward(op: &mut Route<'_>) -> Result<()> {
    let logits = read(op.logits)?;
    let RouterSettings { top_k, normalized } = op.settings;
    let logits = logits.typed::<f32>()?;
    let experts = op.logits.dims2()?.1;
    op.routes.choose(logits, experts, top_k);
    let routes = &*op.routes;
    write_f32(op.weights, |weights| {
        for (token, logits) in logits.chunks_exact(experts).enumerate() {
            let chosen = token * top_k..(token + 1) * top_k;
            let chosen = routes.experts[chosen.clone()].iter().zip(&routes.rows[chosen]);
            let logit = |expert: &u32| logits[*expert as usize];
            let largest = max(logits);
            let sum: f32 = if normalized {
                chosen.clone().map(|(expert, _)| exp(logit(expert) - largest)).sum()
            } else {
                logits.iter().map(|x| exp(x - largest)).sum()
            };
            for (expert, row) in chosen {
                weights[*row as usize] = exp(logit(expert) - largest) / sum;
            }
        }
    })
}

/// Computes [`RouteBackward`]. With p the softmax and s the product of a weight and its gradient, a logit's gradient is
/// s − p · Σ s; s is the scalar product of a row and its gradient.
pub(crate) fn backward(op: &RouteBackward<'_>) -> Result<()> {
    let RouterSettings { top_k, normalized } = op.settings;
    let (_, experts) = op.logits.dims2()?;
    let (_, width) = op.x.dims2()?;
    let routes = op.routes;
    let [x, dx, logits, weights] = [read(op.x)?, read(op.dx)?, read(op.logits)?, read(op.weights)?];
    let (x, dx) = (x.view(), dx.view());
    let (logits, weights) = (logits.typed::<f32>()?, weights.typed::<f32>()?);
    write_rows(
        op.dlogits,
        #[inline(always)]
        |at, gradient, probabilities| {
            let token = at / experts;
            let chosen = token * top_k..(token + 1) * top_k;
            let chosen = routes.experts[chosen.clone()].iter().zip(&routes.rows[chosen]);
            let mut total = 0.0;
            gradient.fill(0.0);
            with_scratch(
                2 * width,
                #[inline(always)]
                |scratch| {
                    let (row, slope) = scratch.split_at_mut(width);
                    for (expert, place) in chosen.clone() {
                        let first = *place as usize * width;
                        let share = dot(x.as_f32(first, row), dx.as_f32(first, slope));
                        gradient[*expert as usize] = share;
                        total += share;
                    }
                },
            );
            if normalized {
                for (expert, place) in chosen {
                    gradient[*expert as usize] -= weights[*place as usize] * total;
                }
                return;
            }
            let logits = &logits[at..at + experts];
            let largest = max(logits);
            for (probability, logit) in probabilities.iter_mut().zip(logits) {
                *probability = exp(logit - largest);
            }
            let sum: f32 = probabilities.iter().sum();
            for (gradient, probability) in gradient.iter_mut().zip(probabilities) {
                *gradient -= *probability / sum * total;
            }
        },
    )
}

pub(crate) fn scale_rows(op: &ScaleRows<'_>) -> Result<()> {
    let (rows, width) = op.x.dims2()?;
    let weights = read(op.weights)?;
    let weights = weights.typed::<f32>()?;
    write(op.x, |x| {
        for_each_part_with_scratch(
            Rows { view: x, width },
            rows,
            [WORK / width + 1, width],
            #[inline(always)]
            |first, rows, mut x, [row]| {
                for i in 0..rows {
                    x.view.as_view().load(i * width, row);
                    scale(row, weights[first + i]);
                    x.view.store(i * width, row);
                }
            },
        );
    })
}
