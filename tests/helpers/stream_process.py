"""Train on a packed stream through Trainer and PackingCollator, on one process or more, and note the documents."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from datasets import IterableDataset
from process_group import end_process_group
from tiny_models import build
from transformers import Trainer, TrainingArguments

import hf_packing as hfp

DOCUMENTS = [[number + 1] * (3 + number % 5) for number in range(24)]


def packed_stream():
    stream = IterableDataset.from_generator(
        lambda: iter({"input_ids": tokens, "attention_mask": [1] * len(tokens)} for tokens in DOCUMENTS)
    )
    return stream.map(hfp.BestFit(16), batched=True, batch_size=24, remove_columns=["attention_mask"])


def train(folder, steps, **settings):
    """The documents of each step of this rank."""
    seen = []

    class Noting(Trainer):
        def compute_loss(self, model, inputs, *args, **more):
            borders, tokens = inputs["cu_seq_lens_q"].tolist(), inputs["input_ids"][0].tolist()
            seen.append([tokens[a:b] for a, b in pairwise(borders)])
            return super().compute_loss(model, inputs, *args, **more)

    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_steps=steps,
        per_device_train_batch_size=1,
        dataloader_pin_memory=False,
        **settings,
    )
    model = hfp.patch_model(build("Llama"))
    trainer = Noting(model, args, train_dataset=packed_stream(), data_collator=hfp.PackingCollator())
    trainer.train()
    return trainer, seen


def main():
    torch.set_num_threads(1)
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    trainer, seen = train(folder, **settings)
    (folder / f"seen-{trainer.args.process_index}.json").write_text(json.dumps(seen))
    trainer.accelerator.free_memory()
    del trainer
    end_process_group()


if __name__ == "__main__":
    main()
