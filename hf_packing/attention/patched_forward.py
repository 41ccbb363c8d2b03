"""The forward of a patched model, and the patch itself: install a route in a model, and remove it.

A patched model that sees the input token at each label's position, as masked language models do, refuses labels that
only repeat its input.
"""

import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.by_segment import ReplacedForward, SegmentedForward, refuse_uneven_gathers
from hf_packing.attention.inspect_model import Signature, configurations, unwrapped
from hf_packing.attention.packed_row import PackedRow, current_row, read_row, use_row
from hf_packing.attention.route import PATCH, Route, fold_into_rows, route_of
from hf_packing.attention.varlen import register
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

_running: ContextVar[tuple[int, ...]] = ContextVar("_running", default=())
"""Ids of the patched models whose forward is running. The model and its inner models are all patched, and only the
outermost one that is called reads the row."""

_ATTENTION = "_attn_implementation_internal"
"""Attribute where a configuration keeps the name of its attention. The patch restores it directly, since
`set_attn_implementation` rejects a name whose package is missing, and None, which some inner configurations have."""

_CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes where a module keeps its activation-checkpointing function: in transformers, and in FSDP's wrapper."""

_FEWEST = 3
"""Fewest trained labels that can be refused. If 15 % of the tokens are trained on, and 10 % of those are
left as they are, only one in 300,000 batches of 3 tokens has no other tokens."""

_MANY = 4096
"""The same if earlier labels differed from the input, counted since the last one that did. The labels of a spelling
corrector repeat its input wherever there is no mistake."""


class PatchedForward(ReplacedForward):
    """The forward of a patched model: read the packed row, make it the current row, build the inputs, run the model.

    Args:
        module: the model, or a model inside it that other libraries, such as PEFT, call directly.
        model: the model that is patched.
        route: the route of the model.
        segmented: the forwards of the model's modules that run by segment.
    """

    def __init__(
        self, module: nn.Module, model: PreTrainedModel, route: Route, segmented: list[SegmentedForward]
    ) -> None:
        super().__init__(module)
        self.model = model
        self.route = route
        self.segmented = segmented
        self.signature = Signature(module)
        # Trainer looks here to see which columns a model takes
        self.__signature__ = inspect.signature(module.forward)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.installed or id(self.model) in _running.get():
            return self.forward(*args, **kwargs)
        inputs, row = self._read(args, kwargs)
        lay_end_to_end = self.route.method.inputs.one_row and not row.is_one_segment_per_row
        token = _running.set((*_running.get(), id(self.model)))
        try:
            with use_row(PackedRow(row.cu_seq_lens, row.lengths) if lay_end_to_end else row):
                output = self.forward(**inputs)
        finally:
            _running.reset(token)
        return fold_into_rows(output, row) if lay_end_to_end and row.rows > 1 else output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _read(self, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], PackedRow]:
        """Return the inputs of the forward, and the row, or rows, that the caller has passed."""
        self._check_patch()
        training = self.module.training
        if training:
            _keep_row_when_checkpointing(self.model)
        inputs, row = read_row(self.signature.by_name(args, kwargs), training)
        refused, ids = self.route.refused_token, inputs.get("input_ids")
        if refused is not None and ids is not None and bool((ids == refused).any()):
            raise PackingError(
                f"input_ids: expected no pad token ({refused}), since this model treats it as padding wherever it is"
            )
        if training and self.route.sees_labels:
            refuse_copied_labels(self.model, ids, inputs.get("labels"), row.cu_seq_lens)
        return self.route.method.inputs.build(self.signature, inputs, row), row

    def _check_patch(self) -> None:
        """Raise PackingError if something that the patch relies on has been changed since."""
        expected, found = self.route.method.attention, self.model.config._attn_implementation
        if expected not in (None, found):
            raise PackingError(
                f"attention: expected {expected!r} on a patched model, got {found!r}, which was set later; call "
                "unpatch_model before setting it"
            )
        patch: Patch = getattr(self.model, PATCH)
        for config, attention in patch.attention_during if expected else ():
            if (found := config._attn_implementation) != attention:
                raise PackingError(
                    f"attention: expected {attention!r} in the {type(config).__name__} of a patched model, got "
                    f"{found!r}, which was set later; call unpatch_model before setting it"
                )
        for forward in self.segmented:
            found = unwrapped(self.model.get_submodule(forward.plan.name))
            if found is not forward.module:
                raise PackingError(
                    f"{forward.plan.name}: expected the {forward.plan.kind} that runs by segment, got another "
                    f"{type(found).__name__}, which was put there later; call unpatch_model before replacing it, and "
                    "patch_model afterwards"
                )
        refuse_uneven_gathers(self.model, self.route.by_segment)

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # unpickling may happen in a process that has not patched a model
        self.__dict__.update(state)


@dataclass
class LabelCheck:
    """Counts the labels of successive batches that repeat the input."""

    differed: bool = False
    """Whether a label has differed from the input token at its position, or some tokens had no label."""
    repeated: int = 0
    """Trained labels since then, all of which repeat the input token at their position."""

    def add(self, model_name: str, input_ids: Tensor, labels: Tensor, cu_seq_lens: Tensor) -> None:
        """Count one more batch.

        Args:
            model_name: class of the model, for the message.
            input_ids: integers [rows, tokens].
            labels: integers [rows, tokens].
            cu_seq_lens: int32 [segments + 1], in the rows laid end to end.

        Raises:
            PackingError: all tokens, except the first of each document, are trained on, and every label repeats the
                input token at its position.
        """
        trained = labels != IGNORED_LABEL
        if bool((trained & (labels != input_ids)).any()) or _are_selected(trained, cu_seq_lens):
            self.differed, self.repeated = True, 0
            return
        self.repeated += int(trained.sum())
        if self.repeated >= (_MANY if self.differed else _FEWEST):
            raise PackingError(
                f"labels: expected other tokens than those of input_ids, since {model_name} sees the input token at "
                f"each label's position, and would learn to copy its input; got {self.repeated} labels that only "
                "repeat input_ids. "
                "Mask tokens before they are packed, in a map or with_transform of the dataset, as transformers' "
                "DataCollatorForLanguageModeling does, with labels of -100 where nothing is asked for (or shift labels "
                "by one, for a causal model that does not shift them)"
            )


@dataclass
class Patch:
    """What a patched model holds: its route, and what to restore when the patch is removed."""

    route: Route
    attention_before: list[tuple[PreTrainedConfig, Any]]
    """Every configuration of the model, with the name of its attention before the patch."""
    attention_during: list[tuple[PreTrainedConfig, Any]] = field(default_factory=list)
    """The same while the patch is installed."""
    replaced: list[ReplacedForward] = field(default_factory=list)
    """All forwards that the patch has replaced, the latest first."""
    label_check: LabelCheck = field(default_factory=LabelCheck)

    def replace(self, forward: ReplacedForward) -> None:
        self.replaced.insert(0, forward)
        forward.install()


def install(model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Install a route: set the attention, and replace the forwards of the model and of the modules that run by segment.

    If anything fails, the model is left unpatched.

    Args:
        model: not patched.
        route: the route to install.
        before: the model's attention, as `attention_of` returns it; `remove` restores it.
    """
    patch = Patch(route, before)
    setattr(model, PATCH, patch)
    try:
        if route.method.attention:
            register()
            model.set_attn_implementation(route.method.attention)
            patch.attention_during = attention_of(model)
        segmented = [SegmentedForward(model.get_submodule(plan.name), plan) for plan in route.by_segment]
        for forward in segmented:
            patch.replace(forward)
        for module in _entry_modules(model):  # last, since a module that runs by segment may be an inner model
            patch.replace(PatchedForward(module, model, route, segmented))
    except BaseException:
        remove(model)
        raise


def remove(model: PreTrainedModel) -> Route:
    """Remove the patch of a model, and return its route."""
    patch: Patch = getattr(model, PATCH)
    for forward in patch.replaced:
        forward.remove()
    for module, name, checkpoint in _checkpointing_functions(model):
        if isinstance(checkpoint, KeepRow):
            setattr(module, name, checkpoint.checkpoint)
    restore_attention(patch.attention_before)
    delattr(model, PATCH)
    return patch.route


def _entry_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model and its inner models that PEFT and other libraries call directly."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    modules = [model, model.base_model, *([decoder] if isinstance(decoder, nn.Module) else [])]
    return list({id(module): module for module in modules}.values())


def attention_of(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """Return every configuration in a model, nested ones included, with the name of its attention."""
    return [(config, getattr(config, _ATTENTION, None)) for config in configurations(model)]


def restore_attention(before: list[tuple[PreTrainedConfig, Any]]) -> None:
    for config, attention in before:
        setattr(config, _ATTENTION, attention)


class KeepRow:
    """A checkpointing function that remembers the current row: the backward pass runs layers again, when that row is no
    longer current."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(_OnRow(function, current_row.get()), *args, **kwargs)


class _OnRow:
    """A function that runs with this row as the current row."""

    def __init__(self, function: Callable[..., Any], row: PackedRow | None) -> None:
        self.function = function
        self.row = row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with use_row(self.row):
            return self.function(*args, **kwargs)


def _keep_row_when_checkpointing(model: nn.Module) -> None:
    """Wrap all checkpointing functions that are not wrapped yet."""
    for module, name, checkpoint in _checkpointing_functions(model):
        if not isinstance(checkpoint, KeepRow):
            setattr(module, name, KeepRow(checkpoint))


def _checkpointing_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name in _CHECKPOINTING:
            if (checkpoint := vars(module).get(name)) is not None:
                yield module, name, checkpoint


def sees_labels(model: PreTrainedModel) -> bool:
    """Return whether a patched model sees the input token at each label's position, as masked language models do."""
    route = route_of(model)
    return route is not None and route.sees_labels


def refuse_copied_labels(
    model: PreTrainedModel, input_ids: Any, labels: Any, cu_seq_lens: Tensor, *, is_sample: bool = False
) -> None:
    """Refuse the labels of a training batch if they only repeat tokens that the patched model sees.

    Args:
        model: patched.
        input_ids: integers [rows, tokens]; anything else is not checked.
        labels: integers [rows, tokens]; anything else is not checked.
        cu_seq_lens: int32 [segments + 1], in the rows laid end to end.
        is_sample: whether this is a sample of a whole dataset. A sample is judged on its own. If any of its labels
            differs from its token, later batches are refused only after many more labels that repeat the tokens.

    Raises:
        PackingError: all labels of this batch, and of enough batches before it, repeat the tokens at their positions.
    """
    both = isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    if not sees_labels(model) or not both or input_ids.shape != labels.shape:
        return
    patch: Any = getattr(model, PATCH)
    check = LabelCheck() if is_sample else patch.label_check
    check.add(type(model).__name__, input_ids, labels.to(input_ids.device), cu_seq_lens)
    if is_sample and check.differed:
        patch.label_check.differed = True


def _are_selected(trained: Tensor, cu_seq_lens: Tensor) -> bool:
    """Return whether a segment has both tokens that are trained on and tokens, besides the first, that are not."""
    each, starts = trained.flatten().cpu().numpy(), cu_seq_lens[:-1].cpu().numpy()
    left_out = ~each
    left_out[starts] = False
    return bool((np.logical_or.reduceat(each, starts) & np.logical_or.reduceat(left_out, starts)).any())
