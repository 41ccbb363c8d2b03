"""Run the forward of a patched model, and install and remove the patch.

A patched forward asks the kinds of batches in turn whose batch its inputs are, and lets the kind run it. Calls with a
cache run as without the patch. After the first one, a batch of PackingCollator waits for the device only if the model
computes its own positions, or takes a token for padding.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from threading import RLock
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from hf_packing.attention.by_segment import ReplacedForward, SegmentedForward, refuse_uneven_gathers, switched_off
from hf_packing.attention.function import register
from hf_packing.attention.kinds import KINDS
from hf_packing.attention.kinds.kind import ROW, Batch, current_batch, itself_uncompiled, tokens_of
from hf_packing.attention.kinds.packed import check_has_first_labels, needs_borders, without_first_labels
from hf_packing.attention.kinds.padded import may_be_packed
from hf_packing.attention.layout import CACHES, Layout, current_layout, running, within
from hf_packing.attention.model import (
    Arguments,
    Inputs,
    Signature,
    backbones_of,
    has_vocabulary,
    inner_model,
    sees_media,
    tower_configurations,
)
from hf_packing.attention.route import (
    BORDER_ARGUMENTS,
    PATCH,
    READ_ARGUMENTS,
    Facts,
    Route,
    is_patched,
    mark_changing_sizes,
    sees_labels,
)
from hf_packing.attention.snapshot import (
    Attention,
    attention_now,
    attention_of,
    restore_attention,
    temporarily,
    use_attention,
)
from hf_packing.batch.collate import refuse_missing_first_labels
from hf_packing.batch.loader import check_loader
from hf_packing.columns import CU_SEQ_LENS, IGNORED_LABEL, SEQ_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.upstream.torch import inside_fsdp, parts_of, trace_only_inside
from hf_packing.upstream.transformers import CHECKPOINTING, attention_name

_lock = RLock()
"""Lock that a thread holds while a patched model runs, since other calls switch the patch off for a while."""


@dataclass(eq=False)
class Patch:
    """The patch of a model: the route, what the patch has replaced, and what is learnt while the model runs."""

    model: PreTrainedModel
    route: Route
    attention_before: Attention
    """The attention settings before the patch, without those of towers, which never get text and keep theirs."""
    signature: Signature
    """The arguments that the model's own forward takes."""
    sees_media: bool
    """True if the model takes pictures or sound."""
    attention_during: Attention = field(default_factory=list)
    """Empty if the patch sets no attention function."""
    replaced: list[ReplacedForward] = field(default_factory=list)
    """The replacements that the patch has installed for the forwards of modules, the latest first."""
    is_running: bool = False
    """True while the model's forward runs. Code traced by torch.compile can read this, but not `running`."""
    hides_mask: bool = False
    """True while the model's forward has an attention_mask that is for its routers only, not for its layers."""
    trusts_collator: bool = False
    """True once a batch of PackingCollator was read in full, and the lengths that came with it were right."""
    knows_labels: bool = False
    """True once labels have shown that the model is not trained to copy its input."""

    def __post_init__(self) -> None:
        modules = [*self.model.modules()]
        self.lists = [each for each in modules if isinstance(each, nn.ModuleList)]
        self.may_checkpoint = [each for each in modules if hasattr(each, "gradient_checkpointing")]
        self._parts: list[tuple[str, nn.Module, dict[str, nn.Module | None]]] = []
        """The name of each module, the module, and its own modules."""
        self._known: set[nn.Module] = set()
        """The modules that the model has, and those that it had before its last change, which may be undone."""
        self.note_modules()

    def replace(self, forward: ReplacedForward) -> None:
        self.replaced.insert(0, forward)
        forward.install()

    @property
    def facts(self) -> Facts:
        """Facts about the model."""
        return self.route.facts

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: within the block, the model runs as without the patch, and other threads wait."""
        lock = nullcontext() if torch.compiler.is_dynamo_compiling() else _lock  # tracing changes nothing
        with lock, use_attention(self.attention_before), switched_off(self.replaced):
            yield

    def check_modules(self) -> None:
        """Raise PackingError if a module was put in after the patch. It may wrap the one that was there, as an adapter
        does, or have no parts, as a layer of FP8, if the patch has changed nothing in its place."""
        for name, owner, before in self._parts:
            for key, new in parts_of(owner).items() if parts_of(owner) != before else ():
                if new is None or new in self._known:
                    continue
                old, inside = before.get(key), {*new.modules()}
                if old not in inside and (len(inside) > 1 or any(old is each.module for each in self.replaced)):
                    raise PackingError(
                        f"{name}.{key}: expected the modules that were there when the model was patched, got a new "
                        f"{type(new).__name__}; call unpatch_model before you put a module in, and patch_model "
                        "afterwards"
                    )
        self.note_modules()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note_modules(self) -> None:
        """Note the modules that are there, after a forward too, since a few models exchange modules themselves."""
        if not self._parts or any(parts_of(owner) != before for _, owner, before in self._parts):
            before = [each for _, each, _ in self._parts]
            self._parts = [(name, each, dict(parts_of(each))) for name, each in self.model.named_modules()]
            self._known = {*before, *(each for _, each, _ in self._parts)}

    def keep_layouts(self) -> None:
        """Wrap the model's activation-checkpointing functions, so that the backward pass, which runs layers again, has
        what they ran under. FSDP replaces layers in the model's lists by wrappers that have such a function."""
        for module in chain(self.may_checkpoint, *self.lists):
            wrapped = inside_fsdp(module)
            for name in CHECKPOINTING:
                checkpoint = vars(wrapped).get(name)
                if checkpoint is not None and not isinstance(checkpoint, KeepLayout):
                    setattr(wrapped, name, KeepLayout(checkpoint, self))


@dataclass(eq=False)
class KeepLayout:
    """A wrapper for an activation-checkpointing function. The backward pass runs the checkpointed layers a second time,
    after the model's forward has ended. The second run has the same layout or padded batch and the same attention
    settings as the first one, and the patch is switched off if it was."""

    checkpoint: Callable[..., Any]
    patch: Patch

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        patch = self.patch
        if torch.compiler.is_compiling() and patch.route.method.borders and not patch.route.by_segment:
            return self.checkpoint(function, *args, **kwargs)  # layers get the borders as arguments
        context, attention = copy_context(), attention_now(patch.attention_before)
        off = [] if patch.replaced[0].installed else patch.replaced

        def run_as_now(*args: Any, **kwargs: Any) -> Any:
            with switched_off(off), use_attention(attention):
                return context.copy().run(function, *args, **kwargs)

        return self.checkpoint(run_as_now, *args, **kwargs)


class PatchedForward(ReplacedForward):
    """A replacement for the forward of a patched model. A call reads where the segments are from the arguments, keeps
    this in `current_layout` while the forward runs, and runs the model's own forward with the route's inputs.

    Args:
        module: the module whose forward is replaced: the patched model itself, or an inner model that other libraries,
            such as PEFT, call directly.
        patch: the patch of the model.
    """

    def __init__(self, module: nn.Module, patch: Patch) -> None:
        super().__init__(module)
        self.patch = patch
        self.signature = Signature(module)
        # Trainer reads this attribute to find out which columns a model takes, and drops all others
        own = inspect.signature(module.forward)
        lengths = inspect.Parameter(SEQ_LENGTHS, inspect.Parameter.KEYWORD_ONLY, default=None)
        self.__signature__ = own.replace(parameters=sorted([*own.parameters.values(), lengths], key=attrgetter("kind")))

    @property
    def model(self) -> PreTrainedModel:
        return self.patch.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate makes a method of this object
            args = args[1:]
        if torch.compiler.is_compiling() and (self.patch.is_running or not self.installed):
            # an inner model, so that the patched model becomes a single graph
            return self.forward(*args, **self.hiding_the_mask(kwargs))
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if self.installed and (is_traced or torch.compiler.is_exporting()):
            raise PackingError(
                "model: expected a model without a patch in torch.export and torch.jit.trace, whose program would run "
                "without hf_packing; export it in a block `with unpatch_model(model):`"
            )
        return self.run(args, kwargs)

    @itself_uncompiled
    def run(self, args: Any, kwargs: Arguments) -> Any:
        """Run the forward on any inputs. What this method calls is compiled, so it calls no more than it must."""
        if id(self.model) in running.get() and self.installed:  # within the forward of the patched model
            return current_batch.get().run_inner(self, args, kwargs)
        with _lock:
            if not self.installed:
                return self.forward(*args, **kwargs)
            inputs, batch = self._read(args, kwargs)
            try:
                if batch is not None:
                    return batch.run(self, inputs)
                with self.patch.suspended():
                    return self.forward(**inputs)
            finally:
                self.patch.note_modules()

    @itself_uncompiled
    def run_row(self, inputs: Arguments, layout: Layout, for_routers: Inputs = MappingProxyType({})) -> Any:
        """Run the forward on a single row, and return the output.

        Args:
            inputs: the arguments.
            layout: the segments of the row.
            for_routers: the attention_mask of the routers, if they get one; the layers do not get it.
        """
        given = {**self._prepare(inputs, layout), **for_routers}
        with self.running(layout, ROW, hides_mask=bool(for_routers)):
            # keys along paths have too many lengths to compile each, and compiled code does not know the other ranks
            forward = torch.compiler.disable(self.forward) if layout.sees_others else self.forward  # type: ignore[no-untyped-call]
            return forward(**given)

    def hiding_the_mask(self, inputs: Arguments) -> Arguments:
        """Return what the patched model passes to an inner model, without the mask that is for routers."""
        if not self.patch.hides_mask or inputs.get("attention_mask") is None:
            return inputs
        ones = self.patch.route.method.mask_of_ones
        return {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"]) if ones else None}

    @contextmanager
    def running(self, layout: Layout | None, batch: Batch, hides_mask: bool = False) -> Iterator[None]:
        """Context manager: within the block, the model's forward is running on a layout, as a part of a batch, and
        transformers does not look for packed documents in position_ids, which would wait for the device. Layers attend
        by the current layout, so a mask need not do this."""
        with (
            temporarily(self.patch, is_running=True, hides_mask=hides_mask),
            temporarily(masking_utils, find_packed_sequence_indices=_find_unknown_borders),
            within(running, (*running.get(), id(self.model))),
            within(current_layout, layout),
            within(current_batch, batch),
        ):
            yield

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _read(self, args: Any, kwargs: Arguments) -> tuple[Arguments, Batch | None]:
        """Check the patch and the arguments of a call, and read its batch.

        Returns:
            The arguments by name, and the batch; None for a call that runs as without the patch.
        """
        inputs, patch = self.signature.by_name(args, kwargs), self.patch
        training = self.module.training
        if training:
            patch.keep_layouts()
        if needs_cache(inputs, training):
            return inputs, None
        self._check_patch(inputs)
        batch = next(filter(None, (kind.read(self, inputs) for kind in KINDS)))
        is_tagger = patch.facts.sees_labels and not has_vocabulary(self.model)
        check_loader(len(batch.layout.lengths), is_tagger)
        if is_tagger:
            check_has_first_labels(inputs)
        may_begin = not training and not needs_borders.get() and not batch.has_padding
        if may_begin and begins_text(self.model, inputs, batch.layout):
            return self.signature.without_unknown(inputs, READ_ARGUMENTS), None
        batch.check(self, inputs)
        if training and patch.facts.sees_labels and not patch.knows_labels:
            ids, labels = batch.lay_end_to_end((inputs.get("input_ids"), inputs.get("labels")))
            refuse_copied_labels(self.model, ids, labels, batch.layout.cu_seq_lens)
        return inputs, batch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, inputs: Arguments, layout: Layout) -> Arguments:
        """Return the keyword arguments for the model's own forward on a single row."""
        facts, ids = self.patch.facts, inputs.get("input_ids")
        if (refused := facts.refused_token) is not None and ids is not None and (ids == refused).any():
            raise PackingError(
                f"input_ids: expected no pad token ({refused}), since this model treats every pad token as padding, "
                "even inside a document; remove the pad tokens from the documents before packing"
            )
        if not facts.sees_labels and has_vocabulary(self.model) and not layout.sees_others:
            inputs = without_first_labels(inputs, layout)
        inputs = self.patch.route.method.build(self.signature, inputs, layout)
        if facts.takes_packed_rows:  # the route was proven with the arguments that the model takes
            inputs = self.patch.signature.without_unknown(inputs, (*BORDER_ARGUMENTS, "position_ids"))
        if not layout.has_fixed_shapes:
            mark_changing_sizes({**inputs, CU_SEQ_LENS[0]: layout.cu_seq_lens}, layout.tokens)
        return inputs

    def _check_patch(self, inputs: Inputs) -> None:
        """Raise PackingError if the model was changed after it was patched, and the patch would no longer work; or if a
        call asks for attention weights."""
        refuse_weights((config for config, _ in self.patch.attention_before), inputs.get("output_attentions"))
        for config, attention in self.patch.attention_during:
            if (found := attention_name(config)) != attention:
                raise PackingError(
                    f"attention: expected {attention!r} on a patched model, in its {type(config).__name__}, got "
                    f"{found!r}, which was set after the model was patched; call unpatch_model before you set another "
                    "attention function"
                )
        self.patch.check_modules()
        if self.patch.route.by_segment:
            refuse_uneven_gathers(self.model, self.patch.route.by_segment)

    def __setstate__(self, state: Arguments) -> None:
        register()  # unpickling may happen in a process that has not patched a model
        self.__dict__.update(state)


trace_only_inside(PatchedForward.__call__)


_find_packed_sequence_indices = masking_utils.find_packed_sequence_indices


def _find_unknown_borders(position_ids: Tensor) -> Any:
    is_known = not torch.compiler.is_compiling() and running.get()
    return None if is_known else _find_packed_sequence_indices(position_ids)


def needs_cache(inputs: Inputs, training: bool) -> bool:
    """Return whether a call generates text, so that it runs as without the patch: whether it has a cache, or asks for
    one explicitly in evaluation mode, and its rows are no packed rows."""
    given = {name for name, value in inputs.items() if value is not None}
    if not given.isdisjoint(BORDER_ARGUMENTS):
        return False
    if training and given.isdisjoint(("attention_mask", "position_ids")):  # PEFT drops those of a packed row
        return False
    asks = not given.isdisjoint(CACHES) or (inputs.get("use_cache") and not training)
    return bool(asks) and not may_be_packed(inputs)


def begins_text(model: PreTrainedModel, inputs: Inputs, layout: Layout) -> bool:
    """Return whether a call without padding, in evaluation mode, may be the first one of a loop that generates text:
    whether the model returns a cache by its configuration, and every row is a document, with no borders beside it."""
    if any(inputs.get(name) is not None for name in ("use_cache", *BORDER_ARGUMENTS)):
        return False
    returns_cache = getattr(model.config.get_text_config(), "use_cache", False)
    return bool(returns_cache) and len(layout.lengths) <= tokens_of(inputs).shape[:-1].numel()


_FEWEST = 3
"""The number of trained labels that are enough to tell whether labels repeat the input. Masked language models are
usually trained on 15 % of the tokens, and 10 % of the trained tokens are left unchanged. In only one of 300,000 correct
batches of 3 tokens, all tokens are trained on and left unchanged."""


def refuse_copied_labels(model: PreTrainedModel, input_ids: Any, labels: Any, cu_seq_lens: Tensor) -> None:
    """Raise PackingError if a model would only learn to copy its input, or does not learn first tokens.

    The check is made only for models that see the input token at each label's position, such as masked language models,
    and only if input_ids and labels are tensors of the same shape. A patched model makes it in training, until a batch
    or a sample of the data shows that labels differ from the input, or are those of chosen tokens.

    Args:
        model: a patched model.
        input_ids: integers [rows, tokens].
        labels: integers [rows, tokens].
        cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.

    Raises:
        PackingError: all labels only repeat the input tokens, and no segment has labels for only some of its tokens. A
            missing label at the first token is ignored. Or first tokens have lost their labels.
    """
    both = isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    if not sees_labels(model) or not both or input_ids.shape != labels.shape:
        return
    ids, labels, borders = (each.flatten().cpu().numpy() for each in (input_ids, labels, cu_seq_lens))
    is_first = np.isin(np.arange(len(ids)), borders)
    trained = labels != IGNORED_LABEL
    ends_within = (trained[1:] != trained[:-1]) & ~is_first[1:] & ~is_first[:-1]  # of trained tokens, or a gap in them
    if (labels != ids)[trained].any() or ends_within.any():
        refuse_missing_first_labels(ids, labels, borders[:-1][np.diff(borders) > 1])
        getattr(model, PATCH).knows_labels = True
    elif trained.sum() >= _FEWEST:
        raise PackingError(
            f"labels: expected labels that differ from input_ids, got {trained.sum()} labels that only repeat "
            f"input_ids. {type(model).__name__} sees the input token at each label's position, and would only learn to "
            "copy this token. For a masked language model, mask tokens before packing, with Dataset.map or "
            "Dataset.with_transform, and set the labels of all other tokens to -100, as "
            "DataCollatorForLanguageModeling does. For a causal model that does not shift labels itself, shift the "
            "labels by one token; one with an adapter or a module that reads later tokens cannot be trained so"
        )


def refuse_weights(configs: Iterable[PreTrainedConfig], asked: bool | None = None) -> None:
    """Raise PackingError if a call asks for attention weights or, if it does not say, a configuration does."""
    if asked or (asked is None and any(config.output_attentions for config in configs)):
        raise PackingError(
            "output_attentions: expected False on a patched model and in its configuration, got True, but a patched "
            "model returns no attention weights. To get them, pass output_attentions=True in a block "
            "`with unpatch_model(model):`"
        )


def install(model: PreTrainedModel, route: Route) -> None:
    """Install a route in an unpatched model: set its attention function, and replace the forwards of the model, of its
    inner models, and of the modules that run by segment. After an error, the model is left unpatched."""
    before = attention_of(model)
    of_towers = tower_configurations(model)
    attention = [each for each in before if id(each[0]) not in of_towers]
    patch = Patch(model, route, attention, Signature(model), sees_media(model))
    setattr(model, PATCH, patch)
    try:
        if route.method.attention:
            register()
            model.set_attn_implementation(route.method.attention)
            restore_attention([each for each in before if id(each[0]) in of_towers])
            patch.attention_during = attention_now(patch.attention_before)
        for plan in route.by_segment:
            patch.replace(SegmentedForward(model.get_submodule(plan.name), plan))
        for module in dict.fromkeys([model, *backbones_of(model)]):  # last: an inner model may also run by segment
            patch.replace(PatchedForward(module, patch))
        if model.can_generate():
            patch.replace(StockGenerate(model))
        for kind in KINDS:
            kind.install(model)
    except BaseException:
        remove(model)
        restore_attention(before)
        raise


def remove(model: PreTrainedModel) -> Route:
    """Remove the patch from a model, and return the route that was installed."""
    patch: Patch = getattr(model, PATCH)
    for forward in patch.replaced:
        forward.remove()
    for module in model.modules():
        for name in CHECKPOINTING:
            if isinstance(checkpoint := vars(module).get(name), KeepLayout):
                setattr(module, name, checkpoint.checkpoint)
    restore_attention(patch.attention_before)
    delattr(model, PATCH)
    return patch.route


@contextmanager
def unpatched_on_error(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Context manager: after an error or an interruption in the block or, if `always`, at its end, a model that was not
    patched before it is left unpatched."""
    inner = inner_model(model)
    was_patched, is_kept = is_patched(inner), False
    try:
        yield
        is_kept = not always
    finally:
        if is_patched(inner) and not (was_patched or is_kept):
            remove(inner)


class StockGenerate(ReplacedForward):
    """A replacement for the method `generate` of a patched model, which runs the model as without the patch."""

    attribute = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch = getattr(self.module, PATCH, None)
        with nullcontext() if patch is None else patch.suspended():
            return self.forward(*args, **kwargs)
