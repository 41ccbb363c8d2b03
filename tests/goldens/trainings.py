"""Losses of ten steps of attached trainers and plain loops, and numbers of the weights that they end with.

    python -m torch.distributed.run --nproc-per-node 2 tests/goldens/trainings.py FOLDER

makes those of a run on several ranks; `on_ranks` starts it.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "helpers")]

import datasets
import numpy as np
import torch
import trainers
import transformers
from accelerate import Accelerator
from goldens.forwards import built, draw, signs_like
from peft import LoraConfig
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import hf_packing as hfp

STEPS = 10
LEARNING_RATE = 0.02


def computed(folder: Path) -> dict[str, list[float]]:
    found = {name: run(folder / str(number)) for number, (name, run) in enumerate(RUNS.items())}
    return found | {"Trainer on two ranks": on_ranks(folder / "ranks")}


def on_ranks(folder: Path) -> list[float]:
    from processes import run_script

    folder.mkdir()
    done = run_script(__file__, folder, ranks=2)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def documents(number: int = 160) -> datasets.Dataset:
    """Return documents of 2 to 48 tokens; the first third of each is not trained on, the last one not at all."""
    rng = np.random.default_rng(11)
    ids = [
        rng.integers(8, 120, length).tolist()
        for length in rng.integers(2, 49, number) // rng.integers(1, 4, number) + 2
    ]
    labels = [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in ids]
    labels[-1] = [-100] * len(labels[-1])
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})


def answers() -> datasets.Dataset:
    """Return documents of which five in turn begin with the same tokens."""
    rng = np.random.default_rng(12)
    prompts = [rng.integers(8, 120, 14).tolist() for _ in range(32)]
    ends = [rng.integers(8, 120, rng.integers(1, 12)).tolist() for _ in range(160)]
    ids = [prompts[place // 5] + end for place, end in enumerate(ends)]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": [[-100] * 14 + end for end in ends]})


def pairs(*columns: str) -> datasets.Dataset:
    """Return texts of a prompt and two answers; only the columns that are named."""
    rng = np.random.default_rng(13)
    rows = []
    for _ in range(80):
        prompt, *given = (
            " ".join(f"w{word}" for word in rng.integers(8, 120, rng.integers(1, n))) for n in (18, 24, 10)
        )
        rows.append({"prompt": prompt + " w3", "chosen": " " + given[0], "rejected": " " + given[1]})
        if "prompt" not in columns:
            rows[-1] = {name: rows[-1]["prompt"] + rows[-1][name] for name in columns}
    return datasets.Dataset.from_list(rows)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return trainers.tokenizer(mask_token="w4")


def headed(head: str, labels: int) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    kind = head.partition("For")[0]
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_attention_heads=4, num_labels=labels, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    for field in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    model = getattr(transformers, head)(config).double()
    draw(model)
    return model


def settings(folder: Path, kind: type = TrainingArguments, **changes: Any) -> Any:
    known = {"max_steps": STEPS, "optim": "sgd", "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant"}
    if kind is not TrainingArguments:
        known |= {"max_length": None, "gradient_checkpointing": False}
    return trainers.arguments(folder, kind, **known | changes)


def trained(trainer: Trainer, batching: hfp.TokenBudget | None, **how: Any) -> list[float]:
    hfp.attach(trainer, batching, **how)
    return trainers.logged(trainer) + weights(trainer.model)


def weights(model: torch.nn.Module) -> list[float]:
    values = torch.cat([each.detach().double().flatten() for each in model.parameters()])
    return [float(values @ signs_like(values)), float(values.norm())]


def attached(data: Callable[[], Any], budget: hfp.TokenBudget, *, loss: str = "token", **changes: Any) -> Any:
    how = {name: changes.pop(name) for name in ("tokens", "max_segments") if name in changes}

    def run(folder: Path) -> list[float]:
        trainer = Trainer(built("Llama"), settings(folder, **changes), train_dataset=data())
        return trained(trainer, budget, loss=loss, **how)

    return run


def tuned(folder: Path, **more: Any) -> list[float]:
    config = settings(folder, SFTConfig)
    trainer = SFTTrainer(built("Llama"), config, train_dataset=documents(), processing_class=tokenizer(), **more)
    if "peft_config" in more:
        draw_lora(trainer.model)
    return trained(trainer, hfp.TokenBudget(160))


def draw_lora(model: torch.nn.Module) -> None:
    rng = np.random.default_rng(14)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.from_numpy((rng.random(tuple(parameter.shape)) - 0.5) / 4)


def masked(folder: Path) -> list[float]:
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.3)
    data = documents().remove_columns("labels")
    trainer = Trainer(built("BERT"), settings(folder), train_dataset=data, data_collator=collator)
    return trained(trainer, hfp.TokenBudget(160))


def classified(folder: Path, batching: hfp.TokenBudget | None = None) -> list[float]:
    data = documents()
    data = data.remove_columns("labels").add_column("labels", [len(row) % 3 for row in data["input_ids"]])
    model, collator = headed("BertForSequenceClassification", 3), DataCollatorWithPadding(tokenizer())
    trainer = Trainer(model, settings(folder), train_dataset=data, data_collator=collator)
    return trained(trainer, batching)


def preferred(folder: Path) -> list[float]:
    model, reference = headed("LlamaForCausalLM", 2), headed("LlamaForCausalLM", 2)
    with torch.no_grad():
        reference.lm_head.weight *= 0.9
    data, config = pairs("prompt", "chosen", "rejected"), settings(folder, DPOConfig)
    trainer = DPOTrainer(model, ref_model=reference, args=config, train_dataset=data, processing_class=tokenizer())
    return trained(trainer, hfp.TokenBudget(200))


def rewarded(folder: Path) -> list[float]:
    model, data = headed("LlamaForSequenceClassification", 1), pairs("chosen", "rejected")
    trainer = RewardTrainer(model, settings(folder, RewardConfig), train_dataset=data, processing_class=tokenizer())
    return trained(trainer, hfp.TokenBudget(200))


def looped(_: Path) -> list[float]:
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), built("Qwen3 with experts")
    loader = hfp.prepare_dataloader(accelerator, documents(), hfp.TokenBudget(96), model=model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = hfp.compute_loss(model, batch)
            accelerator.backward(loss)
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        if len(losses) == 2 * STEPS:
            break
    return losses + weights(model)


RUNS: dict[str, Callable[[Path], list[float]]] = {
    "by token": attached(documents, hfp.TokenBudget(160)),
    "by sequence": attached(documents, hfp.TokenBudget(160), loss="sequence"),
    "accumulation 4": attached(documents, hfp.TokenBudget(64), gradient_accumulation_steps=4),
    "packed rows": attached(lambda: hfp.pack(documents(), hfp.BestFit(64)), hfp.TokenBudget(192)),
    "shared prefixes": attached(answers, hfp.TokenBudget(160, share_prefixes=4)),
    "fixed shapes": attached(documents, hfp.TokenBudget(150), tokens=160, max_segments=24),
    "SFTTrainer": tuned,
    "LoRA": lambda folder: tuned(folder, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"])),
    "masked language model": masked,
    "classifier": lambda folder: classified(folder, hfp.TokenBudget(160)),
    "classifier with its own batches": classified,
    "DPO": preferred,
    "reward model": rewarded,
    "stream": attached(lambda: documents(400).to_iterable_dataset(num_shards=4), hfp.TokenBudget(96)),
    "plain loop": looped,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    into = Path(sys.argv[1])
    numbers = attached(documents, hfp.TokenBudget(96), gradient_accumulation_steps=2)(into / "checkpoints")
    if os.environ["RANK"] == "0":
        (into / "found.json").write_text(json.dumps(numbers))
    torch.distributed.destroy_process_group()
