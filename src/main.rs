//! The `finetune` program.

#[global_allocator]
static ALLOCATOR: finetune::kernels::allocator::Allocator = finetune::kernels::allocator::Allocator;

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
