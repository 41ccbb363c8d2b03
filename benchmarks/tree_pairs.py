"""A step of DPOTrainer on pairs with long prompts: without padding, and with the prompt of each pair computed once.

python benchmarks/tree_pairs.py

Both sides are TRL's DPOTrainer with its own batches, loss and reference model, on one thread. Without shared prefixes,
`attach(trainer, None)` runs all rows without padding. With them, `attach(trainer, None, share_prefixes=True)` runs the
prompt of a pair once in both models. The two losses have to be equal. The output layer runs on all tokens both times.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from measure import figure, in_turn, machine, recorded
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer

import hf_packing as hfp

VOCABULARY = 2048
EQUAL_LOSS = 1e-4


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0", unk_token="w1")


def pairs(number: int, prompt: int, answer: int) -> datasets.Dataset:
    """Random pairs; prompts have half to one and a half times `prompt` tokens, and answers the same of `answer`."""
    rng = np.random.default_rng(0)

    def text(mean: int) -> str:
        return " ".join(f"w{word}" for word in rng.integers(8, VOCABULARY, int(mean * rng.uniform(0.5, 1.5))))

    rows = [
        {"prompt": text(prompt), "chosen": f" {text(answer)}", "rejected": f" {text(answer)}"} for _ in range(number)
    ]
    return datasets.Dataset.from_list(rows)


def trainer_of(data: datasets.Dataset, hidden: int, layers: int, share: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    both = [transformers.LlamaForCausalLM(config.__class__(**config.to_dict())) for _ in range(2)]
    arguments = DPOConfig(
        tempfile.mkdtemp(),
        max_length=None,
        per_device_train_batch_size=len(data),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model=both[0], ref_model=both[1], args=arguments, train_dataset=data, processing_class=tokenizer()
    )
    hfp.attach(trainer, None, share_prefixes=share)
    return trainer


def step(trainer: Any, batch: dict[str, Any]) -> float:
    trainer.model.train().zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--answer", type=int, default=100, help="mean tokens of an answer")
    parser.add_argument("--prompts", type=int, nargs="+", default=[200, 1000], help="mean tokens of a prompt")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(f"{machine('hf-packing', 'torch', 'transformers', 'trl')}, one thread\n")
    for prompt in arguments.prompts:
        data = pairs(arguments.pairs, prompt, arguments.answer)
        calls = {}
        for name, share in (("without", False), ("with", True)):
            trainer = trainer_of(data, arguments.hidden, arguments.layers, share)
            calls[name] = partial(step, trainer, next(iter(trainer.get_train_dataloader())))
        losses = {name: call() for name, call in calls.items()}
        assert abs(losses["with"] - losses["without"]) <= EQUAL_LOSS * abs(losses["without"]), losses
        seconds = in_turn(calls, arguments.rounds, time.process_time)
        gains = [one / other for one, other in zip(seconds["without"], seconds["with"], strict=True)]
        print(
            f"prompts of {prompt:,} tokens, answers of {arguments.answer}: with shared prompts, a step is "
            f"{statistics.median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f}) times as fast"
        )
        figure(prompt=prompt, answer=arguments.answer, gains=gains, processor_seconds=seconds)


if __name__ == "__main__":
    with recorded(__file__):
        main()
