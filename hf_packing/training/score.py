"""Log-likelihoods of documents, from logits that are computed in chunks of tokens.

`score` computes them, or embeddings, without gradients, on packed rows; `document_logps` computes those of a batch,
with gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from accelerate import PartialState
from accelerate.state import is_initialized
from accelerate.utils import gather_object, send_to_device
from datasets.utils import tqdm
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F

from hf_packing.attention import (
    check_patched,
    in_mode,
    inner_model,
    input_device,
    patch_model,
    patched,
    predicts_tokens,
    sees_labels,
)
from hf_packing.batch.collate import PackingCollator, read_integers
from hf_packing.checks import check_choice, check_whole_number
from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, SEGMENT_COLUMNS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import offsets_of
from hf_packing.rows.packed_rows import Rows
from hf_packing.rows.packing import Packing
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.rows.token_columns import column_of_values
from hf_packing.strategies.greedy import BestFit
from hf_packing.training.head import called_on_outputs, join_chunks, observed_logits
from hf_packing.training.kinds import check_keys, labels_of
from hf_packing.training.losses import Batch, exact_type
from hf_packing.training.model_loss import check_predicts_next, inputs_of_model, predicts_next
from hf_packing.trees.forest import check_fewest_shared
from hf_packing.trees.segments import TreePaths

Pooling = Literal["mean", "last", "first"]
"""How the hidden states of a document's tokens become one vector: their mean, or the state of one token."""

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """The results of `score`, in the order of the documents.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> scores = hfp.score(model, [[5, 6, 7, 8], [9, 10]], progress=False)
        >>> scores.num_tokens.tolist(), scores.perplexity.shape
        ([3, 1], (2,))
    """

    log_likelihood: _Floats
    """The summed log-probabilities of each document's scored tokens, float64 [documents]; nan for a model without
    likelihoods."""
    num_tokens: _Integers
    """The number of scored tokens of each document, int64 [documents]."""
    greedy: npt.NDArray[np.bool_]
    """True if each scored token is the most probable one, bool [documents]."""
    hidden: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    """The pooled hidden states of each document, float32 [documents, width]; None if they were not asked for."""

    @cached_property
    def perplexity(self) -> _Floats:
        """exp(-log_likelihood / num_tokens) of each document, float64 [documents]; nan if no token is scored."""
        found: _Floats = np.exp(-self.log_likelihood / np.where(self.num_tokens > 0, self.num_tokens, np.nan))
        return found


def score(
    model: nn.Module,
    documents: Any,
    *,
    max_tokens: int = 16384,
    hidden: Pooling | None = None,
    share_prefixes: bool | int = False,
    progress: bool = True,
) -> Scores:
    """Compute the log-likelihood of documents under a causal language model, or their embeddings, on packed rows.

    Documents are packed in rows of up to `max_tokens` tokens, and do not affect each other. The output layer runs on
    chunks of tokens. The results are in the order of the documents, and depend on `max_tokens` only up to rounding. In
    a run on several processes, each process scores a share of the documents, and all of them get all results.

    With `share_prefixes`, tokens with which several documents begin run once, as in a row that
    `pack(..., share_prefixes=True)` makes: the examples of a few-shot prompt, and the question before its options.
    Results are the same up to rounding. Documents that are equal, or equal up to their last token if `hidden` is None,
    run once in any case.

    Args:
        model: a model of transformers; a causal language model if `hidden` is None. If it is not patched, it is patched
            for this call, which takes time: call `patch_model`, with `trees=True` for shared prefixes, before several
            calls.
        documents: lists of token ids, or a Dataset with the column input_ids. With a column labels, only tokens whose
            label is not -100 are scored; otherwise, all tokens but the first one of each document.
        max_tokens: number of tokens in a row, or in the longest document if this is more.
        hidden: "mean", "last" or "first" to return the last hidden states, pooled over the tokens of each document.
        share_prefixes: whether to compute prefixes that documents share once; an integer is the fewest tokens to share,
            and True means 16.
        progress: whether to show a progress bar, on the first process.

    Returns:
        Scores: log-likelihoods, numbers of tokens, whether the tokens are the most probable ones, and perplexities.

    Raises:
        PackingError: an argument has a wrong value; a document is not a list of integers; labels are not its own
            tokens; or `hidden` is None and the model has no likelihoods of documents, since it sees the tokens that it
            predicts.
        ModelNotSupportedError: it cannot be proven that documents are isolated; or, with `share_prefixes`, that the
            model computes a prefix as it does without what follows, as encoders do not.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=99, **sizes))
        >>> hfp.score(model, [[5, 6, 7], [8, 9]], hidden="mean", progress=False).hidden.shape
        (2, 32)
    """
    check_whole_number("max_tokens", max_tokens)
    if hidden is not None:
        check_choice("hidden", hidden, Pooling)
    fewest = check_fewest_shared(share_prefixes)
    documents = _read(documents)
    inner = inner_model(model)
    with patched(model):
        has_likelihoods = predicts_tokens(inner) and predicts_next(model) and not sees_labels(inner)
        if hidden is None and not has_likelihoods:
            raise PackingError(
                f"model: expected a causal language model, got {type(inner).__name__}, which has no likelihoods of "
                "documents; pass hidden='mean' for embeddings"
            )
        if fewest is not None:
            patch_model(model, trees=True)
        # the last token predicts nothing, so it runs only for its state
        tokens = [each.tokens if hidden is not None else each.tokens[:-1] for each in documents]
        same: dict[bytes, list[int]] = {}  # equal sequences run once
        for number, sequence in enumerate(tokens):
            same.setdefault(sequence.tobytes(), []).append(number)
        same.pop(b"", None)
        numbers = [*same.values()]
        rank, world_size = 0, 1
        if is_initialized():
            rank, world_size = PartialState().process_index, PartialState().num_processes
        rows = rows_to_score([tokens[each[0]] for each in numbers], max_tokens, fewest)
        own = rows[rank::world_size]
        own += rows[:1] * (-(-len(rows) // world_size) - len(own))  # as many forwards on every process
        found = []
        with in_mode(model, training=False), torch.no_grad():
            for row in tqdm(own, unit=" rows", disable=not progress or rank > 0):
                places = {number: each for sequence, each in row.places.items() for number in numbers[sequence]}
                found.append((list(places), _score_row(model, row, places, documents, hidden, has_likelihoods)))
    gathered = gather_object(found) if world_size > 1 else found
    results = np.zeros((len(documents), gathered[0][1].shape[1] if gathered else 2))
    for scored, values in gathered:
        results[scored] = values
    return Scores(
        results[:, 0] if has_likelihoods else np.full(len(documents), np.nan),
        np.array([has_likelihoods * len(each.scored) for each in documents], np.int64),
        has_likelihoods & (results[:, 1] == 0),
        None if hidden is None else results[:, 2:].astype(np.float32),
    )


class _Document(NamedTuple):
    tokens: _Integers
    scored: _Integers
    """The places of the tokens that are scored, int64 [scored tokens]; never the first token, which follows nothing."""


class RowToScore(NamedTuple):
    """Sequences of tokens that a model runs in one row."""

    places: dict[int, _Integers]
    """For each sequence, by its number, the indices of its tokens in the row, int64 [tokens]."""
    tokens: int
    """The number of tokens in the row."""
    build: Callable[[], Rows]
    """Builds the packed row or, if sequences share tokens, the row of trees."""


def rows_to_score(sequences: Sequence[_Integers], max_tokens: int, fewest_shared: int | None) -> list[RowToScore]:
    """Plan the rows for sequences of tokens, the longest row first.

    Args:
        sequences: the tokens of each sequence; none is empty.
        max_tokens: number of tokens in a row, or in the longest sequence if this is more.
        fewest_shared: the fewest tokens that sequences share; None to share none.
    """
    if not sequences:
        return []
    lengths = np.array([len(each) for each in sequences], dtype=np.int64)
    columns = {INPUT_IDS: column_of_values(INPUT_IDS, np.concatenate(sequences), lengths)}
    packed = Packing(BestFit(max(max_tokens, int(lengths.max()))))
    trees = replace(packed, fewest_shared=fewest_shared)
    plan = trees.plan(columns)
    shared = np.zeros_like(plan.segment_length) if plan.segment_shared is None else plan.segment_shared
    rows = []
    for pack, (first, end) in enumerate(pairwise(plan.pack_offsets.tolist())):
        packing = trees if shared[first:end].any() else packed
        paths = TreePaths(plan.segment_length[first:end], shared[first:end])
        of_sequences = np.split(paths.tokens, offsets_of(paths.length)[1:-1])
        places = dict(zip(plan.segment_document[first:end].tolist(), of_sequences, strict=True))
        rows.append(RowToScore(places, paths.own.sum(), partial(packing.rows, columns, plan, np.array([pack]))))
    return sorted(rows, key=lambda row: -row.tokens)


def _read(documents: Any) -> list[_Document]:
    """Return the tokens of all documents, and which of them are scored."""
    if isinstance(documents, (str, bytes)) or not hasattr(documents, "__iter__"):
        raise PackingError(f"documents: expected lists of token ids or a Dataset, got {type(documents).__name__}")
    refuse_lost_borders(documents, getattr(documents, "column_names", None) or (INPUT_IDS,))
    found = []
    for number, each in enumerate(documents):
        row = each if hasattr(each, "keys") else {INPUT_IDS: each}
        if packed := [name for name in SEGMENT_COLUMNS if name in row]:
            raise PackingError(
                f"documents: expected documents, but the column {packed[0]!r} says that row {number} is packed; pass "
                "unpack(packed), or remove the column if the rows are not packed"
            )
        tokens = read_integers(INPUT_IDS, row, number).astype(np.int64)
        labels = read_integers(LABELS, row, number).astype(np.int64) if row.get(LABELS) is not None else tokens
        if len(labels) != len(tokens) or ((labels != IGNORED_LABEL) & (labels != tokens)).any():
            raise PackingError(
                f"labels: expected the {len(tokens)} tokens of document {number} themselves, or {IGNORED_LABEL} for "
                f"tokens that are not scored, got {len(labels)} labels of which some are others"
            )
        found.append(_Document(tokens, 1 + np.flatnonzero(labels[1:] != IGNORED_LABEL)))
    return found


def _score_row(
    model: nn.Module,
    row: RowToScore,
    places: dict[int, _Integers],
    documents: Sequence[_Document],
    pooling: Pooling | None,
    has_likelihoods: bool,
) -> _Floats:
    """Run a model on a row, and return results of its documents, float64 [documents, 2 + width].

    Args:
        places: by the number of each document in the row, the indices of its tokens in the row.

    Returns:
        The log-likelihood, the number of scored tokens that are not the most probable ones, and the pooled states.
    """
    device = input_device(inner_model(model))
    inputs = inputs_of_model(send_to_device(PackingCollator()(row.build().table.to_pylist()), device))
    chosen = [documents[number] for number in places]
    pairs = [  # the token that predicts each token to score, and this token
        np.stack([own[each.scored - 1], each.tokens[each.scored]])
        for own, each in zip(places.values(), chosen, strict=True)
    ]
    different, which = np.unique(np.concatenate(pairs, axis=1), axis=1, return_inverse=True)
    predictors, labels = torch.from_numpy(different).to(device)
    scores = torch.zeros(len(labels), 2, dtype=torch.float64)
    outputs: list[Any] = []
    with called_on_outputs(inner_model(model).base_model, outputs.append):
        if has_likelihoods:
            scores = results_of_labels(model, inputs, predictors, labels, _scores_of).cpu()
        else:
            model(**inputs)
    of_documents = np.repeat(np.arange(len(chosen)), [len(each.scored) for each in chosen])
    results = np.zeros((len(chosen), 2))
    np.add.at(results, of_documents, scores.numpy()[which])
    if pooling is None:
        return results
    pooled = [_pooled(outputs[-1][0], own, pooling) for own in places.values()]
    return np.concatenate([results, torch.stack(pooled).cpu().numpy()], axis=1)


def _scores_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, and whether it is not the most probable one, float64 [labels, 2]."""
    is_less = logits.gather(1, labels[:, None])[:, 0] < logits.amax(-1)
    return torch.stack([log_probs_of(logits, labels), is_less], 1).double()


def _pooled(states: Tensor, places: _Integers, pooling: Pooling) -> Tensor:
    """Return the pooled hidden states of the tokens at some places in the row, float [width]."""
    chosen = {"mean": places, "first": places[:1], "last": places[-1:]}[pooling]
    own = states[0, torch.from_numpy(chosen).to(states.device)]
    return (own if own.dtype == torch.float64 else own.float()).mean(0)


def document_logps(model: nn.Module, batch: Batch) -> Tensor:
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
        PackingError: the batch has no labels or borders, or is a part of a row on several ranks; or the model is not
            patched, or is not a causal language model.

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
    of = labels_of(batch)
    if of.ranks > 1:
        raise PackingError("batch: expected whole documents, got a part of a row; train without max_ranks_per_document")
    check_patched(model)
    check_predicts_next(model)
    if of.shares_tokens:
        patch_model(model, trees=True)  # the proof reads all logits, as the forward below does not
    following = of.next_tokens()
    log_probs = results_of_labels(model, inputs_of_model(batch), following.predictors, following.labels, log_probs_of)
    exact = log_probs.to(exact_type(log_probs.device))
    documents, places = (each.to(exact.device) for each in of.of_documents(following))
    sums = exact.new_zeros(int(of.num_documents())).index_add(0, documents, exact[places])
    return sums.to(log_probs.dtype)


def results_of_labels(
    model: nn.Module,
    inputs: Batch,
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
