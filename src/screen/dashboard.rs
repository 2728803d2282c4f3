//! The dashboard: a screen of five tabs.
//!
//! [`App`] has the shared state and passes keys and clicks to the tabs, one file each; a tab has its own state, handles
//! its keys and draws itself from a [`Scene`](scene::Scene).

mod app;
mod charts;
mod dialogs;
mod events;
mod header;
mod keys;
mod layers;
mod layout;
mod list;
mod live;
mod overview;
mod precision;
mod samples;
mod scene;
mod status;
mod tensors;

#[cfg(test)]
mod tests;

pub(crate) use app::App;
pub(super) use layout::Size;
pub(crate) use scene::DashboardMode;
