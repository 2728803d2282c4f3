//! Terminal output: the dashboard, plain lines, and what every screen shares.

pub mod dashboard;
pub mod terminal;
