//! AdamW (Loshchilov and Hutter, 2019) over candle variables of any floating type, with FP32 masters.
//!
//! candle's AdamW keeps its moments in the variable's type, where an FP16 second moment is zero below 3e-8 and a BF16
//! weight ignores updates below 1/512 of its value; and they are private, so a program cannot resume exactly.

use super::{OptimizerId, ScaledOptimizer, wide};
use crate::{Error, Result};
use candle_core::{Result as CandleResult, Tensor, Var, backprop::GradStore};
use candle_nn::{Optimizer, ParamsAdamW};
use std::collections::{HashMap, HashSet};

/// AdamW with FP32 masters and moments (FP64 for FP64 variables), parameter groups and accessible state.
///
/// A variable in half precision holds its rounded master. A variable in FP32 is its own master. As in PyTorch, each
/// variable counts its own updates, so that one that gets a gradient late starts with the bias correction of a first
/// update; steps that the scaler skips do not count.
///
/// Change such a variable only by [`load_state_dict`](Self::load_state_dict): the next update rounds its master into
/// it.
#[derive(Debug)]
pub struct AdamW {
    id: OptimizerId,
    groups: Vec<ParamsAdamW>,
    vars: Vec<Var>,
    /// The state of each of `vars`.
    states: Vec<ParamState>,
}

#[derive(Debug, Clone)]
struct ParamState {
    group: usize,
    updates: i64,
    /// Detached; an FP32 variable's own storage.
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
}

impl AdamW {
    /// Two groups: variables of two or more dimensions decay by `params.weight_decay`; biases and gains do not.
    pub fn with_decay_on_matrices(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        let (matrices, vectors) = vars.into_iter().partition(|var| var.rank() >= 2);
        let without_decay = ParamsAdamW { weight_decay: 0.0, ..params.clone() };
        let mut optimizer = Self::new(matrices, params)?;
        optimizer.add_group(vectors, without_decay)?;
        Ok(optimizer)
    }

    /// Adds variables with their own settings, as group `groups().len() - 1`. Skips integer variables; a variable that
    /// is already in a group is an error.
    pub fn add_group(&mut self, vars: Vec<Var>, params: ParamsAdamW) -> Result<()> {
        Ok(self.push_group(vars, params)?)
    }

    fn push_group(&mut self, vars: Vec<Var>, params: ParamsAdamW) -> CandleResult<()> {
        check(&params)?;
        let mut known: HashSet<_> = self.vars.iter().map(|var| var.id()).collect();
        let vars: Vec<_> = vars.into_iter().filter(|var| var.dtype().is_float()).collect();
        if let Some(var) = vars.iter().find(|var| !known.insert(var.id())) {
            candle_core::bail!(
                "a variable of shape {:?} is in two groups of `AdamW`; put it in one group",
                var.shape()
            );
        }
        let group = self.groups.len();
        let states: Vec<_> = vars.iter().map(|var| ParamState::new(var, group)).collect::<CandleResult<_>>()?;
        self.groups.push(params);
        self.vars.extend(vars);
        self.states.extend(states);
        Ok(())
    }

    /// The settings of every group.
    pub fn groups(&self) -> &[ParamsAdamW] {
        &self.groups
    }

    /// The mutable settings of every group.
    pub fn groups_mut(&mut self) -> &mut [ParamsAdamW] {
        &mut self.groups
    }

    /// The masters, in the order of the variables.
    pub fn masters(&self) -> impl Iterator<Item = &Tensor> {
        self.states.iter().map(|param| &param.master)
    }

    /// The whole state under PyTorch's names: `{i}.step`, `{i}.exp_avg`, `{i}.exp_avg_sq` of variable i, and its
    /// `{i}.master`, for `candle_core::safetensors::save`. It does not include settings.
    pub fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut state = HashMap::new();
        for (i, param) in self.states.iter().enumerate() {
            state.insert(format!("{i}.step"), Tensor::new(param.updates, param.master.device())?);
            // Copy, because updates write it in place.
            state.insert(format!("{i}.master"), param.master.copy()?);
            state.insert(format!("{i}.exp_avg"), param.exp_avg.clone());
            state.insert(format!("{i}.exp_avg_sq"), param.exp_avg_sq.clone());
        }
        Ok(state)
    }

    /// Restores the state of [`state_dict`](Self::state_dict), including the variables. A state that does not match the
    /// variables is an error and changes nothing.
    pub fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let misfit = |message: String| Error::model("optimizer state", message);
        if state.len() != 4 * self.states.len() {
            let found = state.len();
            let vars = self.states.len();
            return Err(misfit(format!("the state has {found} tensors, but {vars} variables need 4 each")));
        }
        let tensor = |i: usize, name: &str, like: &Tensor| {
            let key = format!("{i}.{name}");
            let tensor = state.get(&key).ok_or_else(|| misfit(format!("`{key}` is missing")))?;
            if (tensor.shape(), tensor.dtype()) != (like.shape(), like.dtype()) {
                let (found, wanted) = ((tensor.dtype(), tensor.dims()), (like.dtype(), like.dims()));
                return Err(misfit(format!("`{key}` is {found:?}, but the variable needs {wanted:?}")));
            }
            Ok(tensor.to_device(like.device())?)
        };
        let counter = Tensor::new(0i64, &candle_core::Device::Cpu)?;
        let load = |(i, param): (usize, &ParamState)| {
            Ok(ParamState {
                group: param.group,
                updates: tensor(i, "step", &counter)?.to_scalar()?,
                master: tensor(i, "master", &param.master)?,
                exp_avg: tensor(i, "exp_avg", &param.exp_avg)?,
                exp_avg_sq: tensor(i, "exp_avg_sq", &param.exp_avg_sq)?,
            })
        };
        let loaded = self.states.iter().enumerate().map(load).collect::<Result<Vec<_>>>()?;
        for ((param, var), loaded) in self.states.iter_mut().zip(&self.vars).zip(loaded) {
            let master = loaded.master.clone();
            *param = ParamState { master: param.master.clone(), ..loaded };
            param.set_master(var, master)?;
        }
        Ok(())
    }
}

/// Rejects settings that would make every weight NaN or infinite.
fn check(params: &ParamsAdamW) -> CandleResult<()> {
    let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
    for (name, value) in [("lr", lr), ("eps", eps), ("weight_decay", weight_decay)] {
        if !(value.is_finite() && value >= 0.0) {
            candle_core::bail!("`{name}` of `AdamW` is {value}; it must be finite, and 0 or more");
        }
    }
    // Moments are FP32, and 0 without a gradient.
    if eps as f32 == 0.0 {
        candle_core::bail!("`eps` of `AdamW` is {eps}, 0 in FP32; it must be above 0, because 0 / 0 is NaN");
    }
    for (name, beta) in [("beta1", beta1), ("beta2", beta2)] {
        if !(0.0..1.0).contains(&beta) {
            candle_core::bail!("`{name}` of `AdamW` is {beta}; it must be 0 or more, and below 1");
        }
    }
    Ok(())
}

impl ParamState {
    fn new(var: &Var, group: usize) -> CandleResult<Self> {
        let master = var.as_detached_tensor().to_dtype(wide(var.dtype()))?;
        Ok(Self { group, updates: 0, exp_avg: master.zeros_like()?, exp_avg_sq: master.zeros_like()?, master })
    }

    fn update(&mut self, var: &Var, grad: &Tensor, params: &ParamsAdamW) -> CandleResult<()> {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *params;
        let t = i32::try_from(self.updates + 1).unwrap_or(i32::MAX);
        let [correction1, correction2] = [beta1, beta2].map(|beta| 1.0 - beta.powi(t));
        let grad = grad.detach().to_dtype(self.master.dtype())?;
        let exp_avg = ((&self.exp_avg * beta1)? + (&grad * (1.0 - beta1))?)?;
        let exp_avg_sq = ((&self.exp_avg_sq * beta2)? + (grad.sqr()? * (1.0 - beta2))?)?;
        let denominator = ((exp_avg_sq.sqrt()? / correction2.sqrt())? + eps)?;
        let change = ((&exp_avg / denominator)? * (lr / correction1))?;
        let master = ((&self.master * (1.0 - lr * weight_decay))? - change)?;
        self.set_master(var, master)?;
        self.exp_avg = exp_avg;
        self.exp_avg_sq = exp_avg_sq;
        self.updates += 1;
        Ok(())
    }

    /// Writes `master` into the variable, rounded to its type.
    fn set_master(&mut self, var: &Var, master: Tensor) -> CandleResult<()> {
        var.set(&master.to_dtype(var.dtype())?)?;
        if var.dtype() != master.dtype() {
            self.master = master;
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    fn new(vars: Vec<Var>, params: ParamsAdamW) -> CandleResult<Self> {
        let mut optimizer = Self { id: OptimizerId::new(), groups: vec![], vars: vec![], states: vec![] };
        optimizer.push_group(vars, params)?;
        Ok(optimizer)
    }

    /// Updates every variable that has a gradient, of any floating type.
    fn step(&mut self, grads: &GradStore) -> CandleResult<()> {
        // The program may have changed them.
        self.groups.iter().try_for_each(check)?;
        for (var, param) in self.vars.iter().zip(&mut self.states) {
            if let Some(grad) = grads.get(var) {
                param.update(var, grad, &self.groups[param.group])?;
            }
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.groups[0].lr
    }

    /// Sets the learning rate of every group; use [`groups_mut`](AdamW::groups_mut) for one.
    fn set_learning_rate(&mut self, lr: f64) {
        for group in &mut self.groups {
            group.lr = lr;
        }
    }
}

impl ScaledOptimizer for AdamW {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn vars(&self) -> &[Var] {
        &self.vars
    }
}
