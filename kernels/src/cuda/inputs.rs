//! The host's numbers that a pass reads, in one block of device memory, which is written once before the pass.

use super::attention::key_ranges;
use super::dispatch::{Attempt, CudaKernels};
use super::embedding::grouped;
use super::launch::{DropoutArgs, Queue, to_u32};
use crate::attention::AttentionShape;
use crate::dropout::Dropout;
use crate::op::Embedding;
use crate::pass::PassInputs;
use crate::rope::PositionIds;
use candle_core::{DType, Device, Error, Result, Tensor};
use std::ops::Range;
use std::sync::PoisonError;

/// A part of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InputPart {
    Draw,
    Ids,
    Targets,
    /// dL/d(row's loss) as bits of FP32.
    Factors,
    Documents,
    TokenOrder,
    /// For each token its row of the table, and its end in the order.
    TokenGroups,
    PositionOrder,
    PositionGroups,
    /// The bounds of attention with a window.
    KeyRanges(Option<usize>),
}

/// The block of a pass.
#[derive(Clone, Debug)]
pub(super) struct Resident {
    parts: Vec<(InputPart, Range<usize>)>,
    pub(super) words: Vec<u32>,
    pub(super) address: u64,
    /// The host's address of the targets: tiles of the head take parts of them.
    targets: usize,
    seq_len: usize,
}

/// A draw of dropout masks, the low word first.
fn draw_words(draw: u64) -> [u32; 2] {
    [draw as u32, (draw >> 32) as u32]
}

pub(super) fn factors(rows: usize, seed: f32, weights: Option<&[f32]>) -> Vec<u32> {
    (0..rows).map(|row| weights.map_or(seed, |weights| seed * weights[row]).to_bits()).collect()
}

/// Adds empty groups, so that there are as many as rows.
fn pad(ends: &mut Vec<u32>, rows: usize) {
    ends.extend([0, rows as u32].repeat(rows - ends.len() / 2));
}

fn grouped_by_position(rows: usize, places: PositionIds<'_>) -> Result<[Vec<u32>; 2]> {
    if places.documents.is_some() {
        return grouped(rows, |row| places.of(row));
    }
    let sequences = to_u32(rows / places.seq_len)?;
    let seq_len = to_u32(places.seq_len)?;
    let rows = to_u32(rows)?;
    let order = (0..seq_len).flat_map(|position| (position..rows).step_by(places.seq_len)).collect();
    Ok([order, (0..seq_len).flat_map(|position| [position, (position + 1) * sequences]).collect()])
}

impl Resident {
    /// The block of these inputs, without an address.
    pub(super) fn new(inputs: &PassInputs<'_>) -> Result<Self> {
        let &PassInputs { ids, seq_len, documents, targets, seed, weights, draw, windows, .. } = inputs;
        let parts = Vec::new();
        let host = targets.as_ptr() as usize;
        let mut block = Self { parts, words: Vec::new(), address: 0, targets: host, seq_len };
        block.push(InputPart::Draw, &draw_words(draw));
        block.push(InputPart::Ids, ids);
        block.push(InputPart::Targets, targets);
        if let Some(seed) = seed {
            block.push(InputPart::Factors, &factors(targets.len(), seed, weights));
        }
        if let Some(starts) = documents {
            block.push(InputPart::Documents, starts);
        }
        let places = PositionIds { seq_len, past: 0, documents };
        let by_token = grouped(ids.len(), |row| ids[row] as usize)?;
        let by_position = grouped_by_position(ids.len(), places)?;
        let names =
            [[InputPart::TokenOrder, InputPart::TokenGroups], [InputPart::PositionOrder, InputPart::PositionGroups]];
        for ([order, groups], [sorted, mut ends]) in names.into_iter().zip([by_token, by_position]) {
            pad(&mut ends, ids.len());
            block.push(order, &sorted);
            block.push(groups, &ends);
        }
        for &window in windows {
            let shape = AttentionShape { window, ..AttentionShape::new(ids.len() / seq_len, seq_len, 1, 1) };
            if let Some(ranges) = key_ranges(&shape, documents)? {
                block.push(InputPart::KeyRanges(window), &ranges);
            }
        }
        Ok(block)
    }

    fn push(&mut self, part: InputPart, words: &[u32]) {
        let first = self.words.len();
        self.words.extend_from_slice(words);
        self.parts.push((part, first..self.words.len()));
        // Parts begin where a kernel's widest accesses can.
        self.words.resize(self.words.len().next_multiple_of(4), 0);
    }

    fn find(&self, part: InputPart) -> Option<(u64, &[u32])> {
        let (_, range) = self.parts.iter().find(|(found, _)| *found == part)?;
        Some((self.address + (range.start * size_of::<u32>()) as u64, &self.words[range.clone()]))
    }

    /// Whether the rows of its sequences begin their documents at `documents`.
    fn has_documents(&self, documents: Option<&[u32]>) -> bool {
        match documents {
            Some(starts) => self.holds(InputPart::Documents, 0, starts).is_some(),
            None => self.find(InputPart::Documents).is_none(),
        }
    }

    /// The address of `words`, if they are in this part, starting at `offset`.
    fn holds(&self, part: InputPart, offset: usize, words: &[u32]) -> Option<u64> {
        let (address, held) = self.find(part)?;
        let same = held.get(offset..offset + words.len()) == Some(words);
        same.then_some(address + (offset * size_of::<u32>()) as u64)
    }
}

impl<Q: Queue> CudaKernels<Q> {
    /// Computes with the block of the current pass.
    fn with_resident<T>(&self, f: impl FnOnce(&Resident) -> Option<T>) -> Option<T> {
        self.resident.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(f)
    }

    /// The address of `words` and their owner, which must stay until their users are launched: their place in the
    /// pass's block, at this offset in a part, or new memory.
    pub(super) fn words(
        &self,
        part: InputPart,
        offset: usize,
        words: &[u32],
        device: &Device,
    ) -> Attempt<(u64, Option<Tensor>)> {
        if let Some(address) = self.with_resident(|block| block.holds(part, offset, words)) {
            return Ok((address, None));
        }
        self.refuse_in_capture("numbers of the host")?;
        let tensor = Tensor::new(words, device)?;
        Ok((self.address(&tensor, DType::U32, words.len())?, Some(tensor)))
    }

    /// Fails while a pass is recorded, which the device then repeats without the host.
    pub(super) fn refuse_in_capture(&self, what: &str) -> Result<()> {
        if self.queue.is_capturing() { Err(Error::msg(format!("it needs {what} during the pass"))) } else { Ok(()) }
    }

    /// The offset of some targets among those of the pass; 0 outside a pass.
    pub(super) fn offset_of(&self, targets: &[u32]) -> usize {
        let offset = |block: &Resident| (targets.as_ptr() as usize).checked_sub(block.targets);
        self.with_resident(offset).unwrap_or(0) / size_of::<u32>()
    }

    /// The rows of each group, and the groups, of this number: [`grouped`] by the row of a table. Those of the pass's
    /// block if it has these tokens.
    pub(super) fn groups(
        &self,
        input: &Embedding<'_>,
        parts: [InputPart; 2],
        of: impl Fn(usize) -> usize,
        device: &Device,
    ) -> Attempt<([u64; 2], usize, [Option<Tensor>; 2])> {
        let rows = input.ids.len();
        let resident = self.with_resident(|block| {
            let has_rows = block.seq_len == input.seq_len && block.find(InputPart::Ids)?.1 == input.ids;
            let [order, groups] = parts.map(|part| block.find(part).map(|(address, _)| address));
            Some([order?, groups?]).filter(|_| has_rows && block.has_documents(input.documents))
        });
        if let Some(addresses) = resident {
            return Ok((addresses, rows, [None, None]));
        }
        let [sorted, ends] = grouped(rows, of)?;
        let (order, first) = self.words(parts[0], 0, &sorted, device)?;
        let (groups, second) = self.words(parts[1], 0, &ends, device)?;
        Ok(([order, groups], ends.len() / 2, [first, second]))
    }

    /// The bounds of attention in the pass's block.
    pub(super) fn resident_key_ranges(&self, shape: &AttentionShape, documents: Option<&[u32]>) -> Option<u64> {
        self.with_resident(|block| {
            let rows = block.find(InputPart::Ids)?.1.len();
            let fits =
                block.has_documents(documents) && rows == shape.batch * shape.seq_len && block.seq_len == shape.seq_len;
            block.find(InputPart::KeyRanges(shape.window)).filter(|_| fits).map(|(address, _)| address)
        })
    }

    /// A dropout mask as the kernels take it, and the owner of its draw; `None` drops nothing.
    pub(super) fn dropout(&self, dropout: Option<Dropout>, device: &Device) -> Attempt<(DropoutArgs, Option<Tensor>)> {
        let Some(dropout) = dropout else { return Ok((DropoutArgs::default(), None)) };
        let (draw, key, site, threshold, keep_scale) = dropout.numbers();
        let (draw, owner) = self.words(InputPart::Draw, 0, &draw_words(draw), device)?;
        Ok((DropoutArgs { draw, key, site, threshold, keep_scale, unused: 0 }, owner))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is a failed test")]
mod tests {
    use super::*;

    #[test]
    fn rows_are_grouped_in_their_order() {
        let rows = 3000;
        let table_row = |row: usize| row * row * 7919 % 70_001;
        let [order, ends] = grouped(rows, table_row).unwrap();
        let mut sorted: Vec<u32> = (0..rows as u32).collect();
        sorted.sort_by_key(|row| table_row(*row as usize));
        assert_eq!(order, sorted);
        let mut grouped_rows = 0;
        for group in ends.chunks(2) {
            let first = grouped_rows;
            let end = group[1] as usize;
            assert!(order[first..end].iter().all(|row| table_row(*row as usize) == group[0] as usize));
            grouped_rows = end;
        }
        assert_eq!(grouped_rows, rows);
        let places = PositionIds { seq_len: 30, past: 0, documents: None };
        assert_eq!(grouped_by_position(rows, places).unwrap(), grouped(rows, |row| places.of(row)).unwrap());
    }
}
