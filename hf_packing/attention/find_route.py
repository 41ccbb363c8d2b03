"""Find the fastest route that is proven to keep packed documents apart in a model, and install that route.

A route consists of an attention function, a format for the model's inputs, and the modules that run segment by segment.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.inspect_model import Signature, configurations, pad_token_of
from hf_packing.attention.patched_forward import attention_of, install, remove, restore_attention
from hf_packing.attention.probe import DocumentTokens, Probe, pack_in_one_row
from hf_packing.attention.proof import (
    Exam,
    model_sees_labels,
    prove_isolation,
    refuse_loss_across_borders,
    run_alone,
    run_alone_in_training,
    treats_pad_as_padding,
)
from hf_packing.attention.route import METHODS, Method, Route, is_patched, packed_share
from hf_packing.attention.search import Search
from hf_packing.attention.varlen import NAME, NAME_WITH_LOCAL_MASKS, Observed, observe
from hf_packing.errors import ModelNotSupportedError

_SHARING_LENGTHS = (9, 14, 9, 14)
"""Lengths, in tokens, of the documents in the second and third test batch of a proof. Some lengths are equal, since a
route may run documents of equal length in one call of a module."""

_Attention = list[tuple[PreTrainedConfig, Any]]
"""The configurations of an unpatched model, each with the name of its attention function, as `attention_of` returns
them."""

known_routes: dict[Any, Route] = {}
"""Routes that were already found and proven in this process. The keys are results of `route_key`."""


class _LocalMaskError(ModelNotSupportedError):
    """Raised if only the attention mask of a model limits attention to a window or a chunk, and the attention function
    does not get this limit."""


class _SeveralRowsError(ModelNotSupportedError):
    """Raised if the proof of a route succeeds for a single packed row, but fails for a batch of several rows."""


def find_and_prove(model: PreTrainedModel) -> None:
    """Install the fastest route that is proven to keep documents apart.

    A route that was already found in this process, for a model with the same `route_key`, is tried first. After an
    error or an interruption, the model is left unpatched.

    Raises:
        ModelNotSupportedError: no route passes the proof, the model cannot be called with input_ids alone, or the
            model's own loss compares labels of one document with outputs of another document. The message contains the
            reason.
    """
    before = attention_of(model)
    try:
        exams = [run_alone(model, Probe(model)), run_alone(model, Probe(model, 1, _SHARING_LENGTHS))]
        exams.append(_in_two_rows(exams[1]))
        rounding = exams[0].probe.rounding
        exams.append(run_alone_in_training(model, rounding))
        with_padding = _run_with_pad_tokens(model, rounding)
        restore_attention(before)
        width = exams[0].references[0].logits[0].shape[-1]
        sees_labels = model_sees_labels(exams[0].probe, width)
        route = _install_proven_route(model, before, exams)
        for exam in (exams[0], exams[-1]):
            refuse_loss_across_borders(exam.probe, width)
        refuses_pad = with_padding is not None and treats_pad_as_padding(with_padding)
        refused = pad_token_of(model) if refuses_pad else None
        if sees_labels or refused is not None:
            remove(model)
            install(model, replace(route, refused_token=refused, sees_labels=sees_labels), before)
    except BaseException:
        if is_patched(model):
            remove(model)
        restore_attention(before)
        raise


def _in_two_rows(exam: Exam) -> Exam:
    """Return a copy of `exam` with the same documents and expected outputs, but packed in a batch of two rows."""
    probe = Probe(exam.probe.model, 1, exam.probe.lengths, _pack_in_two_rows)
    probe.rounding = exam.probe.rounding
    return replace(exam, probe=probe, rows=2)


def _pack_in_two_rows(documents: DocumentTokens) -> dict[str, Any]:
    """Return model inputs for a batch of two packed rows. The first row contains the first half of the documents, and
    the second row contains the second half. Both halves must have the same number of tokens."""
    half = len(documents) // 2
    rows = [pack_in_one_row(each) for each in (documents[:half], documents[half:])]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def _run_with_pad_tokens(model: PreTrainedModel, rounding: float | None) -> Exam | None:
    """Run each of several random documents alone, and return the documents and their outputs. Every document contains
    the model's pad token.

    Args:
        model: an unpatched model.
        rounding: the effect of rounding on a logit, as `Probe.measure_rounding` measured it; None if not measured.

    Returns:
        The documents and their outputs; None if the model has no pad token, or cannot be called on such documents.
    """
    if (token := pad_token_of(model)) is None:
        return None
    probe = Probe(model, 2)
    probe.rounding = rounding
    for document in probe.documents:
        document[2] = document[-1] = token
    with suppress(ModelNotSupportedError):
        return run_alone(model, probe, gradients=False)
    return None


def route_key(model: PreTrainedModel) -> Any:
    """Return a key made of everything that a route depends on. A route that was found for one model is also tried for
    other models with an equal key.

    If the route passes the proof for another model, no search is made in that model. Since the proof does not repeat
    all checks of the search, the key contains the names and classes of all modules.
    """
    attention = model.config._attn_implementation
    classes = tuple((name, type(module)) for name, module in model.named_modules())
    settings = tuple(sorted(_settings_of(config) for config in configurations(model)))
    return classes, settings, attention, model.dtype, model.device.type


def _settings_of(config: PreTrainedConfig) -> str:
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    return repr(sorted(settings.items(), key=str))


def _install_proven_route(model: PreTrainedModel, before: _Attention, exams: list[Exam]) -> Route:
    key = route_key(model)
    if (known := known_routes.get(key)) is not None:
        with suppress(ModelNotSupportedError, AttributeError):
            return _prove(model, known, before, exams)
    failure: ModelNotSupportedError | None = None
    failures: list[str] = []
    for method in _methods_for(model):
        if method.attention == NAME_WITH_LOCAL_MASKS and not isinstance(failure, _LocalMaskError):
            continue
        try:
            known_routes[key] = _search_and_prove(model, method, before, exams, tuple(dict.fromkeys(failures)))
            return known_routes[key]
        except ModelNotSupportedError as error:
            failure = error
            failures.append(
                f"{'with varlen attention' if method.attention else 'with the attention of the model'}: {error}"
            )
    raise ModelNotSupportedError(
        f"{type(model).__name__}: patch_model cannot keep packed documents apart; " + "; ".join(dict.fromkeys(failures))
    )


def _methods_for(model: PreTrainedModel) -> Iterator[Method]:
    """Yield the methods that can be tried on this model, without duplicates, from the fastest to the slowest. A method
    consists of an attention function and an input format."""
    signature = Signature(model)
    takes_borders = signature.takes("cu_seq_lens_q")
    takes_positions = any("position_ids" in Signature(each).names for each in (model, model.base_model))
    tried = set()
    for method in METHODS:
        if method.attention and not model._can_set_attn_implementation():
            continue
        borders, positions = method.inputs.borders and takes_borders, method.inputs.positions and takes_positions
        formats = [replace(method.inputs, borders=borders, positions=positions)]
        if method.inputs.mask_of_ones and not takes_positions:
            # a model that takes no position_ids cannot detect packed rows by itself, so it may need no mask of ones
            formats.insert(0, replace(formats[0], mask_of_ones=False))
        for inputs in formats:
            if (own := Method(method.attention, inputs)) not in tried:
                tried.add(own)
                yield own


def _search_and_prove(
    model: PreTrainedModel, method: Method, before: _Attention, exams: list[Exam], tried: tuple[str, ...]
) -> Route:
    """Find the modules that have to run segment by segment if the model is called with `method`. Install the resulting
    route, prove that the route keeps documents apart, and return the route.

    Args:
        model: an unpatched model.
        method: an attention function, and a format of the model's inputs.
        before: the model's attention settings, which are restored when the route is removed.
        exams: the test batches of the proof.
        tried: the reasons why faster methods failed; stored in the route.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row, or the proof of the route fails. The model
            is left unpatched.
    """
    install(model, Route(method, (), 1.0), before)
    probe = exams[0].probe
    search = Search(model, probe.row)
    try:
        with probe.undisturbed():
            with observe() as observed:
                plans = tuple(search.run(lambda **options: probe.packed(probe.documents, **options)))
            _check_observed(method, observed)
    except ModelNotSupportedError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(model)
    if plans:
        method = replace(method, inputs=replace(method.inputs, one_row=True))
    route = Route(method, plans, packed_share(model, plans), tried)
    try:
        return _prove_for_several_rows(model, route, before, exams)
    except ModelNotSupportedError as error:
        failure = error
    reasons = [str(failure)]
    if plans:
        reasons.append(f"modules that ran by segment: {', '.join(f'{n} {kind}' for kind, n in route.modules.items())}")
    for name, reason in list(search.unsliceable.items())[:2]:
        kind = type(model.get_submodule(name)).__name__
        reasons.append(f"{kind} ({name}) cannot run on a single segment: {reason}")
    raise ModelNotSupportedError("; ".join(reasons)) from failure


def _check_observed(method: Method, observed: Observed) -> None:
    if method.attention and not observed.calls:
        raise ModelNotSupportedError("the model never called the attention function that patch_model had set")
    lost = [mask for mask in observed.local_masks if mask.window not in observed.windows]
    if method.attention == NAME and lost:
        lost_masks = " and ".join(sorted(map(str, lost)))
        raise _LocalMaskError(
            f"only the model's attention mask limits attention to {lost_masks}, and the attention function does not "
            "get this limit"
        )


def _prove_for_several_rows(model: PreTrainedModel, route: Route, before: _Attention, exams: list[Exam]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it. If the proof fails only for a batch of
    several rows, try a second route, which lays the rows of a batch end to end in a single row."""
    try:
        return _prove(model, route, before, exams)
    except _SeveralRowsError:
        if route.method.inputs.one_row:
            raise
        method = replace(route.method, inputs=replace(route.method.inputs, one_row=True))
        return _prove(model, replace(route, method=method), before, exams)


def _prove(model: PreTrainedModel, route: Route, before: _Attention, exams: list[Exam]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it.

    If isolation cannot be fully proven in training mode, the returned route contains the reason in `unproven`.

    Raises:
        ModelNotSupportedError: the proof failed. The model is left unpatched.
    """
    unproven = "; ".join(exam.unproven for exam in exams if exam.unproven)
    route = route if route.unproven == unproven else replace(route, unproven=unproven)
    install(model, route, before)
    try:
        for exam in exams:
            with exam.probe.undisturbed():
                prove_isolation(exam)
    except BaseException as error:
        remove(model)
        if not isinstance(error, Exception):
            raise
        known = isinstance(error, ModelNotSupportedError)
        if exam.rows > 1:
            reason = str(error) if known else f"the model cannot be called on several packed rows: {error}"
            raise _SeveralRowsError(reason) from error
        if known:
            raise
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    return route
