"""Data sets of random words for trainers with batches of their own, and what a step of such a trainer computes."""

import copy

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_packing.attention.tiny_model import tiny_model

WORDS = 128
COMMON = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "per_device_train_batch_size": 6,
}


def tokenizer():
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0", unk_token="w1")


def texts(number, seed=0, **columns):
    """A dataset of random words; each column has a mean length."""
    rng = np.random.default_rng(seed)

    def text(mean):
        return " ".join(f"w{word}" for word in rng.integers(8, 120, rng.integers(1, 2 * mean)))

    return datasets.Dataset.from_list([{name: text(mean) for name, mean in columns.items()} for _ in range(number)])


def pairs(number=6):
    rows = texts(number, prompt=9, chosen=12, rejected=5)
    return rows.map(lambda row: {"chosen": " " + row["chosen"], "rejected": " " + row["rejected"]})


def moved(model):
    """A reference model that differs from the policy."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other


def step(trainer):
    """The loss and the gradients of the first batch."""
    torch.manual_seed(0)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train().zero_grad()
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def policy(name="gpt2"):
    return tiny_model(name, "causal", torch.float64).train()
