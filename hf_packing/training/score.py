"""Define `score`, which computes the log-likelihood of documents, or their embeddings, on packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from accelerate import PartialState
from accelerate.state import is_initialized
from accelerate.utils import gather_object
from datasets.utils import tqdm
from torch import Tensor, nn

from hf_packing.attention import inner_model, input_device, patched, restored_modes, sees_labels
from hf_packing.collate import PackingCollator
from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.integer_columns import read_integers
from hf_packing.planning.lengths import check_whole_number
from hf_packing.strategies.base import plan_packing
from hf_packing.strategies.greedy import BestFit
from hf_packing.training.log_probs import log_probs_and_hidden
from hf_packing.training.losses import predicts_next

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
        with np.errstate(invalid="ignore", divide="ignore"):
            found: _Floats = np.exp(-self.log_likelihood / np.where(self.num_tokens > 0, self.num_tokens, np.nan))
        return found


def score(
    model: nn.Module,
    documents: Any,
    *,
    max_tokens: int = 16384,
    hidden: Pooling | None = None,
    progress: bool = True,
) -> Scores:
    """Compute the log-likelihood of documents under a causal language model, or their embeddings, on packed rows.

    Documents are packed in rows of up to `max_tokens` tokens, and do not affect each other. The output layer runs on
    chunks of tokens. The results are in the order of the documents, and depend on `max_tokens` only up to rounding. In
    a run on several processes, each process scores a share of the documents, and all of them get all results.

    Args:
        model: a model of transformers; a causal language model if `hidden` is None. If it is not patched, it is patched
            for this call, which takes time: call `patch_model` before several calls.
        documents: lists of token ids, or a Dataset with the column input_ids. With a column labels, only tokens whose
            label is not -100 are scored; otherwise, all tokens but the first one of each document.
        max_tokens: number of tokens in a row. A longer document is a row of its own.
        hidden: "mean", "last" or "first" to return the last hidden states, pooled over the tokens of each document.
        progress: whether to show a progress bar, on the first process.

    Returns:
        Scores: log-likelihoods, numbers of tokens, whether the tokens are the most probable ones, and perplexities.

    Raises:
        PackingError: an argument has a wrong value; a document is no list of integers; labels are not its own tokens;
            or `hidden` is None and the model has no likelihoods of documents, since it sees the tokens that it
            predicts.
        ModelNotSupportedError: it cannot be proven that documents are isolated.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=99, **sizes))
        >>> hfp.score(model, [[5, 6, 7], [8, 9]], hidden="mean", progress=False).hidden.shape
        (2, 32)
    """
    check_whole_number("max_tokens", max_tokens)
    if hidden is not None and hidden not in get_args(Pooling):
        raise PackingError(f"hidden: expected None or one of {', '.join(get_args(Pooling))}, got {hidden!r}")
    rows = _read(documents)
    with patched(model), restored_modes(model), torch.no_grad():
        model.eval()
        scores_tokens = _has_likelihoods(model, required=hidden is None)
        rank, world_size = _rank_and_world_size()
        last = 0 if hidden is None else 1  # the last token predicts nothing, so it runs only for its state
        packs = _packs([max(0, len(row.tokens) - 1 + last) for row in rows], max_tokens)
        own = packs[rank::world_size]
        own += packs[:1] * (-(-len(packs) // world_size) - len(own))  # as many forwards on every process
        found: dict[int, _Found] = {}
        for pack in tqdm(own, unit=" rows", disable=not progress or rank > 0):
            found |= _score_pack(model, [rows[number] for number in pack], pack, hidden, scores_tokens)
    gathered = [found] if world_size == 1 else gather_object([found])
    known = {number: each for part in gathered for number, each in part.items()}
    return _joined([known.get(number) for number in range(len(rows))], hidden, scores_tokens)


class _Row(NamedTuple):
    tokens: _Integers
    labels: _Integers


class _Found(NamedTuple):
    """The results for one document."""

    log_likelihood: float
    num_tokens: int
    greedy: bool
    hidden: npt.NDArray[np.float32] | None


def _read(documents: Any) -> list[_Row]:
    """Return the tokens and labels of all documents. The label of a token that is not scored is -100."""
    if isinstance(documents, (str, bytes)) or not hasattr(documents, "__iter__"):
        raise PackingError(f"documents: expected lists of token ids or a Dataset, got {type(documents).__name__}")
    rows = []
    for number, each in enumerate(documents):
        row = each if hasattr(each, "keys") else {INPUT_IDS: each}
        tokens = read_integers(INPUT_IDS, row, number).astype(np.int64)
        labels = read_integers(LABELS, row, number).astype(np.int64) if row.get(LABELS) is not None else tokens.copy()
        if len(labels) != len(tokens):
            raise PackingError(
                f"labels: expected a label for each of the {len(tokens)} tokens of document {number}, got {len(labels)}"
            )
        other = np.flatnonzero((labels != IGNORED_LABEL) & (labels != tokens))
        if len(other):
            raise PackingError(
                f"labels: expected the document's own tokens, or {IGNORED_LABEL} for tokens that are not scored, got "
                f"{labels[other[0]]} for token {other[0]} of document {number}, which is {tokens[other[0]]}"
            )
        labels[:1] = IGNORED_LABEL  # the first token follows nothing
        rows.append(_Row(tokens, labels))
    return rows


def _packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the numbers of the documents in each row, the longest row first, without empty documents."""
    short = [number for number, length in enumerate(lengths) if 0 < length <= max_tokens]
    packs = [[number] for number, length in enumerate(lengths) if length > max_tokens]
    if short:
        plan = plan_packing([lengths[number] for number in short], BestFit(max_tokens))
        borders = plan.pack_offsets.tolist()
        of_segments = plan.segment_document.tolist()
        packs += [[short[each] for each in of_segments[start:end]] for start, end in pairwise(borders)]
    return sorted(packs, key=lambda pack: -sum(lengths[number] for number in pack))


def _has_likelihoods(model: nn.Module, required: bool) -> bool:
    """Return whether a patched model has likelihoods of documents; raise PackingError if it does not but must."""
    inner, reason = inner_model(model), ""
    if inner.get_output_embeddings() is None:
        reason = "has no head that predicts tokens"
    elif not predicts_next(model) or sees_labels(inner):
        reason = "sees the tokens that it predicts, so their probabilities are no likelihood of the document"
    if reason and required:
        raise PackingError(
            f"model: expected a causal language model if hidden is None, but {type(inner).__name__} {reason}; pass "
            "hidden='mean' for embeddings"
        )
    return not reason


def _score_pack(
    model: nn.Module, rows: Sequence[_Row], numbers: Sequence[int], pooling: Pooling | None, scores_tokens: bool
) -> dict[int, _Found]:
    """Run a model on documents packed in one row, and return the results by number of the document."""
    given = [row.tokens if pooling is not None else row.tokens[:-1] for row in rows]
    targets = [np.append(row.labels[1:], IGNORED_LABEL)[: len(each)] for row, each in zip(rows, given, strict=True)]
    batch = PackingCollator()([{INPUT_IDS: each} for each in given])
    device = input_device(inner_model(model))
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    after = torch.from_numpy(np.concatenate(targets)[None]).to(device)
    found_log_probs, found_greedy, states = log_probs_and_hidden(
        model, inputs, after, scores_tokens, pooling is not None
    )
    log_probs, is_greedy = found_log_probs.cpu().numpy(), found_greedy.cpu().numpy()
    borders = np.cumsum([0, *map(len, given)]).tolist()
    found = {}
    for number, row, (start, end) in zip(numbers, rows, pairwise(borders), strict=True):
        scored = int((row.labels != IGNORED_LABEL).sum())
        pooled = None if states is None or pooling is None else _pooled(states[start:end], pooling)
        found[number] = _Found(
            float(log_probs[start:end].sum()) if scores_tokens else np.nan,
            scored if scores_tokens else 0,
            bool(is_greedy[start:end].all()) if scores_tokens else False,
            pooled,
        )
    return found


def _pooled(states: Tensor, pooling: Pooling) -> npt.NDArray[np.float32]:
    states = states.float() if states.dtype != torch.float64 else states
    vector = {"mean": lambda: states.mean(0), "first": lambda: states[0], "last": lambda: states[-1]}[pooling]()
    pooled: npt.NDArray[np.float32] = vector.cpu().numpy().astype(np.float32)
    return pooled


def _joined(found: Sequence[_Found | None], pooling: Pooling | None, scores_tokens: bool) -> Scores:
    """Return the results of all documents; None stands for a document without tokens."""
    empty = 0.0 if scores_tokens else np.nan
    width = next((len(each.hidden) for each in found if each is not None and each.hidden is not None), 0)
    hidden = np.zeros((len(found), width), np.float32) if pooling is not None else None
    for number, each in enumerate(found):
        if hidden is not None and each is not None and each.hidden is not None:
            hidden[number] = each.hidden
    return Scores(
        log_likelihood=np.array([empty if each is None else each.log_likelihood for each in found], np.float64),
        num_tokens=np.array([0 if each is None else each.num_tokens for each in found], np.int64),
        greedy=np.array([scores_tokens if each is None else each.greedy for each in found], np.bool_),
        hidden=hidden,
    )


def _rank_and_world_size() -> tuple[int, int]:
    state = PartialState() if is_initialized() else None
    return (state.process_index, state.num_processes) if state is not None else (0, 1)
