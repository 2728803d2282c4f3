//! A model's tensors in one fixed order, by name.
//!
//! Weights, masters, gradients and Adam's moments are each a [`Parameters`] of one layout, so that index `i` means the
//! same parameter in all of them, in every run.

use crate::engine::kernels::view;
use crate::precision::Unit;
use crate::random::{Domain, Stream, site_of};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::sync::Arc;

/// A parameter's name, in Hugging Face's words without the `transformer.` prefix, and its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// For example `h.0.attn.c_attn.weight`.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// Tensors of one layout, ordered by name.
#[derive(Clone, Debug)]
pub struct Parameters {
    layout: Arc<[Entry]>,
    tensors: Vec<Tensor>,
}

impl Parameters {
    /// Zeros of `dtype` for each name and shape.
    pub fn zeros(shapes: &[(String, Vec<usize>)], dtype: DType, device: &Device) -> Result<Self> {
        let mut layout: Vec<Entry> =
            shapes.iter().map(|(name, shape)| Entry { name: name.clone(), shape: shape.clone() }).collect();
        layout.sort_by(|a, b| a.name.cmp(&b.name));
        Self::of_layout(layout.into(), dtype, device)
    }

    /// Zeros of `dtype` in the same layout.
    pub fn zeros_like(&self, dtype: DType) -> Result<Self> {
        let device = self.tensors.first().map_or(Device::Cpu, |tensor| tensor.device().clone());
        Self::of_layout(self.layout.clone(), dtype, &device)
    }

    fn of_layout(layout: Arc<[Entry]>, dtype: DType, device: &Device) -> Result<Self> {
        let tensors = layout.iter().map(|entry| view::zeros(&entry.shape, dtype, device)).collect::<Result<_>>()?;
        Ok(Self { layout, tensors })
    }

    /// GPT-2's initialisation: normal weights of the given standard deviation, those that close a residual branch
    /// narrower by √(2 · layers), layer norms one, biases zero. `self` must be FP32.
    pub fn initialise(&self, std: f64, layers: usize, seed: u64) -> Result<()> {
        let stream = Stream::new(seed, Domain::Init);
        for (entry, tensor) in self.layout.iter().zip(&self.tensors) {
            view::write_f32(tensor, |out| {
                if entry.name.split('.').next_back() == Some("bias") {
                    out.fill(0.0);
                } else if entry.shape.len() < 2 {
                    out.fill(1.0);
                } else {
                    let closes_branch = entry.name.ends_with("c_proj.weight");
                    let std = if closes_branch { std / (2.0 * layers as f64).sqrt() } else { std };
                    stream.fill_normal(site_of(&entry.name), 0, out);
                    for x in out {
                        *x *= std as f32;
                    }
                }
            })?;
        }
        Ok(())
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

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
    }

    /// Names and shapes, in order.
    pub fn layout(&self) -> &[Entry] {
        &self.layout
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Each name with its tensor, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.layout.iter().map(|entry| entry.name.as_str()).zip(&self.tensors)
    }

    /// The index of a name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.layout.binary_search_by(|entry| entry.name.as_str().cmp(name)).ok()
    }

    /// Puts another tensor of the same shape, such as one of another type, in the place of `index`.
    pub fn replace(&mut self, index: usize, tensor: Tensor) -> Result<()> {
        let entry = &self.layout[index];
        if tensor.dims() != entry.shape {
            bail!("`{}` has the shape {:?}, not {:?}", entry.name, entry.shape, tensor.dims());
        }
        self.tensors[index] = tensor;
        Ok(())
    }

    /// The parameters of a unit, by index.
    pub fn of_unit(&self, unit: Unit) -> Vec<usize> {
        (0..self.len()).filter(|&index| Unit::of(&self.layout[index].name) == unit).collect()
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.position(name).map(|index| &self.tensors[index])
    }
}

impl std::ops::Index<usize> for Parameters {
    type Output = Tensor;

    fn index(&self, index: usize) -> &Tensor {
        &self.tensors[index]
    }
}
