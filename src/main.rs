//! The `finetune` program.

fn main() {}
