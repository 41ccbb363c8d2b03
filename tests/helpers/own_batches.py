"""Data sets of random words for trainers with batches of their own, and what a step of such a trainer computes."""

import copy

import datasets
import torch
import trl
import whole_rows
from trainers import tokenizer
from training_by_hand import gradients_of
from whole_rows import arguments

from tools.tiny_model import tiny_model


def texts(number, **columns):
    return datasets.Dataset.from_list(whole_rows.texts(number, **columns))


def pairs(number=6):
    return datasets.Dataset.from_list(whole_rows.pairs(number))


def moved(model):
    """A reference model that differs from the policy."""
    other = copy.deepcopy(model)
    torch.manual_seed(0)
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
    return float(loss.detach()), gradients_of(trainer.model)


def policy(name="gpt2"):
    return tiny_model(name, "causal", torch.float64).train()


def grpo(folder, model):
    sizes = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 2}
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=arguments(folder, trl.GRPOConfig, **sizes),
        train_dataset=texts(4, prompt=9),
        processing_class=tokenizer(),
    )


def answers(prompts, completions):
    """A batch as GRPO makes them, 21 tokens wide: 12 of prompts padded on the left, 9 of completions on the right."""
    ids, mask = torch.zeros(len(prompts), 21, dtype=torch.long), torch.zeros(len(prompts), 21, dtype=torch.long)
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        place = slice(12 - len(prompt), 12 + len(completion))
        ids[number, place], mask[number, place] = torch.tensor(prompt + completion), 1
    return ids, mask


def dpo(folder, model, data=None, **changes):
    config = arguments(folder, trl.DPOConfig, max_length=None, **changes)
    reference = None if hasattr(model, "peft_config") else moved(model)
    data = pairs() if data is None else data
    return trl.DPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer(), ref_model=reference)
