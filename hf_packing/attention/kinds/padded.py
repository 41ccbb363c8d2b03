"""Padded batches, whose rows are documents: the backbone, the part without the head, runs on the tokens alone.

The tokens are laid end to end, as one packed row, and the outputs are put back where the tokens were. A backbone that
takes no packed rows runs on the rows of equal length together. Poolers, which make one output of all tokens of a
document by reading a place in a row, get every document in a row of its own, which the last module of the backbone that
returns a value for every token makes. Reading a batch waits for the device.

A proof finds the way in which a model runs such batches: in the whole model with its head, every row, with padding on
the right, on the left and on both sides, has to have the outputs and gradients that it has alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_packing.attention.by_segment import ReplacedForward
from hf_packing.attention.cases import DocumentTokens, RowCase, examine_in_training
from hf_packing.attention.kinds.kind import (
    ROW,
    Batch,
    current_batch,
    itself_uncompiled,
    refuse_earlier_tokens,
    refuse_missing_weights,
    tokens_of,
)
from hf_packing.attention.kinds.packed import PackedLayout, PackedRows
from hf_packing.attention.kinds.rows import Rows, has_axes_first
from hf_packing.attention.layout import CACHES, Layout, current_layout, on_device, within
from hf_packing.attention.model import (
    Arguments,
    Inputs,
    backbones_of,
    embedding_of,
    failing_on,
    has_local_weights,
    pad_token_of,
)
from hf_packing.attention.proof import require
from hf_packing.attention.route import BORDER_ARGUMENTS, PATCH, READ_ARGUMENTS
from hf_packing.attention.runs import NotCallableError, Runner
from hf_packing.attention.snapshot import use_attention
from hf_packing.attention.token_axes import Path, leaves, map_tensors, tensors_in
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.planning.lengths import BoolArray

PADDED = "padded batch"
"""What padded batches are called among the kinds of batches that are proven for a model."""

Side = Literal["right", "left", "both"]
"""Where the padding of a batch is: after the tokens of every row, before the tokens of every row, or elsewhere, such as
before the tokens of one row and after the tokens of another row."""

SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class Unpadding:
    """The way in which a patched model runs padded batches. The backbone gets the tokens without padding as a packed
    row, and its outputs are put back where the tokens were. All other modules run on the padded batch.

    Args:
        backbone: name of the backbone; an empty string for the model itself.
        rows_after: name of a module in the backbone, after which poolers get every document in a row of its own.
        to: the side to which the padding of the batch is moved first, for a head that reads the first or the last place
            of a row; None if it stays where it is.
        by_length: whether the backbone, which takes no packed rows, runs on the rows of equal length together.
        share: function that lays rows out so that the prefixes that they share run once, given the arguments of the
            backbone; None to run every row.
    """

    backbone: str
    rows_after: str | None = None
    to: Side | None = None
    by_length: bool = False
    share: Callable[["PaddedRows", Inputs], "PaddedRows"] | None = None

    def __str__(self) -> str:
        shared = "; prefixes that rows share are computed once" if self.share else ""
        return ("rows of equal length run together" if self.by_length else "its tokens run as one packed row") + shared


def unpadding_of(model: PreTrainedModel) -> Unpadding | None:
    """Return the way in which a patched model runs padded batches; None as long as none is proven."""
    way: Unpadding | None = getattr(model, PATCH).facts.proven.get(PADDED)
    return way


@dataclass(frozen=True, eq=False)
class PaddedRows(Rows, Batch):
    """A padded batch, and the places of its tokens. Every row has the tokens of one document, or no tokens.

    Args:
        side: where the padding is.
        has_positions: whether the caller of the model has passed position_ids.
        media: names of the caller's arguments with pictures or sound.
    """

    side: Side = "right"
    has_positions: bool = False
    media: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> Layout:  # type: ignore[override]
        return RowsLayout.of([length for length in self.lengths if length], self.device)

    def with_padding_on(self, side: Side) -> "PaddedRows":
        """Return the places of the tokens after all padding was moved to one side."""
        # what is sorted begins with what is False
        real = ~np.sort(~self.real, axis=1) if side == "right" else np.sort(self.real, axis=1)
        return replace(self, real=real, side=side)

    def move(self, value: Any, moved: "PaddedRows") -> Any:
        """Return nested tensors of shape [rows, tokens, ...] in which tokens have moved to their places in `moved`."""
        rows, tokens = self.shape
        steps = self.real.argmax(1) - moved.real.argmax(1)
        columns = (np.arange(tokens) + steps[:, None]) % tokens
        return self.take(value, on_device(np.arange(rows)[:, None] * tokens + columns, self.device))

    @classmethod
    def read(cls, forward: Any, inputs: Inputs) -> Batch | None:
        facts = forward.patch.facts
        takes_packed_rows = facts.takes_packed_rows or forward.module is not forward.model
        are_documents = not takes_packed_rows or (forward.patch.sees_media and bool(media_of(inputs)))
        rows = read_padded_rows(inputs, are_documents)
        if rows is None or are_documents or rows.has_padding or unpadding_of(forward.model):
            return rows
        return PackedRows.of(inputs, PackedLayout.of(rows.lengths, rows.device))  # as from a tokenizer

    @classmethod
    def install(cls, model: PreTrainedModel) -> None:
        unpadding = unpadding_of(model)
        if unpadding and unpadding.rows_after is not None:
            getattr(model, PATCH).replace(RowsInBackbone(model.get_submodule(unpadding.rows_after)))

    def check(self, forward: Any, inputs: Inputs) -> None:
        """Raise an error if it is not proven that the model takes a padded batch, or these arguments beside one.

        Raises:
            ModelNotSupportedError: the weights of a model whose backbone runs by length are sharded.
            PackingError: no padded batch was proven; the batch has two texts in each row, or embeddings beside padding,
                or numbers that may be places in a row whose padding is moved.
        """
        name, unpadding = type(forward.model).__name__, unpadding_of(forward.model)
        if unpadding is None:
            raise PackingError(
                f"attention_mask: expected packed rows, since it is not proven that {name} runs padded batches; call "
                "patch_model(model, padded=True) before training, or unpatch_model"
            )
        if inputs.get("input_ids") is None and not forward.patch.facts.takes_packed_rows and self.has_padding:
            raise PackingError(
                f"inputs_embeds: expected input_ids in a padded batch, since {name} may find the padding by its token, "
                "got inputs_embeds"
            )
        moves = unpadding.to not in (None, self.side)
        for argument, value in inputs.items():
            if argument.startswith("decoder_") and value is not None:
                raise PackingError(
                    f"{argument}: expected a padded batch of one text for each row, but {name} takes two texts, an "
                    "encoder's and a decoder's; call unpatch_model"
                )
            is_number = isinstance(value, Tensor) and value.ndim and not value.is_floating_point()
            if moves and is_number and argument != "labels" and value.shape[-1:] != self.shape[1:]:
                raise PackingError(
                    f"{argument}: expected padding on the {unpadding.to} beside numbers that may be places in a row, "
                    f"since {name} gets the padding of all batches there"
                )
        if unpadding.by_length and not has_local_weights(forward.model):
            raise ModelNotSupportedError(
                f"{name}: expected all weights on every process, but they are sharded; the backbone of this model runs "
                "once for each length of document, so processes would wait for each other forever"
            )

    @itself_uncompiled
    def run(self, forward: Any, inputs: Arguments) -> Any:
        """Run the forward on the batch, in which the backbone runs without padding."""
        unpadding = unpadding_of(forward.model)
        assert unpadding is not None
        if unpadding.to not in (None, self.side) and self.has_padding:
            moved = self.with_padding_on(unpadding.to)
            return moved.move(moved.run(forward, self.move(inputs, moved)), self)
        if _is_backbone(forward):
            return self._run_backbone(forward, inputs)
        with forward.running(None, self), use_attention(forward.patch.attention_before):
            inputs = with_pad_tokens(forward.model, inputs, self)
            return forward.forward(**forward.signature.without_unknown(inputs, READ_ARGUMENTS))

    @itself_uncompiled
    def run_inner(self, forward: Any, args: Any, kwargs: Arguments) -> Any:
        if not _is_backbone(forward):
            return super().run_inner(forward, args, kwargs)
        return self._run_backbone(forward, forward.signature.by_name(args, kwargs))

    @itself_uncompiled
    def _run_backbone(self, forward: Any, inputs: Arguments) -> Any:
        """Run the backbone on the tokens, and return its output for the padded batch."""
        inputs, unpadding = inputs_of_backbone(forward.module, inputs, self), unpadding_of(forward.model)
        assert unpadding is not None
        if unpadding.by_length:
            with forward.patch.suspended(), within(current_batch, ROW):
                return run_by_length(forward.forward, forward.signature.without_unknown(inputs, READ_ARGUMENTS), self)
        rows = unpadding.share(self, inputs) if unpadding.share else self
        with use_attention(forward.patch.attention_during):
            return rows.put_back(forward.run_row(rows.lay_end_to_end(inputs), rows.layout))


class RowsLayout(Layout):
    """The documents of a padded batch, laid end to end."""

    def into_rows(self, output: Any) -> Any:
        """Return nested tensors, with every tensor of shape [1, tokens, ...] replaced by a tensor that has the tokens
        of each document in a row of its own, padded on the right with zeros."""
        rows = Rows.of(self)

        def cut(_: Path, leaf: Tensor) -> Tensor:
            return rows.spread(leaf[0]) if leaf.shape[:2] == (1, self.tokens) else leaf

        return map_tensors(output, cut)


class RowsInBackbone(ReplacedForward):
    """A replacement for the forward of the last module of a backbone that returns a value for every token. What follows
    in the backbone gets every document in a row of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output, layout = self.forward(*args, **kwargs), current_layout.get()
        return output if layout is None or not self.installed else layout.into_rows(output)


def _is_backbone(forward: Any) -> bool:
    """Return whether the forward is that of the module that gets the tokens of padded batches without padding."""
    unpadding = unpadding_of(forward.model)
    return unpadding is not None and forward.module is forward.model.get_submodule(unpadding.backbone)


def read_padded_rows(inputs: Inputs, are_documents: bool = False) -> PaddedRows | None:
    """Read the places of the tokens from the attention_mask in a model's inputs.

    Args:
        inputs: keyword arguments of a model's forward.
        are_documents: whether every row is one document, also without an attention_mask.

    Returns:
        None if the inputs are packed rows: unless `are_documents`, if there is no attention_mask, or if there are
        borders between documents and attention_mask is all ones.

    Raises:
        PackingError: attention_mask is not a mask of ones and zeros for the tokens of each row; it hides all tokens of
            the batch, or tokens between other tokens; there are borders between documents beside padding, or if
            `are_documents`; or the position_ids do not rise by 1 from token to token.
    """
    mask, position_ids, tokens = inputs.get("attention_mask"), inputs.get("position_ids"), tokens_of(inputs)
    if mask is None and not are_documents:
        return None
    real = np.ones(tokens.flatten(0, -2).shape, np.bool_) if mask is None else _real(mask, tokens)
    has_positions = isinstance(position_ids, Tensor) and position_ids.ndim == 2  # others are those of pictures
    borders = next((name for name in BORDER_ARGUMENTS if inputs.get(name) is not None), None)
    if (has_positions or borders) and real.all() and not are_documents:
        return None
    if borders is not None:
        raise PackingError(
            f"{borders}: expected no borders between documents beside an attention_mask with padding, beside pictures "
            "or sound, or for a model that returns outputs for whole rows"
        )
    if not real.any():
        raise PackingError("attention_mask: expected at least one token in a batch, got a mask of zeros")
    if (torn := np.diff(real, axis=1, prepend=False).sum(1) > 2).any():  # more than one begin and one end
        raise PackingError(
            f"attention_mask: expected no padding between the tokens of a row, got some in row {torn.argmax()}; move "
            "its padding to one side"
        )
    filled = real[real.any(1)]
    side: Side = "right" if filled[:, 0].all() else "left" if filled[:, -1].all() else "both"
    if position_ids is not None and _restart(position_ids, real):
        raise PackingError(
            "position_ids: expected positions that rise by 1 from token to token beside an attention_mask with "
            "padding, or beside pictures or sound, got positions that restart; pass packed rows of texts without "
            "padding, and without an attention_mask"
        )
    return PaddedRows(real, tokens.device, side, position_ids is not None, media_of(inputs))


def _real(mask: Any, tokens: Tensor) -> BoolArray:
    """Return which tokens an attention_mask does not hide, bool [rows, tokens]. This waits for the device."""
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape or mask.is_floating_point():
        shown = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise PackingError(
            f"attention_mask: expected integers of shape {list(tokens.shape)} on a patched model, 1 for tokens and 0 "
            f"for padding, got {shown}; call unpatch_model to use other masks"
        )
    given = mask.flatten(0, -2).cpu().numpy()
    real: BoolArray = given != 0
    if (given != real).any():
        raise PackingError(
            "attention_mask: expected only 1 for tokens and 0 for padding on a patched model, got other values; pass "
            "the borders between packed documents as position_ids or seq_idx"
        )
    return real


def _restart(position_ids: Tensor, real: BoolArray) -> bool:
    """Return whether position ids do not rise from one token of a row to the next."""
    # of pictures, whose places share positions, the first axis is that of time; or, of four axes, that of the text
    has_axes = position_ids.ndim == 3
    step = np.diff((position_ids[0] if has_axes else position_ids).expand(real.shape).cpu().numpy())
    rises = step >= 0 if has_axes and len(position_ids) < 4 else step == 1
    return not rises[real[:, 1:] & real[:, :-1]].all()


def may_be_packed(inputs: Inputs) -> bool:
    """Return whether position_ids or numbers in an attention_mask say that rows beside a cache have several documents.
    The mask also has the tokens of the cache, which come first."""
    mask, position_ids, tokens = inputs.get("attention_mask"), inputs.get("position_ids"), tokens_of(inputs)
    if tokens.shape[-1] == 1:  # most calls of a loop that generates text, which need not wait for the device
        return False
    real = np.ones(tokens.shape, np.bool_)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # for each pair of tokens
            return False
        if (mask > 1).any():
            return True
        real = mask[:, -tokens.shape[-1] :].cpu().numpy() != 0
    return position_ids is not None and _restart(position_ids, real)


def media_of(inputs: Inputs) -> tuple[str, ...]:
    """Return the names of a model's arguments that have pictures or sound: floats that are neither embeddings, labels,
    numbers for whole rows, nor one number for each token."""
    shape = tokens_of(inputs).shape
    return tuple(
        name
        for name, each in inputs.items()
        if isinstance(each, Tensor) and each.is_floating_point() and name not in ("inputs_embeds", "labels")
        if each.ndim > 1 and each.shape != shape
    )


def with_pad_tokens(model: PreTrainedModel, inputs: Arguments, rows: PaddedRows) -> Arguments:
    """Return the arguments with the model's own pad token in padding, by which classifiers find the last token."""
    ids, pad = inputs.get("input_ids"), pad_token_of(model)
    if ids is None or pad is None:
        return inputs
    return {**inputs, "input_ids": ids.masked_fill(~rows.kept.view(ids.shape), pad)}


def inputs_of_backbone(backbone: nn.Module, inputs: Inputs, rows: PaddedRows) -> Arguments:
    """Return the arguments of a backbone's forward for a padded batch, without caches and without attention_mask.

    Position ids that only the model itself has made are left out, since they may count padding.

    Raises:
        PackingError: the backbone does not get the tokens of the padded batch; or encoder_hidden_states are given.
        ModelNotSupportedError: the batch has pictures or sound, and the backbone gets more of them than embeddings of
            tokens: attention masks, or floats that have no axes of rows and tokens.
    """
    mask, positions, kind = inputs.get("attention_mask"), inputs.get("position_ids"), type(backbone).__name__
    is_other = isinstance(mask, Tensor) and mask.shape == rows.shape and not torch.equal(mask != 0, rows.kept)
    if is_other or tokens_of(inputs).shape != rows.shape:
        raise PackingError(
            f"attention_mask: expected the same mask for {kind} as for the whole model, which has changed it, or the "
            "tokens; call unpatch_model"
        )
    for path, leaf in leaves(dict(inputs)) if rows.media else ():
        if _is_of_media(path, leaf, rows):
            raise ModelNotSupportedError(
                f"{kind}: padded batches with pictures or sound are not supported for this model, since it reads them "
                f"beside the tokens: it got {path[0]} of shape {list(getattr(leaf, 'shape', ()))} for rows and tokens "
                f"of shape {list(rows.shape)}; call unpatch_model"
            )
    left_out = {"attention_mask", "use_cache", *CACHES}
    if isinstance(positions, Tensor) and positions.ndim == 2 and not rows.has_positions:
        left_out.add("position_ids")
    inputs = {name: value for name, value in inputs.items() if name not in left_out}
    refuse_earlier_tokens(inputs)
    return inputs


def _is_of_media(path: Path, leaf: Any, rows: PaddedRows) -> bool:
    """Return whether an argument of a backbone has pictures or sound, in more than the embeddings of tokens."""
    if path[0] == "attention_mask":
        return leaf is not None and getattr(leaf, "ndim", 0) != 2
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or has_axes_first(path, leaf, rows.shape):
        return False
    is_of_tokens = leaf.shape[:2] == rows.shape and "cross_attention" not in str(path[0])
    return not is_of_tokens and leaf.ndim >= (2 if path[0] in rows.media else 3)


def run_by_length(forward: Callable[..., Any], inputs: Inputs, rows: PaddedRows) -> Any:
    """Call a forward once for all rows with the same number of tokens, without padding, and return its output for the
    padded batch, with zeros in padding.

    Args:
        forward: forward of a module that takes no packed rows.
        inputs: the arguments, for a padded batch.
        rows: the places of the tokens in the batch.

    Raises:
        ModelNotSupportedError: the module computes something of all rows together, or takes no rows of some length.
    """
    groups = []
    for length in sorted({*rows.lengths} - {0}):
        group = replace(rows, real=rows.real & (rows.real.sum(1, keepdims=True) == length))
        places = group.places.view(-1, length)
        given = rows.take(dict(inputs), places)
        with failing_on(f"the rows of each length separately, {len(places)} rows of {length} tokens"):
            output = forward(**given)
        if isinstance(output, ModelOutput):
            output = type(output)(**{name: value for name, value in output.items() if name not in CACHES})
        groups.append((group, places.shape, dict(leaves(output))))

    def join(path: Path, leaf: Tensor) -> Any:
        if not leaf.is_floating_point():
            return leaf
        # of a single group, the second size may also be that of a pooled state
        is_of_tokens = len(groups) > 1 and all(found[path].shape[:2] == shape for _, shape, found in groups)
        whole = []
        for group, shape, found in groups:
            part = found[path]
            if part.ndim < 2 or len(part) != shape[0]:
                raise ModelNotSupportedError(
                    f"its backbone computes a tensor of shape {list(part.shape)} from all rows of a batch, and would "
                    "run on the rows of each length separately"
                )
            if is_of_tokens or (part.ndim > 2 and part.shape[1] == shape[1]):
                whole.append(group.spread(part.flatten(0, 1)))
                continue
            if part.ndim > 2:  # tokens that were pooled, as in Funnel
                part = F.pad(part, (*[0, 0] * (part.ndim - 2), 0, rows.shape[1] - part.shape[1]))
            whole.append(group.put_back(part))
        return sum(whole)  # each has zeros in the rows of the others

    return map_tensors(output, join)


_NOT_COMPARED = ("loss", "hidden_states", "attentions", "aux_loss", "router_logits", *CACHES)
"""Names of outputs of padded rows that are not compared."""


class PaddedCase(RowCase):
    """Random documents as the rows of a padded batch of a model with any head. All outputs of a row are compared, as
    one vector: those of its tokens, and those of the row as a whole.

    Args:
        runner: runs the model.
        seed: seed of the random tokens.
        with_end: the documents that end in the model's end token, which some heads look for.
        has_choices: whether the model gets rows with a single choice each, as models for multiple choice need.
    """

    where = "padded batch"
    only_of_batch = ()
    may_be_filled = False

    def __init__(self, runner: Runner, seed: int, with_end: Sequence[int], has_choices: bool) -> None:
        super().__init__(runner, seed=seed)
        self.has_choices = has_choices
        end: Any = getattr(runner.model.config.get_text_config(), "eos_token_id", None)
        if end in range(len(embedding_of(runner.model).weight)) and end != pad_token_of(runner.model):
            last = torch.from_numpy(self.trees.begins[1:] - 1)[list(with_end)]
            self.tokens[last] = self.others[last] = end
        self.pad_on("right")

    def pad_on(self, side: Side) -> None:
        """Make a batch with padding on a side. Documents are replaced only where it is on the right, at first."""
        self.make_batch = partial(_padded, pad_token=pad_token_of(self.model) or 0, side=side)
        self.lay_out()
        self.replacements = [[each] for each in range(len(self.paths))] if side == "right" else []

    def ask(self, inputs: Inputs, places: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        # some models pass their own use_cache
        given = {
            name: each for name, each in inputs.items() if name != "use_cache" or name in self.runner.signature.names
        }
        if self.has_choices:
            given |= {name: each[:, None] for name, each in given.items() if isinstance(each, Tensor)}
        parts = []
        for name, value in self.runner(given).items():
            if name not in _NOT_COMPARED and isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(torch.promote_types(value.dtype, torch.float32))
                is_of_tokens = value.shape[:2] == inputs["input_ids"].shape
                parts.append(torch.split(value.flatten(0, 1)[places], [*lengths]) if is_of_tokens else value)
        return [torch.cat([each.flatten() for each in row])[:, None] for row in zip(*parts, strict=True)]


def _padded(documents: DocumentTokens, pad_token: int, side: Side) -> dict[str, Tensor]:
    """Return a padded batch with one document in each row."""
    rows = []
    for tokens in documents:
        missing = max(map(len, documents)) - len(tokens)
        before = {"right": 0, "left": missing, "both": missing // 2}[side]
        rows.append([-1] * before + tokens + [-1] * (missing - before))
    ids = torch.tensor(rows)
    return {"input_ids": ids.where(ids >= 0, pad_token), "attention_mask": (ids >= 0).long()}


def examined_padded_rows(runner: Runner, seed: int = 0) -> PaddedCase:
    """Return a case of documents that the model takes: two of them end in an end token, or all, as BART needs for
    classification, or none. Every document has run alone.

    Raises:
        ModelNotSupportedError: the model takes no rows of tokens.
    """
    failures = []
    for has_choices, with_end in product((False, True), ((0, 2), (0, 1, 2), ())):
        case = PaddedCase(runner, seed, with_end, has_choices)
        try:
            case.examine()
            return case
        except NotCallableError as error:
            failures.append(error)
    raise ModelNotSupportedError(str(failures[0])) from failures[0]


@torch.inference_mode(False)  # gradients are compared
def prove_unpadding(model: PreTrainedModel, by_length: bool = False) -> None:
    """Find a way in which a patched model runs padded batches, prove it, and install it.

    Args:
        model: a patched model.
        by_length: whether the backbone takes no packed rows, and runs on the rows of equal length together.

    Raises:
        ModelNotSupportedError: no way is found in which every row of a padded batch has the outputs and gradients that
            it has alone; the message contains the reason. Or the weights are not in memory.
    """
    refuse_missing_weights(model, "padded batches", "patch_model, and the model on a padded batch,")
    evaluation = examined_padded_rows(Runner(model))
    training = evaluation.in_training()
    examine_in_training(training, evaluation)
    failures = []
    try:
        for unpadding in _candidates(model, by_length, evaluation):
            install_unpadding(model, unpadding)
            try:
                for side, case in product(SIDES, (evaluation, training)):
                    case.pad_on(side)
                    require(case)
                return
            except ModelNotSupportedError as error:
                failures.append(error)
        raise ModelNotSupportedError(f"{type(model).__name__}: padded batches are not supported: {failures[0]}")
    except BaseException:
        install_unpadding(model, None)
        raise


def install_unpadding(model: PreTrainedModel, unpadding: Unpadding | None) -> None:
    """Set the way in which a patched model runs padded batches, instead of the way that was set before."""
    patch: Any = getattr(model, PATCH)
    patch.facts.proven |= {PADDED: unpadding}
    for forward in [each for each in patch.replaced if isinstance(each, RowsInBackbone)]:
        patch.replaced.remove(forward)
        forward.remove()
    PaddedRows.install(model)


def _candidates(model: PreTrainedModel, by_length: bool, case: PaddedCase) -> Iterator[Unpadding]:
    """Yield ways in which a model may run padded batches, the fastest first: its backbones, the innermost first, on a
    packed row or, with `by_length` only, on the rows of equal length together."""
    backbones = [each for each in backbones_of(model) if isinstance(each, PreTrainedModel)]
    names = dict.fromkeys(name for module in backbones for name, each in model.named_modules() if each is module)
    for together in (True,) if by_length else (False, True):
        for name in names:
            unpadding = Unpadding(name, by_length=together)
            if not together:
                unpadding = _with_poolers(model, unpadding, case)
            for side in (None, "right", "left"):
                yield replace(unpadding, to=side)


def _with_poolers(model: PreTrainedModel, unpadding: Unpadding, case: PaddedCase) -> Unpadding:
    """Return a way in which the poolers of the backbone, if it has any, get every document in a row of its own."""
    install_unpadding(model, unpadding)
    module = model.get_submodule(unpadding.backbone)
    forward: Any = module.forward
    row = RowsLayout.of(case.row.trees, case.runner.device)
    with suppress(Exception), case.undisturbed():  # the backbone may take no packed rows by itself
        run = partial(forward.run_row, {"input_ids": case.tokens[None]}, row)
        return replace(unpadding, rows_after=_find_last_of_tokens(model, module, run, row))
    return unpadding


def _find_last_of_tokens(model: nn.Module, backbone: nn.Module, forward: Callable[[], Any], row: Layout) -> str | None:
    """Return the name of the last inner module of a backbone that returns a value for every token, if the backbone
    itself then computes something from all tokens of a packed row; otherwise, return None.

    Args:
        model: a patched model.
        backbone: the backbone of the model.
        forward: function that runs the backbone on a packed row, and returns its output.
        row: the layout of this row.
    """
    last: list[nn.Module] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if any(each.ndim == 3 and each.shape[:2] == (1, row.tokens) for each in tensors_in(output)):
            last[:] = [module]

    with ExitStack() as hooks:
        for module in backbone.children():
            for each in module if isinstance(module, nn.ModuleList) else [module]:  # a list is not called itself
                hooks.enter_context(each.register_forward_hook(record))
        output = tensors_in(forward())
    pools = any(each.ndim > 1 and row.tokens not in each.shape and len(each) != len(row.lengths) for each in output)
    return next((name for name, module in model.named_modules() if pools and module in last), None)
