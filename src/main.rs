//! The `finetune` program.

fn main() -> std::process::ExitCode {
    finetune::cli::main()
}
