"""Check that a model and a trainer can be trained on rows of trees, and warn of what is not exact in them."""

import warnings

from torch import nn
from transformers import Trainer

from hf_packing.attention import has_local_weights, inner_model, patch_model
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.training.checks import masks_tokens
from hf_packing.training.model_loss import check_predicts_next
from hf_packing.training.trainer_loss import TrainerLoss


def check_takes_trees(model: nn.Module, batching: Batching, shapes: Shapes) -> None:
    """Prove that a patched model runs rows of trees, and check that batches can have them.

    If weights are not in memory, trees must have been proven before. A warning names what is not exact in trees.

    Raises:
        PackingError: the model sees the tokens that it predicts; or batches have fixed shapes, or segments that are cut
            by a schedule.
        ModelNotSupportedError: it cannot be proven that the model runs rows of trees.
    """
    check_predicts_next(model)
    if shapes != (None, None):
        raise PackingError(
            f"tokens: expected None for documents that share prefixes, whose batches have no fixed shapes, got "
            f"{shapes[0]}"
        )
    if getattr(batching, "length_schedule", None) is not None:
        raise PackingError(
            "length_schedule: expected None for documents that share prefixes, since extra borders would cut shared "
            "prefixes"
        )
    if has_local_weights(model):
        patch_model(model, trees=True)
    warn_of_shared_randomness(model)


def check_takes_trees_as(own: TrainerLoss, trainer: Trainer) -> None:
    """Raise PackingError unless a trainer's loss is the cross-entropy, which can be that of rows of trees."""
    if masks_tokens(trainer.data_collator):
        raise PackingError(
            f"data_collator: expected a collator that masks no tokens for documents that share prefixes, got "
            f"{type(trainer.data_collator).__name__} with mlm=True"
        )
    if not own.is_cross_entropy:
        raise PackingError(
            "trainer: expected the cross-entropy as the loss for documents that share prefixes, which attach computes, "
            f"but {own.kind.__name__} has a compute_loss, compute_loss_func, label_smoothing_factor, loss_type or "
            "use_liger_kernel of its own; train without share_prefixes"
        )


def warn_of_shared_randomness(model: nn.Module) -> None:
    """Warn of dropout and of losses of routers, which are not those of the documents alone."""
    config = inner_model(model).config.get_text_config()
    dropout = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    if dropout or getattr(config, "attention_dropout", None):
        warnings.warn(
            "dropout: documents that share a prefix also share what is dropped in it; set the dropout of the model to "
            "0 for the gradients of separate documents",
            stacklevel=2,
        )
    if getattr(config, "output_router_logits", False):
        warnings.warn(
            "output_router_logits: the balancing loss of routers counts tokens of a shared prefix once, not once for "
            "each document",
            stacklevel=2,
        )
