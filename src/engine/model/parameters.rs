//! A model's tensors in one fixed order, by name.
//!
//! Weights, masters, gradients and Adam's moments are each a [`Parameters`] of one layout, so that index `i` means the
//! same parameter in all of them, in every run. Parameters that one product reads together (queries, keys and values;
//! gate and up) are views of one tensor, their fused tensor. The base of adapters is frozen and has no
//! masters, moments or gradients. A [`ParamRef`] is the index of a fused tensor in one of the two.

use super::quantized_base::{QuantizedBase, WeightRef};
use super::spec::{ModuleId, ParamInit, ParamRole, ParamSpec};
use crate::engine::collective::Shards;
use crate::engine::kernels::Kernels;
use crate::engine::kernels::isa::vectorize;
use crate::engine::kernels::matmul;
use crate::engine::kernels::quantized::QuantizedMatrix;
use crate::engine::kernels::view;
use crate::precision::PrecisionUnit;
use crate::random::{Domain, Stream, site_of};
use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

/// The parameters, and the fused tensors that hold them.
#[derive(Debug, PartialEq)]
struct ParamLayout {
    entries: Vec<ParamSpec>,
    fused: Vec<FusedTensor>,
}

/// A tensor in memory: a parameter, or several stacked along the first dimension.
#[derive(Debug, PartialEq)]
struct FusedTensor {
    layer: ModuleId,
    role: ParamRole,
    shape: Vec<usize>,
    /// Its parameters, in order.
    members: Vec<usize>,
}

impl ParamLayout {
    fn new(mut entries: Vec<ParamSpec>) -> Self {
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let mut fused: Vec<FusedTensor> = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            match fused.iter_mut().rev().find(|tensor| (tensor.layer, tensor.role) == (entry.fused_into, entry.role)) {
                Some(tensor) => {
                    tensor.shape[0] += entry.shape[0];
                    tensor.members.push(index);
                }
                None => fused.push(FusedTensor {
                    layer: entry.fused_into,
                    role: entry.role,
                    shape: entry.shape.clone(),
                    members: vec![index],
                }),
            }
        }
        for tensor in &mut fused {
            tensor.members.sort_by_key(|&member| entries[member].layer);
        }
        Self { entries, fused }
    }

    /// The first tensor of another block that is the same layer's.
    fn counterpart(&self, index: usize) -> Option<usize> {
        let is_like = |other: &FusedTensor, tensor: &FusedTensor| {
            other.layer.block.is_some()
                && (other.layer.op, other.role, &other.shape) == (tensor.layer.op, tensor.role, &tensor.shape)
        };
        let tensor = self.fused.get(index).filter(|tensor| tensor.layer.block.is_some())?;
        self.fused[..index].iter().position(|other| is_like(other, tensor))
    }
}

/// Tensors of one layout, ordered by name.
#[derive(Clone, Debug)]
pub struct Parameters {
    layout: Arc<ParamLayout>,
    tensors: Vec<Tensor>,
    fused: Vec<Tensor>,
    base: Option<Arc<Parameters>>,
    /// The quantized matrices of a base; their tensors are empty.
    quantized: Option<Arc<QuantizedBase>>,
    /// All shards and the rank of this one, if the tensors are a shard.
    shard: Option<(Arc<Shards>, usize)>,
}

/// A fused tensor of the trained parameters or of their base, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParamRef {
    Trainable(usize),
    /// A parameter of the frozen base.
    Frozen(usize),
}

impl Parameters {
    /// Zeros of `dtype` for each parameter.
    pub fn zeros(entries: &[ParamSpec], dtype: DType, device: &Device) -> Result<Self> {
        Self::of_layout(Arc::new(ParamLayout::new(entries.to_vec())), dtype, device, None)
    }

    /// Random initial values in FP32 for each parameter, see [`Self::init_weights`].
    pub fn random(entries: &[ParamSpec], seed: u64, device: &Device) -> Result<Self> {
        let parameters = Self::zeros(entries, DType::F32, device)?;
        parameters.init_weights(seed)?;
        Ok(parameters)
    }

    /// Zeros on `device`, for a frozen base. The matrices in `quantized` stay in their quantized blocks: either all
    /// matrices of a product, or none.
    pub fn with_quantized(
        entries: &[ParamSpec],
        dtype: DType,
        mut quantized: BTreeMap<String, QuantizedMatrix>,
        device: &Device,
    ) -> Result<Self> {
        let layout = Arc::new(ParamLayout::new(entries.to_vec()));
        let mut matrices = BTreeMap::new();
        for (index, tensor) in layout.fused.iter().enumerate() {
            let names = tensor.members.iter().map(|&member| &layout.entries[member].name);
            let parts: Vec<_> = names.filter_map(|name| quantized.remove(name)).collect();
            match parts.len() {
                0 => {}
                count if count == tensor.members.len() => drop(matrices.insert(index, QuantizedMatrix::stack(parts)?)),
                _ => bail!("only some parts of {:?} are quantized", tensor.layer),
            }
        }
        let base = (!matrices.is_empty()).then(|| QuantizedBase::new(matrices, dtype, device)).transpose()?;
        Self::of_layout(layout, dtype, device, base.map(Arc::new))
    }

    /// Converts whole parameters to another dtype, without their base. Quantized matrices are shared.
    pub fn to_dtype(&self, dtype: DType, kernels: &dyn Kernels) -> Result<Self> {
        let quantized = self.quantized.as_ref().map(|quantized| quantized.to_dtype(dtype)).transpose()?.map(Arc::new);
        let converted = Self::of_layout(self.layout.clone(), dtype, &self.device(), quantized)?;
        for (from, to) in self.fused.iter().zip(&converted.fused).filter(|(from, _)| from.elem_count() > 0) {
            kernels.copy(from, to)?;
        }
        Ok(converted)
    }

    /// Zeros of `dtype` in the same layout; for a shard on the device where processes update it.
    pub fn zeros_like(&self, dtype: DType) -> Result<Self> {
        if self.shard.is_some() {
            return self.zeros_of_shard(|_| dtype);
        }
        Self::of_layout(self.layout.clone(), dtype, &self.device(), None)
    }

    /// Like [`Self::zeros_like`] for whole tensors, with one memory for a layer's tensors in all blocks.
    pub fn zeros_of_one_block(&self, dtype: DType) -> Result<Self> {
        let mut zeros = Self { fused: Vec::new(), base: None, quantized: None, ..self.clone() };
        for (index, tensor) in self.layout.fused.iter().enumerate() {
            let counterpart = self.layout.counterpart(index).map(|other| zeros.fused[other].clone());
            zeros.fused.push(counterpart.map_or_else(|| view::zeros(&tensor.shape, dtype, &self.device()), Ok)?);
        }
        (0..zeros.fused.len()).try_for_each(|index| zeros.view_members(index))?;
        Ok(zeros)
    }

    /// Number of elements of [`Self::zeros_of_one_block`] for these parameters.
    pub fn elements_of_one_block(entries: Vec<ParamSpec>) -> u64 {
        let layout = ParamLayout::new(entries);
        let kept = (0..layout.fused.len()).filter(|index| layout.counterpart(*index).is_none());
        kept.map(|index| layout.fused[index].shape.iter().product::<usize>() as u64).sum()
    }

    /// Zeros of the same types that share no memory.
    pub fn unshared(&self) -> Result<Self> {
        let mut zeros = self.clone();
        for (index, tensor) in self.fused.iter().enumerate() {
            zeros.replace_fused(index, view::zeros(tensor.dims(), tensor.dtype(), tensor.device())?)?;
        }
        Ok(zeros)
    }

    /// Zeros of `dtype` for the parameters `kept`, in order; for a shard, for the same shard of them.
    pub fn zeros_for(&self, kept: &[usize], dtype: DType) -> Result<Self> {
        let entries: Vec<ParamSpec> = kept.iter().map(|index| self.layout.entries[*index].clone()).collect();
        let zeros = Self::zeros(&entries, dtype, &self.device())?;
        match &self.shard {
            Some((shards, rank)) => zeros.shard(&Arc::new(shards.select(kept)), *rank)?.zeros_like(dtype),
            None => Ok(zeros),
        }
    }

    /// Adds a frozen `base` to these tensors.
    #[must_use]
    pub fn with_base(self, base: Option<Arc<Parameters>>) -> Self {
        Self { base, ..self }
    }

    /// The frozen base.
    pub fn base(&self) -> Option<&Arc<Parameters>> {
        self.base.as_ref()
    }

    /// The shard of process `rank` of whole parameters: for each a row of elements, which may be empty, in the same
    /// memory.
    pub fn shard(&self, shards: &Arc<Shards>, rank: usize) -> Result<Self> {
        let mut parts = self.clone();
        parts.shard = Some((shards.clone(), rank));
        parts.fused.clear();
        for (index, tensor) in parts.tensors.iter_mut().enumerate() {
            let range = shards.range(rank, index);
            *tensor = tensor.flatten_all()?.narrow(0, range.start, range.len())?;
        }
        Ok(parts)
    }

    /// A deep copy on the CPU.
    pub fn deep_clone(&self) -> Result<Self> {
        self.map(|tensor| view::to_host(&tensor.force_contiguous()?))
    }

    /// Zeros of a shard's shapes, of the type for each tensor, on the device where processes update it.
    pub fn zeros_of_shard(&self, dtype: impl Fn(&Tensor) -> DType) -> Result<Self> {
        let on_host = self.shards().is_some_and(|shards| shards.on_host);
        let device = if on_host { Device::Cpu } else { self.device() };
        self.map(|tensor| view::zeros(tensor.dims(), dtype(tensor), &device))
    }

    /// Whether each tensor is one of `other`, or a part of it, in the same memory.
    pub fn shares_storage(&self, other: &Self) -> bool {
        self.tensors.iter().zip(&other.tensors).all(|(one, other)| view::share_storage(one, other))
    }

    fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let mut mapped = self.clone();
        mapped.tensors.iter_mut().try_for_each(|tensor| f(tensor).map(|new| *tensor = new))?;
        Ok(mapped)
    }

    /// The elements of parameter `index` in this shard.
    pub fn range(&self, index: usize) -> Range<usize> {
        match &self.shard {
            Some((shards, rank)) => shards.range(*rank, index),
            None => 0..self.layout.entries[index].shape.iter().product(),
        }
    }

    /// The shards, if the tensors are one of them; `None` if they are whole.
    pub fn shards(&self) -> Option<&Arc<Shards>> {
        self.shard.as_ref().map(|(shards, _)| shards)
    }

    fn of_layout(
        layout: Arc<ParamLayout>,
        dtype: DType,
        device: &Device,
        quantized: Option<Arc<QuantizedBase>>,
    ) -> Result<Self> {
        let is_quantized = |index| quantized.as_ref().is_some_and(|quantized| quantized.has(index));
        let empty = Tensor::zeros(0, dtype, &Device::Cpu)?;
        let tensor = |(index, tensor): (usize, &FusedTensor)| {
            if is_quantized(index) { Ok(empty.clone()) } else { view::zeros(&tensor.shape, dtype, device) }
        };
        let fused: Vec<Tensor> = layout.fused.iter().enumerate().map(tensor).collect::<Result<_>>()?;
        let dense: Vec<usize> = (0..fused.len()).filter(|&index| !is_quantized(index)).collect();
        let tensors = vec![empty; layout.entries.len()];
        let mut parameters = Self { tensors, fused, layout, base: None, quantized, shard: None };
        for tensor in dense {
            parameters.view_members(tensor)?;
        }
        Ok(parameters)
    }

    /// Makes the parameters of fused tensor `index` views of it.
    fn view_members(&mut self, index: usize) -> Result<()> {
        let FusedTensor { members, .. } = &self.layout.fused[index];
        let tensor = &self.fused[index];
        let mut first = 0;
        for &member in members {
            let rows = self.layout.entries[member].shape[0];
            self.tensors[member] = if members.len() == 1 { tensor.clone() } else { tensor.narrow(0, first, rows)? };
            first += rows;
        }
        Ok(())
    }

    /// Draws initial values, each parameter from a separate random stream. `self` must be FP32. The caller,
    /// who has the base, sets DoRA's magnitudes.
    pub fn init_weights(&self, seed: u64) -> Result<()> {
        let mut entries = self.layout.entries.iter().zip(&self.tensors);
        entries.try_for_each(|(entry, tensor)| view::write_f32(tensor, |out| sample_init(entry, seed, 0, out)))
    }

    /// The device of the tensors.
    pub fn device(&self) -> Device {
        let first = || self.tensors.first().map_or(Device::Cpu, |tensor| tensor.device().clone());
        // The tensors of quantized matrices are empty, and on the CPU.
        self.quantized.as_ref().map_or_else(first, |quantized| quantized.device().clone())
    }

    /// Number of elements of all tensors.
    pub fn elements(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.elem_count() as u64).sum()
    }

    /// Bytes of all tensors and blocks.
    pub fn bytes(&self) -> u64 {
        let tensors = self.tensors.iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64);
        tensors.sum::<u64>() + self.quantized.as_ref().map_or(0, |quantized| quantized.bytes())
    }

    /// The bytes of a base in quantized blocks, and its bytes without quantization.
    pub fn quantization_savings(&self) -> Option<(u64, u64)> {
        self.quantized.as_ref()?;
        let size = self.tensors.first()?.dtype().size_in_bytes() as u64;
        let elements = self.layout.entries.iter().map(|entry| entry.shape.iter().product::<usize>() as u64);
        Some((self.bytes(), elements.sum::<u64>() * size))
    }

    /// Bytes of the buffer for dequantized matrices: the size of the largest matrix in use.
    pub fn buffer_bytes(&self) -> u64 {
        self.quantized.as_ref().map_or(0, |quantized| quantized.buffer_bytes())
    }

    /// The specification of each parameter, in order.
    pub fn layout(&self) -> &[ParamSpec] {
        &self.layout.entries
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The parameters one by one, each with its tensor, so that memory is freed in between.
    pub fn into_each(self) -> impl Iterator<Item = (ParamSpec, Tensor)> {
        self.layout.entries.clone().into_iter().zip(self.tensors)
    }

    /// Each name with its tensor, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.layout.entries.iter().map(|entry| entry.name.as_str()).zip(&self.tensors)
    }

    /// Like [`Self::iter`], with the tensors of the frozen base.
    pub fn with_frozen(&self) -> Vec<(&str, &Tensor)> {
        let mut all: Vec<_> = self.iter().chain(self.base.iter().flat_map(|base| base.iter())).collect();
        all.sort_by_key(|(name, _)| *name);
        all
    }

    /// The index of a name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.layout.entries.binary_search_by(|entry| entry.name.as_str().cmp(name)).ok()
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.position(name).map(|index| &self.tensors[index])
    }

    /// Runs `body`, which generates text: the products that this thread begins pack each weight only once. The weights
    /// must not change meanwhile.
    pub fn with_packed<R>(&self, body: impl FnOnce() -> R) -> R {
        let base = self.base.iter().flat_map(|base| &base.fused);
        matmul::with_packed(self.fused.iter().chain(base), body)
    }

    /// Looks up parameter `role` of a layer's product.
    pub(super) fn find_fused(&self, layer: ModuleId, role: ParamRole) -> Option<ParamRef> {
        let own = self.layout.fused.iter().position(|tensor| (tensor.layer, tensor.role) == (layer, role));
        own.map(ParamRef::Trainable).or_else(|| match self.base.as_ref()?.find_fused(layer, role)? {
            ParamRef::Trainable(index) | ParamRef::Frozen(index) => Some(ParamRef::Frozen(index)),
        })
    }

    /// The quantized base and the index of `param`, if `param` is quantized.
    fn quantized_of(&self, param: ParamRef) -> Option<(&QuantizedBase, usize)> {
        let ParamRef::Frozen(index) = param else { return None };
        let quantized = self.base.as_ref()?.quantized.as_ref()?;
        quantized.has(index).then_some((&**quantized, index))
    }

    /// The matrix of a layer for one operation, dequantized if it is quantized.
    pub(crate) fn weight(&self, param: ParamRef) -> Result<WeightRef<'_>> {
        match self.quantized_of(param) {
            Some((quantized, index)) => quantized.dequantize(index),
            None => Ok(WeightRef::Dense(self.fused(param))),
        }
    }

    /// Rows `ids` of a quantized table, dequantized; `None` for a dense table.
    pub(crate) fn gathered(&self, param: ParamRef, ids: &[u32]) -> Result<Option<WeightRef<'_>>> {
        self.quantized_of(param).map(|(quantized, index)| quantized.gather(index, ids)).transpose()
    }

    /// The tensor of a layer. For a quantized matrix it is empty, but has the right dtype.
    ///
    /// # Panics
    /// If it is in the base and there is none.
    pub(crate) fn fused(&self, param: ParamRef) -> &Tensor {
        match (param, &self.base) {
            (ParamRef::Trainable(index), _) => &self.fused[index],
            (ParamRef::Frozen(index), Some(base)) => &base.fused[index],
            (ParamRef::Frozen(_), None) => unreachable!("a model with adapters keeps its base"),
        }
    }

    /// The tensor of a layer; `None` if it is frozen. In a [`Parameters`] of gradients, the tensor for the gradient.
    pub(crate) fn trainable(&self, param: ParamRef) -> Option<&Tensor> {
        match param {
            ParamRef::Trainable(index) => Some(&self.fused[index]),
            ParamRef::Frozen(_) => None,
        }
    }

    pub(crate) fn hash_identity(&self, hasher: &mut impl Hasher) {
        self.fused.iter().for_each(|tensor| tensor.id().hash(hasher));
        if let Some(base) = &self.base {
            base.hash_identity(hasher);
        }
    }

    /// Fused tensor `index` of the trained parameters.
    pub(crate) fn fused_at(&self, index: usize) -> &Tensor {
        &self.fused[index]
    }

    /// The indices of a unit's fused tensors.
    pub fn fused_in(&self, unit: PrecisionUnit) -> Vec<usize> {
        (0..self.fused.len()).filter(|&index| self.layout.fused[index].layer.unit() == unit).collect()
    }

    /// The tensor of a layer's weight or bias.
    pub(crate) fn of_module(&self, layer: ModuleId, role: ParamRole) -> Option<&Tensor> {
        self.find_fused(layer, role).map(|param| self.fused(param))
    }

    /// Replaces the trained weight or bias of a layer by a copy, and returns the copy; `None` if there is none.
    pub(crate) fn unshare(&mut self, layer: ModuleId, role: ParamRole) -> Result<Option<&Tensor>> {
        let Some(ParamRef::Trainable(index)) = self.find_fused(layer, role) else { return Ok(None) };
        self.replace_fused(index, self.fused[index].force_contiguous()?)?;
        Ok(Some(&self.fused[index]))
    }

    /// Replaces fused tensor `index` by a tensor of the same shape, for example with a different dtype.
    pub fn replace_fused(&mut self, index: usize, tensor: Tensor) -> Result<()> {
        let FusedTensor { shape, layer, .. } = &self.layout.fused[index];
        if tensor.dims() != shape {
            bail!("the weights of {layer:?} have the shape {shape:?}, not {:?}", tensor.dims());
        }
        self.fused[index] = tensor;
        self.view_members(index)
    }
}

impl std::ops::Index<usize> for Parameters {
    type Output = Tensor;

    fn index(&self, index: usize) -> &Tensor {
        &self.tensors[index]
    }
}

/// Fills `out` with initial values of a parameter, starting at value `first`, a multiple of four.
pub fn sample_init(entry: &ParamSpec, seed: u64, first: usize, out: &mut [f32]) {
    let stream = Stream::new(seed, Domain::Init);
    let site = site_of(&entry.name);
    match entry.init {
        ParamInit::Zeros | ParamInit::WeightNorm => out.fill(0.0),
        ParamInit::Ones => out.fill(1.0),
        ParamInit::Normal(std) => sample_normal(stream, site, std as f32, first, out),
        ParamInit::Uniform(bound) => {
            stream.fill_uniform(site, 0, (first / 4) as u32, out);
            for x in out {
                *x *= bound as f32;
            }
        }
    }
}

/// Fills `out` with normal numbers of standard deviation `std`, starting at the even number `first`.
fn sample_normal(stream: Stream, site: u32, std: f32, first: usize, out: &mut [f32]) {
    const TASK_ELEMENTS: usize = 1 << 14;
    out.par_chunks_mut(TASK_ELEMENTS).enumerate().for_each(|(part, out)| {
        vectorize!({
            stream.fill_normal(site, 0, (first / 2 + part * (TASK_ELEMENTS / 2)) as u32, out);
            for x in out {
                *x *= std;
            }
        });
    });
}
