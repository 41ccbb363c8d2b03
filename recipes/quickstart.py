"""Pack real documents and train on them, padded and packed, side by side.

    python recipes/quickstart.py
    python recipes/quickstart.py --data my.jsonl --tokenizer gpt2 --max-length 4096

Without --data the documents are the functions of the Python standard library that runs this script. Rows of a --data
file or dataset need `text`, `prompt` and `completion`, `messages`, or `input_ids`.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from documents import load_tokenizer, read_documents, tokenise
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainingArguments,
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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json, .parquet, .csv or .txt file (also .gz), or a dataset's name")
    parser.add_argument(
        "--tokenizer", help="name or folder; default: the model's, or a byte-level BPE trained on the documents"
    )
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens a pack holds")
    parser.add_argument("--strategy", choices=STRATEGIES, default="best-fit", help="how the dataset is packed")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run")
    parser.add_argument("--documents-per-step", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    return parser.parse_args()


def new_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The same weights at every call."""
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
    """Tokens and slots of random batches, each padded to its longest document."""
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
    plans = {name: hfp.plan_packing(lengths, STRATEGIES[name](max_length)) for name in shown}
    for name, plan in plans.items():
        m = plan.metrics()
        print(
            f"{name.replace('-', ' '):24}{m.padding_ratio:>10.2%}{m.truncation_ratio:>12.2%}"
            f"{m.concatenation_ratio:>15.2f}{m.packing_efficiency:>12.2%}{m.num_packs:>9,}"
        )
    print("truncation: documents cut / documents. concatenation: documents / rows.")
    print("padding drops what is longer than a row; the strategies here drop nothing.\n")
    return plans


def mean_loss(model: PreTrainedModel, batches: list[dict]) -> float:
    """Mean over all tokens that have a label to predict."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            inputs = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in batch.items()}
            labelled = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**inputs, use_cache=False).loss) * labelled
            count += labelled
    return total / count


def segments_of(row: dict) -> list[dict]:
    ends = np.cumsum(row["seq_lengths"])[:-1]
    return [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in np.split(np.array(row["input_ids"]), ends)]


@dataclass
class Run:
    """What one training run showed."""

    documents: list[int]
    losses: list[float]
    tokens_per_second: float


class Progress(ProgressCallback):
    """The bar with the loss at its end, instead of a line for each step."""

    def on_log(self, *_, logs: dict | None = None, **__) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=logs["loss"])


def train(model: PreTrainedModel, rows: datasets.Dataset, rows_per_step: int, collator, arguments, name: str) -> Run:
    training = TrainingArguments(
        output_dir=str(arguments.output / f"trainer-{name}"),
        per_device_train_batch_size=rows_per_step,
        num_train_epochs=1,
        learning_rate=3e-3 if arguments.model is None else 2e-5,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=torch.cuda.is_available(),
        seed=arguments.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=training, train_dataset=rows, data_collator=collator)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)
    print(f"training {name}:")
    seconds = trainer.train().metrics["train_runtime"]
    tokens = sum(map(len, rows["input_ids"]))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen = [entry["step"] * arguments.documents_per_step for entry in logged]
    return Run(seen, [float(entry["loss"]) for entry in logged], tokens / seconds)


def draw(
    lengths: np.ndarray, plans: dict[str, hfp.PackingPlan], runs: dict[str, Run], max_length: int, file: Path
) -> None:
    figure, (before, after, curves) = plt.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    before.hist(lengths, bins=np.geomspace(1, max(lengths.max(), 2), 60), color="#4878a8")
    before.axvline(max_length, color="#b04030", linestyle="--", label=f"max_length {max_length:,}")
    before.set(xscale="log", xlabel="tokens", ylabel="documents", title=f"{len(lengths):,} documents before packing")
    before.legend(frameon=False)
    colours = {"fixed-length": "#999999", "first-come": "#d8a048", "best-fit": "#488858"}
    for name, plan in plans.items():
        fill = np.sort(np.add.reduceat(plan.segment_length, plan.pack_offsets[:-1]) / plan.pack_capacity)
        label = f"{name.replace('-', ' ')}: {plan.num_packs:,} rows, {plan.metrics().truncation_ratio:.1%} cut"
        after.plot(
            np.linspace(0, 100, len(fill)), 100 * fill, color=colours.get(name, "#7858a8"), linewidth=2, label=label
        )
    after.set(
        xlabel="rows, emptiest first (%)", ylabel="fill of the row (%)", ylim=(0, 104), title="Rows after packing"
    )
    after.legend(frameon=False, loc="lower right")
    styles = {"padded": ("#4878a8", "-", 4), "packed": ("#b04030", "--", 1.8)}
    for name, run in runs.items():
        colour, line, width = styles[name]
        label = f"{name}: {run.tokens_per_second:,.0f} tokens/s"
        curves.plot(run.documents, run.losses, color=colour, linestyle=line, linewidth=width, label=label)
    curves.set(xlabel="documents seen", ylabel="training loss", title="The same documents, padded and packed")
    curves.legend(frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def compare_losses(arguments, packed: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Patch a model, show that documents stay apart, and that their loss is the one they have with padding."""
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


def train_both(arguments, documents: datasets.Dataset, lengths: np.ndarray, tokenizer) -> dict[str, Run]:
    """Train twice from the same weights on the same documents in the same order, the same number of them per step."""
    per_step = arguments.documents_per_step
    fitting = np.flatnonzero((lengths > 0) & (lengths <= arguments.max_length))
    steps = min(arguments.steps, len(fitting) // per_step)
    chosen = np.random.default_rng(arguments.seed).permutation(fitting)[: steps * per_step]
    documents = documents.select(chosen)
    batches = hfp.FirstCome(per_step * arguments.max_length, order="dataset", max_documents=per_step, seed=None)
    rows = hfp.pack(documents, batches)
    documents = documents.add_column("labels", documents["input_ids"][:])
    padded = train(
        new_model(arguments, tokenizer), documents, per_step, DataCollatorForSeq2Seq(tokenizer), arguments, "padded"
    )
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):  # proven as it will be trained
        model = hfp.patch_model(new_model(arguments, tokenizer))
    packed = train(model, rows, 1, hfp.PackingCollator(), arguments, "packed")
    print(
        f"\n{per_step} documents per step, {len(documents):,} documents: "
        f"padded {padded.tokens_per_second:,.0f} tokens/s, packed {packed.tokens_per_second:,.0f} tokens/s: "
        f"{packed.tokens_per_second / padded.tokens_per_second:.1f} times as fast"
    )
    print(f"loss of the last step: padded {padded.losses[-1]:.4f}, packed {packed.losses[-1]:.4f}")
    return {"padded": padded, "packed": packed}


def main() -> None:
    arguments = parse_arguments()
    began = time.perf_counter()
    output: Path = arguments.output
    documents = read_documents(arguments.data)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model, documents)
    documents = tokenise(documents, tokenizer)
    lengths = np.array([len(ids) for ids in documents.with_format("numpy")["input_ids"]])
    print(
        f"{len(lengths):,} documents, {lengths.sum():,} tokens: "
        f"mean {lengths.mean():.0f}, median {np.median(lengths):.0f}, longest {lengths.max():,}"
    )
    plans = compare(lengths, arguments)
    packed = hfp.pack(documents, STRATEGIES[arguments.strategy](arguments.max_length))
    packed.save_to_disk(output / "packed")
    plans[arguments.strategy].save(output / "plan")
    compare_losses(arguments, packed, tokenizer)
    runs = train_both(arguments, documents, lengths, tokenizer)
    draw(lengths, plans, runs, arguments.max_length, output / "report.png")
    print(
        f"\nin {output.resolve()}:\n  packed/     the packed dataset, for datasets.load_from_disk\n"
        f"  plan/       the plan, for hf_packing.PackingPlan.load\n  report.png  lengths, fill and losses\n"
        f"{time.perf_counter() - began:.0f} seconds in all"
    )


if __name__ == "__main__":
    main()
