//! The `finetune` program.

#[global_allocator]
static ALLOCATOR: finetune::engine::kernels::allocator::Allocator = finetune::engine::kernels::allocator::Allocator;

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
