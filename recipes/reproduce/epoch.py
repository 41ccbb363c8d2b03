"""One epoch of training by one method, and its outcome."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import torch
from accelerate import Accelerator
from methods import Method, Row, batch_of
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import hf_packing as hfp

WARM_UP = 0.05


@dataclass(frozen=True)
class Outcome:
    """Speed and losses of an epoch."""

    steps: int
    speed: float
    """Tokens of documents per CPU second, which other processes do not affect."""
    training_loss: float
    """Mean over all tokens of the epoch, each measured in the step that trained on it."""
    validation_loss: float


def new_model(vocabulary: int, hidden: int, layers: int, longest: int) -> LlamaForCausalLM:
    """Return a model with the same random weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def train(
    title: str,
    model: LlamaForCausalLM,
    method: Method,
    steps: Sequence[Sequence[Row]],
    validation: datasets.Dataset,
    learning_rate: float,
) -> Outcome:
    """Train one epoch with a learning rate that falls to zero by the last step, then measure the validation loss."""
    model.train()
    if not method.padded:
        hfp.patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = get_linear_schedule_with_warmup(optimizer, round(WARM_UP * len(steps)), len(steps))
    summed_loss, tokens, seconds = 0.0, 0, 0.0
    for rows in tqdm(steps, desc=title):
        began = time.process_time()
        loss = model(**batch_of(method, rows), use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds += time.process_time() - began
        trained = sum(len(row["input_ids"]) for row in rows)
        summed_loss, tokens = summed_loss + trained * loss.item(), tokens + trained
    with hfp.patched(model):
        validation_loss = hfp.evaluation_loss(Accelerator(cpu=True), model, validation, rows_per_batch=16)
    return Outcome(len(steps), tokens / seconds, summed_loss / tokens, validation_loss)
