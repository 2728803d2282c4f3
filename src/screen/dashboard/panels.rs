//! The panels: each draws one aspect of a run on a pad of any size.

pub(super) mod chart;
pub(super) mod curve;
pub(super) mod dialogs;
pub(super) mod event_detail;
pub(super) mod events;
pub(super) mod gradients;
pub(super) mod header;
pub(super) mod layers;
pub(super) mod loss;
pub(super) mod overflows;
pub(super) mod readout;
pub(super) mod samples;
pub(super) mod status;
pub(super) mod tensors;
pub(super) mod what_if;
