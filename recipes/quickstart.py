"""Pack real documents, and train on them padded and packed, in alternating steps.

    python recipes/quickstart.py
    python recipes/quickstart.py --data my.jsonl --tokenizer gpt2 --max_length 4096

It prints what padding costs, what packing saves, and whether a model keeps the documents of a row apart, before and
after `patch_model`. Then it trains two copies of the model on the same documents, and draws a picture, which needs
`pip install "hf-packing[plots]"`. Rows of --data need `text`, `prompt` and `completion`, or `messages`; without --data,
they are functions of the Python standard library. Without --model, the model is a small Llama from scratch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import common
import numpy as np
import psutil
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, HfArgumentParser, PreTrainedTokenizerBase

import hf_packing as hfp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECOND = "second" if DEVICE == "cuda" else "CPU second"
now = time.perf_counter if DEVICE == "cuda" else time.process_time  # other processes hardly change CPU seconds
NEXT_STEPS = """
Next:
  see what packing does for your data   hf-packing report my.jsonl --tokenizer gpt2 --max-length 2048 4096
  run this on your data                 python recipes/quickstart.py --data my.jsonl --tokenizer gpt2
  fine-tune a model on your chats       python recipes/sft.py --data chats.jsonl --model_name_or_path Qwen/Qwen3-0.6B"""
Figures = dict[str, list[float]]


@dataclass
class Arguments:
    data: str | None = field(default=None, metadata={"help": "file, folder or name of the rows; see above"})
    tokenizer: str | None = field(default=None, metadata={"help": "name or folder"})
    model: str | None = field(default=None, metadata={"help": "name or folder"})
    max_length: int = field(default=2048, metadata={"help": "tokens that a row holds"})
    documents_per_step: int = field(default=16, metadata={"help": "of each training"})
    steps: int = field(default=8, metadata={"help": "of each training; an epoch at most"})
    output_dir: Path = field(default=Path("outputs/quickstart"), metadata={"help": "folder of the picture"})


def main(flags: Sequence[str] | None = None) -> tuple[Figures, Figures]:
    parser = HfArgumentParser(Arguments, description=__doc__, formatter_class=common.Help)
    (args,) = parser.parse_args_into_dataclasses(flags)
    common.check_positive(args, "documents_per_step", "steps")
    torch.set_num_threads(1)  # threads that wait for a busy core would slow the short operations of packed rows most
    rows = common.read(args.data) if args.data else common.functions()
    some = common.texts(rows.select(range(0, len(rows), len(rows) // 2000 + 1)))
    tokenizer = common.load_tokenizer(args.tokenizer or args.model, some, vocabulary=4096)
    documents = hfp.tokenize(rows, tokenizer)
    report = hfp.packing_report(documents, args.max_length, padded_rows=args.documents_per_step)
    costs = print_costs(report)
    began = time.perf_counter()
    packed = hfp.pack(documents, hfp.BestFit(args.max_length))
    print(f"\npacked into {len(packed):,} rows in {time.perf_counter() - began:.2f} seconds\n")
    seconds, losses = train_both(args, documents, tokenizer)
    both = ", ".join(f"{name} {each[0]:.5f} and {each[-1]:.5f}" for name, each in losses.items())
    print(f"loss of the first and of the last step: {both}\n")
    draw(report, costs, seconds, losses, args.output_dir)
    print(f"{time.time() - psutil.Process().create_time():.0f} seconds in all; picture: {args.output_dir}/report.png")
    print(NEXT_STEPS)
    return seconds, losses


def print_costs(report: hfp.PackingReport) -> list[tuple[str, int, float, int]]:
    """Print and return what padding and packing cost: name, rows, share of padding, documents cut."""
    lengths, setup, (padded,) = report.lengths, report.setup, report.padded
    costs = [(f"padding, {setup.padded_rows} a batch", lengths.documents, padded.padding_ratio, padded.cut_documents)]
    for name, metrics in ((row.name, row.compared.metrics) for row in report.rows):
        costs.append((name, metrics.num_packs, metrics.padding_ratio, metrics.num_cut_documents))
    print(f"{lengths.documents:,} documents, {lengths.tokens:,} tokens, the longest document {lengths.longest:,}\n")
    print(f"{'':24}{'rows':>9}{'padding':>10}{'documents cut':>16}{'tokens computed':>18}")
    for name, rows, padding, cut in costs:
        print(f"{name:24}{rows:>9,}{padding:>10.1%}{cut:>16,}{lengths.tokens / (1 - padding):>18,.0f}")
    return costs


@torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")
def train_both(args: Arguments, documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> tuple[Figures, Figures]:
    """Train twice from the same weights, in turn, on the same documents in each step; return seconds and losses."""
    size, lengths = args.documents_per_step, np.array([len(ids) for ids in documents["input_ids"]])
    fitting = np.flatnonzero((lengths > 0) & (lengths <= args.max_length))
    steps = min(args.steps, len(fitting) // size)
    if not steps:
        raise ValueError(f"--documents_per_step: expected at most {len(fitting):,}, which fit a row, got {size:,}")
    chosen = np.random.default_rng(0).permutation(fitting)[: steps * size].reshape(steps, size)
    collators = {"padded": DataCollatorForSeq2Seq(tokenizer), "packed": hfp.PackingCollator()}
    models = {
        name: common.load_model(AutoModelForCausalLM, args.model, common.small_llama(len(tokenizer))).to(DEVICE)
        for name in collators
    }
    for kind, model in ("stock", models["padded"]), ("patched", hfp.patch_model(models["packed"])):
        checked = hfp.check_isolation(model)
        print(f"{kind} model: isolated={checked.isolated}: {checked.reason}\n")
    rate = 2e-5 if args.model else 3e-3
    optimizers = {name: torch.optim.AdamW(model.train().parameters(), lr=rate) for name, model in models.items()}
    seconds, losses = {name: [] for name in models}, {name: [] for name in models}
    for numbers in (progress := tqdm(chosen, desc="Training in turn")):
        rows = documents.select(numbers).to_list()
        for name, model in models.items():
            began, batch = now(), collators[name](rows)
            inputs = {column: value.to(DEVICE) if torch.is_tensor(value) else value for column, value in batch.items()}
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name].append(loss.item())  # waits for the GPU
            seconds[name].append(now() - began)
        progress.set_postfix_str(speeds(lengths[chosen], seconds))
    print(f"{speeds(lengths[chosen], seconds)} (medians of {steps} steps)")
    return seconds, losses


def speeds(lengths: np.ndarray, seconds: Figures) -> str:
    """Return medians of the steps so far, which a busy machine hardly changes. Tokens do not include padding.

    Args:
        lengths: integers [steps, documents].
        seconds: of each step so far, of both trainings.
    """
    tokens = lengths.sum(axis=1)[: len(seconds["packed"])]
    padded, packed = (np.median(tokens / seconds[name]) for name in ("padded", "packed"))
    ratio = np.median(np.divide(seconds["padded"], seconds["packed"]))
    return f"padded {padded:,.0f}, packed {packed:,.0f} tokens per {SECOND}, {ratio:.1f} times as fast"


def draw(report: hfp.PackingReport, costs: Sequence[tuple], seconds: Figures, losses: Figures, folder: Path) -> None:
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    documents, plans, curves = figure.subplots(1, 3)
    lengths = report.lengths
    documents.hist(np.arange(lengths.longest + 1), np.geomspace(1, lengths.longest + 1, 40), weights=lengths.counts)
    documents.axvline(report.padded[0].max_length, color="C3", linestyle="--")
    documents.set(xscale="log", xlabel="tokens", ylabel="documents", title="Lengths (dashed: max_length)")
    for name, _, padding, cut in reversed(costs):
        plans.barh(name, lengths.tokens / (1 - padding) / 1e6, color="#dddddd")
        plans.barh(name, lengths.tokens / 1e6, color="#a5d3ad")
        plans.text(0, name, f" {padding:.1%} padding, {cut:,} documents cut", va="center")
    plans.set(xlabel="million tokens in an epoch, padding in grey", title="What packing saves")
    for name, taken in seconds.items():
        curves.plot(np.cumsum(taken), losses[name], "o-", label=f"{name}, {sum(taken):.1f} {SECOND}s")
    curves.set(xlabel=f"{SECOND}s", ylabel="training loss", title=f"The same {len(taken)} steps, padded and packed")
    curves.legend(frameon=False, loc="upper right")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "report.png", dpi=120)


if __name__ == "__main__":
    common.run(main)
