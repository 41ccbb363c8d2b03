"""Training a small Mamba and a small Jamba on real documents, padded and packed, 16 documents per step.

python benchmarks/by_segment.py

The documents are the functions of Python's standard library. Both sides see the same documents in the same steps; a
round is one step of each. Without mamba-ssm the scan is transformers' own, a loop over positions whose backward pass
grows with the square of the longest document of a call: use --max-length 64 to see what packing alone gains.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

import common
from measure import figure, in_turn, machine, ratio, recorded
from transformers import PreTrainedModel

import hf_packing as hfp

VOCABULARY = 8192
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
EXPERTS = {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}


def new_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "Mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES))
    return transformers.JambaForCausalLM(transformers.JambaConfig(**SIZES, **ATTENTION, **EXPERTS))


def padded(documents: list[list[int]]) -> dict:
    longest = max(map(len, documents))
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in documents])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in documents])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "use_cache": False,
    }


def packed(documents: list[list[int]]) -> dict:
    return hfp.PackingCollator()([{"input_ids": tokens} for tokens in documents])


class Training:
    """A model and its steps.

    Args:
        model: patched, where batches are packed.
        make_batch: documents to the model's inputs.
    """

    def __init__(self, model: PreTrainedModel, make_batch: Callable[[list[list[int]]], dict]) -> None:
        self.model, self.make_batch = model.train(), make_batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def step(self, documents: list[list[int]]) -> None:
        loss = self.model(**self.make_batch(documents)).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--documents", type=int, default=16, help="documents per step")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument(
        "--sample", type=int, default=None, help="use only this many of the functions, to try the script"
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(machine("hf-packing", "transformers", "torch"))
    texts = common.functions().shuffle(seed=0)
    texts = texts.select(range(arguments.sample or len(texts)))
    ids = hfp.tokenize(texts, common.load_tokenizer(None, texts["text"]))["input_ids"]
    random = np.random.default_rng(0)
    for name in ("Mamba", "Jamba"):
        chosen = random.choice(len(ids), arguments.steps * arguments.documents, replace=len(ids) < 200)
        rows = [ids[int(number)][: arguments.max_length] for number in chosen]
        steps = [rows[start : start + arguments.documents] for start in range(0, len(rows), arguments.documents)]
        sides = {
            "padded": Training(new_model(name), padded),
            "packed": Training(hfp.patch_model(new_model(name)), packed),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for documents in steps:
            taken = in_turn({side: lambda run=run, d=documents: run.step(d) for side, run in sides.items()}, 1)
            for side, each in taken.items():
                seconds[side] += each
        real = sum(map(len, rows))
        slots = sum(len(documents) * max(map(len, documents)) for documents in steps)
        route = hfp.check_isolation(sides["packed"].model).route
        print(f"\n{name}: {'; '.join(route.describe().splitlines())}")
        print(f"{real:,} real tokens in {len(steps)} steps, {1 - real / slots:.0%} padding")
        for side, run in sides.items():
            figure(model=name, side=side, real_tokens=real, seconds=seconds[side], losses=run.losses)
            speed, first, last = real / sum(seconds[side]), run.losses[0], run.losses[-1]
            print(f"{side:8}{speed:>9,.0f} real tokens/s, loss of the first step {first:.5f}, of the last {last:.4f}")
        print(f"packed is {ratio(seconds['padded'], seconds['packed'])} times as fast, step by step")


if __name__ == "__main__":
    with recorded(__file__):
        main()
