"""Padded batches with and without computing the padding: a classifier on four length distributions, DPO, and memory.

python benchmarks/padded_batches.py

A BERT classifier of 4 layers is trained on batches of 32 rows, padded to the longest row of the batch: rows in random
order, rows sorted by length, and rows in random order after patch_model. Slots are tokens with padding. The model is
BERT-Mini, of width 256; for the shortest documents, where a call costs most, also BERT-Small, of width 512. Then a
Llama of 4 layers is trained with TRL's DPOTrainer on pairs in the same three ways. Last, the memory that a reward model
keeps for the backward pass is compared. All sides run in turn, on one thread; times are those of the process. Before
that, the losses of all sides are compared.
"""

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from measure import figure, machine, recorded
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import hf_packing as hfp

LENGTHS = {
    "CoLA-like, mean 11": (10, 0.4, 128),
    "MNLI-like, mean 38": (34, 0.5, 128),
    "SQuAD-like, mean 156": (147, 0.35, 384),
    "IMDB-like, mean 218": (180, 0.65, 512),
}
"""Median length, sigma of its logarithm, and longest length in tokens, of documents with these names."""

ROWS, VOCABULARY, CLOSE = 32, 4096, 1e-4

Batch = dict[str, torch.Tensor]


def documents(name: str, number: int, shrink: int) -> list[np.ndarray]:
    median, sigma, longest = LENGTHS[name]
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(median / shrink), sigma, number), 4, longest // shrink).astype(int)
    return [rng.integers(5, VOCABULARY, length) for length in lengths]


def padded(rows: list[np.ndarray]) -> Batch:
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


def in_batches(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def seconds(call: Callable[[], None]) -> float:
    """Return the time of this process, so that other processes of the machine count little."""
    began = time.process_time()
    call()
    return time.process_time() - began


def spread(slow: list[float], fast: list[float]) -> str:
    """Return the median of the ratios round by round, with the smallest and the largest, to two places."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compare(name: str, sides: dict[str, Callable[[], None]], rounds: int, slots: float | None) -> None:
    """Run all sides in turn, and print how much faster the last one is than the others."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for side in sides.values():
        side()
    for _ in range(rounds):
        for side, call in sides.items():
            found[side].append(seconds(call))
    *others, last = sides
    text = ", ".join(f"{spread(found[other], found[last])} over {other}" for other in others)
    share = "" if slots is None else f"; slots / tokens of random batches: {slots:.2f}"
    print(f"{name:33} without padding: {text}{share}")
    figure(name=name, slots=slots, seconds=found)


def classify(arguments: argparse.Namespace) -> None:
    for name, width in [*((name, 256) for name in LENGTHS), (next(iter(LENGTHS)), 512)]:
        hidden = width // arguments.shrink
        sizes = {"hidden_size": hidden, "num_attention_heads": width // 64, "intermediate_size": 4 * hidden}
        config = transformers.BertConfig(vocab_size=VOCABULARY, num_hidden_layers=4, **sizes)
        torch.manual_seed(0)
        stock = transformers.BertForSequenceClassification(config)
        unpadded = hfp.patch_model(copy.deepcopy(stock))
        rows = documents(name, arguments.rows, arguments.shrink)
        random = [padded(each) for each in in_batches(rows, ROWS)]
        by_length = [padded(each) for each in in_batches(sorted(rows, key=len), ROWS)]
        with torch.no_grad():
            losses = [float(model.eval()(**random[0]).loss) for model in (stock, unpadded)]
        if abs(losses[0] - losses[1]) > CLOSE:
            raise SystemExit(f"{name}: the losses differ: {losses}")
        slots = sum(each["input_ids"].numel() for each in random) / sum(map(len, rows))

        def train(model: Any, batches: list[Batch]) -> Callable[[], None]:
            def run() -> None:
                model.train()
                for batch in batches:
                    model.zero_grad()
                    model(**batch).loss.backward()

            return run

        sides = {
            "random order": train(stock, random),
            "sorted": train(stock, by_length),
            "unpadded": train(unpadded, random),
        }
        compare(f"{name}, width {width}", sides, arguments.rounds, slots)


def llama(layers: int, shrink: int, **labels: int) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 256 // shrink, "intermediate_size": 768 // shrink, "num_attention_heads": 4}
    return transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, num_hidden_layers=layers, pad_token_id=0, **labels)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w3")


def prefer(arguments: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)

    def text(median: int) -> str:
        length = int(np.clip(rng.lognormal(np.log(median / arguments.shrink), 0.85), 4, 700 // arguments.shrink))
        return " ".join(f"w{word}" for word in rng.integers(5, VOCABULARY, length))

    pairs = [{"prompt": text(60), "chosen": " " + text(90), "rejected": " " + text(80)} for _ in range(arguments.pairs)]
    torch.manual_seed(0)
    policy = transformers.LlamaForCausalLM(llama(4, arguments.shrink))

    def trainer() -> Any:
        settings = DPOConfig(
            tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            report_to="none",
            max_length=None,
            gradient_checkpointing=False,
        )
        models_of_trainer = {"model": copy.deepcopy(policy), "ref_model": copy.deepcopy(policy)}
        data = datasets.Dataset.from_list(pairs)
        return DPOTrainer(args=settings, train_dataset=data, processing_class=tokenizer(), **models_of_trainer)

    stock, unpadded = trainer(), trainer()
    hfp.attach(unpadded, None)
    rows = [stock.train_dataset[number] for number in range(len(pairs))]
    length = [2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows]
    random = [stock.data_collator(each) for each in in_batches(rows, 8)]
    by_length = [stock.data_collator(each) for each in in_batches([rows[n] for n in np.argsort(length)], 8)]
    slots = sum(each["attention_mask"].numel() for each in random) / sum(
        int(each["attention_mask"].sum()) for each in random
    )
    losses = [float(each.compute_loss(each.model, random[0]).detach()) for each in (stock, unpadded)]
    if abs(losses[0] - losses[1]) > CLOSE:
        raise SystemExit(f"DPO: the losses differ: {losses}")

    def train(each: Any, batches: list[Any]) -> Callable[[], None]:
        def run() -> None:
            for batch in batches:
                each.model.zero_grad()
                each.compute_loss(each.model, batch).backward()

        return run

    sides = {
        "random order": train(stock, random),
        "sorted": train(stock, by_length),
        "unpadded": train(unpadded, random),
    }
    compare("DPO", sides, arguments.rounds, slots)


def keep(shrink: int) -> None:
    """Compare the bytes that a reward model keeps for the backward pass, without its weights."""
    stock = transformers.LlamaForSequenceClassification(llama(8, shrink, num_labels=1))
    rng = np.random.default_rng(0)
    lengths = np.r_[512, rng.integers(40, 300, 15)] // shrink
    batch = padded([rng.integers(5, VOCABULARY, length) for length in lengths])
    del batch["labels"]
    found = []
    for model in (stock, hfp.patch_model(copy.deepcopy(stock))):
        kept: dict[int, int] = {}
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def note(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = model.train()(**batch)
        found.append(sum(size for place, size in kept.items() if place not in weights))
        del output
    real = float(batch["attention_mask"].float().mean())
    print(
        f"reward model, {real:.0%} of the slots are tokens: {found[1] / 1e6:,.0f} MB are kept for the backward pass, "
        f"{found[0] / 1e6:,.0f} MB with padding; {found[1] / found[0]:.2f} of it"
    )
    figure(name="memory", real=real, padded=found[0], unpadded=found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96, help="documents of each length distribution")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths and the widths of models by this number")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    print(f"{machine('torch', 'transformers', 'trl')}, 1 thread\n")
    classify(arguments)
    prefer(arguments)
    keep(arguments.shrink)


if __name__ == "__main__":
    with recorded(__file__):
        main()
