//! The fixed binary tree along which the gradients of a step's micro-batches are summed.
//!
//! A node covers a range of micro-batches; its left child takes the largest power of two that is less than their
//! number. The shape depends only on the number of micro-batches, so the sum has the same bits for any distribution
//! over processes: a process sums the nodes inside its share, and the rest of the tree sums over those.

use std::ops::Range;

/// The first micro-batch of the right child of a node of two or more micro-batches.
pub(crate) fn split(node: &Range<usize>) -> usize {
    node.start + node.len().next_power_of_two() / 2
}

/// Whether `left` and `right` are the children of one node in the tree over `leaves` micro-batches.
fn are_siblings(leaves: usize, left: &Range<usize>, right: &Range<usize>) -> bool {
    let parent = left.start..right.end;
    let mut node = 0..leaves;
    while node != parent {
        if node.len() < 2 {
            return false;
        }
        let cut = split(&node);
        match () {
            () if parent.end <= cut => node.end = cut,
            () if parent.start >= cut => node.start = cut,
            () => return false,
        }
    }
    left.end == right.start && parent.len() > 1 && split(&parent) == left.end
}

/// The nodes that a process has summed so far, left to right.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReductionTree {
    /// The micro-batches of the step.
    pub(crate) leaves: usize,
    share: Range<usize>,
    next: usize,
    open: Vec<Range<usize>>,
}

/// The destination of the next node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Merge {
    /// The index of its sum, counted from the left.
    pub(crate) at: usize,
    /// Whether it is added to the sum or begins a node.
    pub(crate) adds: bool,
    /// How many nodes are then added to their left neighbors, the rightmost first.
    pub(crate) merges: usize,
}

impl ReductionTree {
    /// Starts a step of `leaves` micro-batches. This process sums `share`.
    pub(crate) fn begin(&mut self, share: Range<usize>, leaves: usize) {
        self.open.clear();
        self.next = share.start;
        self.share = share;
        self.leaves = leaves;
    }

    /// The micro-batches that this process sums.
    pub(crate) fn share(&self) -> Range<usize> {
        self.share.clone()
    }

    /// Adds the node of the next `len` micro-batches.
    pub(crate) fn push(&mut self, len: usize) -> Merge {
        let node = self.next..self.next + len;
        self.next = node.end;
        let adds = self.open.last().is_some_and(|last| are_siblings(self.leaves, last, &node));
        match self.open.last_mut() {
            Some(last) if adds => last.end = node.end,
            _ => self.open.push(node),
        }
        let at = self.open.len() - 1;
        let mut merges = 0;
        while let [.., left, right] = self.open.as_mut_slice()
            && are_siblings(self.leaves, left, right)
        {
            left.end = right.end;
            self.open.pop();
            merges += 1;
        }
        Merge { at, adds, merges }
    }

    /// The nodes that remain after `share` was summed, left to right.
    pub(crate) fn nodes_of_range(share: Range<usize>, leaves: usize) -> Vec<Range<usize>> {
        Self::summed(share, leaves).0
    }

    /// The maximum number of sums in memory.
    pub(crate) fn max_live_sums(share: Range<usize>, leaves: usize) -> usize {
        Self::summed(share, leaves).1
    }

    fn summed(share: Range<usize>, leaves: usize) -> (Vec<Range<usize>>, usize) {
        let mut nodes = Self::default();
        let mut most = 0;
        nodes.begin(share.clone(), leaves);
        for _ in share {
            most = most.max(nodes.push(1).at + 1);
        }
        (nodes.open, most)
    }

    /// Like [`Self::max_live_sums`] for all micro-batches, where the nodes of `width` of them are added at a time.
    pub(crate) fn max_live_sums_by(width: usize, leaves: usize) -> usize {
        let mut nodes = Self::default();
        nodes.begin(0..leaves, leaves);
        let rounds =
            (0..leaves).step_by(width).flat_map(|first| Self::nodes_of_range(first..leaves.min(first + width), leaves));
        rounds.map(|node| nodes.push(node.len()).at + 1).max().unwrap_or(0)
    }
}

/// The process whose [`local_range`] has micro-batch `leaf`.
pub(crate) fn rank_of(leaf: usize, world_size: usize, leaves: usize) -> usize {
    leaf * world_size / leaves
}

/// The micro-batches of process `rank` in a step of `leaves`, distributed evenly. Rank 0 always has the first.
pub(crate) fn local_range(rank: usize, world_size: usize, leaves: usize) -> Range<usize> {
    (rank * leaves).div_ceil(world_size)..((rank + 1) * leaves).div_ceil(world_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree's sum as text.
    fn text(node: Range<usize>) -> String {
        if node.len() == 1 {
            return node.start.to_string();
        }
        let cut = split(&node);
        format!("({}+{})", text(node.start..cut), text(cut..node.end))
    }

    #[test]
    fn the_shape_hangs_on_the_number_alone() {
        assert_eq!(text(0..3), "((0+1)+2)");
        assert_eq!(text(0..4), "((0+1)+(2+3))");
        assert_eq!(text(0..7), "(((0+1)+(2+3))+((4+5)+6))");
    }

    /// Sums a share like the engine, as text, and returns the nodes by their ranges.
    fn by_share(share: Range<usize>, leaves: usize) -> Vec<String> {
        let mut nodes = ReductionTree::default();
        let mut sums = Vec::<String>::new();
        nodes.begin(share.clone(), leaves);
        for leaf in share {
            let placed = nodes.push(1);
            if placed.adds {
                sums[placed.at] = format!("({}+{leaf})", sums[placed.at]);
            } else {
                sums.push(leaf.to_string());
            }
            assert_eq!(sums.len(), placed.at + 1);
            for _ in 0..placed.merges {
                let right = sums.pop().unwrap_or_default();
                if let Some(left) = sums.last_mut() {
                    *left = format!("({left}+{right})");
                }
            }
        }
        sums
    }

    #[test]
    fn every_share_sums_nodes_of_the_tree_and_nothing_else() {
        for leaves in 1..=33 {
            assert_eq!(by_share(0..leaves, leaves), [text(0..leaves)]);
            for world_size in 1..=9 {
                let mut covered = 0;
                for rank in 0..world_size {
                    let share = local_range(rank, world_size, leaves);
                    assert!(share.clone().all(|leaf| rank_of(leaf, world_size, leaves) == rank));
                    let nodes = ReductionTree::nodes_of_range(share.clone(), leaves);
                    assert_eq!(by_share(share, leaves), nodes.iter().cloned().map(text).collect::<Vec<_>>());
                    for node in nodes {
                        assert_eq!(node.start, covered);
                        covered = node.end;
                    }
                }
                assert_eq!(covered, leaves, "{world_size} processes");
            }
        }
    }

    #[test]
    fn sums_take_the_logarithm_of_their_number_in_memory() {
        for leaves in 2..=64usize {
            assert_eq!(ReductionTree::max_live_sums(0..leaves, leaves) as u32, leaves.ilog2(), "{leaves}");
        }
    }
}
