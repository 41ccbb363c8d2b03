"""Find the fastest route that is proven to keep packed documents apart in a model, and install that route.

A route consists of an attention function, a format for the model's inputs, and the modules that run segment by segment.
"""

from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.forward import install, remove, unpatched_on_error
from hf_packing.attention.inspect_model import Signature, has_vocabulary, pad_token_of
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
from hf_packing.attention.route import (
    Facts,
    LocalMaskError,
    Method,
    Route,
    is_patched,
    known_routes,
    methods_for,
    packed_share,
    route_key,
)
from hf_packing.attention.search import Search
from hf_packing.attention.snapshot import Attention, attention_of
from hf_packing.attention.tolerance import NotCallableError
from hf_packing.attention.unpadding_proof import prove_unpadding
from hf_packing.attention.varlen import NAME_WITH_LOCAL_MASKS, observe
from hf_packing.errors import ModelNotSupportedError, PackingError

_ROWS = ((18,), (9, 9))
"""Lengths, in tokens, of the documents in each row of a proof's test batch with several rows. Only one row has a border
between documents, which shows whether every row gets its own borders."""

_LENGTHS_IN_TRAINING = (17, 17)
"""Lengths, in tokens, of the documents of the test batch in training mode. They are equal, since a route may run
documents of equal length in one call of a module, which may mix the rows of the call in training mode only."""


class _NeverCalledError(ModelNotSupportedError):
    """Raised if a model does not call the attention function that its configuration names."""

    def __init__(self) -> None:
        super().__init__("the model never called the attention function that patch_model had set")


class _SeveralRowsError(ModelNotSupportedError):
    """Raised if the proof of a route only fails for a batch of several rows."""


def find_and_prove(model: PreTrainedModel, only: Route | None = None) -> None:
    """Install the fastest route that is proven to keep documents apart.

    A route that was found before, for a model with the same `route_key`, is tried first. If `only` is given, no other
    route is tried. After an error or an interruption, the model is left unpatched.

    Raises:
        ModelNotSupportedError: no route passes the proof, the model cannot be called with input_ids alone, or the
            model's own loss compares labels of one document with outputs of another document. The message contains the
            reason.
    """
    before = attention_of(model)
    try:
        with unpatched_on_error(model, before):
            _prove_on_packed_rows(model, model, before, only)
    except ModelNotSupportedError as error:
        takes_labels = "labels" in Signature(model).names
        is_backbone = model.base_model is model and model.base_model_prefix and not takes_labels
        if has_vocabulary(model) or not (isinstance(error, NotCallableError) or is_backbone):
            raise
        _prove_around_backbone(model, before, only)


def _prove_around_backbone(model: PreTrainedModel, before: Attention, only: Route | None) -> None:
    """Patch a model that takes padded batches only. Its backbone gets packed rows or else the rows of equal length."""
    if model.base_model is not model:
        with suppress(ModelNotSupportedError), unpatched_on_error(model, before):
            _prove_on_packed_rows(model, model.base_model, before, only)
            return
    with unpatched_on_error(model, before):
        facts = Facts(takes_packed_rows=False)
        install(model, Route(Method(None, positions=False, borders=False), (), 0.0, facts=facts), before)
        prove_unpadding(model, by_length=True)


def _prove_on_packed_rows(model: PreTrainedModel, module: nn.Module, before: Attention, only: Route | None) -> None:
    """Install the fastest route on which `module`, the model or its backbone, takes packed rows, and prove it. If the
    model has no vocabulary, try to prove that it takes padded batches, too."""
    exams = _run_documents_alone(model, module)
    width = exams[0].references[0].logits[0].shape[-1]
    sees_labels = model_sees_labels(exams[0].probe, width)
    route = _install_proven_route(model, before, exams, only)
    refuse_loss_across_borders(exams[0].probe, exams[-1].probe, width)
    refused = pad_token_of(model) if _treats_pad_as_padding(exams[1], route, before) else None
    facts = route.facts
    facts.refused_token, facts.sees_labels, facts.takes_packed_rows = refused, sees_labels, module is model
    if not has_vocabulary(model):
        with suppress(ModelNotSupportedError) if module is model else nullcontext():
            prove_unpadding(model)


def _run_documents_alone(model: PreTrainedModel, module: nn.Module) -> list[Exam]:
    """Return the test batches of a proof: a single row, several rows, and a single row in training mode.

    To save time, none of these exams is thorough, and the documents in several rows contain pad tokens, if the model
    can be called on such documents. Gradients are computed in training mode, or, if that is not possible, for a single
    row in evaluation mode.
    """
    probe = Probe(model, module=module)
    tokens, other = probe.documents[-1], probe.others[-1]
    other[len(other) // 2] = tokens[len(tokens) // 2]  # the logits of this token show that a leak would be noticed
    first = run_alone(probe, gradients=False)
    try:
        in_rows = run_alone(_probe_of_rows(probe, pad_token_of(model)), gradients=False)
    except ModelNotSupportedError:
        in_rows = run_alone(_probe_of_rows(probe), gradients=False)
    training = Probe(model, lengths=_LENGTHS_IN_TRAINING, training=True, module=module)
    training.rounding = probe.rounding
    in_training = run_alone_in_training(training)
    if in_training.unproven:
        first = run_alone(probe, gradients=True)
    return [first, replace(in_rows, rows=len(_ROWS)), in_training]


def _probe_of_rows(like: Probe, pad_token: int | None = None) -> Probe:
    """Return a probe of several packed rows. If `pad_token` is given, every document contains it."""
    probe = Probe(like.model, 1, [*chain(*_ROWS)], _pack_in_rows, like=like, module=like.module)
    if pad_token is not None:
        for document in probe.documents:
            document[2] = document[-1] = pad_token
    return probe


def _pack_in_rows(documents: DocumentTokens) -> dict[str, Any]:
    """Return model inputs for a batch of packed rows, with as many documents in each row as `_ROWS` has."""
    left = iter(documents)
    rows = [pack_in_one_row(list(islice(left, len(lengths)))) for lengths in _ROWS]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def _treats_pad_as_padding(in_rows: Exam, route: Route, before: Attention) -> bool:
    """Return whether a patched model treats pad tokens in a document as padding. Documents that contain pad tokens then
    have different logits in packed rows and in a row of their own. `in_rows` is the exam of several rows that the model
    has passed. If its documents contain pad tokens, the result is known."""
    model, token = in_rows.probe.model, pad_token_of(in_rows.probe.model)
    if token is None or token in in_rows.probe.documents[0]:
        return False
    remove(model)
    try:
        exam = run_alone(_probe_of_rows(in_rows.probe, token), gradients=False, thorough=True)
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


def _install_proven_route(model: PreTrainedModel, before: Attention, exams: list[Exam], only: Route | None) -> Route:
    """Install the fastest route that is proven to keep documents apart, and return it.

    If an exam fails, it is replaced in `exams` by a thorough one.
    """
    key = route_key(model)
    if only is not None:
        known_routes[key] = _prove(model, only, before, exams)
        return known_routes[key]
    if (known := known_routes.get(key)) is not None:
        with suppress(ModelNotSupportedError, AttributeError):
            return _prove(model, known, before, exams)
    failure: ModelNotSupportedError | None = None
    failures: list[str] = []
    for method in methods_for(model, exams[0].probe.module):
        if method.attention == NAME_WITH_LOCAL_MASKS and not isinstance(failure, LocalMaskError):
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
    model: PreTrainedModel, method: Method, before: Attention, exams: list[Exam], tried: tuple[str, ...]
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
            if route is None or found.by_segment != route.by_segment:
                route = found
                return _prove_for_several_rows(model, route, before, exams)
        except LocalMaskError:
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


def _route_found_by(search: Search, method: Method, before: Attention, probe: Probe, tried: tuple[str, ...]) -> Route:
    """Run a search, and return the route that consists of `method` and of the modules that the search found.

    If the model never calls the attention function of `method`, the route has the first method without one instead.
    """
    model = search.model
    install(model, Route(method, (), 1.0), before)
    try:
        with probe.undisturbed(), observe() as observed:
            plans = tuple(search.run(lambda **options: probe.packed(probe.documents, **options)))
            method.check(observed)
    except ModelNotSupportedError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(model)
    if method.attention and not observed.calls:
        tried = (*tried, f"with varlen attention: {_NeverCalledError()}")
        method = next(each for each in methods_for(model, probe.module) if not each.attention)
    if plans:
        method = replace(method, one_row=True)
    return Route(method, plans, packed_share(model, plans), tried)


def _prove_for_several_rows(model: PreTrainedModel, route: Route, before: Attention, exams: list[Exam]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it. If the proof fails only for a batch of
    several rows, try a second route, which lays the rows of a batch end to end in a single row."""
    try:
        return _prove(model, route, before, exams)
    except _SeveralRowsError:
        if route.method.one_row:
            raise
        method = replace(route.method, one_row=True)
        return _prove(model, replace(route, method=method), before, exams)


def _prove(model: PreTrainedModel, route: Route, before: Attention, exams: list[Exam]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it.

    If isolation cannot be fully proven in training mode, the returned route contains the reason in `unproven`. If the
    proof fails, a ModelNotSupportedError is raised, and the model is left unpatched.
    """
    route = replace(route, facts=Facts(unproven="; ".join(exam.unproven for exam in exams if exam.unproven)))
    install(model, route, before)
    try:
        for number, exam in enumerate(exams):
            is_known = exam.rows > 1 and route.method.one_row  # rows run as one row, which another exam has
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


def _pass(exam: Exam, route: Route, before: Attention) -> Exam:
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
        exam = replace(exam, probe=_probe_of_rows(exam.probe))
    elif isinstance(failure, BeyondRoundingError) and own_attention_agrees(exam):
        raise failure
    exam = repeat_thoroughly(exam)
    install(model, route, before)
    with exam.probe.undisturbed():
        prove_isolation(exam)
    return exam
