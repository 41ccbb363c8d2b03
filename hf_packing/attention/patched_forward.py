"""Install a route in a model, remove the route, and run the forward of a patched model.

A route is a way of keeping packed documents apart in a model (see `Route`). If a patched model sees the input token at
each label's position, as a masked language model does, it also refuses labels that only repeat the input tokens.
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
"""The `id()` of each patched model whose forward is running. A patch replaces the forwards of a model and of its inner
models, but only the outermost forward reads the packed row."""

_ATTENTION = "_attn_implementation_internal"
"""The attribute in which a configuration stores the name of its attention function. The patch restores this attribute
directly. The method `set_attn_implementation` would reject the value None, which some inner configurations have, and
would reject an attention function whose package is not installed."""

_CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Names of attributes in which modules store an activation-checkpointing function. Modules of transformers have the
first attribute, and FSDP's checkpoint wrapper has the second attribute."""

_FEWEST = 3
"""The number of successive trained labels at which `LabelCheck` raises an error if all of them repeat the input. Masked
language models are usually trained on 15 % of the tokens, and 10 % of the trained tokens are left unchanged. In only
one of 300,000 correct batches of 3 tokens, all tokens are trained on and left unchanged."""

_MANY = 4096
"""The number of successive trained labels at which `LabelCheck` raises an error if all of them repeat the input, but an
earlier batch had labels that differ from the input. The number is large since correct labels may repeat many tokens:
the labels of a spelling corrector, for example, repeat the input wherever the text has no mistake."""


class PatchedForward(ReplacedForward):
    """A callable object that replaces the forward of a patched model.

    A call reads the borders between packed documents from the arguments, stores them in `current_row` while the forward
    runs, builds the inputs that the route requires, and runs the model's own forward.

    Args:
        module: the module whose forward is replaced: the patched model itself, or an inner model that other libraries,
            such as PEFT, call directly.
        model: the patched model.
        route: the route of the patched model.
        segmented: the replacements for the forwards of the modules that run segment by segment.
    """

    def __init__(
        self, module: nn.Module, model: PreTrainedModel, route: Route, segmented: list[SegmentedForward]
    ) -> None:
        super().__init__(module)
        self.model = model
        self.route = route
        self.segmented = segmented
        self.signature = Signature(module)
        # Trainer reads this attribute to find out which columns a model takes
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
        """Check the patch and the arguments of a call. Return the keyword arguments for the model's own forward, and
        the borders of the packed rows."""
        self._check_patch()
        training = self.module.training
        if training:
            _keep_row_when_checkpointing(self.model)
        inputs, row = read_row(self.signature.by_name(args, kwargs), training)
        refused, ids = self.route.refused_token, inputs.get("input_ids")
        if refused is not None and ids is not None and bool((ids == refused).any()):
            raise PackingError(
                f"input_ids: expected no pad token ({refused}), since this model treats every pad token as padding, "
                "even inside a document; remove the pad tokens from the documents before packing"
            )
        if training and self.route.sees_labels:
            refuse_copied_labels(self.model, ids, inputs.get("labels"), row.cu_seq_lens)
        return self.route.method.inputs.build(self.signature, inputs, row), row

    def _check_patch(self) -> None:
        """Raise PackingError if the model was changed after it was patched, and the patch would no longer work.

        This is so if another attention function was set, or if a module that runs by segment was replaced, or contains
        modules whose weights FSDP or DeepSpeed gathers separately.
        """
        expected, found = self.route.method.attention, self.model.config._attn_implementation
        if expected not in (None, found):
            raise PackingError(
                f"attention: expected {expected!r} on a patched model, got {found!r}, which was set after the model "
                "was patched; call unpatch_model before you set another attention function"
            )
        patch: Patch = getattr(self.model, PATCH)
        for config, attention in patch.attention_during if expected else ():
            if (found := config._attn_implementation) != attention:
                raise PackingError(
                    f"attention: expected {attention!r} in the {type(config).__name__} of a patched model, got "
                    f"{found!r}, which was set after the model was patched; call unpatch_model before you set another "
                    "attention function"
                )
        for forward in self.segmented:
            found = unwrapped(self.model.get_submodule(forward.plan.name))
            if found is not forward.module:
                raise PackingError(
                    f"{forward.plan.name}: expected the same {forward.plan.kind} as when the model was patched, got "
                    f"another module ({type(found).__name__}); call unpatch_model before you replace a module, and "
                    "patch_model afterwards"
                )
        refuse_uneven_gathers(self.model, self.route.by_segment)

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # unpickling may happen in a process that has not patched a model
        self.__dict__.update(state)


@dataclass
class LabelCheck:
    """A check, over successive batches, for labels that only repeat the input tokens at their positions."""

    differed: bool = False
    """True if an earlier batch had a label that differs from the input token at its position, or a document in which
    only some tokens have labels."""
    repeated: int = 0
    """The number of trained labels since the last batch that set `differed`. All of these labels repeat the input token
    at their position. A label is trained if it is not -100."""

    def add(self, model_name: str, input_ids: Tensor, labels: Tensor, cu_seq_lens: Tensor) -> None:
        """Count the trained labels of one more batch, and raise an error if too many of them only repeat the input.

        The count goes on from batch to batch. It restarts at 0 after a batch in which a label differs from the input
        token at its position, or in which only some tokens of a document have labels (see `_are_selected`).

        Args:
            model_name: name of the model's class, for the error message.
            input_ids: integers [rows, tokens].
            labels: integers [rows, tokens].
            cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.

        Raises:
            PackingError: the count reaches `_FEWEST`, or `_MANY` if a label has differed from its input
                token before.
        """
        trained = labels != IGNORED_LABEL
        if bool((trained & (labels != input_ids)).any()) or _are_selected(trained, cu_seq_lens):
            self.differed, self.repeated = True, 0
            return
        self.repeated += int(trained.sum())
        if self.repeated >= (_MANY if self.differed else _FEWEST):
            raise PackingError(
                f"labels: expected labels that differ from input_ids, got {self.repeated} successive labels that only "
                f"repeat input_ids. {model_name} sees the input token at each label's position, and would only learn "
                "to copy this token. "
                "For a masked language model, mask tokens before packing, with Dataset.map or Dataset.with_transform, "
                "and set the labels of all other tokens to -100, as DataCollatorForLanguageModeling does. "
                "For a causal model that does not shift labels itself, shift the labels by one token"
            )


@dataclass
class Patch:
    """The patch of a model: the route, the state to restore when the patch is removed, and a check of labels."""

    route: Route
    attention_before: list[tuple[PreTrainedConfig, Any]]
    """Pairs of a configuration and the name of its attention function before the patch, for all configurations."""
    attention_during: list[tuple[PreTrainedConfig, Any]] = field(default_factory=list)
    """Pairs of a configuration and the name of its attention function under the patch; empty if the patch sets none."""
    replaced: list[ReplacedForward] = field(default_factory=list)
    """The replacements that the patch has installed for the forwards of modules, the latest first."""
    label_check: LabelCheck = field(default_factory=LabelCheck)

    def replace(self, forward: ReplacedForward) -> None:
        self.replaced.insert(0, forward)
        forward.install()


def install(model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Install a route in a model.

    The function sets the model's attention function, and replaces the forwards of the model, of its inner models, and
    of the modules that run by segment. If an error occurs, the model is left unpatched.

    Args:
        model: a model that is not patched.
        route: the route to install.
        before: the attention settings that `remove` will restore, as returned by `attention_of`.
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
        for module in _entry_modules(model):  # last, since an inner model may also run by segment
            patch.replace(PatchedForward(module, model, route, segmented))
    except BaseException:
        remove(model)
        raise


def remove(model: PreTrainedModel) -> Route:
    """Remove the patch from a model, and return the route that was installed."""
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
    """Return a model and the inner models that PEFT or other libraries may call directly, without duplicates."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    modules = [model, model.base_model, *([decoder] if isinstance(decoder, nn.Module) else [])]
    return list({id(module): module for module in modules}.values())


def attention_of(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """Return pairs of a configuration and the name of its attention function, for all configurations in a model."""
    return [(config, getattr(config, _ATTENTION, None)) for config in configurations(model)]


def restore_attention(before: list[tuple[PreTrainedConfig, Any]]) -> None:
    for config, attention in before:
        setattr(config, _ATTENTION, attention)


class KeepRow:
    """A wrapper for an activation-checkpointing function. The backward pass runs the checkpointed layers a second time,
    after the model's forward has ended. In this second run, the packed row of the forward is again the current row."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(_OnRow(function, current_row.get()), *args, **kwargs)


class _OnRow:
    """A wrapper for a function. During every call of the function, `row` is the current packed row."""

    def __init__(self, function: Callable[..., Any], row: PackedRow | None) -> None:
        self.function = function
        self.row = row

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with use_row(self.row):
            return self.function(*args, **kwargs)


def _keep_row_when_checkpointing(model: nn.Module) -> None:
    """Wrap each activation-checkpointing function of a model in `KeepRow`, if the function is not wrapped yet."""
    for module, name, checkpoint in _checkpointing_functions(model):
        if not isinstance(checkpoint, KeepRow):
            setattr(module, name, KeepRow(checkpoint))


def _checkpointing_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name in _CHECKPOINTING:
            if (checkpoint := vars(module).get(name)) is not None:
                yield module, name, checkpoint


def sees_labels(model: PreTrainedModel) -> bool:
    """Return whether a patched model sees the input token at each label's position, as masked language models do.

    Return False for a model that is not patched.
    """
    route = route_of(model)
    return route is not None and route.sees_labels


def refuse_copied_labels(
    model: PreTrainedModel, input_ids: Any, labels: Any, cu_seq_lens: Tensor, *, is_sample: bool = False
) -> None:
    """Raise PackingError if a model would only learn to copy its input.

    The check is made only for models that see the input token at each label's position, such as masked language models,
    and only if input_ids and labels are tensors of the same shape.

    Args:
        model: a patched model.
        input_ids: integers [rows, tokens].
        labels: integers [rows, tokens].
        cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.
        is_sample: whether the batch is a sample of the whole dataset. A sample is checked separately from the training
            batches. If labels of the sample differ from the input, the limit for the training batches rises from
            `_FEWEST` to `_MANY` repeated labels.

    Raises:
        PackingError: too many successive labels only repeat the input tokens; see `LabelCheck.add`.
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
    """Return whether any segment has labels for only some tokens. A missing label at the first token is ignored.

    Args:
        trained: bool [rows, tokens], True for tokens with labels.
        cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.
    """
    each, starts = trained.flatten().cpu().numpy(), cu_seq_lens[:-1].cpu().numpy()
    left_out = ~each
    left_out[starts] = False
    return bool((np.logical_or.reduceat(each, starts) & np.logical_or.reduceat(left_out, starts)).any())
