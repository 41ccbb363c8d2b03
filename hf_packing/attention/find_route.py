"""Find the fastest route that provably keeps packed documents apart in a model, and install that route.

A route consists of an attention function, a format for the model's inputs, and the modules that run by segment.
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
"""Number of tokens in each document of the second proof. Some documents have equal lengths, since a route may run such
documents in one call."""

_Attention = list[tuple[PreTrainedConfig, Any]]
"""The attention settings of an unpatched model, as returned by `attention_of`."""

known_routes: dict[Any, Route] = {}
"""Routes that were already found in this process. The keys are the results of `route_key`."""


class _LocalMaskError(ModelNotSupportedError):
    """Error for a model that restricts attention to a window or chunk only through its attention mask."""


class _SeveralRowsError(ModelNotSupportedError):
    """Error for documents that are isolated in a single packed row, but not in a batch of several packed rows."""


def find_and_prove(model: PreTrainedModel) -> None:
    """Install the fastest route that provably keeps documents apart. If a route was already found for an equal model,
    that route is tried first.

    After an error or an interruption, the model is left unpatched.

    Raises:
        ModelNotSupportedError: no route can be proven. The message contains the reason for every failed attempt.
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
    """Return the same `Exam`, documents and expected outputs, with the documents packed in a batch of two rows."""
    probe = Probe(exam.probe.model, 1, exam.probe.lengths, _pack_in_two_rows)
    probe.rounding = exam.probe.rounding
    return replace(exam, probe=probe, rows=2)


def _pack_in_two_rows(documents: DocumentTokens) -> dict[str, Any]:
    """Return model inputs with the first half of the documents in one packed row, and the second half in another packed
    row. The halves must have equal numbers of tokens."""
    half = len(documents) // 2
    rows = [pack_in_one_row(each) for each in (documents[:half], documents[half:])]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def _run_with_pad_tokens(model: PreTrainedModel, rounding: float | None) -> Exam | None:
    """Run documents that contain pad tokens, one at a time; return the documents and their outputs as an `Exam`.

    Return None if the model has no pad token, or fails on such documents.
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
    """Return a key made of everything that a route depends on. Models with equal keys can use the same route.

    The classes of all modules are part of the key. A known route is proven again, but without a new search, and a
    search makes checks that a proof does not make.
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
            failures.append(f"{'with varlen attention' if method.attention else 'by segment'}: {error}")
    raise ModelNotSupportedError(f"{type(model).__name__}: " + "; ".join(dict.fromkeys(failures)))


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
            # a model without position_ids cannot detect packed rows, so a mask of ones may be unnecessary
            formats.insert(0, replace(formats[0], mask_of_ones=False))
        for inputs in formats:
            if (own := Method(method.attention, inputs)) not in tried:
                tried.add(own)
                yield own


def _search_and_prove(
    model: PreTrainedModel, method: Method, before: _Attention, exams: list[Exam], tried: tuple[str, ...]
) -> Route:
    """Find the modules that have to run by segment with this method. Then install, prove and return the route.

    Raises:
        ModelNotSupportedError: the route cannot be proven. The model is left unpatched.
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
        raise _LocalMaskError(f"only the attention mask, and not the attention function, has {lost_masks}")


def _prove_for_several_rows(model: PreTrainedModel, route: Route, before: _Attention, exams: list[Exam]) -> Route:
    """Install, prove and return a route. If documents are isolated in a single row but not in several rows, the route
    that is returned lays several rows end to end, as a single row."""
    try:
        return _prove(model, route, before, exams)
    except _SeveralRowsError:
        if route.method.inputs.one_row:
            raise
        method = replace(route.method, inputs=replace(route.method.inputs, one_row=True))
        return _prove(model, replace(route, method=method), before, exams)


def _prove(model: PreTrainedModel, route: Route, before: _Attention, exams: list[Exam]) -> Route:
    """Install a route, verify that it isolates documents, and return it. If that fails, remove the route and raise.

    If isolation cannot be fully proven in training mode, the returned route contains the reason in `unproven`.
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
