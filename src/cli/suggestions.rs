//! Tips for commands and flags of other trainers.

use clap::error::{ContextKind, ContextValue};

/// Flags and keys of transformers' Trainer and TRL, axolotl, mlx-lm, Unsloth and LLaMA-Factory, in their spelling with
/// underscores, and what replaces them here.
const FLAGS: &[(&str, &str)] = &[
    ("model_name_or_path model_name base_model", "`--model` names the model"),
    ("model hf_path", "name the model without a flag: `finetune generate MODEL`"),
    ("dataset dataset_name datasets train_file", "`--data` names the training text"),
    (
        "val_set_size test_size validation_file",
        "`--val` names a validation text or a share such as `5%`; `none` disables validation",
    ),
    ("num_train_epochs num_epochs max_epochs", "`--epochs` sets the passes over the text"),
    ("max_steps max_iters num_steps iters", "`--steps` sets the number of steps"),
    (
        "output_dir out_dir adapter_path save_path",
        "a run is saved in `--checkpoint-dir FOLDER` under the name `--run NAME`",
    ),
    ("per_device_train_batch_size micro_batch_size", "`--batch-size` sets the sequences of a micro-batch"),
    ("gradient_accumulation_steps grad_accumulation_steps", "`--grad-accum` sets the micro-batches of a step"),
    (
        "max_seq_length max_length max_seq_len sequence_len block_size cutoff_len",
        "`--seq-len` sets the tokens of a sequence",
    ),
    ("learning_rate", "`--lr` sets the highest learning rate"),
    ("lr_scheduler_type lr_scheduler lr_schedule", "`--schedule` is constant, linear or cosine"),
    ("warmup_ratio", "`--set schedule.warmup_ratio=X` sets the share of the run; `--warmup-steps` sets a number"),
    ("optim", "`--optimizer` is adamw or adamw8bit"),
    ("fp16 bf16 fp32 half tf32", "`--dtype` sets the type: fp16, bf16 or fp32"),
    (
        "load_in_4bit load_in_8bit quantization_bit qlora",
        "a quantized base is a GGUF file: `--model FILE.gguf --lora r=16,alpha=32`",
    ),
    (
        "adapter use_peft finetuning_type fine_tune_type num_layers r lora_r lora_rank lora_alpha lora_dropout lora_target \
         lora_target_modules lora_target_linear use_rslora use_dora",
        "`--lora r=16,alpha=32` trains adapters; `dropout=0.05`, `target_modules=q_proj+v_proj`, `use_rslora` and `use_dora` follow after commas",
    ),
    (
        "eval_steps eval_strategy evaluation_strategy evals_per_epoch steps_per_eval",
        "`--eval-every` sets the steps between validations, or `epoch`",
    ),
    ("save_steps save_strategy saves_per_epoch", "`--save-every` sets the steps between checkpoints, or `epoch`"),
    ("save_total_limit", "`--keep-last` sets the number of checkpoints to keep"),
    ("logging_steps steps_per_report", "`--log-every` sets the steps between printed lines; the log has every step"),
    (
        "report_to wandb wandb_project logging_dir",
        "every run has a log: `finetune watch`, `finetune export-metrics`, and `--set telemetry.tensorboard=true`",
    ),
    ("push_to_hub push_model hub_model_id", "`finetune export RUN FOLDER --push OWNER/NAME` uploads a model"),
    ("use_gradient_checkpointing grad_checkpoint", "`--gradient-checkpointing` keeps only the input of each block"),
    (
        "train_on_responses_only train_on_inputs mask_prompt assistant_only_loss completion_only_loss",
        "`--loss-on` selects the turns that count in the loss; the default is `answers`, without prompts",
    ),
    ("sample_packing", "`--packing` packs short documents into a row"),
    ("template", "`--chat-template` names a chat template"),
    ("resume_from_checkpoint resume_adapter_file", "`--resume NAME` continues a run"),
    ("random_state random_seed", "`--seed` sets the seed of every random stream"),
    ("stage do_train train", "`finetune` without a command trains; other commands have their own flags"),
    ("no_dashboard no_tui disable_tqdm", "`--plain` prints lines, `--progress` one status line"),
    ("loss_type", "`--objective` names the training signal, such as dpo, ipo, kto, grpo or dapo"),
    ("ref_model ref_model_name_or_path", "`--reference` names the model to compare log-probabilities with"),
    ("reward_funcs reward_model_name_or_path", "`--reward` names a rule or a program"),
    ("epsilon epsilon_high", "`--set objective.epsilon=X` and `--set objective.epsilon_high=X` clip the ratio"),
    ("scale_rewards", "`--set objective.scale_rewards=false` leaves advantages as they are"),
    ("label_smoothing", "`--set objective.label_smoothing=X` sets the share of swapped pairs"),
    ("simpo_gamma", "`--set objective.simpo_gamma=X` sets the target margin"),
    ("max_prompt_length", "`--seq-len` limits a prompt and its answer together"),
    ("adam_beta1 adam_beta2", "`--set optimizer.betas=[0.9,0.95]` sets both"),
    ("adam_epsilon", "`--set optimizer.eps=X` sets it"),
    ("load_best_model_at_end", "the best checkpoint is kept; `--best` of other commands selects it"),
    ("max_new_tokens", "`--max-tokens` sets how many tokens are generated"),
];

/// Commands of other programs, and what replaces them here.
const COMMANDS: &[(&str, &str)] = &[
    ("train run fit sft pt", "`finetune` without a command trains; use the same flags"),
    ("lora qlora", "`finetune --lora 16` trains adapters; use the same flags"),
    (
        "dpo kto orpo simpo grpo rloo ppo reward",
        "`--objective` names the training signal: `finetune --objective dpo --data pairs.jsonl`",
    ),
    (
        "preprocess prepare tokenize",
        "training tokenizes its data; `finetune data show` prints a sample as the model sees it",
    ),
    ("merge-lora merge_lora fuse", "`finetune merge RUN FOLDER` merges adapters into their base model"),
    (
        "convert quantize save gguf",
        "`finetune export RUN OUT` writes a folder, GGUF or ONNX; `--dtype q4_k` quantizes a GGUF file",
    ),
    (
        "serve server api webui webchat vllm-serve vllm_serve",
        "`finetune chat RUN` chats in the terminal; `finetune export RUN model.gguf` writes a file for a server",
    ),
    ("env info", "`finetune doctor` shows the capabilities of this machine"),
    (
        "upload push fetch download",
        "`finetune export RUN FOLDER --push OWNER/NAME` uploads a model; `--model OWNER/NAME` downloads one",
    ),
    ("resume continue", "`finetune --resume` continues the newest run, `--resume NAME` another"),
    (
        "delete rm remove",
        "`finetune runs delete NAME` deletes runs, `finetune checkpoint prune NAME` a run's older checkpoints",
    ),
    ("log logs tail monitor", "`finetune watch NAME` shows a run"),
    ("version", "`finetune --version` prints the version"),
    ("list ls", "`finetune runs` lists the runs"),
    ("test evaluate", "`finetune eval MODEL` evaluates a model on a text"),
    ("sample predict infer inference", "`finetune generate MODEL` generates text, `finetune chat MODEL` answers"),
];

/// A part of the command line that `error` names.
pub(super) fn typed(error: &clap::Error, kind: ContextKind) -> Option<&str> {
    if let Some(ContextValue::String(typed)) = error.get(kind) { Some(typed) } else { None }
}

pub(super) fn suggestion(error: &clap::Error) -> Option<&'static str> {
    let typed = |kind| typed(error, kind).unwrap_or_default();
    let flag = typed(ContextKind::InvalidArg).trim_start_matches('-').replace('-', "_");
    let command = typed(ContextKind::InvalidSubcommand);
    let is_config = [".yml", ".yaml", ".toml", ".json"].iter().any(|ending| command.ends_with(ending));
    find(FLAGS, &flag)
        .or_else(|| find(COMMANDS, command))
        .or(is_config
            .then_some("`--config FILE` reads settings from a TOML file; `finetune config --explain` prints one"))
}

fn find(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    table.iter().find(|(names, _)| names.split(' ').any(|one| one == name)).map(|(_, tip)| *tip)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::definition;
    use crate::train::Config;
    use clap::error::ErrorKind;

    /// The commonest flags of four other trainers, as their users type them.
    const COMMON: [&str; 4] = [
        // transformers and TRL
        "model_name_or_path dataset_name output_dir num_train_epochs per_device_train_batch_size \
         gradient_accumulation_steps learning_rate lr_scheduler_type warmup_ratio max_steps bf16 logging_steps \
         save_steps eval_steps report_to push_to_hub gradient_checkpointing load_in_4bit max_length packing \
         assistant_only_loss seed weight_decay max_grad_norm loss_type ref_model reward_funcs epsilon scale_rewards \
         label_smoothing max_prompt_length adam_beta2 load_best_model_at_end",
        // axolotl
        "base-model datasets sequence-len micro-batch-size gradient-accumulation-steps num-epochs learning-rate \
         lr-scheduler optimizer adapter lora-r lora-alpha sample-packing val-set-size train-on-inputs \
         gradient-checkpointing wandb-project evals-per-epoch saves-per-epoch warmup-steps",
        // mlx-lm
        "model train data iters batch-size num-layers learning-rate max-seq-length mask-prompt grad-checkpoint \
         steps-per-eval steps-per-report save-every adapter-path resume-adapter-file fine-tune-type seed config",
        // Unsloth and LLaMA-Factory
        "model_name max_seq_length load_in_4bit r lora_alpha lora_dropout use_gradient_checkpointing \
         random_state train_on_responses_only push_model stage do_train dataset template finetuning_type \
         lora_target lora_rank cutoff_len save_total_limit",
    ];

    /// The commonest commands of other trainers, typed after `finetune` instead of their program's name.
    const COMMANDS_OF_OTHERS: [&str; 40] = [
        // TRL
        "sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name stanfordnlp/imdb --output_dir out",
        "sft --config sft.yaml",
        "dpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/ultrafeedback_binarized",
        "kto --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/kto-mix-14k",
        "grpo --model_name_or_path Qwen/Qwen2.5-0.5B",
        "reward --model_name_or_path Qwen/Qwen2.5-0.5B",
        "rloo --config rloo.yaml",
        "vllm-serve --model Qwen/Qwen2.5-0.5B",
        "env",
        "chat --model_name_or_path Qwen/Qwen2.5-0.5B",
        // axolotl
        "train config.yml",
        "config.yml",
        "preprocess config.yml",
        "fetch examples",
        "inference config.yml --lora-model-dir out",
        "merge-lora config.yml --lora-model-dir out",
        "evaluate config.yml",
        "quantize config.yml",
        "vllm-serve config.yml",
        "train config.yml --learning-rate 1e-4 --micro-batch-size 2",
        // LLaMA-Factory
        "train examples/train_lora/llama3_lora_sft.yaml",
        "chat examples/inference/llama3_lora_sft.yaml",
        "export examples/merge_lora/llama3_lora_sft.yaml",
        "api examples/inference/llama3_lora_sft.yaml",
        "webui",
        "webchat examples/inference/llama3.yaml",
        "eval examples/inference/llama3.yaml",
        "env",
        "version",
        "train --stage sft --do_train --model_name_or_path m --dataset d --template qwen --finetuning_type lora",
        // mlx-lm
        "lora --model mistralai/Mistral-7B-v0.1 --train --data data --iters 600",
        "lora --model m --adapter-path adapters --data data --test",
        "generate --model m --adapter-path adapters --prompt hello",
        "generate --model m --prompt hello --max-tokens 100 --temp 0.5",
        "chat --model m",
        "fuse --model m --adapter-path adapters",
        "fuse --model m --export-gguf",
        "convert --hf-path m -q --upload-repo o/n",
        "server --model m --port 8080",
        "evaluate --model m --tasks arc_easy",
    ];

    #[test]
    fn common_flags_and_commands_of_other_trainers_work_or_have_a_tip() {
        let flags = COMMON.iter().flat_map(|flags| flags.split_whitespace()).map(|flag| (format!("--{flag}=1"), true));
        let commands = COMMANDS_OF_OTHERS.map(|line| (line.to_owned(), false));
        for (line, is_flag) in flags.chain(commands) {
            let words = std::iter::once("finetune").chain(line.split_whitespace());
            let Err(error) = definition().try_get_matches_from(words) else { continue };
            let unknown = [ErrorKind::UnknownArgument, ErrorKind::InvalidSubcommand].contains(&error.kind());
            let named = suggestion(&error).is_some() || is_flag && error.get(ContextKind::SuggestedArg).is_some();
            assert!(!unknown || named, "{line}: {error}");
        }
    }

    /// Every flag, key and command that a tip names exists, and no name has two tips.
    #[test]
    fn tips_name_what_exists() {
        let mut command = definition();
        command.build();
        let has = |flag: &str| {
            let all = std::iter::once(&command).chain(command.get_subcommands());
            all.flat_map(clap::Command::get_arguments).any(|arg| arg.get_long() == Some(flag))
        };
        let keys: Vec<_> = Config::settings().into_iter().map(|setting| setting.key).collect();
        for table in [FLAGS, COMMANDS] {
            let mut names: Vec<_> = table.iter().flat_map(|(names, _)| names.split(' ')).collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count);
        }
        for (_, tip) in FLAGS.iter().chain(COMMANDS) {
            let words: Vec<_> = tip.split(['`', ' ', ':', ';', ',']).collect();
            for (at, word) in words.iter().enumerate() {
                if let Some(flag) = word.strip_prefix("--") {
                    assert!(has(flag) || flag == "version", "{tip}");
                }
                if *word == "--set" {
                    let key = words[at + 1].split('=').next().unwrap_or_default();
                    assert!(keys.iter().any(|known| known == key), "{tip}");
                }
                if *word == "finetune" && words[at + 1].starts_with(char::is_lowercase) && words[at + 1] != "without" {
                    assert!(command.find_subcommand(words[at + 1]).is_some(), "{tip}");
                }
            }
        }
    }
}
