"""The same model on the same documents with SFTTrainer: padded, with TRL's packing, and with ours, in one run.

python benchmarks/training.py

The documents are the functions of Python's standard library. Padded batches have as many documents as a packed row has
on average, so that all sides take about equally many steps. TRL packs with its best fit and keeps documents apart by
the mask that transformers makes from position_ids for sdpa; ours runs by segment. Before training, the loss of the
documents is computed from the batches of every side, and has to be the same. Then all sides train in turn, a few steps
of each in every round. Real tokens are those of documents, without padding.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

import common
from measure import figure, in_turn, machine, ratio, recorded
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp

SIDES = ("padding", "TRL packing", "hf_packing")
EQUAL_LOSS = 1e-4


class Side:
    """One way to train, with an endless iterator over its batches.

    Args:
        name: of SIDES.
        documents: with input_ids.
        tokenizer: that made them.
        arguments: of the command line.
    """

    def __init__(
        self,
        name: str,
        documents: datasets.Dataset,
        tokenizer: PreTrainedTokenizerBase,
        arguments: argparse.Namespace,
    ) -> None:
        self.name = name
        per_row = max(1, round(arguments.max_length / np.mean([len(ids) for ids in documents["input_ids"]])))
        config = SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=per_row if name == "padding" else 1,
            max_length=arguments.max_length if name == "TRL packing" else None,
            packing=name == "TRL packing",
            learning_rate=1e-3,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            dataloader_pin_memory=False,
            disable_tqdm=True,
            save_strategy="no",
        )
        model = new_model(arguments, tokenizer)
        self.trainer = SFTTrainer(model, config, train_dataset=documents, processing_class=tokenizer)
        if name == "hf_packing":
            hfp.attach(self.trainer, hfp.TokenBudget(arguments.max_length))
        self.model = self.trainer.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = self.forever()
        self.real_tokens = 0

    def forever(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.trainer.get_train_dataloader()

    def loss_before(self) -> tuple[float, int]:
        """Return the mean loss over all labels of one epoch, and the number of labels."""
        total, labels = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in self.trainer.get_train_dataloader():
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                logits = self.model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
                wanted = batch["labels"][:, 1:].flatten()
                total += F.cross_entropy(logits, wanted, reduction="sum").item()
                labels += int((wanted != -100).sum())
        self.model.train()
        return total / labels, labels

    def train(self, steps: int) -> None:
        """Take some steps as SFTTrainer does."""
        self.real_tokens = 0
        for _ in range(steps):
            batch = next(self.batches)
            self.real_tokens += real_tokens(batch)
            self.trainer.current_gradient_accumulation_steps = 1
            items = (batch["labels"][:, 1:] != -100).sum()
            self.trainer.training_step(self.model, dict(batch), items)
            self.optimizer.step()
            self.optimizer.zero_grad()


def real_tokens(batch: dict[str, Any]) -> int:
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())


def new_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 64),
        num_key_value_heads=max(1, arguments.hidden // 128),
        max_position_embeddings=arguments.max_length,
        attn_implementation="sdpa",
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=1024, help="longer documents are left out")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample", type=int, help="use only this many of the functions, to try the script")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    functions = common.functions().shuffle(seed=0)
    functions = functions.select(range(arguments.sample or len(functions)))
    tokenizer = common.load_tokenizer(None, functions["text"])
    tokenized = hfp.tokenize(functions, tokenizer).select_columns("input_ids")
    fitting = tokenized.filter(lambda row: 2 <= len(row["input_ids"]) <= arguments.longest)
    documents = fitting.select(range(min(arguments.documents, len(fitting))))
    lengths = np.array([len(ids) for ids in documents["input_ids"]])
    print(machine("hf-packing", "trl", "transformers", "torch"))
    print(f"{len(lengths):,} documents, mean {lengths.mean():.0f} tokens; rows of {arguments.max_length:,}, one thread")
    sides = {name: Side(name, documents, tokenizer, arguments) for name in SIDES}
    before = {name: side.loss_before() for name, side in sides.items()}
    for name, (loss, labels) in before.items():
        print(f"{name:<12} loss before training {loss:.6f} over {labels:,} labels")
    if max(loss for loss, _ in before.values()) - min(loss for loss, _ in before.values()) > EQUAL_LOSS:
        raise SystemExit("the losses before training differ")
    for side in sides.values():
        side.train(1)
    tokens: dict[str, list[int]] = {name: [] for name in SIDES}

    def timed(name: str) -> None:
        sides[name].train(arguments.steps)
        tokens[name].append(sides[name].real_tokens)

    began = time.perf_counter()
    seconds = in_turn({name: lambda name=name: timed(name) for name in SIDES}, arguments.rounds)
    per_token = {name: [s / t for s, t in zip(seconds[name], tokens[name], strict=True)] for name in SIDES}
    for name in SIDES:
        facts = {"loss_before": before[name][0], "labels": before[name][1], "seconds": seconds[name]}
        figure(side=name, real_tokens=tokens[name], **facts)
        print(f"{name:<12} {sum(tokens[name]) / sum(seconds[name]):,.0f} real tokens/s")
    for other in SIDES[:-1]:
        print(f"hf_packing is {ratio(per_token[other], per_token['hf_packing'])} times as fast as {other}")
    print(f"{arguments.rounds} rounds in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    with recorded(__file__):
        main()
