"""Pack real documents and train on them, padded and packed, alternating step by step.

    python recipes/quickstart.py
    python recipes/quickstart.py --data my.jsonl --tokenizer gpt2 --max-length 4096

Without --data the documents are the functions of the Python standard library that runs this script. Rows of a --data
file or dataset need `text`, `prompt` and `completion`, `messages`, or `input_ids`.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
from checkpoints import positive
from documents import load_tokenizer, read_documents, tokenize
from in_turn import DEVICE, SPEED, Side, in_turn, summary
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

import hf_packing as hfp

try:
    import matplotlib
except ImportError as error:
    raise hfp.MissingDependencyError('the picture needs matplotlib: pip install "hf-packing[plots]"') from error

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STRATEGIES = {
    "fixed-length": hfp.FixedLength,
    "first-come": hfp.FirstCome,
    "multipack": hfp.Multipack,
    "shortest-pack-first": hfp.ShortestPackFirst,
    "best-fit": hfp.BestFit,
    "optimal": hfp.Optimal,
}
ALWAYS_SHOWN = ("fixed-length", "first-come", "best-fit")
ROWS_COMPARED = 8
EQUAL_LOSS = 1e-5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json, .parquet, .csv or .txt file (also .gz), or a dataset's name")
    parser.add_argument(
        "--tokenizer", help="name or folder; default: the model's, or a byte-level BPE trained on the documents"
    )
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--max-length", type=positive, default=2048, help="tokens a pack holds")
    parser.add_argument("--strategy", choices=STRATEGIES, default="best-fit", help="how the dataset is packed")
    parser.add_argument("--steps", type=positive, default=40, help="steps of each training, an epoch at most")
    parser.add_argument("--documents-per-step", type=positive, default=16)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, packs, and the choice of documents")
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"), help="folder; overwritten")
    return parser.parse_args()


def new_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model, with the same weights at every call."""
    set_seed(arguments.seed)
    if arguments.model:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(DEVICE)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(arguments.max_length, 2048),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def padded_batches(lengths: np.ndarray, size: int, seed: int) -> tuple[int, int]:
    """Count the tokens and slots of random batches, each padded to its longest document."""
    order = np.random.default_rng(seed).permutation(lengths)
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    return int(lengths.sum()), sum(len(batch) * int(batch.max()) for batch in batches)


def compare(lengths: np.ndarray, arguments: argparse.Namespace) -> dict[str, hfp.PackingPlan]:
    """Print what each way of forming rows costs."""
    max_length, batch = arguments.max_length, arguments.documents_per_step
    tokens, slots = padded_batches(np.minimum(lengths, max_length), batch, arguments.seed)
    print(f"\n{'':24}{'padding':>10}{'truncation':>12}{'concatenation':>15}{'efficiency':>12}{'rows':>9}")
    cut = float((lengths > max_length).mean())
    row = f"padding, {batch} a batch"
    print(f"{row:24}{1 - tokens / slots:>10.2%}{cut:>12.2%}{1:>15.2f}{tokens / slots:>12.2%}{len(lengths):>9,}")
    shown = dict.fromkeys((*ALWAYS_SHOWN, arguments.strategy))
    plans = {name: hfp.plan_packing(lengths, STRATEGIES[name](max_length, seed=arguments.seed)) for name in shown}
    for name, plan in plans.items():
        m = plan.metrics()
        print(
            f"{name.replace('-', ' '):24}{m.padding_ratio:>10.2%}{m.truncation_ratio:>12.2%}"
            f"{m.concatenation_ratio:>15.2f}{m.packing_efficiency:>12.2%}{m.num_packs:>9,}"
        )
    print("truncation: documents cut / documents. concatenation: documents / rows.")
    print("padding drops the tokens beyond a row; the strategies here drop nothing.\n")
    return plans


def mean_loss(model: PreTrainedModel, batches: list[dict]) -> float:
    """Return the mean loss over all tokens that have a label to predict."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            inputs = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in batch.items()}
            labeled = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**inputs, use_cache=False).loss) * labeled
            count += labeled
    return total / count


def segments_of(row: dict) -> list[dict]:
    ends = np.cumsum(row["seq_lengths"])[:-1]
    return [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in np.split(np.array(row["input_ids"]), ends)]


def draw(
    lengths: np.ndarray, plans: dict[str, hfp.PackingPlan], sides: Sequence[Side], max_length: int, file: Path
) -> None:
    figure, (before, after, curves) = plt.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    before.hist(lengths, bins=np.geomspace(1, max(lengths.max(), 2), 60), color="#4878a8")
    before.axvline(max_length, color="#b04030", linestyle="--", label=f"max_length {max_length:,}")
    before.set(xscale="log", xlabel="tokens", ylabel="documents", title=f"{len(lengths):,} documents before packing")
    before.legend(frameon=False)
    colors = {"fixed-length": "#999999", "first-come": "#d8a048", "best-fit": "#488858"}
    for name, plan in plans.items():
        fill = np.sort(np.add.reduceat(plan.segment_length, plan.pack_offsets[:-1]) / plan.pack_capacity)
        label = f"{name.replace('-', ' ')}: {plan.num_packs:,} rows, {plan.metrics().truncation_ratio:.1%} cut"
        after.plot(
            np.linspace(0, 100, len(fill)), 100 * fill, color=colors.get(name, "#7858a8"), linewidth=2, label=label
        )
    after.set(
        xlabel="rows, emptiest first (%)", ylabel="fill of the row (%)", ylim=(0, 104), title="Rows after packing"
    )
    after.legend(frameon=False, loc="lower right")
    styles = {"padded": ("#4878a8", "-", 4), "packed": ("#b04030", "--", 1.8)}
    for side in sides:
        color, line, width = styles[side.name]
        label = f"{side.name}: {side.tokens_per_second:,.0f} {SPEED}"
        seen = np.arange(1, len(side.losses) + 1) * len(sides[0].batches[0])
        curves.plot(seen, side.losses, color=color, linestyle=line, linewidth=width, label=label)
    curves.set(xlabel="documents seen", ylabel="training loss", title="The same documents, padded and packed")
    curves.legend(frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def compare_losses(arguments, packed: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Patch a model, show that documents stay apart, and that their loss is the same as with padding."""
    model = new_model(arguments, tokenizer)
    report = hfp.check_isolation(model)
    print(f"stock model:   isolated={report.isolated}: {report.reason}")
    rows = [packed[row] for row in range(min(ROWS_COMPARED, len(packed)))]
    padding = DataCollatorForSeq2Seq(tokenizer)
    padded_loss = mean_loss(model, [padding(segments_of(row)) for row in rows])
    report = hfp.check_isolation(hfp.patch_model(model))
    print(f"patched model: isolated={report.isolated}: {report.reason}")
    packed_loss = mean_loss(model, [hfp.PackingCollator()([row]) for row in rows])
    difference = abs(padded_loss - packed_loss)
    print(
        f"loss of the same {sum(len(row['seq_lengths']) for row in rows)} documents before training: "
        f"padded {padded_loss:.7f}, packed {packed_loss:.7f}, difference {difference:.1e}\n"
    )
    if not difference <= EQUAL_LOSS:
        raise SystemExit(f"the losses differ by more than {EQUAL_LOSS}")


def train_both(arguments, documents: datasets.Dataset, lengths: np.ndarray, tokenizer) -> list[Side]:
    """Train twice from the same weights on the same documents in the same order, the same number of them per step."""
    per_step = arguments.documents_per_step
    fitting = np.flatnonzero((lengths > 0) & (lengths <= arguments.max_length))
    steps = min(arguments.steps, len(fitting) // per_step)
    if not steps:
        raise SystemExit(
            f"--documents-per-step: expected at most {len(fitting):,}, the documents that fit a row, got {per_step:,}"
        )
    chosen = np.random.default_rng(arguments.seed).permutation(fitting)[: steps * per_step]
    documents = documents.select(chosen)
    one_step = hfp.FirstCome(per_step * arguments.max_length, order="dataset", max_documents=per_step, seed=None)
    packs = [[pack] for pack in hfp.pack(documents, one_step)]
    ids = documents["input_ids"][:]
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in ids]
    padded = [rows[first : first + per_step] for first in range(0, len(rows), per_step)]
    learning_rate = 3e-3 if arguments.model is None else 2e-5
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):  # verified in the precision of the training
        model = hfp.patch_model(new_model(arguments, tokenizer))
    sides = [
        Side("padded", new_model(arguments, tokenizer), padded, DataCollatorForSeq2Seq(tokenizer), learning_rate),
        Side("packed", model, packs, hfp.PackingCollator(), learning_rate),
    ]
    in_turn(sides)
    print(summary(*sides))
    return sides


def main() -> None:
    arguments = parse_arguments()
    began = time.perf_counter()
    output: Path = arguments.output
    documents = read_documents(arguments.data)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model, documents)
    documents = tokenize(documents, tokenizer)
    lengths = np.array([len(ids) for ids in documents.with_format("numpy")["input_ids"]])
    print(
        f"{len(lengths):,} documents, {lengths.sum():,} tokens: "
        f"mean {lengths.mean():.0f}, median {np.median(lengths):.0f}, longest {lengths.max():,}"
    )
    plans = compare(lengths, arguments)
    packed = hfp.pack(documents, STRATEGIES[arguments.strategy](arguments.max_length, seed=arguments.seed))
    packed.save_to_disk(output / "packed")
    plans[arguments.strategy].save(output / "plan")
    compare_losses(arguments, packed, tokenizer)
    sides = train_both(arguments, documents, lengths, tokenizer)
    draw(lengths, plans, sides, arguments.max_length, output / "report.png")
    print(
        f"\nin {output.resolve()}:\n  packed/     the packed dataset, for datasets.load_from_disk\n"
        f"  plan/       the plan, for hf_packing.PackingPlan.load\n  report.png  lengths, fill and losses\n"
        f"{time.perf_counter() - began:.0f} seconds in all"
    )


if __name__ == "__main__":
    main()
