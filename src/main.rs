//! The `finetune` program.

#[global_allocator]
static ALLOCATOR: finetune::engine::kernels::machine::allocator::Allocator =
    finetune::engine::kernels::machine::allocator::Allocator;

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
