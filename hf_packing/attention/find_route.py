"""Find the fastest route that is proven to keep packed documents apart in a model, and install that route.

A route consists of an attention function, a format for the model's inputs, and the modules that run segment by segment.
"""

from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.cases import DocumentTokens, RowCase, examine_in_training, pack_in_one_row
from hf_packing.attention.inspect_model import Signature, has_vocabulary, pad_token_of
from hf_packing.attention.own_loss import model_sees_labels, refuse_loss_across_borders
from hf_packing.attention.patched_forward import install, remove, unpatched_on_error
from hf_packing.attention.proof import prove, require
from hf_packing.attention.route import (
    InputFormat,
    LocalMaskError,
    Method,
    Route,
    have_equal_plans,
    is_patched,
    known_routes,
    methods_for,
    packed_share,
    route_key,
)
from hf_packing.attention.runs import NotCallableError, Runner
from hf_packing.attention.search import Search
from hf_packing.attention.snapshot import Attention, attention_of
from hf_packing.attention.unpadding_proof import prove_unpadding
from hf_packing.attention.varlen import NAME_WITH_LOCAL_MASKS, observe
from hf_packing.errors import ModelNotSupportedError, PackingError

_ROWS = ((18,), (9, 9))
"""Lengths, in tokens, of the documents in each row of a proof's test batch with several rows. Only one row has a border
between documents, which shows whether every row gets its own borders."""

_PLACES_OF_PADS = [2, 17, 20, 26, 29, 35]
"""Where pad tokens stand in these documents: in the third and in the last place of each."""

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
        inputs = InputFormat(positions=False, borders=False)
        install(model, Route(Method(None, inputs), (), 0.0, takes_packed_rows=False), before)
        prove_unpadding(model, by_length=True)


def _prove_on_packed_rows(model: PreTrainedModel, module: nn.Module, before: Attention, only: Route | None) -> None:
    """Install the fastest route on which `module`, the model or its backbone, takes packed rows, and prove it. If the
    model has no vocabulary, try to prove that it takes padded batches, too."""
    cases = _examined(Runner(model, module))
    width = cases[0].known[0].outputs[0].shape[-1]
    sees_labels = model_sees_labels(cases[0], width)
    route = _install_proven_route(model, before, cases, only)
    refuse_loss_across_borders(cases[0], cases[-1], width)
    refused = pad_token_of(model) if _treats_pad_as_padding(cases[1]) else None
    if sees_labels or refused is not None or module is not model:
        remove(model)
        route = replace(route, refused_token=refused, sees_labels=sees_labels, takes_packed_rows=module is model)
        install(model, route, before)
    if not has_vocabulary(model):
        with suppress(ModelNotSupportedError) if module is model else nullcontext():
            prove_unpadding(model)


def _examined(runner: Runner) -> list[RowCase]:
    """Return the cases of a proof: a single row, several rows, and a single row in training mode, with the outputs of
    documents alone. Gradients are computed in training mode, or, if that is not possible, for a single row in
    evaluation mode."""
    case = RowCase(runner)
    middle = case.trees.tokens - case.lengths[-1] // 2
    case.others[middle] = case.tokens[middle]  # the logits of this token show that a leak would be noticed
    case.examine()
    rows = _rows(case, with_pads=True)
    try:
        rows.examine()
    except ModelNotSupportedError:  # the model refuses pad tokens itself
        rows = _rows(case)
        rows.examine()
    training = RowCase(runner, training=True, lengths=_LENGTHS_IN_TRAINING)
    training.noise = rows.noise
    examine_in_training(training, case)
    return [case, rows, training]


def _pack_in_rows(documents: DocumentTokens) -> dict[str, Any]:
    """Return model inputs for a batch of packed rows, with as many documents in each row as `_ROWS` has."""
    left = iter(documents)
    rows = [pack_in_one_row(list(islice(left, len(lengths)))) for lengths in _ROWS]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def _rows(like: RowCase, with_pads: bool = False) -> RowCase:
    """Return a case of several packed rows of the same model. Documents with pad tokens show whether the model treats
    them as padding."""
    case = RowCase(like.runner, lengths=[*chain(*_ROWS)], make_batch=_pack_in_rows, seed=1)
    case.noise = like.known[0].noise
    if with_pads and (token := pad_token_of(like.model)) is not None:
        case.tokens[_PLACES_OF_PADS] = token
    return case


def _treats_pad_as_padding(rows: RowCase) -> bool:
    """Return whether a patched model treats pad tokens in a document as padding. Documents that contain pad tokens then
    have different logits in packed rows and in a row of their own. `rows` is the case that the model has passed."""
    case = _rows(rows, with_pads=True)
    if torch.equal(case.tokens, rows.tokens):
        return False
    case.replacements = []
    try:
        case.examine()
        return prove(case).problem is not None
    except Exception:  # the model refuses pad tokens itself
        return False


def _install_proven_route(model: PreTrainedModel, before: Attention, cases: list[RowCase], only: Route | None) -> Route:
    """Install the fastest route that is proven to keep documents apart, and return it."""
    key = route_key(model)
    if only is not None:
        known_routes[key] = _prove(model, only, before, cases)
        return known_routes[key]
    if (known := known_routes.get(key)) is not None:
        with suppress(ModelNotSupportedError, AttributeError):
            return _prove(model, known, before, cases)
    failure: ModelNotSupportedError | None = None
    failures: list[str] = []
    for method in methods_for(model, cases[0].runner.called):
        if method.attention == NAME_WITH_LOCAL_MASKS and not isinstance(failure, LocalMaskError):
            continue
        if method.attention and isinstance(failure, _NeverCalledError):
            continue
        try:
            known_routes[key] = _search_and_prove(model, method, before, cases, tuple(dict.fromkeys(failures)))
            return known_routes[key]
        except ModelNotSupportedError as error:
            failure = error
            attention = "varlen attention" if method.attention else "the attention of the model"
            failures.append(f"with {attention}: {error}")
    raise ModelNotSupportedError(
        f"{type(model).__name__}: patch_model cannot keep packed documents apart; " + "; ".join(dict.fromkeys(failures))
    )


def _search_and_prove(
    model: PreTrainedModel, method: Method, before: Attention, cases: list[RowCase], tried: tuple[str, ...]
) -> Route:
    """Find the modules that have to run segment by segment if the model is called with `method`. Install the resulting
    route, prove that it keeps documents apart, and return it.

    In the first search, modules that are built alike are searched once. If the proof of the resulting route fails, all
    modules are searched.

    Args:
        model: an unpatched model.
        method: an attention function, and a format of the model's inputs.
        before: the model's attention settings, which are restored when the route is removed.
        cases: the test batches of the proof.
        tried: the reasons why faster methods failed; stored in the route.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row, or the proof of the route fails. The model
            is left unpatched.
    """
    route, failure = None, None
    for thorough in (False, True):
        search = Search(model, cases[0].row, thorough=thorough)
        try:
            found = _route_found_by(search, method, before, cases[0], tried)
            if route is None or not have_equal_plans(found, route):
                route = found
                return _prove_for_several_rows(model, route, before, cases)
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


def _route_found_by(search: Search, method: Method, before: Attention, case: RowCase, tried: tuple[str, ...]) -> Route:
    """Run a search, and return the route that consists of `method` and of the modules that the search found.

    If the model never calls the attention function of `method`, the route has the first method without one instead.
    """
    model = search.model
    install(model, Route(method, (), 1.0), before)
    try:
        with case.undisturbed(), observe() as observed:
            check = partial(method.check, observed)
            plans = tuple(search.run(lambda **options: case.outputs(case.tokens, **options), check))
    except ModelNotSupportedError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(model)
    if method.attention and not observed.calls:
        tried = (*tried, f"with varlen attention: {_NeverCalledError()}")
        method = next(each for each in methods_for(model, case.runner.called) if not each.attention)
    if plans:
        method = replace(method, inputs=replace(method.inputs, one_row=True))
    return Route(method, plans, packed_share(model, plans), tried)


def _prove_for_several_rows(model: PreTrainedModel, route: Route, before: Attention, cases: list[RowCase]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it. If the proof fails only for a batch of
    several rows, try a second route, which lays the rows of a batch end to end in a single row."""
    try:
        return _prove(model, route, before, cases)
    except _SeveralRowsError:
        if route.method.inputs.one_row:
            raise
        method = replace(route.method, inputs=replace(route.method.inputs, one_row=True))
        return _prove(model, replace(route, method=method), before, cases)


def _prove(model: PreTrainedModel, route: Route, before: Attention, cases: list[RowCase]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it.

    If isolation cannot be fully proven in training mode, the returned route contains the reason in `unproven`. If the
    proof fails, a ModelNotSupportedError is raised, and the model is left unpatched.
    """
    unproven = "; ".join(case.unproven for case in cases if case.unproven)
    route = route if route.unproven == unproven else replace(route, unproven=unproven)
    install(model, route, before)
    number = 0
    try:
        for number, case in enumerate(cases):
            is_known = number == 1 and route.method.inputs.one_row  # rows run as one row, which another case has
            cases[number] = case = _pass(case, [] if is_known else [[each] for each in range(len(case.paths))])
    except BaseException as error:
        if is_patched(model):
            remove(model)
        if not isinstance(error, Exception):
            raise
        known = isinstance(error, ModelNotSupportedError)
        if number == 1:
            reason = str(error) if known else f"the model cannot be called on several packed rows: {error}"
            raise _SeveralRowsError(reason) from error
        if known:
            raise
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    return route


def _pass(case: RowCase, replacements: list[list[int]]) -> RowCase:
    """Prove a case, and return it. If its documents contain pad tokens, they may be the reason for a failure; other
    documents are then proven."""
    case.replacements = replacements
    try:
        if case.can_be_run:
            require(case)
        return case
    except PackingError:
        others = _rows(case) if case.known else case
        if case.lengths != others.lengths or torch.equal(case.tokens, others.tokens):
            raise
    others.replacements = replacements
    others.examine()
    require(others)
    return others
