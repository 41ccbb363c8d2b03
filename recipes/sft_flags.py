"""What sft.py does with every flag of TRL's SFTConfig: honored, or refused with what to do instead.

python recipes/sft_flags.py    # writes the table of recipes/README.md
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- flags of sft.py: python recipes/sft_flags.py -->", "<!-- end of flags -->"


@dataclass(frozen=True)
class Rule:
    """One line of the table, for one or several flags."""

    flags: str
    """Names, separated by spaces."""
    says: str
    """What an honored flag does here, or why a flag is refused and what to do instead."""
    tested: str = ""
    """The function of tests/test_sft.py that checks what it does, or why there is none."""
    needs_eval_data: bool = False

    @property
    def names(self) -> list[str]:
        return self.flags.split()


@dataclass(frozen=True)
class Refused(Rule):
    accepted: tuple[Any, ...] = field(default=())
    """Values that match what the recipe does anyway."""


BY_RECIPE = (
    Rule(
        "resume_from_checkpoint",
        "`True` or `last`: the latest in `--output_dir`; or a checkpoint's folder. Resumes with the very next step",
        "test_a_resumed_run_is_the_unbroken_one",
    ),
    Rule(
        "output_dir",
        "where checkpoints and the model go; refused if it holds checkpoints of an earlier run, unless that is resumed",
        "test_checkpoints_are_not_overwritten",
    ),
    Rule(
        "completion_only_loss",
        "whether prompts of prompt and completion are left out of the loss; yes if not given. `False` trains on whole "
        "chats as well, unless `--assistant_only_loss True`",
        "test_trainable_tokens",
    ),
    Rule(
        "assistant_only_loss",
        "whether only the assistant's turns are trained on; yes for messages if not given, unlike in TRL",
        "test_trainable_tokens",
    ),
    Rule(
        "seed data_seed",
        "`seed` is for the training, `data_seed` (the same if not given) for packs and their order",
        "test_the_order_of_documents_has_a_seed",
    ),
    Rule(
        "model_init_kwargs trust_remote_code",
        "passed to `from_pretrained` of the model; `revision` and `trust_remote_code` also to that of the tokenizer",
        "test_model_init_kwargs",
    ),
    Rule("eos_token", "the token after a completion; it has to be in the vocabulary", "test_eos_token"),
    Rule(
        "chat_template_path",
        "a .jinja or .j2 file; a tokenizer's folder is refused, since its tokens would be missing here",
        "test_chat_template_path",
    ),
    Rule("dataset_num_proc", "number of processes that tokenize", "test_processes_that_tokenize"),
    Rule("do_eval", "evaluates after training, as `--eval_data` alone does", "test_evaluation", needs_eval_data=True),
    Rule(
        "use_cpu bf16",
        "without an accelerator, `use_cpu` is True and `bf16` False if not given",
        "test_yaml_says_what_flags_say",
    ),
)

BY_TRAINER = (
    Rule("max_steps num_train_epochs", "as in Trainer", "test_yaml_says_what_flags_say"),
    Rule(
        "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 "
        "adam_beta2 adam_epsilon optim_target_modules max_grad_norm",
        "as in Trainer; values that the checkpoint's optimizer restores have to be the same in a resumed run",
        "test_what_a_checkpoint_brings_along",
    ),
    Rule(
        "gradient_accumulation_steps",
        "micro-batches of `--max_tokens` per optimizer step; the loss is the mean over the whole step",
        "test_accumulation",
    ),
    Rule(
        "label_smoothing_factor",
        "as in SFTTrainer; refused with `--loss sequence` and with `--share_prefixes`",
        "test_losses_of_trl",
    ),
    Rule(
        "loss_type",
        "as in SFTTrainer; `dft` is refused with `--loss sequence` and with `--share_prefixes`",
        "test_losses_of_trl",
    ),
    Rule("router_aux_loss_coef", "as in SFTTrainer", "test_router_loss"),
    Rule("fp16 tf32", "as in Trainer", "need a GPU"),
    Rule(
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
        "as in SFTTrainer; on unless turned off",
        "test_checkpointed_activations_change_no_loss",
    ),
    Rule("activation_offloading", "as in SFTTrainer", "needs a GPU"),
    Rule(
        "torch_compile torch_compile_backend torch_compile_mode",
        "as in Trainer",
        "test_compiled",
    ),
    Rule("torch_empty_cache_steps debug skip_memory_metrics", "as in Trainer", "test_other_flags"),
    Rule(
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica disable_tqdm report_to run_name project",
        "as in Trainer",
        "test_other_flags",
    ),
    Rule("include_num_input_tokens_seen", "as in Trainer; rows have no padding", "test_other_flags"),
    Rule("trackio_space_id trackio_bucket_id trackio_static_space_id", "as in Trainer", "need trackio"),
    Rule(
        "save_strategy save_steps save_total_limit save_only_model save_on_each_node",
        "as in Trainer; resuming from a checkpoint without its optimizer is refused",
        "test_what_cannot_be_resumed",
    ),
    Rule("enable_jit_checkpoint", "as in Trainer", "needs a signal"),
    Rule(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
        "as in Trainer: checkpoints as `hub_strategy` says, the model at the end",
        "need the hub",
    ),
    Rule("ignore_data_skip", "as in Trainer: a resumed run begins with a full epoch", "test_ignored_data_skip"),
    Rule(
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context",
        "as in Trainer",
        "test_workers",
    ),
    Rule(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "full_determinism",
        "as in Trainer",
        "test_two_processes_and_flags_of_ddp",
    ),
    Rule(
        "eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size",
        "as in Trainer; the loss is the mean over tokens, whatever the batch",
        "test_evaluation",
        needs_eval_data=True,
    ),
    Rule(
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "as in Trainer",
        "test_the_best_model",
        needs_eval_data=True,
    ),
    Rule(
        "bf16_full_eval fp16_full_eval",
        "as in Trainer",
        "test_evaluation",
        needs_eval_data=True,
    ),
    Rule(
        "pad_token",
        "as in SFTTrainer; rows have no padding, but the saved tokenizer and model name it",
        "test_pad_token",
    ),
)

PLANNED = "packs decide which documents share a row, and --max_tokens which rows share a batch"
REFUSED = (
    Refused("per_device_train_batch_size", f"{PLANNED}; --match_documents_per_step keeps the schedule of a batch size"),
    Refused("auto_find_batch_size", "--max_tokens says how large batches are; lower it", accepted=(False,)),
    Refused("train_sampling_strategy", f"{PLANNED}; leave it out", accepted=("random",)),
    Refused("length_column_name", "lengths are those of the tokens; leave it out"),
    Refused("dataloader_drop_last", "every document is trained on in every epoch", accepted=(False,)),
    Refused("dataloader_in_order", "batches come as planned, so that a run resumes exactly", accepted=(True,)),
    Refused("shuffle_dataset", "documents come in another order in every epoch, set by --data_seed", accepted=(True,)),
    Refused("packing", "rows are packed here, and TRL would pack them again; --strategy says how", accepted=(False,)),
    Refused("packing_strategy", "rows are packed here; --strategy says how"),
    Refused("eval_packing", "evaluation runs on documents, without padding", accepted=(False, None)),
    Refused("padding_free", "rows are never padded", accepted=(True,)),
    Refused("pad_to_multiple_of", "rows are never padded; leave it out", accepted=(None,)),
    Refused("max_length", "--pack_length says how long rows are; longer documents are split", accepted=(None,)),
    Refused("truncation_mode", "nothing is truncated: documents longer than --pack_length are split; leave it out"),
    Refused(
        "dataset_text_field",
        "documents are messages, or prompt and completion; for plain text see recipes/accelerate_loop.py",
    ),
    Refused("dataset_kwargs", "tokens and packs are made here; leave it out"),
    Refused("remove_unused_columns", "rows have input_ids and labels, and no other columns", accepted=(True,)),
    Refused("label_names", "labels are made here; leave it out"),
    Refused(
        "average_tokens_across_devices",
        "without it the gradient would depend on the number of processes",
        accepted=(True,),
    ),
    Refused(
        "neftune_noise_alpha",
        "its noise is scaled by row length, and packed rows are longer, so it would be weaker; leave it out",
        accepted=(None,),
    ),
    Refused(
        "use_liger_kernel",
        "it changes the model after isolation was verified; --model_init_kwargs '{\"use_kernels\": true}' "
        "loads kernels before that",
        accepted=(False,),
    ),
    Refused("liger_kernel_config", "see use_liger_kernel", accepted=(None,)),
    Refused("use_cache", "a packed row has no cache", accepted=(False,)),
    Refused("do_train", "this recipe trains", accepted=(True,)),
    Refused("do_predict", "this recipe predicts nothing; see --eval_data for the loss", accepted=(False,)),
    Refused("prediction_loss_only", "evaluation computes only the loss", accepted=(True,)),
    Refused("eval_do_concat_batches", "evaluation computes only the loss; leave it out", accepted=(True,)),
    Refused("eval_use_gather_object batch_eval_metrics", "evaluation computes only the loss", accepted=(False,)),
    Refused("eval_accumulation_steps", "evaluation computes only the loss; leave it out", accepted=(None,)),
    Refused("include_for_metrics", "evaluation computes only the loss; leave it out"),
    Refused("restore_callback_states_from_checkpoint", "this recipe adds no callbacks with states", accepted=(False,)),
    Refused("accelerator_config", f"{PLANNED}; for the rest: accelerate launch --config_file recipes/configs/ddp.yaml"),
    Refused("parallelism_config", "set it in the file of accelerate launch --config_file"),
    Refused(
        "fsdp fsdp_config",
        "accelerate launch --config_file recipes/configs/fsdp2.yaml shards the model after isolation was verified",
    ),
    Refused(
        "deepspeed",
        "accelerate launch --config_file recipes/configs/zero3.yaml shards the model after isolation was verified",
    ),
    Refused("local_rank", "start processes with accelerate launch or torchrun", accepted=(-1,)),
)

RULES = (*BY_RECIPE, *BY_TRAINER, *REFUSED)
RULE_OF = {name: rule for rule in RULES for name in rule.names}


def table() -> str:
    """Return the table of recipes/README.md."""
    lines = ["| flag | in sft.py | what it does, or why it is refused | tested by |", "|---|---|---|---|"]
    for rule in RULES:
        names = ", ".join(f"`{name}`" for name in rule.names)
        what, here = rule.says, "honored"
        if isinstance(rule, Refused):
            here = (
                f"refused, except {' or '.join(f'`{each}`' for each in rule.accepted)}" if rule.accepted else "refused"
            )
        if rule.needs_eval_data:
            what += "; needs `--eval_data`"
        tested = "test_refused" if isinstance(rule, Refused) else rule.tested
        lines.append(f"| {names} | {here} | {what.replace('|', '/')} | {tested.replace('test_', '')} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with its table replaced by the current one."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
