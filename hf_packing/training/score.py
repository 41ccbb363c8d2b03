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

from hf_packing.attention import (
    in_mode,
    inner_model,
    input_device,
    patch_model,
    patched,
    predicts_tokens,
    sees_labels,
)
from hf_packing.batch.collate import read_integers
from hf_packing.checks import check_whole_number
from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, SEGMENT_COLUMNS
from hf_packing.errors import PackingError
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.training.log_probs import log_probs_and_hidden
from hf_packing.training.model_loss import predicts_next
from hf_packing.training.next_tokens import NextTokens
from hf_packing.training.rows_to_score import RowToScore, rows_to_score
from hf_packing.trees.forest import check_fewest_shared

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
        max_tokens: number of tokens in a row. A longer document has a row of its own; documents that share its prefix
            add up to `max_tokens` tokens to this row.
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
    if hidden is not None and hidden not in get_args(Pooling):
        raise PackingError(f"hidden: expected None or one of {', '.join(get_args(Pooling))}, got {hidden!r}")
    fewest = check_fewest_shared(share_prefixes)
    documents = _read(documents)
    with patched(model), in_mode(model, training=False):
        scores_tokens = _has_likelihoods(model, required=hidden is None)
        if fewest is not None:
            patch_model(model, trees=True)
        # the last token predicts nothing, so it runs only for its state
        sequences = _Sequences.of([each.tokens if hidden is not None else each.tokens[:-1] for each in documents])
        rank, world_size = _rank_and_world_size()
        rows = rows_to_score(sequences.tokens, max_tokens, fewest)
        own = rows[rank::world_size]
        own += rows[:1] * (-(-len(rows) // world_size) - len(own))  # as many forwards on every process
        found: dict[int, _Found] = {}
        with torch.no_grad():
            for row in tqdm(own, unit=" rows", disable=not progress or rank > 0):
                found |= _score_row(model, row, sequences, documents, hidden, scores_tokens)
    gathered = [found] if world_size == 1 else gather_object([found])
    known = {number: each for part in gathered for number, each in part.items()}
    return _joined([known.get(number) for number in range(len(documents))], hidden, scores_tokens)


class _Document(NamedTuple):
    tokens: _Integers
    labels: _Integers
    """The token itself if it is scored, otherwise -100."""


class _Sequences(NamedTuple):
    """Sequences that the model runs for all documents; equal sequences run once."""

    tokens: list[_Integers]
    """The tokens of each sequence; none is empty."""
    documents: list[list[int]]
    """For each sequence, the numbers of its documents."""

    @classmethod
    def of(cls, given: Sequence[_Integers]) -> "_Sequences":
        known: dict[bytes, list[int]] = {}
        for number, tokens in enumerate(given):
            if len(tokens):
                known.setdefault(tokens.tobytes(), []).append(number)
        numbers = list(known.values())
        return cls([given[each[0]] for each in numbers], numbers)


class _Found(NamedTuple):
    """The results for one document."""

    log_likelihood: float
    num_tokens: int
    greedy: bool
    hidden: npt.NDArray[np.float32] | None


def _read(documents: Any) -> list[_Document]:
    """Return the tokens and labels of all documents."""
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
        found.append(_Document(tokens, labels))
    return found


def _has_likelihoods(model: nn.Module, required: bool) -> bool:
    """Return whether a patched model has likelihoods of documents; raise PackingError if it does not but must."""
    inner, reason = inner_model(model), ""
    if not predicts_tokens(inner):
        reason = "has no head that predicts tokens"
    elif not predicts_next(model) or sees_labels(inner):
        reason = "sees the tokens that it predicts, so their probabilities are no likelihood of the document"
    if reason and required:
        raise PackingError(
            f"model: expected a causal language model if hidden is None, but {type(inner).__name__} {reason}; pass "
            "hidden='mean' for embeddings"
        )
    return not reason


def _score_row(
    model: nn.Module,
    row: RowToScore,
    sequences: _Sequences,
    documents: Sequence[_Document],
    pooling: Pooling | None,
    scores_tokens: bool,
) -> dict[int, _Found]:
    """Run a model on a row, and return the results of its documents by their numbers."""
    device = input_device(inner_model(model))
    inputs = row.inputs(sequences.tokens)
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    places = dict(zip(row.sequences.tolist(), row.places(), strict=True))
    numbers = {number: sequence for sequence in places for number in sequences.documents[sequence]}
    scored = {number: np.flatnonzero(documents[number].labels != IGNORED_LABEL) for number in numbers}
    predictors = [places[sequence][scored[number] - 1] for number, sequence in numbers.items()]
    labels = [documents[number].tokens[scored[number]] for number in numbers]
    following, which = _next_tokens(np.concatenate(predictors), np.concatenate(labels), device)
    log_probs, is_greedy, states = log_probs_and_hidden(
        model, inputs, following if scores_tokens else None, pooling is not None
    )
    found_log_probs, found_greedy = log_probs.cpu().numpy(), is_greedy.cpu().numpy()
    borders = np.cumsum([0, *map(len, labels)]).tolist()
    found = {}
    for (number, sequence), (start, end) in zip(numbers.items(), pairwise(borders), strict=True):
        pooled = None if states is None or pooling is None else _pooled(states, places[sequence], pooling)
        if scores_tokens:
            own = which[start:end]
            found[number] = _Found(
                float(found_log_probs[own].sum()), end - start, bool(found_greedy[own].all()), pooled
            )
        else:
            found[number] = _Found(np.nan, 0, False, pooled)
    return found


def _next_tokens(predictors: _Integers, labels: _Integers, device: torch.device) -> tuple[NextTokens, _Integers]:
    """Return the tokens to score without duplicates, and for each of those given, its index among them.

    Args:
        predictors: the token of the row that predicts each token to score, int64 [labels].
        labels: the tokens to score, int64 [labels]; none is negative.
        device: the device of the result.
    """
    base = int(labels.max(initial=0)) + 1
    different, which = np.unique(predictors * base + labels, return_inverse=True)
    after, to_score = (torch.from_numpy(each).to(device) for each in np.divmod(different, base))
    return NextTokens(after, after, to_score), which


def _pooled(states: Tensor, places: _Integers, pooling: Pooling) -> npt.NDArray[np.float32]:
    """Return the pooled hidden states of the tokens at some places in the row."""
    places = {"mean": places, "first": places[:1], "last": places[-1:]}[pooling]
    own = states[torch.from_numpy(places).to(states.device)]
    own = own.float() if own.dtype != torch.float64 else own
    pooled: npt.NDArray[np.float32] = own.mean(0).cpu().numpy().astype(np.float32)
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
