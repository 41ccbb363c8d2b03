"""Train sentence embeddings with SentenceTransformerTrainer, whose encoder does not compute padding, and embed texts.

    python recipes/embed.py --data pairs.jsonl --model sentence-transformers/all-MiniLM-L6-v2
    torchrun --nproc-per-node 2 recipes/embed.py --data pairs.jsonl --epochs 3

Rows have an `anchor` and the `positive` text that belongs to it; the other texts of a batch are the negatives. Without
--data, the anchors are first lines of docstrings in the Python standard library, and the positives are the functions
without the docstrings. Without --model, a small BERT is trained from scratch.

Needs sentence-transformers: pip install "hf-packing[embed]". The batches are those of its trainer, and not of a token
budget, since the loss compares each anchor with all texts of its batch.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from accelerate import PartialState
from accelerate.utils import set_seed
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer, read_documents, train_and_test
from function_data import described
from models import small_bert
from process_group import end_process_group
from trainer_flags import add_training, on_cpu, training_arguments
from transformers import BertModel

import hf_packing as hfp

try:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
except ImportError as error:
    raise hfp.MissingDependencyError('sentence-transformers is missing: pip install "hf-packing[embed]"') from error

COLUMNS = ["anchor", "positive"]


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json, .parquet or .csv file with anchor and positive")
    parser.add_argument("--eval_data", help="rows to evaluate on; default: 10 percent of --data")
    parser.add_argument("--model", help="name or folder; default: a small BERT from scratch, mean of its tokens")
    parser.add_argument("--max_length", type=positive, default=256, help="longer texts are truncated, and counted")
    parser.add_argument("--batch_size", type=positive, default=64, help="pairs of a micro-batch on each process")
    add_training(parser, "outputs/embed", learning_rate=5e-4)
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    with PartialState(cpu=on_cpu()).main_process_first():
        train, test = read(given)
        model = load_model(given, train)
    hfp.patch_model(model[0].auto_model)
    tokens_of(model, [*train["anchor"], *train["positive"]], "to train on")
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            **training_arguments(given),
            per_device_train_batch_size=given.batch_size,
            batch_sampler="no_duplicates",
        ),
        train_dataset=train,
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.accelerator.print(hfp.check_isolation(model[0].auto_model).route.describe())
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = evaluate(model, test, given.batch_size)
    trainer.accelerator.print(
        f"{metrics['accuracy']:.1%} of {len(test):,} anchors are closest to their own text among all of them"
    )
    trainer.save_model()
    return metrics


def read(given: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the pairs to train on, and those to evaluate on."""
    rows = read_documents(given.data)
    parts = train_and_test(described(rows) if given.data is None else rows, given.eval_data)
    for flag, part in zip(("--data", "--eval_data"), parts, strict=True):
        if not set(COLUMNS) <= set(part.column_names):
            raise SystemExit(f"{flag}: expected columns anchor and positive, got {', '.join(part.column_names)}")
    train, test = (part.select_columns(COLUMNS) for part in parts)
    return train, test


def load_model(given: argparse.Namespace, rows: datasets.Dataset) -> SentenceTransformer:
    """Return the named model, or a small BERT whose embeddings are the means of its tokens' hidden states."""
    set_seed(0)
    if given.model and given.tokenizer:
        raise SystemExit(f"--tokenizer: expected none beside --model, which has its own, got {given.tokenizer!r}")
    if given.model:
        model = SentenceTransformer(given.model)
        if not isinstance(model[0], Transformer):
            raise SystemExit(
                f"--model: expected a model with an encoder of transformers, got {type(model[0]).__name__}"
            )
        model.max_seq_length = given.max_length
        return model
    untrained = str(Path(given.output_dir) / "untrained")  # Transformer takes folders only
    if PartialState().is_main_process:
        tokenizer = load_tokenizer(given.tokenizer, rows.select_columns("positive").rename_column("positive", "text"))
        tokenizer.save_pretrained(untrained)
        small = small_bert(len(tokenizer), given.max_length, pad_token_id=tokenizer.pad_token_id)
        BertModel(small).save_pretrained(untrained)
    encoder = Transformer(untrained, max_seq_length=given.max_length)
    return SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension(), "mean")])


def evaluate(model: SentenceTransformer, rows: datasets.Dataset, batch_size: int) -> dict[str, float]:
    """Return the share of anchors that are closest to their own text, and compare the ways to embed these texts."""
    anchors, texts = rows["anchor"][:], rows["positive"][:]
    encode = partial(model.encode, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False)
    tokens = tokens_of(model, texts, "to embed")
    found, seconds = timed(lambda: encode(texts))
    with hfp.unpatch_model(model[0].auto_model):
        padded, seconds_padded = timed(lambda: encode(texts))
    metrics = {"difference": float(np.abs(found - padded).max())}
    said = [
        f"encode: {seconds:.1f} s, {seconds_padded:.1f} s with padding; largest difference of the "
        f"embeddings {metrics['difference']:.0e}",
    ]
    if is_a_mean(model):
        pooled, seconds = timed(lambda: hfp.score(model[0].auto_model, tokens, hidden="mean", progress=False).hidden)
        pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
        metrics["difference_of_score"] = float(np.abs(found - pooled).max())
        said.append(
            f"hfp.score: {seconds:.1f} s; largest difference of the embeddings {metrics['difference_of_score']:.0e}"
        )
    PartialState().print("\n".join(said))
    closest = (encode(anchors) @ found.T).argmax(1)
    return metrics | {"accuracy": float(np.mean(closest == np.arange(len(texts))))}


def tokens_of(model: SentenceTransformer, texts: list[str], use: str) -> list[list[int]]:
    """Return the tokens of the texts as the model sees them, and say how many texts are truncated."""
    tokens = model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]
    at_limit = sum(len(each) >= model.max_seq_length for each in tokens)
    PartialState().print(
        f"{at_limit:,} of {len(texts):,} texts {use} have {model.max_seq_length} tokens or are truncated to it"
    )
    return tokens


def is_a_mean(model: SentenceTransformer) -> bool:
    """Return whether embeddings are the means of the tokens' hidden states, of any length."""
    _, pooling, *others = model
    return getattr(pooling, "pooling_mode", None) == "mean" and all(isinstance(each, Normalize) for each in others)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function returns, and how many seconds it took."""
    began = time.perf_counter()
    return call(), time.perf_counter() - began


if __name__ == "__main__":
    main()
    end_process_group()
