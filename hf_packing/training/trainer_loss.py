"""Whether a trainer's own loss is divided by num_items_in_batch, found out by asking it once."""

import copy
import warnings
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import Trainer

from hf_packing.attention import has_local_weights, inner_model, input_device, random_documents, takes_argument
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.training.losses import ITEMS
from hf_packing.training.ranks import data_rank
from hf_packing.training.refusals import has_loss_of, sft_trainer_of

PROBED_TOKENS = 13
MUCH = 1e-3
"""Share of the loss that has to go where it is divided by twice as many items."""
METRICS = "_metrics"
"""Where SFTTrainer writes down what it sees."""


def accept_items(trainer: Trainer) -> None:
    """Have the model given what is in a whole step of the optimiser, where it takes that."""
    trainer.model_accepts_loss_kwargs = trainer.model_accepts_loss_kwargs or takes_items(trainer)


def refuse_undivided(trainer: Trainer, divided: bool) -> None:
    """Refuse a loss that is not divided by what is in a whole step of the optimiser, unless that is one micro-batch.

    Raises:
        PackingError: it does not divide by num_items_in_batch, and there is more than one micro-batch in a step.
    """
    micro_batches = trainer.args.gradient_accumulation_steps * data_rank(trainer.accelerator).world_size
    if micro_batches > 1 and not divided:
        raise PackingError(
            f"trainer: expected a loss that is divided by {ITEMS}, that of {type(trainer).__name__} with "
            f"{type(inner_model(trainer.model)).__name__} is not, so that its gradient would depend on how a step is "
            f"split into {micro_batches} micro-batches; gradient_accumulation_steps=1 on one process has no split"
        )


def takes_items(trainer: Trainer) -> bool:
    return takes_argument(inner_model(trainer.model), ITEMS)


def is_divided(trainer: Trainer) -> bool:
    """Whether twice as many items make the loss of a short document smaller.

    SFTTrainer is known to do so, unless a function of the user's makes its loss. Weights that are elsewhere cannot be
    asked.
    """
    sft_trainer = sft_trainer_of(trainer)
    if sft_trainer is not None and has_loss_of(trainer, sft_trainer) and trainer.compute_loss_func is None:
        return True
    if not has_local_weights(trainer.model):
        return True
    if not takes_items(trainer) and trainer.compute_loss_func is None and trainer.label_smoother is None:
        return False
    once, twice = (loss_with(trainer, items) for items in (PROBED_TOKENS, 2 * PROBED_TOKENS))
    return abs(once - twice) > MUCH * abs(once)


def loss_with(trainer: Trainer, items: int) -> float:
    """The trainer's loss of a random document, as in training; nothing that it writes down is kept."""
    model = trainer.model
    documents, others = random_documents(inner_model(model), [PROBED_TOKENS], seed=0)
    packed = PackingCollator()([{"input_ids": documents[0], "labels": others[0]}])  # a masked one refuses its tokens
    batch = send_to_device(packed, input_device(inner_model(model)))
    aside: Any = copy.copy(trainer)
    aside.model_accepts_loss_kwargs = trainer.model_accepts_loss_kwargs or takes_items(trainer)
    aside.current_gradient_accumulation_steps = 1
    if hasattr(trainer, METRICS):
        setattr(aside, METRICS, copy.deepcopy(getattr(trainer, METRICS)))
    was_training = model.training
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradient checkpointing misses gradients
            torch.manual_seed(0)
            return float(aside.compute_loss(model, batch, num_items_in_batch=torch.tensor(items)))
    except Exception as error:  # of code that is not ours
        raise PackingError(
            f"trainer: expected a compute_loss that takes a packed batch, that of {type(trainer).__name__} raises "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)
