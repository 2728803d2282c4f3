//! A finished model and what is done with it: opening, text, loss on a text, export.

pub mod chat;
pub mod evaluate;
pub mod export;
pub mod fp16_check;
pub mod generate;
pub mod trained;
