"""Train on rows of trees: find the trees of a dataset's documents, and check that a model and a trainer take them."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import Trainer

from hf_packing.attention import has_local_weights, inner_model, patch_model
from hf_packing.columns import TOKEN_TYPE_IDS
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.sampling.rows import TreesOfDocuments
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.losses import Loss
from hf_packing.training.model_loss import check_loss_of_model, check_predicts_next
from hf_packing.training.shared_randomness import warn_of_shared_randomness
from hf_packing.training.trainer_loss import TrainerLoss


def trees_to_train(
    dataset: Any, batching: Batching, unread: Sequence[str], model: nn.Module | None, more: Sequence[str] = ()
) -> TreesOfDocuments:
    """Return the trees of a training dataset's documents.

    Args:
        dataset: the training dataset.
        batching: a TokenBudget that shares prefixes.
        unread: names of columns that are not read.
        model: the model that will run the batches; None stands for any model.
        more: names of further columns to read.
    """
    assert isinstance(batching, TokenBudget)
    assert batching.fewest_shared is not None
    has_token_types = model is None or bool(getattr(inner_model(model).config, "type_vocab_size", 0))
    unread = [*unread, *([] if has_token_types else [TOKEN_TYPE_IDS])]
    return TreesOfDocuments.find(dataset, batching.max_tokens, batching.fewest_shared, batching.overflow, unread, more)


def check_takes_trees(model: nn.Module, loss: Loss, batching: Batching, shapes: Shapes) -> None:
    """Prove that a patched model runs rows of trees, and check that it can be trained on them with these settings.

    If weights are not in memory, trees must have been proven before. A warning names what is not exact in trees.

    Raises:
        PackingError: the model sees the tokens that it predicts; its own loss is not the cross-entropy of its logits;
            or batches have fixed shapes, or segments that are cut by a schedule.
        ModelNotSupportedError: it cannot be proven that the model runs rows of trees.
    """
    check_predicts_next(model)
    check_loss_of_model(model, loss, trees=True)
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


def check_takes_trees_as(own: TrainerLoss, trainer: Trainer, masks: Any) -> None:
    """Check that a trainer's loss is the model's own one, whose cross-entropy can be that of rows of trees.

    Args:
        own: the way in which the trainer computes its loss.
        trainer: the trainer, whose model is patched.
        masks: the trainer's collator if it masks tokens, else None.

    Raises:
        PackingError: the trainer's own loss is another one than the cross-entropy, or its collator masks tokens.
    """
    if masks is not None:
        raise PackingError(
            f"data_collator: expected a collator that masks no tokens for documents that share prefixes, got "
            f"{type(masks).__name__} with mlm=True"
        )
    if (own.is_its_own and not own.sums_log_probs) or trainer.args.use_liger_kernel:
        raise PackingError(
            "trainer: expected the cross-entropy as the loss for documents that share prefixes, which attach computes, "
            f"but {own.kind.__name__} has a compute_loss, compute_loss_func, label_smoothing_factor, loss_type or "
            "use_liger_kernel of its own; train without share_prefixes"
        )
