"""The parts of gpu.py that train a model of the sizes of Qwen3-0.6B, on documents and on documents that share prefixes.

A side takes steps as its trainer does, and then one of SGD, so that the sides' models fit beside each other. The
documents are random tokens, and their lengths are drawn from a log-normal distribution.
"""

import dataclasses
import importlib.util
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from gpu_part import DEVICE, CannotRunError, Results, Scale, Side, compare, on_device
from internals import kernel_of
from lengths import log_normal
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments
from tree_data import FIRST_TOKEN, Documents, collect, random_pairs, random_samples
from tree_training import first_tokens, sides_of, step

import hf_packing as hfp

OURS = "hf_packing"
HAS_TRL = importlib.util.find_spec("trl") is not None
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None and DEVICE.type == "cuda"
EQUAL_LOSS = 1e-2
"""Largest relative difference between losses in bfloat16."""


def config_of(scale: Scale) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=3 * scale.hidden,
        num_hidden_layers=scale.layers,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        use_cache=False,
        pad_token_id=0,
        **scale.attention(),
    )


def new_model(scale: Scale, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    how = {"dtype": torch.bfloat16, "attn_implementation": attention}
    with DEVICE:
        return transformers.AutoModelForCausalLM.from_config(config_of(scale), **how)


def lengths_for(scale: Scale) -> np.ndarray:
    return log_normal(scale.documents, np.log(scale.longest / 8), 0.9, scale.longest).clip(2)


def run(results: Results, scale: Scale) -> None:
    """Train on documents: padded, with TRL's packing, with hf_packing, and without anything to gain."""
    quiet()
    lengths = lengths_for(scale)
    tokens = np.random.default_rng(1).integers(FIRST_TOKEN, scale.vocabulary, int(lengths.sum()), dtype=np.int32)
    documents = Documents(tokens, lengths, np.zeros_like(lengths))
    makers: dict[str, Callable[[], Side]] = {}
    for suffix, attention in {"": "sdpa", ", flash-attn": "flash_attention_2"}.items():
        if suffix and not HAS_FLASH:
            continue
        new = partial(new_model, scale, attention)
        makers[f"padding{suffix}"] = partial(trained, new, documents, padded_batches(documents, scale))
        makers[f"TRL packing{suffix}"] = partial(packed_by_trl, new, documents, scale)
    makers[OURS] = partial(packed_by_us, partial(new_model, scale), documents, scale)
    makers["nothing to pad"] = partial(trained, partial(new_model, scale), documents, equal_batches(documents, scale))
    about = f"documents of {lengths.mean():,.0f} tokens on average, at most {scale.longest:,}"
    results.found["settings"] = f"{settings(scale)}; {about}"
    compare(results, scale, "documents", makers, reference="padding", step_tokens=scale.tokens)


def run_trees(results: Results, scale: Scale) -> None:
    """Train on documents that share prefixes: packed, and as trees. One model runs both, on the same documents."""
    quiet()
    results.found["settings"] = settings(scale)
    answer, prompt = scale.longest // 8, scale.longest // 4
    sets = {
        "pairs of answers, half of a document is the prompt": random_pairs,
        f"8 answers of {answer:,} tokens to a prompt of {prompt:,}": partial(random_samples, 40, 8, prompt, answer),
    }
    model = hfp.patch_model(new_model(scale), trees=True)
    scale = dataclasses.replace(scale, seconds=scale.seconds / len(sets))
    for title, make in sets.items():
        fitting = collect(make()).fitting(scale.tokens)
        documents = first_tokens(fitting._replace(tokens=fitting.tokens % scale.vocabulary), 4 * scale.tokens)
        sides = sides_of(documents, scale.tokens)
        raw = int(documents.lengths.sum())
        rows = {name: sum(batch["input_ids"].shape[1] for batch in batches) for name, (batches, _) in sides.items()}
        losses: dict[str, float] = {}
        makers = {
            name: partial(of_batches, model, name, [on_device(batch) for batch in batches], items, raw, losses)
            for name, (batches, items) in sides.items()
        }
        about = {"documents": len(documents.lengths), "fewer": raw / rows["trees"]}
        compare(results, scale, title, makers, reference="packed", **about)
        if len(losses) == 2 and abs(losses["packed"] - losses["trees"]) > EQUAL_LOSS * losses["packed"]:
            raise CannotRunError(f"failed: {title}: losses differ: {losses}")


def settings(scale: Scale) -> str:
    with torch.device("meta"):
        parameters = transformers.Qwen3ForCausalLM(config_of(scale)).num_parameters()
    size = f"{parameters / 1e6:,.1f} million parameters, a vocabulary of {scale.vocabulary:,}, bfloat16"
    return f"{size}, steps of at most {scale.tokens:,} tokens"


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def of_batches(
    model: PreTrainedModel, name: str, batches: list[dict[str, Any]], items: int, raw: int, losses: dict[str, float]
) -> Side:
    """Return a side that runs all of its batches in a step."""

    def one() -> int:
        losses[name] = step(model, batches, items)
        return raw

    return Side(one, lambda: {"kernel": kernel_of(model)})


def trainer_for(model: PreTrainedModel, documents: Documents, packed_to: int | None = None) -> Trainer:
    """Return an SFTTrainer, or a Trainer where TRL is not installed.

    Args:
        packed_to: number of tokens of a row, for TRL's packing; None for none.
    """
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 1,
        "report_to": "none",
        "use_cpu": DEVICE.type == "cpu",
        "bf16": False,  # the model is in bfloat16 as it is
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
    }
    dataset = documents.as_dataset(labels=False)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    if not HAS_TRL:
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        return Trainer(model, TrainingArguments(**common), train_dataset=dataset, data_collator=collator)
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**common, max_length=packed_to, packing=packed_to is not None)
    return SFTTrainer(model, config, train_dataset=dataset, processing_class=tokenizer)


def packed_by_trl(new: Callable[[], PreTrainedModel], documents: Documents, scale: Scale) -> Side:
    if not HAS_TRL:
        raise CannotRunError("trl is not installed")
    trainer = trainer_for(new(), documents, scale.tokens)
    return stepping(trainer, forever(trainer))


def packed_by_us(new: Callable[[], PreTrainedModel], documents: Documents, scale: Scale) -> Side:
    trainer = trainer_for(new(), documents)
    hfp.attach(trainer, hfp.TokenBudget(scale.tokens))
    return stepping(trainer, forever(trainer))


def trained(new: Callable[[], PreTrainedModel], documents: Documents, batches: Iterator[dict[str, Any]]) -> Side:
    return stepping(trainer_for(new(), documents), batches)


def forever(trainer: Trainer) -> Iterator[dict[str, Any]]:
    while True:
        yield from trainer.get_train_dataloader()


def stepping(trainer: Trainer, batches: Iterator[dict[str, Any]]) -> Side:
    """Return a side that takes steps as a trainer does."""
    model = trainer.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    trainer.current_gradient_accumulation_steps = 1

    def one() -> int:
        batch = next(batches)
        mask = batch.get("attention_mask")
        real = batch["input_ids"].numel() if mask is None else int(mask.sum())
        trainer.training_step(model, dict(batch), (batch["labels"][:, 1:] != -100).sum())
        optimizer.step()
        optimizer.zero_grad()
        return real

    return Side(one, lambda: {"kernel": kernel_of(model) or model.config._attn_implementation})


def padded_batches(documents: Documents, scale: Scale) -> Iterator[dict[str, Any]]:
    """Yield batches of as many documents as fit when each is padded to the longest of them."""
    rows = np.split(documents.tokens, documents.lengths.cumsum()[:-1])
    batch: list[np.ndarray] = []
    for row in itertools.cycle(rows):
        if (len(batch) + 1) * max(map(len, [*batch, row])) > scale.tokens:
            longest = max(map(len, batch))
            ids = torch.from_numpy(np.stack([np.pad(each, (0, longest - len(each))) for each in batch])).long()
            mask = torch.stack([torch.arange(longest) < len(each) for each in batch])
            labels = ids.masked_fill(~mask, -100)
            yield {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
            batch = []
        batch.append(row)


def equal_batches(documents: Documents, scale: Scale) -> Iterator[dict[str, Any]]:
    """Yield batches of documents of their mean length, which need no padding and no packing."""
    length = int(documents.lengths.mean())
    rows = scale.tokens // length
    for begin in itertools.cycle(range(0, len(documents.tokens) - rows * length, rows * length)):
        ids = torch.from_numpy(documents.tokens[begin : begin + rows * length]).long().view(rows, length)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
