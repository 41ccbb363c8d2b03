"""Packing with flash attention (arXiv 2407.09105): its eight methods and its six claims.

    python recipes/reproduce/packing_with_flash_attention.py
    python recipes/reproduce/packing_with_flash_attention.py --sets python --documents 8000    # needs no data

A small Llama is trained on rows of concatenated documents of all sets, as most large models are. From there, each
method trains it for one epoch on each set, 4 rows a step: 4 documents, or 4 packs. Validation is always on documents
alone. The options say how many documents of each set are for what: `--before` are for the model that all methods start
from. The paper fine-tunes models of 7 billion parameters and more on GPUs.
"""

import argparse
import ast
import copy
import gzip
import json
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from common import Report, Stopwatch, chunks, options, parse, shared_file, small_model, yes_or_no
from tokenizers.implementations import ByteLevelBPETokenizer
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM, PreTrainedModel, get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import get_length_grouped_indices

import hf_packing as hfp

SOURCES = {
    "math": "GSM8K's training problems, one {prompt, completion} a line",
    "instruct": "GPTeacher's instructions, one {prompt, completion} a line",
    "python": "the functions of Python's standard library",
}
END, VOCABULARY = "<|endoftext|>", 2048
FIRST_LEARNING_RATE, LEARNING_RATE, WARM_UP = 2e-3, 5e-4, 0.05
FIRST_BATCH, BATCH = 2, 4
"""Rows per step, documents or packs: of the base training, which all methods start from, and of the methods."""
PAPER_BY_ROW = {512: "1.294 (4k)", 1024: "1.352 (8k)", 2048: "1.431 (16k)"}
"""Validation loss without position ids, rows 8 times as long."""
EQUAL = 0.01
"""Losses that differ by less count as equal; another order of the documents changes them by about as much."""
MOST = 0.5
"""Closing more than this share of a gap is closing most of it."""

PADDING, GROUPED, MINI_BATCH = "random + padding", "group by length + padding", "minibatch + PosID"
WITHOUT, WITH = "fixed length", "fixed length + PosID"
MULTIPACK, SORTED, RANDOM = "multipack + PosID", "sorted + PosID", "random packing + PosID"
METHODS = (PADDING, GROUPED, MINI_BATCH, WITHOUT, WITH, MULTIPACK, SORTED, RANDOM)
PADDED = (PADDING, GROUPED)
"""Batches are padded, for an unpatched model; those of other methods are flat, for a patched one."""
MORE_STEPS = f"{MULTIPACK}, 1 pack a step"
SORTED_IN_STEPS, RANDOM_IN_STEPS = (f"{name}, steps of multipack" for name in (SORTED, RANDOM))

Row = dict[str, Any]


class Set(NamedTuple):
    name: str
    training: datasets.Dataset
    validation: datasets.Dataset


class Outcome(NamedTuple):
    """Speed and losses of an epoch."""

    steps: int
    speed: float
    """Tokens of documents per CPU second."""
    training_loss: float
    """Mean over all tokens of the epoch, each measured in the step that trained on it."""
    validation_loss: float


def main() -> None:
    parser = options(__doc__, documents=1500, validation=200, before=1500, row_length=1024, hidden=96, layers=3)
    parser.add_argument("--row-lengths", type=int, nargs="*", default=[512, 2048], help="more, on the first set")
    parser.add_argument("--sets", nargs="+", choices=list(SOURCES), default=list(SOURCES))
    toy = {"documents": 24, "validation": 6, "before": 24, "row_length": 128, "row_lengths": [64]}
    arguments = parse(parser, **toy, hidden=32, layers=1)
    datasets.disable_progress_bars()
    report = Report("Packing with flash attention (arXiv 2407.09105)", "torch", "transformers")
    numbers = arguments.documents, arguments.validation, arguments.before
    texts = {name: draw(read_texts(name), numbers) for name in arguments.sets}
    base, tokenizer = train_base([text for *_, before in texts.values() for text in before], arguments)
    sets = [
        Set(name, *(tokenize(part, tokenizer, arguments.row_length) for part in parts))
        for name, (*parts, _) in texts.items()
    ]
    found = {data.name: compare(data, base, arguments.row_length, report) for data in sets}
    verdicts = zip(*map(claims, found.values()), strict=True)
    report.table(
        f"The paper's claims; losses that differ by less than {EQUAL} count as equal",
        ["claim", "paper", *found],
        [(*of_sets[0][:2], *(verdict for *_, verdict in of_sets)) for of_sets in verdicts],
    )
    report.say("""
        Speed: a CPU is as busy with 4 documents as with 4 packs, so packing ahead gains little over a minibatch; the
        paper's factor is that of a GPU. Sorted and random packing leave more room free than multipack, so they have
        more packs and more steps, and the number of steps matters more than the order; hence the lines with as many
        steps. In the paper, sorted packing falls behind on FLAN, whose lengths vary more than those here.
    """)
    vary_row_length(sets[0], base, found[sets[0].name], arguments, report)
    report.save(arguments.output / "packing_with_flash_attention.md")


def read_texts(name: str) -> list[str]:
    if name == "python":
        return list(standard_library_functions())
    with gzip.open(shared_file(f"{name}.jsonl.gz", SOURCES[name]), "rt", encoding="utf-8") as lines:
        return ["{prompt}\n{completion}".format(**json.loads(line)) for line in lines]


def standard_library_functions() -> Iterator[str]:
    """Yield the source of every function and method of the standard library, without its tests."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in tqdm(sorted(library.rglob("*.py")), desc="Reading the standard library", unit=" files"):
        if {"site-packages", "test", "tests"} & set(file.relative_to(library).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            nodes: list[ast.AST] = [ast.parse(source)]
        except (SyntaxError, UnicodeDecodeError):  # a few files are bad on purpose
            continue
        lines = source.split("\n")  # as ast counts them; splitlines would also cut at form feeds
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
            else:
                nodes.extend(reversed(list(ast.iter_child_nodes(node))))


def draw(texts: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    """Draw this many texts for each part at random, no text for two parts."""
    drawn = [texts[place] for place in np.random.default_rng(0).permutation(len(texts))]
    return [drawn[begin:end] for begin, end in pairwise(np.cumsum([0, *sizes]))]


def tokenize(texts: Sequence[str], tokenizer: ByteLevelBPETokenizer, longest: int) -> datasets.Dataset:
    """Tokenize the texts, add an end token to each, and truncate to `longest` tokens."""
    end = tokenizer.token_to_id(END)
    encodings = tokenizer.encode_batch(list(texts))
    return datasets.Dataset.from_dict({"input_ids": [[*encoding.ids, end][:longest] for encoding in encodings]})


def train_base(texts: Sequence[str], arguments: argparse.Namespace) -> tuple[PreTrainedModel, ByteLevelBPETokenizer]:
    """Train a tokenizer, and the model that all methods start from, on texts that no method sees."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, VOCABULARY, min_frequency=0, special_tokens=[END], show_progress=False)
    longest = max([arguments.row_length, *arguments.row_lengths])
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 3 * arguments.hidden, "max_position_embeddings": longest}
    model = small_model(LlamaForCausalLM, arguments.hidden, arguments.layers, tie_word_embeddings=True, **sizes)
    documents = tokenize(texts, tokenizer, arguments.row_length).shuffle(seed=0)
    steps = chunks(rows_of(WITHOUT, documents, arguments.row_length), FIRST_BATCH)
    validation = documents.select(range(min(len(documents), arguments.validation)))
    train("base model", model, WITHOUT, steps, validation, FIRST_LEARNING_RATE)
    hfp.unpatch_model(model)
    return model, tokenizer


def rows_of(method: str, documents: datasets.Dataset, row_length: int) -> list[Row]:
    """Return the rows of an epoch, documents or packs, in training order."""
    if method in (PADDING, MINI_BATCH):
        return list(documents.shuffle(seed=0))
    if method == GROUPED:  # as Trainer does: sorted by length within blocks of 50 batches
        lengths, generator = list(map(len, documents["input_ids"])), torch.Generator().manual_seed(0)
        return list(documents.select(get_length_grouped_indices(lengths, BATCH, generator=generator)))
    strategies = {
        WITHOUT: hfp.FixedLength(row_length, seed=None),  # in the order of the documents, which is random already
        WITH: hfp.FixedLength(row_length, seed=None),
        MULTIPACK: hfp.Multipack(row_length),
        SORTED: hfp.FirstCome(row_length, order="longest_first"),
        RANDOM: hfp.FirstCome(row_length),
    }
    rows = list(hfp.pack(documents, strategies[method]))
    if method == WITHOUT:  # to the model, a row is one document: attention and positions continue across the borders
        return [{"input_ids": row["input_ids"]} for row in rows]
    return rows


def batch_of(method: str, rows: Sequence[Row]) -> dict[str, Any]:
    if method not in PADDED:
        return hfp.PackingCollator()(rows)
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = [pad_sequence(ids, batch_first=True, padding_value=fill) for fill in (0, -100)]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return {"input_ids": padded[0], "labels": padded[1], "attention_mask": mask}


def train(
    title: str,
    model: PreTrainedModel,
    method: str,
    steps: Sequence[Sequence[Row]],
    validation: datasets.Dataset,
    learning_rate: float,
) -> Outcome:
    """Train one epoch with a learning rate that falls to zero by the last step, then measure the validation loss."""
    if method not in PADDED:
        hfp.patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = get_linear_schedule_with_warmup(optimizer, round(WARM_UP * len(steps)), len(steps))
    summed_loss, tokens, seconds = 0.0, 0, 0.0
    for rows in tqdm(steps, desc=title):
        with Stopwatch() as watch:
            loss = model(**batch_of(method, rows), use_cache=False).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        trained = sum(len(row["input_ids"]) for row in rows)
        summed_loss, tokens, seconds = summed_loss + trained * loss.item(), tokens + trained, seconds + watch.seconds
    with hfp.patched(model):
        validation_loss = hfp.evaluation_loss(Accelerator(cpu=True), model, validation, rows_per_batch=16)
    return Outcome(len(steps), tokens / seconds, summed_loss / tokens, validation_loss)


def compare(data: Set, base: PreTrainedModel, row_length: int, report: Report) -> dict[str, Outcome]:
    """Train by all methods on one set, and by some of them with other numbers of steps."""
    rows = {method: rows_of(method, data.training, row_length) for method in METHODS}
    epochs = {method: (method, chunks(rows[method], BATCH)) for method in METHODS}
    epochs[MORE_STEPS] = MULTIPACK, chunks(rows[MULTIPACK], 1)
    for title, method in ((SORTED_IN_STEPS, SORTED), (RANDOM_IN_STEPS, RANDOM)):
        ends = np.linspace(0, len(rows[method]), len(epochs[MULTIPACK][1]) + 1).round().astype(int)
        epochs[title] = method, [rows[method][begin:end] for begin, end in pairwise(ends)]
    found = {
        title: train(f"{data.name}, {title}", copy.deepcopy(base), method, steps, data.validation, LEARNING_RATE)
        for title, (method, steps) in epochs.items()
    }
    tokens = sum(map(len, data.training["input_ids"])) / len(data.training)
    caption = f"{data.name}: {len(data.training):,} documents of {tokens:.0f} tokens on average, rows of {row_length}"
    report.table(
        f"{caption}, speed in tokens per CPU second beside padding's",
        ["method", "steps:,", "speed:.2f", "training loss:.4f", "validation loss:.4f"],
        [(title, steps, speed / found[PADDING].speed, *losses) for title, (steps, speed, *losses) in found.items()],
    )
    return found


def claims(found: dict[str, Outcome]) -> list[tuple[str, str, str]]:
    """Return the paper's claims, its figures for Mistral-7B on FLAN, and whether the claims hold here."""
    training = {name: outcome.training_loss for name, outcome in found.items()}
    validation = {name: outcome.validation_loss for name, outcome in found.items()}

    def faster(fast: Sequence[str], slow: str) -> str:
        ratio = sum(found[name].speed for name in fast) / len(fast) / found[slow].speed
        return f"{yes_or_no(ratio > 1)}: {ratio:.2f} times"

    def lower(losses: dict[str, float], low: Sequence[str], high: Sequence[str]) -> str:
        highest, lowest = max(losses[name] for name in low), min(losses[name] for name in high)
        verdict = "equal" if abs(highest - lowest) < EQUAL else yes_or_no(highest < lowest)
        return f"{verdict}: {highest:.3f}, {lowest:.3f}"

    def equal(one: str, other: str) -> str:
        same = abs(validation[one] - validation[other]) < EQUAL
        return f"{yes_or_no(same)}: {validation[one]:.3f}, {validation[other]:.3f}"

    ahead, unsorted = (WITH, MULTIPACK, SORTED, RANDOM), (WITH, MULTIPACK, RANDOM)
    unsorted_in_steps = (WITH, MULTIPACK, RANDOM_IN_STEPS)
    best, few, many = (validation[name] for name in (MINI_BATCH, MULTIPACK, MORE_STEPS))
    closed = (few - many) / (few - best)
    most = f"{yes_or_no(closed > MOST)}: {few:.3f} to {many:.3f}, {closed:.0%} of the gap"
    again = "the same, in as many steps"
    return [
        ("minibatch is faster than padding", "1.90 times", faster([MINI_BATCH], PADDING)),
        ("packing ahead is faster than minibatch", "2.14 times", faster(ahead, MINI_BATCH)),
        ("validation loss: minibatch = padding", "equal", equal(MINI_BATCH, PADDING)),
        ("validation loss: minibatch < packed ahead", "lower", lower(validation, [MINI_BATCH], ahead)),
        ("validation loss: packed ahead < without PosID", "lower", lower(validation, ahead, [WITHOUT])),
        ("more steps close most of that gap", "1.215 to 1.153", most),
        ("sorted: lowest training loss", "lowest", lower(training, [SORTED], unsorted)),
        (again, "", lower(training, [SORTED_IN_STEPS], unsorted_in_steps)),
        ("sorted: highest validation loss", "highest", lower(validation, unsorted, [SORTED])),
        (again, "", lower(validation, unsorted_in_steps, [SORTED_IN_STEPS])),
        ("validation loss: random packing = multipack", "equal", equal(RANDOM, MULTIPACK)),
        (again, "", equal(RANDOM_IN_STEPS, MULTIPACK)),
    ]


def vary_row_length(
    data: Set, base: PreTrainedModel, found: dict[str, Outcome], arguments: argparse.Namespace, report: Report
) -> None:
    """Train with fixed length, without and with position ids, with the same tokens per step at every row length."""
    tokens, pairs = BATCH * arguments.row_length, {arguments.row_length: [found[WITHOUT], found[WITH]]}
    for row_length in arguments.row_lengths:
        pairs[row_length] = []
        for method in (WITHOUT, WITH):
            steps = chunks(rows_of(method, data.training, row_length), max(1, tokens // row_length))
            title = f"{data.name}, {method}, rows of {row_length}"
            outcome = train(title, copy.deepcopy(base), method, steps, data.validation, LEARNING_RATE)
            pairs[row_length].append(outcome)
    rows = [
        (length, pair[0].steps, pair[0].validation_loss, PAPER_BY_ROW.get(length), pair[1].validation_loss)
        for length, pair in sorted(pairs.items())
    ]
    report.table(
        f"{data.name}: validation loss by row length, {tokens} tokens a step",
        ["row", "steps", f"{WITHOUT}:.4f", "paper", f"{WITH}:.4f"],
        rows,
    )
    _, _, without, _, with_ids = zip(*rows, strict=True)
    report.say(f"""
        Without PosID the loss grows with the row length: {yes_or_no(list(without) == sorted(without))}. With PosID it
        stays within {EQUAL}: {yes_or_no(max(with_ids) - min(with_ids) < EQUAL)}; the paper has it flat as well.
    """)


if __name__ == "__main__":
    main()
