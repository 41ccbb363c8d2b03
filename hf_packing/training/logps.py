"""Log-probabilities of tokens and of documents, from logits that are computed in chunks of tokens."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F

from hf_packing.attention import check_patched, inner_model, patch_model
from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import INPUT_IDS, SEQ_IDX
from hf_packing.training.head import called_on_outputs, join_chunks, observed_logits
from hf_packing.training.losses import (
    NextTokens,
    check_keys,
    documents_and_tokens,
    documents_in,
    exact_type,
    labels_key,
)
from hf_packing.training.model_loss import check_predicts_next, inputs_of_model


def document_logps(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Compute the log-probability of each document's labels under a causal language model, with gradients.

    Labels of -100 do not count. The result is for losses that compare documents, such as DPO, and for scores. It does
    not depend on which documents share the batch or a prefix. Logits are computed for one chunk of tokens at a time;
    the backward pass computes them again, except with FSDP, where the logits of the whole batch are kept.

    Args:
        model: a patched causal language model of transformers, with or without wrappers.
        batch: a batch of a PackingCollator on the device of the model, or a batch of prepare_dataloader.

    Returns:
        float32 [documents], or float64 if the logits are float64: the sum over a document's labels of the log of their
        probabilities, given the tokens before them; 0 for a document without labels. In a packed batch, documents are
        the segments, without those that only fill fixed shapes. In a batch of trees, they are in the order of `ends`.

    Raises:
        PackingError: the batch has no labels or borders; or the model is not patched, or is not a causal language
            model.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = hfp.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)))
        >>> chosen = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
        >>> rejected = {"input_ids": [5, 6, 9], "labels": [-100, -100, 9]}
        >>> logps = hfp.document_logps(model, hfp.PackingCollator()([chosen, rejected]))
        >>> loss = -(logps[0] - logps[1]).sigmoid().log()
        >>> loss.backward()
    """
    check_keys(batch)
    labels = batch[labels_key(batch)]
    check_patched(model)
    check_predicts_next(model)
    if is_tree_batch(batch):
        patch_model(model, trees=True)  # the proof reads all logits, as the forward below does not
    following = NextTokens.of_batch(batch, labels)
    log_probs = results_of_labels(model, inputs_of_model(batch), following.predictors, following.labels, log_probs_of)
    exact = log_probs.to(exact_type(log_probs.device))
    if is_tree_batch(batch):
        of_documents, tokens = (torch.from_numpy(each).to(exact.device) for each in documents_and_tokens(batch))
        exact = exact[torch.searchsorted(following.tokens.to(exact.device), tokens)]
    else:
        of_documents = batch[SEQ_IDX][0, following.tokens].long().to(exact.device)
    sums = exact.new_zeros(int(documents_in(batch))).index_add(0, of_documents, exact)
    return sums.to(log_probs.dtype)


def results_of_labels(
    model: nn.Module,
    inputs: Mapping[str, Any],
    predictors: Tensor,
    labels: Tensor,
    result_of: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Run a model, and return a result for each of some labels, [labels, ...], from the logits that predict it.

    Args:
        model: a patched language model, with or without wrappers.
        inputs: the model's inputs, without labels.
        predictors: the token of the row that predicts each label, int64 [labels].
        labels: int64 [labels].
        result_of: a function (logits of a chunk of tokens, float [tokens, vocabulary]; their labels) -> results.
    """

    def replace(outputs: Any) -> None:
        outputs.logits = join_chunks(
            outputs.logits, predictors, lambda logits, chunk: result_of(logits, labels[chunk].to(logits.device))
        )

    is_sharded = any(isinstance(each, (FSDPModule, FullyShardedDataParallel)) for each in model.modules())
    # the backward pass would need weights of the output layer again, which are sharded by then
    whole = is_sharded and torch.is_grad_enabled()
    with (
        nullcontext() if whole else observed_logits(model, inputs[INPUT_IDS].shape),
        called_on_outputs(inner_model(model), replace),
    ):
        found: Tensor = model(**inputs).logits
    return found


def log_probs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, float32 or float64 [labels]; 0 for a label of -100."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return -F.cross_entropy(exact, labels, reduction="none")
