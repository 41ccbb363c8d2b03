"""Rollouts that are level on all ranks: the share of time in which ranks work, and steps of GRPO on two processes.

python benchmarks/rollouts.py

Simulated are 8 and 64 ranks with 4 micro-batches in an optimizer step, which wait for each other after each one, on
lengths of answers to mathematical problems (in the folder HF_PACKING_DATA) and lognormal ones. Then a Llama trains with
GRPOTrainer on two processes of one thread each, with and without `level`, on sampled rows of the same lengths.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from internals import divide, linear_cost_of, mean_over_max
from measure import figure, machine, recorded
from tokenizers import Tokenizer, models

import hf_packing as hfp

DATA = Path(os.environ.get("HF_PACKING_DATA") or Path(__file__).parents[2] / "shared" / "data") / "lengths"
ROUNDS = 4
LLAMA_8B = transformers.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)


def lengths_of(name: str) -> np.ndarray:
    if name == "math" and (DATA / "math.npy").exists():
        return np.load(DATA / "math.npy")
    return np.clip(np.random.default_rng(1).lognormal(6.5, 0.8, 100_000), 1, 8192).astype(int) + 200


def simulate(steps: int) -> None:
    print(f"{'lengths':<12}{'ranks':>6}{'rows':>6}{'as sampled':>12}{'level':>8}{'largest micro-batch':>21}")
    for name in ("math", "lognormal"):
        lengths, rng = lengths_of(name), np.random.default_rng(0)
        for ranks in (8, 64):
            for rows in (4, 8, 16):
                found = []
                for _ in range(steps):
                    tokens = rng.choice(lengths, ranks * ROUNDS * rows).astype(float)
                    cost = linear_cost_of(LLAMA_8B) * tokens + tokens**2
                    before = np.arange(len(cost)).reshape(ROUNDS, ranks, rows)
                    after = divide(cost, ROUNDS, ranks)
                    busy = [mean_over_max(work, work) for work in (cost[each].sum(2) for each in (before, after))]
                    found.append((*busy, tokens[after].sum(2).max() / tokens[before].sum(2).max()))
                sampled, level, largest = np.mean(found, axis=0)
                figure(lengths=name, ranks=ranks, rows=rows, sampled=sampled, level=level, largest=largest)
                print(f"{name:<12}{ranks:>6}{rows:>6}{sampled:>12.1%}{level:>8.1%}{largest:>20.2f}x", flush=True)


def train(args: argparse.Namespace) -> None:
    """Train on this process, and print the seconds of the optimizer steps after the first one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers}
    config = transformers.LlamaConfig(vocab_size=512, num_attention_heads=args.hidden // 64, **sizes)
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w1")),
        eos_token="w2",
        pad_token="w0",
        unk_token="w1",
    )
    lengths = np.minimum(lengths_of("math") // args.shrink + 1, args.longest)
    options = {"max_completion_length": args.longest + 1, "num_generations": 4, "per_device_train_batch_size": 4}
    options |= {"gradient_accumulation_steps": ROUNDS, "max_steps": args.steps + 1, "logging_steps": 1}
    model = transformers.LlamaForCausalLM(config)

    def scripted(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        rng = np.random.default_rng([trainer.state.global_step, trainer.accelerator.process_index])
        answers = torch.zeros(len(input_ids), args.longest + 1, dtype=torch.long)
        for row, length in enumerate(rng.choice(lengths, len(answers)).tolist()):
            answers[row, :length], answers[row, length] = torch.from_numpy(rng.integers(3, 512, length)), 2
        return torch.cat([input_ids, answers], 1)

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [float(len(each) % 5) for each in completions],
            args=trl.GRPOConfig(folder, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, **options),
            train_dataset=Dataset.from_dict({"prompt": [f"w{n % 500 + 5}" for n in range(4096)]}),
            processing_class=words,
        )
        model.generate = scripted
        hfp.attach(trainer, None, prove="model", level=bool(args.level))
        seconds, begun, own = [], [0.0], trainer._prepare_inputs

        def prepared(inputs: Any) -> Any:
            found = own(inputs)
            if len(seconds) % ROUNDS == 0:  # sampling is over
                trainer.accelerator.wait_for_everyone()
                begun[0] = time.perf_counter()
            seconds.append(0.0)
            return found

        class Ends(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                seconds[-1] = time.perf_counter() - begun[0]

        trainer._prepare_inputs = prepared
        trainer.add_callback(Ends())
        trainer.train()
        if trainer.is_world_process_zero():
            logs = [each for each in trainer.state.log_history if "utilization" in each]
            print(json.dumps({"seconds": seconds[2 * ROUNDS - 1 :: ROUNDS], "logs": logs}))
    trainer.accelerator.end_training()


def run(args: argparse.Namespace, level: int) -> dict[str, Any]:
    """Train on two processes."""
    known = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = [f"--{name}={getattr(args, name)}" for name in ("hidden", "layers", "steps", "longest", "shrink")]
    command = [sys.executable, *launch, __file__, "--level", str(level), *settings]
    done = subprocess.run(command, env=known, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"sec')))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, default=50, help="simulated steps")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--shrink", type=int, default=2, help="divides the lengths of answers in the training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--level", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.level is not None:
        train(args)
        return
    print(machine("hf-packing", "trl", "transformers", "torch"))
    simulate(args.simulated)
    ratios = []
    for _ in range(args.rounds):
        sampled, level = run(args, 0), run(args, 1)
        ratios.append(sum(sampled["seconds"]) / sum(level["seconds"]))
        figure(sampled=sampled, level=level)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"steps of GRPO on two processes, sampling aside: {spread} times as fast with level=True")


if __name__ == "__main__":
    with recorded(__file__):
        main()
