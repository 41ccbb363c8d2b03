"""compute_loss: the loss of a batch in a loop of one's own."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_packing.attention import inner_model, refuse_copied_labels
from hf_packing.errors import PackingError
from hf_packing.training.loss_of_model import check_patched, predicts_next, router_loss
from hf_packing.training.losses import ITEMS, TARGETS, WEIGHTS, weighted_loss, weights_of


def compute_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss of a batch that `prepare_dataloader` made; `accelerator.backward(loss)` then does the rest.

    Args:
        model: a causal or masked language model of transformers, also as PEFT and accelerate have wrapped it.
        batch: as the loader yields it.

    Returns:
        float scalar. Its gradient, averaged over ranks and accumulated steps as accelerate does, is that of the whole
        batch's loss. Where the model has a mixture of experts, its weighted balancing loss is added, which accelerate
        averages over ranks and gradient_accumulation_steps, also where the last update of an epoch has fewer.

    Raises:
        PackingError: a batch that is not of prepare_dataloader; a model that is not patched, or no language model; in
            training, labels that only repeat the tokens that a masked language model sees.

    Example:
        >>> import hf_packing as hfp, torch, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = hfp.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)))
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> hfp.compute_loss(model, {**batch, "num_items_in_batch": torch.tensor(3.0)}).shape
        torch.Size([])
    """
    if not isinstance(batch, Mapping):
        raise PackingError(f"batch: expected one of prepare_dataloader, got {type(batch).__name__}")
    if ITEMS in batch and "labels" in batch:
        batch = {**batch, TARGETS: batch["labels"], WEIGHTS: weights_of(batch, "token") / batch[ITEMS]}
    if WEIGHTS not in batch:
        raise PackingError(f"batch: expected one of prepare_dataloader, got {', '.join(batch) or 'nothing'}")
    check_patched(model)
    if model.training:
        refuse_copied_labels(inner_model(model), batch.get("input_ids"), batch[TARGETS], batch["cu_seq_lens_q"])
    not_for_the_model = ("labels", ITEMS, TARGETS, WEIGHTS)
    outputs = model(**{name: value for name, value in batch.items() if name not in not_for_the_model})
    loss = weighted_loss(outputs.logits, batch[TARGETS], batch[WEIGHTS], predicts_next(model))
    auxiliary = router_loss(outputs, model)
    return loss if auxiliary is None else loss + auxiliary
