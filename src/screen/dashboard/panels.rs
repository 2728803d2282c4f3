//! The panels: each draws one aspect of a run on the pad it is given, whatever its size.

pub(super) mod dialogs;
pub(super) mod events;
pub(super) mod gradients;
pub(super) mod loss;
pub(super) mod loss_scale;
pub(super) mod overflows;
pub(super) mod samples;
pub(super) mod status;
pub(super) mod tensors;
pub(super) mod what_if;
