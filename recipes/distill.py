"""Distill a teacher into a smaller model with DistillationTrainer, without computing the padding of their batches.

    python recipes/distill.py --data prompts.jsonl --model_name_or_path Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B
    python recipes/distill.py --max_completion_length 32 --learning_rate 1e-2 --max_steps 20    # on a CPU

The student samples the completions, and learns the probabilities that the teacher gives each token (arXiv 2306.13649).
Both need one tokenizer. Rows have a `prompt`: a text, or messages. Without --data, the prompts are first lines of
functions of the Python standard library. Without --model_name_or_path, student and teacher are small Llamas with random
weights.

The flags are those below, and TRL's: those of DistillationConfig, and of ModelConfig for the student and LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import common
from trl import DistillationConfig, DistillationTrainer, ModelConfig, TrlParser, get_peft_config

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of the prompts; see above")
    teacher: str | None = common.flag(None, "name or folder of the teacher; see above")


def main(flags: Sequence[str] | None = None) -> DistillationTrainer:
    parser = TrlParser((Arguments, DistillationConfig, ModelConfig), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/distill", logging_steps=1, **common.on_cpu())
    given, args, model = parser.parse_args_and_config(flags)
    checkpoint = common.checkpoint_of(args)
    if (given.teacher is None) != (model.model_name_or_path is None):
        raise ValueError(f"--teacher: expected one beside --model_name_or_path, and only then, got {given.teacher!r}")
    with args.main_process_first():
        prompts = common.read(given.data, ("prompt",)) if given.data else common.pairs().select(range(80))
        texts = [*map(str, prompts["prompt"])]
        name = model.model_name_or_path or common.save_small(f"{args.output_dir}/small", texts)
        teacher = given.teacher or common.save_small(f"{args.output_dir}/teacher", texts, initializer_range=0.1)
    args.model_init_kwargs = common.loading_of(model) | (args.model_init_kwargs or {})
    trainer = DistillationTrainer(
        name,
        teacher,
        args=args,
        train_dataset=prompts.select_columns(["prompt"]),
        peft_config=get_peft_config(model),
    )
    trainer.accelerator.print(hfp.attach(trainer, None))
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
    some, first, last = common.first_and_last(losses)
    trainer.accelerator.print(f"loss: {first:.4f} in the first {some} steps, {last:.4f} in the last {some}")
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    common.run(main)
