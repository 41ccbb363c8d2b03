"""Find the fastest route that is proven to keep packed documents apart in a model, and install that route.

A route consists of an attention function, a format for the model's inputs, and the modules that run segment by segment.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.inspect_model import configurations, pad_token_of
from hf_packing.attention.patched_forward import attention_of, install, remove, restore_attention
from hf_packing.attention.probe import DocumentTokens, Probe, pack_in_one_row
from hf_packing.attention.proof import (
    BeyondRoundingError,
    Exam,
    model_sees_labels,
    own_attention_agrees,
    prove_isolation,
    refuse_loss_across_borders,
    repeat_thoroughly,
    run_alone,
    run_alone_in_training,
)
from hf_packing.attention.route import Method, Route, have_equal_plans, is_patched, methods_for, packed_share
from hf_packing.attention.search import Search
from hf_packing.attention.varlen import NAME, NAME_WITH_LOCAL_MASKS, Observed, observe
from hf_packing.errors import ModelNotSupportedError, PackingError

_ROWS = ((18,), (9, 9))
"""Lengths, in tokens, of the documents in each row of a proof's test batch with several rows. Only one row has a border
between documents, which shows whether every row gets its own borders."""

_LENGTHS_IN_TRAINING = (17, 17)
"""Lengths, in tokens, of the documents of the test batch in training mode. They are equal, since a route may run
documents of equal length in one call of a module, which may mix the rows of the call in training mode only."""

_Attention = list[tuple[PreTrainedConfig, Any]]
"""The configurations of an unpatched model, with the names of their attention functions (see `attention_of`)."""

known_routes: dict[Any, Route] = {}
"""Routes that were already found and proven in this process. The keys are results of `route_key`."""


class _LocalMaskError(ModelNotSupportedError):
    """Raised if only the mask, and not the attention function, limits attention to a window or a chunk."""


class _NeverCalledError(ModelNotSupportedError):
    """Raised if a model does not call the attention function that its configuration names."""

    def __init__(self) -> None:
        super().__init__("the model never called the attention function that patch_model had set")


class _SeveralRowsError(ModelNotSupportedError):
    """Raised if the proof of a route succeeds for a single packed row, but fails for a batch of several rows."""


def find_and_prove(model: PreTrainedModel) -> None:
    """Install the fastest route that is proven to keep documents apart.

    A route that was found before, for a model with the same `route_key`, is tried first. After an error or an
    interruption, the model is left unpatched.

    Raises:
        ModelNotSupportedError: no route passes the proof, the model cannot be called with input_ids alone, or the
            model's own loss compares labels of one document with outputs of another document. The message contains the
            reason.
    """
    before = attention_of(model)
    try:
        exams = _run_documents_alone(model)
        width = exams[0].references[0].logits[0].shape[-1]
        sees_labels = model_sees_labels(exams[0].probe, width)
        route = _install_proven_route(model, before, exams)
        refuse_loss_across_borders(exams[0].probe, exams[-1].probe, width)
        refused = pad_token_of(model) if _treats_pad_as_padding(exams[1], route, before) else None
        if sees_labels or refused is not None:
            remove(model)
            install(model, replace(route, refused_token=refused, sees_labels=sees_labels), before)
    except BaseException:
        if is_patched(model):
            remove(model)
        restore_attention(before)
        raise


def _run_documents_alone(model: PreTrainedModel) -> list[Exam]:
    """Return the test batches of a proof: a single row, several rows, and a single row in training mode.

    To save time, none of these exams is thorough, and the documents in several rows contain pad tokens, if the model
    can be called on such documents. Gradients are computed in training mode, or, if that is not possible, for a single
    row in evaluation mode.
    """
    probe = Probe(model)
    tokens, other = probe.documents[-1], probe.others[-1]
    other[len(other) // 2] = tokens[len(tokens) // 2]  # the logits of this token show that a leak would be noticed
    first = run_alone(probe, gradients=False)
    try:
        in_rows = run_alone(_probe_of_rows(model, pad_token_of(model), probe), gradients=False)
    except ModelNotSupportedError:
        in_rows = run_alone(_probe_of_rows(model, None, probe), gradients=False)
    training = Probe(model, lengths=_LENGTHS_IN_TRAINING, training=True)
    training.rounding = probe.rounding
    in_training = run_alone_in_training(training)
    if in_training.unproven:
        first = run_alone(probe, gradients=True)
    return [first, replace(in_rows, rows=len(_ROWS)), in_training]


def _probe_of_rows(model: PreTrainedModel, pad_token: int | None = None, like: Probe | None = None) -> Probe:
    """Return a probe of several packed rows. If `pad_token` is given, every document contains it."""
    probe = Probe(model, 1, [length for row in _ROWS for length in row], _pack_in_rows, like=like)
    if pad_token is not None:
        for document in probe.documents:
            document[2] = document[-1] = pad_token
    return probe


def _pack_in_rows(documents: DocumentTokens) -> dict[str, Any]:
    """Return model inputs for a batch of packed rows, with as many documents in each row as `_ROWS` has."""
    left = iter(documents)
    rows = [pack_in_one_row(list(islice(left, len(lengths)))) for lengths in _ROWS]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def _treats_pad_as_padding(in_rows: Exam, route: Route, before: _Attention) -> bool:
    """Return whether a patched model treats pad tokens in a document as padding.

    If so, documents that contain pad tokens have different logits in packed rows and in a row of their own.

    Args:
        in_rows: the exam of several rows that the model has passed. If its documents contain pad tokens, the result is
            known.
        route: the route of the patched model.
        before: the model's attention settings before it was patched.
    """
    model, token = in_rows.probe.model, pad_token_of(in_rows.probe.model)
    if token is None or token in in_rows.probe.documents[0]:
        return False
    remove(model)
    try:
        exam = run_alone(_probe_of_rows(model, token), gradients=False, thorough=True)
    except ModelNotSupportedError:  # the model refuses pad tokens itself
        exam = None
    install(model, route, before)
    if exam is None:
        return False
    try:
        with exam.probe.undisturbed():
            packed = exam.probe.packed(exam.probe.documents)
    except Exception:  # the model refuses pad tokens itself
        return False
    return all(exam.probe.tolerance.unexplained(packed, reference.logits) > 0 for reference in exam.references)


def route_key(model: PreTrainedModel) -> Any:
    """Return a key made of everything that a route depends on. A route that was found for one model is also tried for
    other models with an equal key, and if the proof succeeds, no search is made in them. Since the proof does not
    repeat all checks of the search, the key contains the names and classes of all modules."""
    attention = model.config._attn_implementation
    classes = tuple((name, type(module)) for name, module in model.named_modules())
    settings = tuple(sorted(_settings_of(config) for config in configurations(model)))
    return classes, settings, attention, model.dtype, model.device.type


def _settings_of(config: PreTrainedConfig) -> str:
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    return repr(sorted(settings.items(), key=str))


def _install_proven_route(model: PreTrainedModel, before: _Attention, exams: list[Exam]) -> Route:
    """Install the fastest route that is proven to keep documents apart, and return it.

    If an exam fails, it is replaced in `exams` by a thorough one.
    """
    key = route_key(model)
    if (known := known_routes.get(key)) is not None:
        with suppress(ModelNotSupportedError, AttributeError):
            return _prove(model, known, before, exams)
    failure: ModelNotSupportedError | None = None
    failures: list[str] = []
    for method in methods_for(model):
        if method.attention == NAME_WITH_LOCAL_MASKS and not isinstance(failure, _LocalMaskError):
            continue
        if method.attention and isinstance(failure, _NeverCalledError):
            continue
        try:
            known_routes[key] = _search_and_prove(model, method, before, exams, tuple(dict.fromkeys(failures)))
            return known_routes[key]
        except ModelNotSupportedError as error:
            failure = error
            attention = "varlen attention" if method.attention else "the attention of the model"
            failures.append(f"with {attention}: {error}")
    raise ModelNotSupportedError(
        f"{type(model).__name__}: patch_model cannot keep packed documents apart; " + "; ".join(dict.fromkeys(failures))
    )


def _search_and_prove(
    model: PreTrainedModel, method: Method, before: _Attention, exams: list[Exam], tried: tuple[str, ...]
) -> Route:
    """Find the modules that have to run segment by segment if the model is called with `method`. Install the resulting
    route, prove that it keeps documents apart, and return it.

    In the first search, modules that are built alike are searched once. If the proof of the resulting route fails, all
    modules are searched.

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
    route, failure = None, None
    for thorough in (False, True):
        search = Search(model, exams[0].probe.row, thorough=thorough)
        try:
            found = _route_found_by(search, method, before, exams[0].probe, tried)
            if route is None or not have_equal_plans(found, route):
                route = found
                return _prove_for_several_rows(model, route, before, exams)
        except _LocalMaskError:
            raise
        except ModelNotSupportedError as error:
            failure = error
        if not search.has_assumed or (route is None and not search.found):
            break
    assert failure is not None
    if route is None:
        raise failure
    if route.method.attention != method.attention:
        raise _NeverCalledError from failure
    reasons = [str(failure)]
    if route.by_segment:
        reasons.append(f"modules that ran by segment: {', '.join(f'{n} {kind}' for kind, n in route.modules.items())}")
    for name, reason in list(search.unsliceable.items())[:2]:
        kind = type(model.get_submodule(name)).__name__
        reasons.append(f"{kind} ({name}) cannot run on a single segment: {reason}")
    raise ModelNotSupportedError("; ".join(reasons)) from failure


def _route_found_by(search: Search, method: Method, before: _Attention, probe: Probe, tried: tuple[str, ...]) -> Route:
    """Run a search, and return the route that consists of `method` and of the modules that the search found.

    If the model never calls the attention function of `method`, the route has the first method without one instead.
    """
    model = search.model
    install(model, Route(method, (), 1.0), before)
    try:
        with probe.undisturbed(), observe() as observed:
            check = partial(_check_observed, method, observed)
            plans = tuple(search.run(lambda **options: probe.packed(probe.documents, **options), check))
    except ModelNotSupportedError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(model)
    if method.attention and not observed.calls:
        tried = (*tried, f"with varlen attention: {_NeverCalledError()}")
        method = next(each for each in methods_for(model) if not each.attention)
    if plans:
        method = replace(method, inputs=replace(method.inputs, one_row=True))
    return Route(method, plans, packed_share(model, plans), tried)


def _check_observed(method: Method, observed: Observed) -> None:
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

    If isolation cannot be fully proven in training mode, the returned route contains the reason in `unproven`. If the
    proof fails, a ModelNotSupportedError is raised, and the model is left unpatched.
    """
    unproven = "; ".join(exam.unproven for exam in exams if exam.unproven)
    route = route if route.unproven == unproven else replace(route, unproven=unproven)
    install(model, route, before)
    try:
        for number, exam in enumerate(exams):
            is_known = exam.rows > 1 and route.method.inputs.one_row  # rows run as one row, which another exam has
            exams[number] = _pass(replace(exam, only_equality=is_known), route, before)
    except BaseException as error:
        if is_patched(model):
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


def _pass(exam: Exam, route: Route, before: _Attention) -> Exam:
    """Prove with one exam that an installed route keeps documents apart; if that fails, but may succeed with a thorough
    exam without pad tokens, prove again. Return the exam that was passed."""
    try:
        with exam.probe.undisturbed():
            prove_isolation(exam)
        return exam
    except (ModelNotSupportedError, PackingError) as error:
        if exam.is_thorough:
            raise
        failure = error
    model = exam.probe.model
    remove(model)
    if exam.rows > 1:
        exam = replace(exam, probe=_probe_of_rows(model))
    elif isinstance(failure, BeyondRoundingError) and own_attention_agrees(exam):
        raise failure
    exam = repeat_thoroughly(exam)
    install(model, route, before)
    with exam.probe.undisturbed():
        prove_isolation(exam)
    return exam
