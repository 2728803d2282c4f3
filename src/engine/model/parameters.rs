//! A model's tensors in one fixed order, by name.
//!
//! Weights, masters, gradients and Adam's moments are each a [`Parameters`] of one layout, so that index `i` means the
//! same parameter in all of them, in every run. Parameters that one product reads together (queries, keys and values;
//! gate and up) are views of one tensor, their *pack*. Beneath adapters lies a frozen base, which has no masters,
//! moments or gradients: [`Slot`] says on which side of the line a pack is.

use super::blocks::{Blocks, Operand};
use super::spec::{Init, Layer, ParamRole, ParamSpec};
use crate::engine::collective::Shards;
use crate::engine::kernels::Kernels;
use crate::engine::kernels::isa::vectorize;
use crate::engine::kernels::quantised::Quantised;
use crate::engine::kernels::view;
use crate::precision::PrecisionUnit;
use crate::random::{Domain, Stream, site_of};
use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Which parameters there are and which of them lie in one tensor.
#[derive(Debug, PartialEq)]
struct Layout {
    entries: Vec<ParamSpec>,
    packs: Vec<Pack>,
}

/// A tensor in memory: a parameter, or several stacked along the first dimension.
#[derive(Debug, PartialEq)]
struct Pack {
    layer: Layer,
    role: ParamRole,
    shape: Vec<usize>,
    /// Its parameters, in order.
    members: Vec<usize>,
}

impl Layout {
    fn new(mut entries: Vec<ParamSpec>) -> Self {
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let mut packs: Vec<Pack> = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            match packs.iter_mut().rev().find(|pack| (pack.layer, pack.role) == (entry.pack, entry.role)) {
                Some(pack) => {
                    pack.shape[0] += entry.shape[0];
                    pack.members.push(index);
                }
                None => packs.push(Pack {
                    layer: entry.pack,
                    role: entry.role,
                    shape: entry.shape.clone(),
                    members: vec![index],
                }),
            }
        }
        for pack in &mut packs {
            pack.members.sort_by_key(|&member| entries[member].layer);
        }
        Self { entries, packs }
    }
}

/// Tensors of one layout, ordered by name.
#[derive(Clone, Debug)]
pub struct Parameters {
    layout: Arc<Layout>,
    tensors: Vec<Tensor>,
    packs: Vec<Tensor>,
    base: Option<Arc<Parameters>>,
    /// The packs that are held in blocks; their tensors are empty.
    blocks: Option<Arc<Blocks>>,
    /// All shards and the rank of this one, if the tensors are a shard.
    shard: Option<(Arc<Shards>, usize)>,
}

/// Where a pack is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Among the parameters themselves, which are trained.
    Own(usize),
    /// In the frozen base beneath them.
    Base(usize),
}

impl Parameters {
    /// Zeros of `dtype` for each parameter.
    pub fn zeros(entries: &[ParamSpec], dtype: DType, device: &Device) -> Result<Self> {
        Self::of_layout(Arc::new(Layout::new(entries.to_vec())), dtype, device, None)
    }

    /// Zeros on the CPU, for a frozen base. The matrices in `quantised` stay in their quantized blocks: either all
    /// matrices of a product, or none.
    pub fn with_blocks(
        entries: &[ParamSpec],
        dtype: DType,
        mut quantised: BTreeMap<String, Quantised>,
    ) -> Result<Self> {
        let layout = Arc::new(Layout::new(entries.to_vec()));
        let mut matrices = BTreeMap::new();
        for (index, pack) in layout.packs.iter().enumerate() {
            let names = pack.members.iter().map(|&member| &layout.entries[member].name);
            let parts: Vec<_> = names.filter_map(|name| quantised.remove(name)).collect();
            match parts.len() {
                0 => {}
                count if count == pack.members.len() => drop(matrices.insert(index, Quantised::stack(parts)?)),
                _ => bail!("only some parts of {:?} are in blocks", pack.layer),
            }
        }
        let blocks = if matrices.is_empty() { None } else { Some(Arc::new(Blocks::new(matrices, dtype)?)) };
        Self::of_layout(layout, dtype, &Device::Cpu, blocks)
    }

    /// A frozen base in another compute type: its blocks are shared, other tensors converted.
    pub fn converted(&self, dtype: DType, kernels: &dyn Kernels) -> Result<Self> {
        let blocks = self.blocks.as_ref().map(|blocks| blocks.converted(dtype)).transpose()?.map(Arc::new);
        let converted = Self::of_layout(self.layout.clone(), dtype, &self.device(), blocks)?;
        for (from, to) in self.packs.iter().zip(&converted.packs).filter(|(from, _)| from.elem_count() > 0) {
            kernels.copy(from, to)?;
        }
        Ok(converted)
    }

    /// Zeros of `dtype` in the same layout; for a shard on the CPU, where processes exchange and update them.
    pub fn zeros_like(&self, dtype: DType) -> Result<Self> {
        if self.shard.is_some() {
            return self.map(|tensor| view::zeros(tensor.dims(), dtype, &Device::Cpu));
        }
        Self::of_layout(self.layout.clone(), dtype, &self.device(), None)
    }

    /// Zeros of `dtype` for the parameters `kept`, in order; for a shard, for the same shard of them.
    pub fn zeros_of(&self, kept: &[usize], dtype: DType) -> Result<Self> {
        let entries: Vec<ParamSpec> = kept.iter().map(|index| self.layout.entries[*index].clone()).collect();
        let zeros = Self::zeros(&entries, dtype, &self.device())?;
        match &self.shard {
            Some((shards, rank)) => zeros.shard(&Arc::new(shards.select(kept)), *rank)?.zeros_like(dtype),
            None => Ok(zeros),
        }
    }

    /// The same tensors over a frozen `base`.
    #[must_use]
    pub fn over(self, base: Option<Arc<Parameters>>) -> Self {
        Self { base, ..self }
    }

    /// The frozen base.
    pub fn base(&self) -> Option<&Arc<Parameters>> {
        self.base.as_ref()
    }

    /// The shard of process `rank` of whole parameters: for each a row of elements, which may be empty, in the same memory.
    pub fn shard(&self, shards: &Arc<Shards>, rank: usize) -> Result<Self> {
        let mut parts = self.clone();
        parts.shard = Some((shards.clone(), rank));
        parts.packs.clear();
        for (index, tensor) in parts.tensors.iter_mut().enumerate() {
            let range = shards.range(rank, index);
            *tensor = tensor.flatten_all()?.narrow(0, range.start, range.len())?;
        }
        Ok(parts)
    }

    /// A deep copy on the CPU.
    pub fn copied(&self) -> Result<Self> {
        self.map(|tensor| view::host(&tensor.force_contiguous()?))
    }

    /// Zeros of the same shapes and types on the CPU.
    pub fn zeros_on_host(&self) -> Result<Self> {
        self.map(|tensor| view::zeros(tensor.dims(), tensor.dtype(), &Device::Cpu))
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

    fn of_layout(layout: Arc<Layout>, dtype: DType, device: &Device, blocks: Option<Arc<Blocks>>) -> Result<Self> {
        let in_blocks = |index| blocks.as_ref().is_some_and(|blocks| blocks.has(index));
        let empty = Tensor::zeros(0, dtype, &Device::Cpu)?;
        let pack = |(index, pack): (usize, &Pack)| {
            if in_blocks(index) { Ok(empty.clone()) } else { view::zeros(&pack.shape, dtype, device) }
        };
        let packs: Vec<Tensor> = layout.packs.iter().enumerate().map(pack).collect::<Result<_>>()?;
        let dense: Vec<usize> = (0..packs.len()).filter(|&index| !in_blocks(index)).collect();
        let tensors = vec![empty; layout.entries.len()];
        let mut parameters = Self { tensors, packs, layout, base: None, blocks, shard: None };
        for pack in dense {
            parameters.view_members(pack)?;
        }
        Ok(parameters)
    }

    /// Makes a pack's parameters views of its tensor.
    fn view_members(&mut self, pack: usize) -> Result<()> {
        let Pack { members, .. } = &self.layout.packs[pack];
        let tensor = &self.packs[pack];
        let mut first = 0;
        for &member in members {
            let rows = self.layout.entries[member].shape[0];
            self.tensors[member] = if members.len() == 1 { tensor.clone() } else { tensor.narrow(0, first, rows)? };
            first += rows;
        }
        Ok(())
    }

    /// Draws initial values, each parameter from a separate random stream. `self` must be FP32. The lengths of outputs
    /// are the caller's to set, who has the base.
    pub fn initialise(&self, seed: u64) -> Result<()> {
        let mut entries = self.layout.entries.iter().zip(&self.tensors);
        entries.try_for_each(|(entry, tensor)| view::write_f32(tensor, |out| draw(entry, seed, 0, out)))
    }

    /// The device of the tensors.
    pub fn device(&self) -> Device {
        self.tensors.first().map_or(Device::Cpu, |tensor| tensor.device().clone())
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Number of elements of all tensors.
    pub fn elements(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.elem_count() as u64).sum()
    }

    /// Bytes of all tensors and blocks.
    pub fn bytes(&self) -> u64 {
        let tensors = self.tensors.iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64);
        tensors.sum::<u64>() + self.blocks.as_ref().map_or(0, |blocks| blocks.bytes())
    }

    /// The bytes of a base in quantized blocks, and its bytes without quantization.
    pub fn saved_by_blocks(&self) -> Option<(u64, u64)> {
        self.blocks.as_ref()?;
        let size = self.tensors.first()?.dtype().size_in_bytes() as u64;
        let elements = self.layout.entries.iter().map(|entry| entry.shape.iter().product::<usize>() as u64);
        Some((self.bytes(), elements.sum::<u64>() * size))
    }

    /// Bytes of the buffer for dequantized matrices: the size of the largest matrix in use.
    pub fn buffer_bytes(&self) -> u64 {
        self.blocks.as_ref().map_or(0, |blocks| blocks.buffer_bytes())
    }

    /// The specification of each parameter, in order.
    pub fn layout(&self) -> &[ParamSpec] {
        &self.layout.entries
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Each name with its tensor, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.layout.entries.iter().map(|entry| entry.name.as_str()).zip(&self.tensors)
    }

    /// The index of a name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.layout.entries.binary_search_by(|entry| entry.name.as_str().cmp(name)).ok()
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.position(name).map(|index| &self.tensors[index])
    }

    /// Looks up parameter `role` of a layer's product.
    pub(super) fn find_pack(&self, layer: Layer, role: ParamRole) -> Option<Slot> {
        let own = self.layout.packs.iter().position(|pack| (pack.layer, pack.role) == (layer, role));
        own.map(Slot::Own).or_else(|| match self.base.as_ref()?.find_pack(layer, role)? {
            Slot::Own(index) | Slot::Base(index) => Some(Slot::Base(index)),
        })
    }

    /// The blocks of a pack, if it is in blocks, and its index.
    fn blocks_of(&self, slot: Slot) -> Option<(&Blocks, usize)> {
        let Slot::Base(index) = slot else { return None };
        let blocks = self.base.as_ref()?.blocks.as_ref()?;
        blocks.has(index).then_some((&**blocks, index))
    }

    /// The matrix of a layer, for one operation: dequantised, if it is in blocks.
    pub(crate) fn operand(&self, slot: Slot) -> Result<Operand<'_>> {
        match self.blocks_of(slot) {
            Some((blocks, index)) => blocks.dequantise(index),
            None => Ok(Operand::Held(self.pack(slot))),
        }
    }

    /// Rows `ids` of a table that is in blocks, dequantised; `None` for one that is not.
    pub(crate) fn gathered(&self, slot: Slot, ids: &[u32]) -> Result<Option<Operand<'_>>> {
        self.blocks_of(slot).map(|(blocks, index)| blocks.gather(index, ids)).transpose()
    }

    /// The tensor of a layer: the weight of its product, in one piece. It is empty, but has the right type, if it is in
    /// blocks.
    ///
    /// # Panics
    /// If it is in the base and there is none.
    pub(crate) fn pack(&self, slot: Slot) -> &Tensor {
        match (slot, &self.base) {
            (Slot::Own(index), _) => &self.packs[index],
            (Slot::Base(index), Some(base)) => &base.packs[index],
            (Slot::Base(_), None) => unreachable!("a model with adapters keeps its base"),
        }
    }

    /// The tensor of a layer, unless it is frozen: where its gradient goes.
    pub(crate) fn own(&self, slot: Slot) -> Option<&Tensor> {
        match slot {
            Slot::Own(index) => Some(&self.packs[index]),
            Slot::Base(_) => None,
        }
    }

    /// Pack `index` of the parameters themselves.
    pub(crate) fn pack_at(&self, index: usize) -> &Tensor {
        &self.packs[index]
    }

    /// The packs of a unit, by index.
    pub fn packs_of(&self, unit: PrecisionUnit) -> Vec<usize> {
        (0..self.packs.len()).filter(|&index| self.layout.packs[index].layer.unit() == unit).collect()
    }

    /// The tensor of a layer's weight or bias.
    pub(crate) fn of_layer(&self, layer: Layer, role: ParamRole) -> Option<&Tensor> {
        self.find_pack(layer, role).map(|slot| self.pack(slot))
    }

    /// Replaces the trained weight or bias of a layer by a copy, and returns the copy; `None` if there is none.
    pub(crate) fn unshare(&mut self, layer: Layer, role: ParamRole) -> Result<Option<&Tensor>> {
        let Some(Slot::Own(index)) = self.find_pack(layer, role) else { return Ok(None) };
        self.replace_pack(index, self.packs[index].force_contiguous()?)?;
        Ok(Some(&self.packs[index]))
    }

    /// Replaces pack `index` by a tensor of the same shape, for example with a different dtype.
    pub fn replace_pack(&mut self, index: usize, tensor: Tensor) -> Result<()> {
        let Pack { shape, layer, .. } = &self.layout.packs[index];
        if tensor.dims() != shape {
            bail!("the weights of {layer:?} have the shape {shape:?}, not {:?}", tensor.dims());
        }
        self.packs[index] = tensor;
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
pub fn draw(entry: &ParamSpec, seed: u64, first: usize, out: &mut [f32]) {
    let (stream, site) = (Stream::new(seed, Domain::Init), site_of(&entry.name));
    match entry.init {
        Init::Zeros | Init::OutputNorms => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal(std) => draw_normal(stream, site, std as f32, first, out),
        Init::Uniform(bound) => {
            stream.fill_uniform(site, 0, (first / 4) as u32, out);
            for x in out {
                *x *= bound as f32;
            }
        }
    }
}

/// Fills `out` with normal numbers of standard deviation `std`, starting at the even number `first`.
fn draw_normal(stream: Stream, site: u32, std: f32, first: usize, out: &mut [f32]) {
    const PART: usize = 1 << 14;
    out.par_chunks_mut(PART).enumerate().for_each(|(part, out)| {
        vectorize(
            #[inline(always)]
            || {
                stream.fill_normal(site, 0, (first / 2 + part * (PART / 2)) as u32, out);
                for x in out {
                    *x *= std;
                }
            },
        );
    });
}
