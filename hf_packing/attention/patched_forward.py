"""Install a route in a model, remove the route, and run the forward of a patched model.

A route is a way of keeping packed documents apart in a model (see `Route`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.by_segment import ReplacedForward, SegmentedForward, refuse_uneven_gathers, switched_off
from hf_packing.attention.inspect_model import Signature, sees_media, tower_configurations
from hf_packing.attention.keep_row import KeepRow, running
from hf_packing.attention.label_check import LabelCheck, refuse_copied_labels
from hf_packing.attention.layout import Layout, current_layout, fold_into_rows, has_trees, read_layout
from hf_packing.attention.loader_check import check_loader
from hf_packing.attention.padded_rows import current_rows, media_of
from hf_packing.attention.route import BORDER_ARGUMENTS, PATCH, Facts, Route, is_patched, mark_changing_sizes
from hf_packing.attention.snapshot import Attention, attention_now, restore_attention, use_attention
from hf_packing.attention.unpadding import (
    PADDING_OR_CACHE,
    StockGenerate,
    UnpaddedForward,
    check_readers,
    install_unpadding,
)
from hf_packing.attention.varlen import register
from hf_packing.columns import CU_SEQ_LENS, PARENTS, SEQ_LENGTHS
from hf_packing.errors import PackingError

_PLACES = (*BORDER_ARGUMENTS, "position_ids")

_ROUTER_SETTING = "output_router_logits"
"""The setting of a configuration that decides whether routers get a loss for load balancing. The model computes this
loss outside of its inner model, from all tokens with a 1 in attention_mask."""

_CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Names of attributes in which modules store an activation-checkpointing function. Modules of transformers have the
first attribute, and FSDP's checkpoint wrapper has the second attribute."""

_locks: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
"""Locks that a thread holds while a patched model runs, since other calls switch parts of the patch off for a while."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _lock_of(model: nn.Module) -> RLock:
    """Return the model's lock. Not compiled: torch.compile would go through all of `_locks` while models leave it."""
    return _locks.setdefault(model, RLock())


class PatchedForward(UnpaddedForward):
    """A replacement for the forward of a patched model. A call reads where the segments are from the arguments,
    keeps this in `current_layout` while the forward runs, and runs the model's own forward with the route's inputs.

    Args:
        module: the module whose forward is replaced: the patched model itself, or an inner model that other libraries,
            such as PEFT, call directly.
        model: the patched model.
        segmented: the replacements for the forwards of the modules that run segment by segment.
    """

    def __init__(self, module: nn.Module, model: PreTrainedModel, segmented: list[SegmentedForward]) -> None:
        super().__init__(module)
        self.model = model
        self.segmented = segmented
        self.signature = Signature(module)
        self.sees_media = sees_media(model)
        self.masks_routers = len(_entry_modules(model)) > 1 and hasattr(model.config.get_text_config(), _ROUTER_SETTING)
        # Trainer reads this attribute to find out which columns a model takes, and drops all others
        self.__signature__ = _with_seq_lengths(inspect.signature(module.forward))

    @property
    def patch(self) -> "Patch":
        patch: Patch = getattr(self.model, PATCH)
        return patch

    @property
    def route(self) -> Route:  # type: ignore[override]
        return self.patch.route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate makes a method of this object
            args = args[1:]
        if torch.compiler.is_compiling():
            if not self.installed:  # within `suspended`, so that generate can be compiled as a single graph
                return self.forward(*args, **kwargs)
            if self.patch.is_running:  # an inner model, so that the patched model becomes a single graph
                return self.run_inside(args, kwargs)
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_traced or torch.compiler.is_exporting():
            return self._run_exported(args, kwargs)
        return self.run(args, kwargs)

    def _run_exported(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the forward as without the patch, while a program is made of it that runs without hf_packing."""
        if given := [name for name in (*BORDER_ARGUMENTS, PARENTS) if kwargs.get(name) is not None]:
            raise PackingError(
                f"{given[0]}: expected no borders between documents in a model that is exported, since it runs as "
                "without the patch; export the model with rows of one document each"
            )
        with self.patch.suspended():
            return self.forward(*args, **kwargs)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the forward on any inputs. torch.compile compiles what this method calls, so it calls no more than it
        must."""
        if id(self.model) in running.get() and self.installed:
            rows = current_rows.get()
            if rows is not None and self.is_backbone:
                return self.run_unusual(self._by_name(args, kwargs), rows)
            return self.run_inside(args, kwargs) if rows is None else self.forward(*args, **kwargs)
        with _lock_of(self.model):
            if not self.installed:
                return self.forward(*args, **kwargs)
            inputs = self._by_name(args, kwargs)
            if self.module.training:
                self._keep_rows()
            return self.run_unusual(inputs, None) if self._is_unusual(inputs) else self.run_packed(inputs)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def run_packed(self, inputs: dict[str, Any], row: Layout | None = None) -> Any:
        """Run the forward on packed rows, and return the output. If `row` is None, the borders are in the inputs."""
        inputs, row, laid = self._read(inputs, row)
        patch = self.patch
        was_running, patch.is_running = patch.is_running, True
        ids, current = running.set((*running.get(), id(self.model))), current_layout.set(laid)
        padded = current_rows.set(None)
        try:
            output = self._run_uncompiled(inputs) if laid.has_branches else self.forward(**inputs)
        finally:
            current_rows.reset(padded)
            current_layout.reset(current)
            running.reset(ids)
            patch.is_running = was_running
        return self._finish(output, row) if row.padding or laid is not row else output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_uncompiled(self, inputs: dict[str, Any]) -> Any:
        """Run the forward on a row of trees, whose paths have too many lengths to compile each."""
        return self.forward(**inputs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: within the block, the model's forward is running."""
        token = running.set((*running.get(), id(self.model)))
        try:
            yield
        finally:
            running.reset(token)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _by_name(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return self.signature.by_name(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _is_unusual(self, inputs: dict[str, Any]) -> bool:
        """Return whether a call is not one with packed rows, or a row of trees, and without a cache."""
        if self.sees_media and media_of(inputs):
            return True
        if has_trees(inputs):
            return False
        takes_packed_rows = self.patch.facts.takes_packed_rows or self.module is not self.model
        given = (inputs.get(name) for name in PADDING_OR_CACHE)
        return not takes_packed_rows or any(each is not None and each is not False for each in given)

    def run_inside(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the forward of an inner model, which does not get the mask that `_read` makes for routers."""
        if self.masks_routers and (mask := kwargs.get("attention_mask")) is not None:
            ones = torch.ones_like(mask) if self.route.method.mask_of_ones else None
            kwargs = {**kwargs, "attention_mask": ones}
        return self.forward(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep_rows(self) -> None:
        """Wrap the model's activation-checkpointing functions, so that they keep what the forward runs under."""
        gives_borders = self.route.method.borders and not self.route.by_segment
        for module, name, checkpoint in _checkpointing_functions(self.model):
            if not isinstance(checkpoint, KeepRow):
                setattr(module, name, KeepRow(checkpoint, self.patch, gives_borders))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _read(self, inputs: dict[str, Any], row: Layout | None) -> tuple[dict[str, Any], Layout, Layout]:
        """Check the patch and the arguments of a call. Return the keyword arguments for the model's own forward, the
        borders of the packed rows, and the borders of the rows as the model gets them, which may be laid end to end."""
        self.check_patch(inputs)
        training = self.module.training
        is_unpadded = row is not None
        if row is None:
            inputs, row = self._read_trees(inputs) if has_trees(inputs) else read_layout(inputs, training)
            check_loader(self.model, row, inputs.get("labels"))
        ids = inputs.get("input_ids")
        self.patch.facts.check_tokens(ids)
        if training and self.patch.facts.sees_labels and not is_unpadded:
            refuse_copied_labels(self.model, ids, inputs.get("labels"), row.cu_seq_lens)
        inputs = self.route.method.build(self.signature, inputs, row)
        if is_unpadded and self.patch.facts.takes_packed_rows:  # proven with the arguments that the model takes
            takes = self.patch.signature.takes
            inputs = {name: each for name, each in inputs.items() if name not in _PLACES or takes(name)}
        if row.has_fixed_shape and self.masks_routers and self.module is self.model:
            inputs["attention_mask"] = row.mask  # the loss of routers leaves out tokens whose mask is 0
        if not row.has_fixed_shape:
            mark_changing_sizes({**inputs, CU_SEQ_LENS[0]: row.cu_seq_lens}, row.rows * row.tokens)
        lay_end_to_end = self.route.method.one_row and not row.is_one_path_per_row
        return inputs, row, replace(row, rows=1) if lay_end_to_end else row

    def _read_trees(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Layout]:
        """Read a row of trees, as `read_layout` does. Prove before that the model supports trees."""
        if not self.patch.facts.takes_packed_rows and self.module is self.model:
            raise PackingError(f"model: {type(self.model).__name__} returns outputs for whole rows, and takes no trees")
        inputs, row = read_layout(inputs)
        if row.has_branches and not self.patch.facts.takes_trees:
            type(self.patch).prove_trees(self.model)
        return inputs, row

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _finish(self, output: Any, row: Layout) -> Any:
        """Return the model's output. If rows were laid end to end, the output gets the shape of the rows again."""
        if row.padding and not self.masks_routers and getattr(output, "aux_loss", None) is not None:
            raise PackingError(
                f"aux_loss: expected none with batches of fixed shapes, since {type(self.model).__name__} "
                f"would also compute it for the padding; pass {_ROUTER_SETTING}=False, or batches of any shape"
            )
        return fold_into_rows(output, row) if row.rows > 1 else output

    def check_patch(self, inputs: Mapping[str, Any]) -> None:
        """Raise PackingError if the model was changed after it was patched, and the patch would no longer work; or if a
        call asks for attention weights."""
        if (asked := inputs.get("output_attentions")) is None:
            refuse_weights(config for config, _ in self.patch.attention_before)
        elif asked:
            raise PackingError(f"output_attentions: expected False on a patched model, got True; {_NO_WEIGHTS}")
        for config, attention in self.patch.attention_during:
            if (found := config._attn_implementation) != attention:
                raise PackingError(
                    f"attention: expected {attention!r} on a patched model, in its {type(config).__name__}, got "
                    f"{found!r}, which was set after the model was patched; call unpatch_model before you set another "
                    "attention function"
                )
        for forward in self.segmented:
            forward.check_module(self.model)
        if self.route.by_segment:
            refuse_uneven_gathers(self.model, self.route.by_segment)
        if self.patch.facts.unpadding is not None:
            check_readers(self.model, self.patch.facts.unpadding)

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # unpickling may happen in a process that has not patched a model
        self.__dict__.update(state)


skip_code(PatchedForward.__call__.__code__)  # it is traced only where it is called from traced code


def _with_seq_lengths(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a forward that also takes the lengths of segments."""
    lengths = inspect.Parameter(SEQ_LENGTHS, inspect.Parameter.KEYWORD_ONLY, default=None)
    *others, last = signature.parameters.values()
    last_is_any = last.kind is inspect.Parameter.VAR_KEYWORD
    return signature.replace(parameters=[*others, *([lengths, last] if last_is_any else [last, lengths])])


@dataclass
class Patch:
    """The patch of a model: the route, the state to restore when the patch is removed, and a check of labels."""

    route: Route
    attention_before: Attention
    """The attention settings before the patch, without those of towers, which never get text and keep theirs."""
    signature: Signature
    """The arguments that the model's own forward takes."""
    attention_during: Attention = field(default_factory=list)
    """Empty if the patch sets no attention function."""
    replaced: list[ReplacedForward] = field(default_factory=list)
    """The replacements that the patch has installed for the forwards of modules, the latest first."""
    label_check: LabelCheck = field(default_factory=LabelCheck)
    is_running: bool = False
    """True while the model's forward runs. Code traced by torch.compile can read this, but not `running`."""
    prove_unpadding: ClassVar[Callable[[PreTrainedModel], None]]
    """A function that proves that a model can run padded batches, and then calls `install_unpadding`."""
    prove_trees: ClassVar[Callable[[PreTrainedModel], Any]]
    """A function that proves that a model can run rows of trees."""

    def replace(self, forward: ReplacedForward) -> None:
        self.replaced.insert(0, forward)
        forward.install()

    @property
    def facts(self) -> Facts:
        """What is known about the patched model."""
        return self.route.facts

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: within the block, the model runs as without the patch, and other threads wait."""
        model = next(each.model for each in self.replaced if isinstance(each, PatchedForward))
        lock = nullcontext() if torch.compiler.is_dynamo_compiling() else _lock_of(model)  # tracing changes nothing
        with lock, use_attention(self.attention_before), switched_off(self.replaced):
            yield


_NO_WEIGHTS = (
    "a patched model returns no attention weights. To get them, pass output_attentions=True in a block "
    "`with unpatch_model(model):`"
)


def refuse_weights(configs: Iterable[PreTrainedConfig]) -> None:
    """Raise PackingError if a configuration asks for attention weights."""
    if asking := next((config for config in configs if config.output_attentions), None):
        raise PackingError(
            f"output_attentions: expected False in the {type(asking).__name__} of a patched model, got True; "
            f"{_NO_WEIGHTS}"
        )


def install(model: PreTrainedModel, route: Route, before: Attention) -> None:
    """Install a route in an unpatched model: set its attention function, and replace the forwards of the model, of its
    inner models, and of the modules that run by segment. `remove` will restore the attention settings `before`."""
    of_towers = {id(config) for config in tower_configurations(model)}
    patch = Patch(route, [each for each in before if id(each[0]) not in of_towers], Signature(model))
    setattr(model, PATCH, patch)
    try:
        if route.method.attention:
            register()
            model.set_attn_implementation(route.method.attention)
            restore_attention([each for each in before if id(each[0]) in of_towers])
            patch.attention_during = attention_now(patch.attention_before)
        segmented = [SegmentedForward(model.get_submodule(plan.name), plan) for plan in route.by_segment]
        for forward in segmented:
            patch.replace(forward)
        for module in _entry_modules(model):  # last, since an inner model may also run by segment
            patch.replace(PatchedForward(module, model, segmented))
        if model.can_generate():
            model.generate = StockGenerate(model, vars(model).get("generate"))
        if route.facts.unpadding is not None:
            install_unpadding(model, route.facts.unpadding)
    except BaseException:
        remove(model)
        raise


def remove(model: PreTrainedModel) -> Route:
    """Remove the patch from a model, and return the route that was installed."""
    patch: Patch = getattr(model, PATCH)
    for forward in patch.replaced:
        forward.remove()
    if isinstance(generate := vars(model).get("generate"), StockGenerate):
        del model.generate
        if generate.before is not None:
            model.generate = generate.before
    for module, name, checkpoint in _checkpointing_functions(model):
        if isinstance(checkpoint, KeepRow):
            setattr(module, name, checkpoint.checkpoint)
    restore_attention(patch.attention_before)
    delattr(model, PATCH)
    return patch.route


@contextmanager
def unpatched_on_error(model: PreTrainedModel, before: Attention) -> Iterator[None]:
    """Context manager: after an error or an interruption in the block, the model is left unpatched."""
    try:
        yield
    except BaseException:
        if is_patched(model):
            remove(model)
        restore_attention(before)
        raise


def _entry_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model and the inner models that PEFT or other libraries may call directly, without duplicates."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    is_model = isinstance(decoder, nn.Module) and decoder is not model.get_output_embeddings()  # as in ModernBERT
    modules = [model, model.base_model, *([decoder] if is_model else [])]
    return list({id(module): module for module in modules}.values())


def _checkpointing_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield each activation-checkpointing function of a model: its module, the name of the attribute, the function."""
    for module in model.modules():
        for name in _CHECKPOINTING:
            if (checkpoint := vars(module).get(name)) is not None:
                yield module, name, checkpoint
