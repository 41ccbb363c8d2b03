"""Optimizer steps of a stock trainer on padded batches, to compare the steps of an attached trainer with."""

import json

import torch
from whole_rows import LEARNING_RATE, key, trainer_of


def by_hand(kind, folder, steps):
    """Parameters after steps of the stock trainer's loss, unpatched and padded, without dropout.

    Args:
        steps: for each optimizer step, the keys of its rows.
    """
    trainer = trainer_of(kind, folder)
    rows = {json.dumps(key(row)): row for row in trainer.get_train_dataloader().dataset}
    model = trainer.model.train()
    for step in steps:
        batch = trainer.data_collator([rows[json.dumps(each)] for each in step])
        loss = trainer.compute_loss(model, batch)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return model.state_dict()


def apart(ours, theirs):
    """Largest difference of a parameter, relative to the largest parameter."""
    largest = max(float(each.abs().max()) for each in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
