"""What it costs to patch a model, by its depth and by its size, before the first training step.

python benchmarks/patching.py

Every figure is from a process of its own, so that no route is known from before. The deep models are narrow, so their
time is that of the search. The large models are patched by `attach`, which searches a small model of the same
configuration; the time of the proof on the first batch comes on top, and is told as well. The model with 70 billion
parameters is on the meta device.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from datasets import Dataset
from measure import figure, machine, recorded
from transformers import LlamaConfig, Trainer, TrainingArguments

import hf_packing as hfp

NARROW = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_llama(layers: int) -> Any:
    return LlamaConfig(**NARROW, num_hidden_layers=layers)


def small_jamba(layers: int) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    mamba = {"mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False}
    return transformers.JambaConfig(**NARROW, **experts, **mamba, num_hidden_layers=layers)


def small_mamba2(layers: int) -> Any:
    state = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
    return transformers.Mamba2Config(vocab_size=128, hidden_size=64, **state, num_hidden_layers=layers)


def small_qwen3_next(layers: int) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}
    return transformers.Qwen3NextConfig(**NARROW, **experts, **linear, num_hidden_layers=layers)


DEEP = {
    "Llama": (small_llama, 80),
    "Jamba": (small_jamba, 32),
    "Mamba2": (small_mamba2, 48),
    "Qwen3-Next": (small_qwen3_next, 48),
}
"""Deep, narrow models, and their numbers of layers."""

LARGE = {
    "268M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16},
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""Llamas with a vocabulary of 32,000, by their number of parameters."""

META = "70B"
"""The model whose weights are not in memory."""


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(name: str, shrink: int, tokens: int) -> dict[str, float]:
    """Return the seconds that each call takes for one of the models."""
    if name in DEEP:
        configuration, layers = DEEP[name]
        model = transformers.AutoModelForCausalLM.from_config(configuration(max(4, layers // shrink)))
        return {"patch_model": seconds_of(lambda: hfp.patch_model(model))}
    torch.set_num_threads(1)
    layers = max(2, LARGE[name]["num_hidden_layers"] // shrink)
    config = LlamaConfig(**LARGE[name] | {"num_hidden_layers": layers})
    if name == META:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        return {'patch_model(prove="small")': seconds_of(lambda: hfp.patch_model(model, prove="small"))}
    documents = Dataset.from_dict({"input_ids": [list(range(1, 65))] * (2 * tokens // 64)})
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(folder, report_to=[], use_cpu=True)
        trainer = Trainer(transformers.LlamaForCausalLM(config), settings, train_dataset=documents)
        seconds = {"attach": seconds_of(lambda: hfp.attach(trainer, hfp.TokenBudget(tokens)))}
        batch = next(iter(trainer.get_train_dataloader()))
    batch = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
    return seconds | {"proof on the first batch": seconds_of(lambda: hfp.check_isolation(trainer.model, batch=batch))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the first batch")
    parser.add_argument("--shrink", type=int, default=1, help="divide the number of layers by this number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=[*DEEP, *LARGE], choices=[*DEEP, *LARGE])
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.shrink, options.tokens)))
        return
    print(machine("torch", "transformers"))
    print(f"Large models use one thread, and their first batch has {options.tokens} tokens.\n")
    for name in options.models:
        command = [sys.executable, __file__, "--only", name, "--shrink", options.shrink, "--tokens", options.tokens]
        runs = [
            json.loads(subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout)
            for _ in range(options.rounds)
        ]
        layers = DEEP[name][1] if name in DEEP else LARGE[name]["num_hidden_layers"]
        for call in runs[0]:
            seconds = [run[call] for run in runs]
            figure(model=name, layers=layers, call=call, seconds=seconds)
            print(f"{name:12}{layers:>3} layers  {call:28}{statistics.median(seconds):>8.1f} s")


if __name__ == "__main__":
    with recorded(__file__):
        main()
