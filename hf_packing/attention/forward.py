"""Run the forward of a patched model, and install and remove the patch.

A patched forward classifies its inputs. Packed rows and rows of trees run with the layout of their segments. Padded
batches run as usual but for the backbone, which gets the tokens without padding, as one packed row. Calls with a cache
run as without the patch. A batch of PackingCollator waits for the device not once, after the first one.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from hf_packing.attention.by_segment import ReplacedForward, SegmentedForward, refuse_uneven_gathers, switched_off
from hf_packing.attention.function import register
from hf_packing.attention.inspect_model import (
    Signature,
    has_local_weights,
    has_vocabulary,
    inner_model,
    sees_media,
    tower_configurations,
)
from hf_packing.attention.labels import check_loader, refuse_copied_labels
from hf_packing.attention.layout import (
    CACHES,
    Layout,
    filled_cache,
    fold_into_rows,
    has_trees,
    layout_of_collator,
    read_layout,
    use_layout,
    within,
)
from hf_packing.attention.padded import (
    PaddedRows,
    SharedRows,
    Unpadding,
    current_rows,
    inputs_of_backbone,
    media_of,
    read_padded_rows,
    rows_without_padding,
    run_by_length,
    with_pad_tokens,
)
from hf_packing.attention.route import (
    BORDER_ARGUMENTS,
    PATCH,
    READ_ARGUMENTS,
    Facts,
    Route,
    is_patched,
    mark_changing_sizes,
)
from hf_packing.attention.row_readers import RowReader, RowsInBackbone
from hf_packing.attention.snapshot import Attention, attention_now, attention_of, restore_attention, use_attention
from hf_packing.columns import CU_SEQ_LENS, IGNORED_LABEL, PARENTS, SEQ_LENGTHS
from hf_packing.errors import ModelNotSupportedError, PackingError

_WHERE = {"right": "after", "left": "before", "both": "on both sides of"}

_CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Names of attributes in which modules store an activation-checkpointing function. Modules of transformers have the
first attribute, and FSDP's checkpoint wrapper has the second attribute."""

running: ContextVar[tuple[int, ...]] = ContextVar("running", default=())
"""The `id()` of each patched model whose forward is running. A patch replaces the forwards of a model and of its inner
models, but only the outermost forward reads the inputs."""

_locks: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
"""Locks that a thread holds while a patched model runs, since other calls switch the patch off for a while."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _lock_of(model: nn.Module) -> RLock:
    """Return the model's lock. Not compiled: torch.compile would go through all of `_locks` while models leave it."""
    return _locks.setdefault(model, RLock())


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
    trusts_collator: bool = False
    """True once a batch of PackingCollator was read in full, and the lengths that came with it were right."""
    knows_labels: bool = False
    """True once it is known that the model is not trained to copy its input."""
    layers: list[nn.Module] | None = None
    """The modules in the model's lists when `may_checkpoint` was found; None before."""
    may_checkpoint: list[nn.Module] = field(default_factory=list)
    """The modules that have an activation-checkpointing function, or may get one."""

    def __post_init__(self) -> None:
        self.lists = [each for each in self.model.modules() if isinstance(each, nn.ModuleList)]

    def replace(self, forward: ReplacedForward) -> None:
        self.replaced.insert(0, forward)
        forward.install()

    @property
    def facts(self) -> Facts:
        """What is known about the model."""
        return self.route.facts

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: within the block, the model runs as without the patch, and other threads wait."""
        is_tracing = torch.compiler.is_dynamo_compiling()  # which changes nothing
        lock = nullcontext() if is_tracing else _lock_of(self.model)
        with lock, use_attention(self.attention_before), switched_off(self.replaced):
            yield

    def keep_layouts(self) -> None:
        """Wrap the model's activation-checkpointing functions, so that the backward pass, which runs layers again, has
        what they ran under. All modules are searched only after layers were replaced, as FSDP does."""
        layers = [layer for each in self.lists for layer in each]
        if layers != self.layers:
            self.layers = layers
            names = (*_CHECKPOINTING, "gradient_checkpointing")
            self.may_checkpoint = [each for each in self.model.modules() if any(hasattr(each, name) for name in names)]
        gives_borders = self.route.method.borders and not self.route.by_segment
        for module in self.may_checkpoint:
            for name in _CHECKPOINTING:
                checkpoint = vars(module).get(name)
                if checkpoint is not None and not isinstance(checkpoint, KeepLayout):
                    setattr(module, name, KeepLayout(checkpoint, self, gives_borders))


@dataclass(eq=False)
class KeepLayout:
    """A wrapper for an activation-checkpointing function. The backward pass runs the checkpointed layers a second time,
    after the model's forward has ended. The second run has the same layout or padded batch and the same attention
    settings as the first one, and the patch is switched off if it was.

    Args:
        checkpoint: the function to wrap.
        patch: the patch of the model.
        gives_borders: whether all layers get the borders of the segments as arguments. If so, compiled layers do not
            need the current layout.
    """

    checkpoint: Callable[..., Any]
    patch: Patch
    gives_borders: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.gives_borders and torch.compiler.is_compiling()):
            function = self._as_now(function)
        return self.checkpoint(function, *args, **kwargs)

    def _as_now(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `function` under what holds now."""
        context, attention = copy_context(), attention_now(self.patch.attention_before)
        is_on = self.patch.replaced[0].installed

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if is_on else switched_off(self.patch.replaced), use_attention(attention):
                return context.copy().run(function, *args, **kwargs)

        return run


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
        self.is_backbone = False
        """True if the module gets the tokens of padded batches without padding."""
        # Trainer reads this attribute to find out which columns a model takes, and drops all others
        self.__signature__ = _with_seq_lengths(inspect.signature(module.forward))

    @property
    def model(self) -> PreTrainedModel:
        return self.patch.model

    @property
    def route(self) -> Route:
        return self.patch.route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate makes a method of this object
            args = args[1:]
        if torch.compiler.is_compiling() and (self.patch.is_running or not self.installed):
            return self.forward(*args, **kwargs)  # an inner model, so that the patched model becomes a single graph
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
        if id(self.model) in running.get() and self.installed:  # within the forward of the patched model
            rows = current_rows.get()
            if rows is None or not self.is_backbone:
                return self.forward(*args, **kwargs)
            return self._run_backbone(self._by_name(args, kwargs), rows)
        with _lock_of(self.model):
            if not self.installed:
                return self.forward(*args, **kwargs)
            inputs, kind = self._classify(args, kwargs)
            if isinstance(kind, Layout):
                return self.run_packed(inputs, kind)
            if isinstance(kind, PaddedRows):
                return self._run_padded(inputs, kind)
            with self.patch.suspended():
                return self.forward(**inputs)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def run_packed(self, inputs: dict[str, Any], layout: Layout) -> Any:
        """Run the forward on packed rows or trees, and return the output."""
        inputs, laid = self._prepare(inputs, layout)
        attends_by_layout = within(_knows_borders, self.route.method.attention is not None)
        with self._running(), use_layout(laid), within(current_rows, None), attends_by_layout:
            output = self._run_uncompiled(inputs) if laid.has_branches else self.forward(**inputs)
        return self._finish(output, layout) if layout.padding or laid is not layout else output

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def _run_padded(self, inputs: dict[str, Any], rows: PaddedRows) -> Any:
        """Run the forward on a padded batch, in which the backbone runs without padding."""
        if self.is_backbone:
            return self._run_backbone(inputs, rows)
        with self._running(), use_attention(self.patch.attention_before), use_layout(None), within(current_rows, rows):
            return self.forward(**self._taken(with_pad_tokens(self.model, inputs, rows)))

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def _run_backbone(self, inputs: dict[str, Any], rows: PaddedRows) -> Any:
        """Run the backbone on the tokens of a padded batch, and return its output for the padded batch."""
        inputs = inputs_of_backbone(self.module, inputs, rows)
        if self._unpadding.by_length:
            with self.patch.suspended(), within(current_rows, None):
                return run_by_length(self.forward, self._taken(inputs), rows)
        with use_attention(self.patch.attention_during), within(current_rows, None):
            laid, fewest = rows.lay_end_to_end(inputs), self.patch.facts.fewest_shared
            shared = None if fewest is None else SharedRows.find(laid, rows.layout.lengths, fewest)
            if shared is None:
                return rows.put_back(self.run_packed(laid, rows.layout))
            return rows.put_back(shared.give(self.run_packed(shared.take(laid), shared.layout)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_uncompiled(self, inputs: dict[str, Any]) -> Any:
        """Run the forward on a row of trees, whose paths have too many lengths to compile each."""
        return self.forward(**inputs)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Context manager: within the block, the model's forward is running."""
        before, self.patch.is_running = self.patch.is_running, True
        try:
            with within(running, (*running.get(), id(self.model))):
                yield
        finally:
            self.patch.is_running = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _by_name(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return self.signature.by_name(args, kwargs)

    def _taken(self, inputs: dict[str, Any]) -> dict[str, Any]:
        takes = self.signature.takes
        return {name: value for name, value in inputs.items() if name not in READ_ARGUMENTS or takes(name)}

    @property
    def _takes_packed_rows(self) -> bool:
        return self.patch.facts.takes_packed_rows or self.module is not self.model

    @property
    def _unpadding(self) -> Unpadding:
        """The way in which the model runs padded batches."""
        if self.patch.facts.unpadding is None:
            raise PackingError(
                f"attention_mask: expected packed rows, since it is not proven that {type(self.model).__name__} runs "
                "padded batches; call patch_model(model, padded=True) before training, or unpatch_model"
            )
        return self.patch.facts.unpadding

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _classify(self, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Layout | PaddedRows | None]:
        """Check the patch and the arguments of a call, and read where its tokens are.

        Returns:
            The arguments by name; and the layout of packed rows or trees, the rows of a padded batch, or None for a
            call that runs as without the patch.
        """
        inputs, training = self.signature.by_name(args, kwargs), self.module.training
        if training:
            self.patch.keep_layouts()
        media = media_of(inputs) if self.patch.sees_media else ()
        if (media or not has_trees(inputs)) and needs_cache(inputs, training):
            return inputs, None
        self._check_patch(inputs)
        labels = inputs.get("labels")
        rows = None if has_trees(inputs) and not media else self._read_padded(inputs, media)
        if rows is None:
            inputs, layout = self._read_layout(inputs)
        elif self._takes_full_rows(rows) and not media:  # as from a tokenizer
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
            layout, rows = Layout.of(rows.lengths, rows.device, len(rows.lengths)), None
        else:
            layout = rows.layout
        check_loader(self.model, layout, labels)
        if rows is not None:
            _check_rows(self.model, rows, inputs, self.route, self._unpadding)
        self._check_labels(inputs, rows, layout)
        return inputs, layout if rows is None else rows

    def _takes_full_rows(self, rows: PaddedRows) -> bool:
        """Return whether rows without any padding run as packed rows, each a document, since padded batches are not
        proven."""
        return self.patch.facts.unpadding is None and self._takes_packed_rows and not rows.has_padding

    def _read_layout(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Layout]:
        """Read the layout of packed rows or trees. Compare it once with what PackingCollator knows of its batch."""
        trees, trusts = has_trees(inputs), self.patch.trusts_collator
        if trees and not self._takes_packed_rows:
            raise PackingError(f"model: {type(self.model).__name__} returns outputs for whole rows, and takes no trees")
        given, layout = read_layout(inputs, self.module.training, trusts)
        if layout.has_branches and not self.patch.facts.takes_trees:
            raise PackingError(
                f"{PARENTS}: expected packed rows, since it is not proven that {type(self.model).__name__} runs rows "
                "of trees; call patch_model(model, trees=True) before training"
            )
        if not trees and not trusts and (known := layout_of_collator(inputs)) is not None:
            self.patch.trusts_collator = (known.lengths, known.padding) == (layout.lengths, layout.padding)
        return given, layout

    def _read_padded(self, inputs: dict[str, Any], media: tuple[str, ...]) -> PaddedRows | None:
        """Return the places of the tokens in a padded batch, or None for packed rows."""
        if media:
            self._check_rows_with_media(inputs, media[0])
        rows = read_padded_rows(inputs)
        if rows is not None or (not media and self._takes_packed_rows):
            return rows
        borders = (*BORDER_ARGUMENTS, *(["position_ids"] if inputs.get("attention_mask") is None else []))
        if not media and any(inputs.get(name) is not None for name in borders):
            raise PackingError(
                "model: expected a padded batch with an attention_mask, got packed rows; "
                f"{type(self.model).__name__} returns outputs for whole rows, not for the documents in a row. Its "
                "backbone gets the tokens of a padded batch without padding"
            )
        return rows_without_padding(inputs)

    def _check_rows_with_media(self, inputs: Mapping[str, Any], name: str) -> None:
        """Raise PackingError if the rows of a batch with pictures or sound may be packed rows. `name` is the argument
        that has the pictures or the sound."""
        given = next((each for each in (*BORDER_ARGUMENTS, PARENTS) if inputs.get(each) is not None), None)
        if given is not None:
            raise PackingError(
                f"{given}: expected no borders between documents beside {name}, since a row with pictures or sound has "
                "to be one document; pass a padded batch with an attention_mask"
            )
        if self.module.training and all(inputs.get(each) is None for each in ("attention_mask", "position_ids")):
            raise PackingError(
                f"attention_mask: expected an attention_mask or position_ids beside {name} in training mode, got "
                "neither, so it is not known whether each row is one document; pass a mask of ones if it is"
            )

    def _check_labels(self, inputs: Mapping[str, Any], rows: PaddedRows | None, layout: Layout) -> None:
        """Raise PackingError if the model is trained to copy its input, until it is known that it is not."""
        if self.module.training and self.patch.facts.sees_labels and not self.patch.knows_labels:
            given = [inputs.get("input_ids"), inputs.get("labels")]
            ids, labels = given if rows is None else rows.lay_end_to_end(given)
            refuse_copied_labels(self.model, ids, labels, layout.cu_seq_lens)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, inputs: dict[str, Any], layout: Layout) -> tuple[dict[str, Any], Layout]:
        """Return the keyword arguments for the model's own forward, and the layout of the rows as the model gets them:
        laid end to end."""
        self.patch.facts.check_tokens(inputs.get("input_ids"))
        labels = inputs.get("labels")
        if layout.rows > 1 and isinstance(labels, Tensor) and not self.patch.facts.sees_labels:
            inputs["labels"] = labels.clone()
            inputs["labels"][:, 0] = IGNORED_LABEL  # no row predicts the first token of the next one
        inputs = self.route.method.build(self.signature, inputs, layout)
        if self.patch.facts.takes_packed_rows:  # the route was proven with the arguments that the model takes
            takes, places = self.patch.signature.takes, (*BORDER_ARGUMENTS, "position_ids")
            inputs = {name: each for name, each in inputs.items() if name not in places or takes(name)}
        if not layout.has_fixed_shape:
            mark_changing_sizes({**inputs, CU_SEQ_LENS[0]: layout.cu_seq_lens}, layout.rows * layout.tokens)
        return inputs, replace(layout, rows=1) if layout.rows > 1 else layout

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _finish(self, output: Any, layout: Layout) -> Any:
        """Return the model's output, in the shape of the rows."""
        if layout.padding and getattr(output, "aux_loss", None) is not None:
            raise PackingError(
                f"aux_loss: expected none with batches of fixed shapes, since {type(self.model).__name__} would also "
                "compute the loss of its routers for the padding; pass output_router_logits=False, or batches of any "
                "shape"
            )
        return fold_into_rows(output, layout) if layout.rows > 1 else output

    def _check_patch(self, inputs: Mapping[str, Any]) -> None:
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
        for forward in self.patch.replaced:
            if isinstance(forward, SegmentedForward):
                forward.check_module(self.model)
        if self.route.by_segment:
            refuse_uneven_gathers(self.model, self.route.by_segment)
        if self.patch.facts.unpadding is not None:
            check_readers(self.model, self.patch.facts.unpadding)

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # unpickling may happen in a process that has not patched a model
        _skip_search_in_positions()
        self.__dict__.update(state)


skip_code(PatchedForward.__call__.__code__)  # it is traced only where it is called from traced code


_knows_borders: ContextVar[bool] = ContextVar("_knows_borders", default=False)
"""True while layers attend by the borders of the current layout, so that no mask needs to tell segments apart."""


def _skip_search_in_positions() -> None:
    """Keep transformers from looking for packed documents in position_ids where the borders are known. It would wait
    for the device in every forward."""
    search = masking_utils.find_packed_sequence_indices
    if getattr(search, "__module__", None) == __name__:
        return

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        is_known = not torch.compiler.is_compiling() and _knows_borders.get()
        return None if is_known else search(position_ids)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def needs_cache(inputs: Mapping[str, Any], training: bool) -> bool:
    """Return whether a call generates text, so that it runs as without the patch: whether it has a cache, or asks for
    one explicitly in evaluation mode, and has no borders between packed documents."""
    if any(inputs.get(name) is not None for name in BORDER_ARGUMENTS):
        return False
    if inputs.get("position_ids") is not None and inputs.get("attention_mask") is None and not filled_cache(inputs):
        return False
    return any(inputs.get(name) is not None for name in CACHES) or (bool(inputs.get("use_cache")) and not training)


def _check_rows(model: Any, rows: PaddedRows, inputs: Mapping[str, Any], route: Route, unpadding: Unpadding) -> None:
    """Raise an error if it is not proven that the model takes the padding of a batch where it is.

    Raises:
        ModelNotSupportedError: it was not proven that the model ignores padding in these places; or the weights of a
            model whose backbone runs by length are sharded.
        PackingError: the batch has two texts in each row, or embeddings beside padding.
    """
    name = type(model).__name__
    decoder = next((name for name, value in inputs.items() if name.startswith("decoder_") and value is not None), "")
    if decoder or (model.config.is_encoder_decoder and has_vocabulary(model)):
        raise PackingError(
            f"{decoder or 'model'}: expected a padded batch of one text for each row, but {name} takes two texts, an "
            "encoder's and a decoder's; call unpatch_model"
        )
    if inputs.get("input_ids") is None and not route.facts.takes_packed_rows and rows.has_padding:
        raise PackingError(
            f"inputs_embeds: expected input_ids in a padded batch, since {name} may find the padding by its token, got "
            "inputs_embeds"
        )
    if reason := dict(unpadding.refused).get(rows.side):
        raise ModelNotSupportedError(f"{name}: padding {_WHERE[rows.side]} the tokens is not supported, since {reason}")
    if unpadding.by_length and not has_local_weights(model):
        raise ModelNotSupportedError(
            f"{name}: expected all weights on every process, but they are sharded; the backbone of this model runs "
            "once for each length of document, so processes would wait for each other forever"
        )


def _with_seq_lengths(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a forward that also takes the lengths of segments."""
    lengths = inspect.Parameter(SEQ_LENGTHS, inspect.Parameter.KEYWORD_ONLY, default=None)
    *others, last = signature.parameters.values()
    last_is_any = last.kind is inspect.Parameter.VAR_KEYWORD
    return signature.replace(parameters=[*others, *([lengths, last] if last_is_any else [last, lengths])])


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


def install(model: PreTrainedModel, route: Route) -> None:
    """Install a route in an unpatched model: set its attention function, and replace the forwards of the model, of its
    inner models, and of the modules that run by segment. After an error, the model is left unpatched."""
    before = attention_of(model)
    of_towers = {id(config) for config in tower_configurations(model)}
    attention = [each for each in before if id(each[0]) not in of_towers]
    patch = Patch(model, route, attention, Signature(model), sees_media(model))
    setattr(model, PATCH, patch)
    try:
        if route.method.attention:
            register()
            _skip_search_in_positions()
            model.set_attn_implementation(route.method.attention)
            restore_attention([each for each in before if id(each[0]) in of_towers])
            patch.attention_during = attention_now(patch.attention_before)
        for plan in route.by_segment:
            patch.replace(SegmentedForward(model.get_submodule(plan.name), plan))
        for module in _entry_modules(model):  # last, since an inner model may also run by segment
            patch.replace(PatchedForward(module, patch))
        if model.can_generate():
            model.generate = StockGenerate(model, vars(model).get("generate"))
        if route.facts.unpadding is not None:
            install_unpadding(model, route.facts.unpadding)
    except BaseException:
        remove(model)
        restore_attention(before)
        raise


def install_unpadding(model: PreTrainedModel, unpadding: Unpadding | None) -> None:
    """Set the way in which a patched model runs padded batches, instead of the way that was set before."""
    patch: Patch = getattr(model, PATCH)
    for reader in [each for each in patch.replaced if isinstance(each, (RowReader, RowsInBackbone))]:
        patch.replaced.remove(reader)
        reader.remove()
    patch.facts.unpadding = unpadding
    for forward in patch.replaced:
        if isinstance(forward, PatchedForward):
            forward.is_backbone = unpadding is not None and forward.module is model.get_submodule(unpadding.backbone)
    if unpadding is None:
        return
    for name, sharing in unpadding.readers:
        patch.replace(RowReader(model.get_submodule(name), sharing))
    if unpadding.rows_after is not None:
        patch.replace(RowsInBackbone(model.get_submodule(unpadding.rows_after)))


def check_readers(model: PreTrainedModel, unpadding: Unpadding) -> None:
    """Raise PackingError if a module that gets every document in a row of its own was replaced."""
    for name in (*(name for name, _ in unpadding.readers), *([unpadding.rows_after] if unpadding.rows_after else [])):
        modules = model.get_submodule(name).modules()
        if not any(isinstance(vars(each).get("forward"), (RowReader, RowsInBackbone)) for each in modules):
            raise PackingError(
                f"{name}: expected the same module as when the model was patched, got another "
                f"{type(model.get_submodule(name)).__name__}; call unpatch_model before you replace a module, and "
                "patch_model afterwards"
            )


def remove(model: PreTrainedModel) -> Route:
    """Remove the patch from a model, and return the route that was installed."""
    patch: Patch = getattr(model, PATCH)
    for forward in patch.replaced:
        forward.remove()
    if isinstance(generate := vars(model).get("generate"), StockGenerate):
        del model.generate
        if generate.before is not None:
            model.generate = generate.before
    for module in model.modules():
        for name in _CHECKPOINTING:
            if isinstance(checkpoint := vars(module).get(name), KeepLayout):
                setattr(module, name, checkpoint.checkpoint)
    restore_attention(patch.attention_before)
    delattr(model, PATCH)
    return patch.route


@contextmanager
def unpatched_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager: after an error or an interruption in the block, a model that was not patched before it is left
    unpatched."""
    inner = inner_model(model)
    was_patched = is_patched(inner)
    try:
        yield
    except BaseException:
        if is_patched(inner) and not was_patched:
            remove(inner)
        raise


def _entry_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model and the inner models that PEFT or other libraries may call directly, without duplicates."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    is_model = isinstance(decoder, nn.Module) and decoder is not model.get_output_embeddings()  # as in ModernBERT
    modules = [model, model.base_model, *([decoder] if is_model else [])]
    return list({id(module): module for module in modules}.values())


@dataclass(eq=False)
class StockGenerate:
    """A replacement for the method `generate` of a patched model. While it runs, the model runs as without the patch.

    Args:
        model: the patched model.
        before: the method that other code had already set on the model object; None if there is none.
    """

    model: nn.Module
    before: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch = getattr(self.model, PATCH, None)
        with nullcontext() if patch is None else patch.suspended():
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]
