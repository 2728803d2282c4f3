//! What is drawn on a terminal: the dashboard, plain lines, and what every screen shares.

pub mod dashboard;
pub mod terminal;
