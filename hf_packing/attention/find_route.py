"""Find the fastest route that is proven to keep packed documents apart in a model, and install that route.

The methods are tried in order, from the fastest to the most general. For each, a search finds the modules that have to
run segment by segment, and the route is proven on three cases: a row, several rows, and a row in training mode.
"""

import warnings
from collections.abc import Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import ModulePlan, is_inside
from hf_packing.attention.cases import DocumentTokens, RowCase, examine_in_training, pack_in_one_row
from hf_packing.attention.forward import install, remove, unpatched_on_error
from hf_packing.attention.inspect_model import Signature, has_local_weights, has_vocabulary, pad_token_of
from hf_packing.attention.kernels import kernel_of, switched_off
from hf_packing.attention.own_loss import model_sees_labels, refuse_loss_across_borders
from hf_packing.attention.proof import prove, require
from hf_packing.attention.route import (
    Facts,
    Method,
    Route,
    is_patched,
    known_routes,
    methods_for,
    packed_share,
    route_key,
    route_of,
)
from hf_packing.attention.runs import NoLanguageModelError, NotCallableError, Runner
from hf_packing.attention.search import Search
from hf_packing.attention.small_copy import random_where_zero, small_copy_of
from hf_packing.attention.unpadding_proof import prove_unpadding
from hf_packing.errors import ModelNotSupportedError

_ROWS = ((18,), (9, 9))
"""Lengths, in tokens, of the documents in each row of a proof's test batch with several rows. Only one row has a border
between documents, which shows whether every row gets its own borders."""

_PLACES_OF_PADS = [2, 17, 20, 26, 29, 35]
"""Where pad tokens stand in these documents: in the third and in the last place of each."""

_LENGTHS_IN_TRAINING = (17, 17)
"""Lengths, in tokens, of the documents of the test batch in training mode. They are equal, since a route may run
documents of equal length in one call of a module, which may mix the rows of the call in training mode only."""

_NEVER_CALLED = "the model never called the attention function that patch_model had set"

_COPY_DTYPES = (torch.float64, torch.float32)
"""Dtypes of a small copy, tried in this order. The copy has large random weights, with which rounding errors grow from
layer to layer. In float64, the errors stay small, but some kernels do not support float64."""


class _NoCopyError(ModelNotSupportedError):
    """Raised if a model's class or its configuration rejects small sizes."""


def find_and_prove(model: PreTrainedModel, only: Route | None = None) -> None:
    """Install the fastest route that is proven to keep documents apart.

    A route that was found before, for a model with the same `route_key`, is tried first. If `only` is given, no other
    route is tried. After an error or an interruption, the model is left unpatched.

    Raises:
        ModelNotSupportedError: no route passes the proof, the model cannot be called with input_ids alone, or the
            model's own loss compares labels of one document with outputs of another document. The message contains the
            reason.
    """
    try:
        with unpatched_on_error(model):
            _prove_on_packed_rows(model, model, only)
        return
    except ModelNotSupportedError as error:
        takes_labels = "labels" in Signature(model).names
        is_backbone = model.base_model is model and model.base_model_prefix and not takes_labels
        if has_vocabulary(model) or not (isinstance(error, NotCallableError) or is_backbone):
            raise
    if model.base_model is not model:
        with suppress(ModelNotSupportedError), unpatched_on_error(model):
            _prove_on_packed_rows(model, model.base_model, only)
            return
    with unpatched_on_error(model):
        facts = Facts(takes_packed_rows=False)
        install(model, Route(Method(None, positions=False, borders=False), (), 0.0, facts=facts))
        prove_unpadding(model, by_length=True)


def _prove_on_packed_rows(model: PreTrainedModel, module: nn.Module, only: Route | None) -> None:
    """Install the fastest route on which `module`, the model or its backbone, takes packed rows, and prove it. If the
    model has no vocabulary, try to prove that it takes padded batches, too."""
    cases = _examined(Runner(model, module))
    width = cases[0].known[0].outputs[0].shape[-1]
    sees_labels = model_sees_labels(cases[0], width)
    facts = _install_proven_route(cases, only).facts
    refuse_loss_across_borders(cases[0], cases[-1], width)
    facts.refused_token = pad_token_of(model) if _treats_pad_as_padding(cases[0]) else None
    facts.sees_labels, facts.takes_packed_rows = sees_labels, module is model
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
    rows = _several_rows(case)
    rows.examine()
    training = RowCase(runner, training=True, lengths=_LENGTHS_IN_TRAINING)
    training.noise = case.known[0].noise
    examine_in_training(training, case)
    return [case, rows, training]


def _pack_in_rows(documents: DocumentTokens) -> dict[str, Any]:
    """Return model inputs for a batch of packed rows, with as many documents in each row as `_ROWS` has."""
    left = iter(documents)
    rows = [pack_in_one_row(list(islice(left, len(lengths)))) for lengths in _ROWS]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def _several_rows(like: RowCase) -> RowCase:
    """Return a case of several packed rows of the same model, in which rounding is as large."""
    case = RowCase(like.runner, lengths=[*chain(*_ROWS)], make_batch=_pack_in_rows, seed=1)
    case.noise = like.known[0].noise
    return case


def _treats_pad_as_padding(like: RowCase) -> bool:
    """Return whether a patched model treats pad tokens in a document as padding. Documents that contain pad tokens then
    have different logits in packed rows and in a row of their own."""
    token = pad_token_of(like.model)
    if token is None:
        return False
    case = _several_rows(like)
    case.tokens[_PLACES_OF_PADS] = token
    case.replacements = []
    try:
        case.examine()
        return prove(case).problem is not None
    except Exception:  # the model refuses pad tokens itself
        return False


def _install_proven_route(cases: list[RowCase], only: Route | None) -> Route:
    """Install the fastest route that is proven to keep documents apart, and return it."""
    model = cases[0].model
    key = route_key(model)
    if (known := only or known_routes.get(key)) is not None:
        with nullcontext() if only else suppress(ModelNotSupportedError, AttributeError):
            known_routes[key] = _prove(known, cases)
            return known_routes[key]
    failures: dict[str, None] = {}
    calls_attention = True
    for method in methods_for(model, cases[0].runner.called):
        if method.attention and not calls_attention:
            continue
        try:
            known_routes[key] = _search_and_prove(method, cases, tuple(failures))
            return known_routes[key]
        except ModelNotSupportedError as error:
            calls_attention = str(error) != _NEVER_CALLED
            attention = "varlen attention" if method.attention else "the attention of the model"
            failures[f"with {attention}: {error}"] = None
    raise ModelNotSupportedError(
        f"{type(model).__name__}: patch_model cannot keep packed documents apart; " + "; ".join(failures)
    )


def _search_and_prove(method: Method, cases: list[RowCase], tried: tuple[str, ...]) -> Route:
    """Find the modules that have to run segment by segment if the model is called with `method`. Install the resulting
    route, prove that it keeps documents apart, and return it.

    In the first search, modules that are built alike are searched once. If the proof of the resulting route fails, all
    modules are searched.

    Args:
        method: an attention function, and a format of the model's inputs.
        cases: the test batches of the proof.
        tried: the reasons why faster methods failed; stored in the route.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row, or the proof of the route fails. The model
            is left unpatched.
    """
    model, route, failure = cases[0].model, None, None
    for thorough in (False, True):
        search = Search(model, cases[0].row, thorough=thorough)
        try:
            found = _route_found_by(search, method, cases[0], tried)
            if route is None or found.by_segment != route.by_segment:
                route = found
                return _prove(route, cases)
        except ModelNotSupportedError as error:
            failure = error
        if not search.has_assumed or (route is None and not search.found):
            break
    assert failure is not None
    if route is None:
        raise failure
    if route.method.attention != method.attention:
        raise ModelNotSupportedError(_NEVER_CALLED) from failure
    reasons = [str(failure)]
    if route.by_segment:
        reasons.append(f"modules that ran by segment: {', '.join(f'{n} {kind}' for kind, n in route.modules.items())}")
    for name, reason in list(search.unsliceable.items())[:2]:
        kind = type(model.get_submodule(name)).__name__
        reasons.append(f"{kind} ({name}) cannot run on a single segment: {reason}")
    raise ModelNotSupportedError("; ".join(reasons)) from failure


def _route_found_by(search: Search, method: Method, case: RowCase, tried: tuple[str, ...]) -> Route:
    """Run a search, and return the route that consists of `method` and of the modules that the search found.

    If the model never calls the attention function of `method`, the route has the first method without one instead.
    """
    model = search.model
    plans = _run_search(search, Route(method, (), 1.0), case)
    if method.attention and not kernel_of(model):
        tried = (*tried, f"with varlen attention: {_NEVER_CALLED}")
        method = next(each for each in methods_for(model, case.runner.called) if not each.attention)
    if plans:
        method = replace(method, one_row=True)
    return Route(method, plans, packed_share(model, plans), tried)


def _run_search(search: Search, route: Route, case: RowCase) -> tuple[ModulePlan, ...]:
    """Run a search in a model that is patched with a route, and return the plans that it makes. The model is left
    unpatched.

    Attention is exact meanwhile: a kernel that is wrong would look like a module that has to run by segment.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row.
    """
    install(search.model, route)
    try:
        with case.undisturbed(), switched_off():
            return tuple(search.run(lambda **options: case.outputs(case.tokens, **options)))
    except ModelNotSupportedError:
        raise
    except Exception as error:  # custom model code may raise anything
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(search.model)


def _prove(route: Route, cases: list[RowCase]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it as it was installed.

    If the proof fails only for a batch of several rows, try the route that lays its rows end to end in a single row. If
    isolation cannot be fully proven in training mode, the returned route contains the reason in `unproven`. If the
    proof fails, a ModelNotSupportedError is raised, and the model is left unpatched.
    """
    model, case = cases[0].model, cases[0]
    route = replace(route, facts=Facts(unproven="; ".join(case.unproven for case in cases if case.unproven)))
    install(model, route)
    try:
        for case in cases:
            if case.can_be_run:
                # rows that run as one row are known from another case
                is_known = case is cases[1] and route.method.one_row
                case.replacements = [] if is_known else [[each] for each in range(len(case.paths))]
                require(case)
    except BaseException as error:
        if is_patched(model):
            remove(model)
        if not isinstance(error, Exception):
            raise
        if case is cases[1] and not route.method.one_row:
            return _prove(replace(route, method=replace(route.method, one_row=True)), cases)
        if isinstance(error, ModelNotSupportedError):
            raise
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    return route


def find_on_small_copy(model: PreTrainedModel) -> Route:
    """Find and prove a route on a small copy of a model, and return it as a route for the model itself.

    Modules that the copy does not have, such as those of PEFT or of the user, are searched in the model, if its weights
    are in memory. Otherwise, the model itself is not run.

    Raises:
        ModelNotSupportedError: no copy can be built; or no route can be proven on the copy; or a module that runs
            segment by segment in the copy has another class in the model, or is missing there.
    """
    failures: list[str] = []
    for dtype in _COPY_DTYPES:
        try:
            copy = small_copy_of(model, dtype)
        except Exception as error:  # a configuration may be rejected for many reasons
            raise _NoCopyError(
                f"{type(model).__name__}: isolation has to be tested on a small copy of the model, but no copy can be "
                f"built: {error}. Load the weights on a machine with enough memory, and call patch_model with "
                "prove='model' before the model is sharded"
            ) from error
        try:
            find_and_prove(copy)
            return _for_model(model, copy)
        except NoLanguageModelError:
            raise
        except ModelNotSupportedError as error:
            failures.append(f"on a small copy of the model in {dtype}: {error}")
    raise ModelNotSupportedError("; ".join(failures))


def _for_model(model: PreTrainedModel, copy: PreTrainedModel) -> Route:
    """Turn the route of a small copy into a route for the model itself, and return it.

    Raises:
        ModelNotSupportedError: a module that runs segment by segment in the copy has another class in the model, or is
            missing there.
    """
    route = route_of(copy)
    assert route is not None
    classes = {name: type(module) for name, module in copy.named_modules()}
    own = dict(model.named_modules())
    for plan in route.by_segment:
        names = [cls.__name__ for cls in type(own[plan.name]).__mro__] if plan.name in own else ["no such module"]
        if classes[plan.name].__name__ not in names:
            raise ModelNotSupportedError(
                f"{type(model).__name__}: patch_model found a route on a small copy of the model, but the route does "
                f"not fit the model itself; expected {plan.name} to be of class {plan.kind} as in the copy, got "
                f"{names[0]}"
            )
    refused = None if route.facts.refused_token is None else pad_token_of(model)  # the copy has smaller token ids
    facts = replace(route.facts, refused_token=refused)
    route = replace(route, packed_share=packed_share(model, route.by_segment), facts=facts)
    only_in_model: list[str] = []
    for name, module in own.items():
        is_changed = "forward" in vars(module) or bool(module._forward_pre_hooks) or bool(module._forward_hooks)
        is_other = is_changed or not issubclass(type(module), classes.get(name, ()))
        if name and is_other and not any(is_inside(name, outer) for outer in only_in_model[-1:]):
            only_in_model.append(name)
    if not only_in_model or not has_local_weights(model):
        return route
    with random_where_zero(nn.ModuleList(map(model.get_submodule, only_in_model))):
        return _extended(model, route, only_in_model)


def _extended(model: PreTrainedModel, route: Route, names: Collection[str]) -> Route:
    """Search the modules of an unpatched model that have these names, with their inner modules, and return a route in
    which they run segment by segment if they have to.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row.
    """
    case = RowCase(Runner(model))
    found = _run_search(Search(model, case.row, only=names), route, case)
    if not found:
        return route
    outside = [plan for plan in route.by_segment if not any(is_inside(plan.name, each.name) for each in found)]
    new = [plan for plan in found if not any(is_inside(plan.name, each.name) for each in outside)]
    plans = (*outside, *new)
    method = replace(route.method, one_row=True)
    return replace(route, method=method, by_segment=plans, packed_share=packed_share(model, plans))


def find_for_long_documents(model: PreTrainedModel) -> None:
    """Replace the route of a patched model by a route that also works for long documents.

    Some modules work differently on documents that are longer than a threshold. For example, a module that selects the
    best 2048 tokens selects all tokens of a shorter document. The documents that a route is tested with are shorter
    than such thresholds, so this function looks for a route on a small copy of the model, in which the thresholds are
    small. The new route is then proven on the model itself. If no copy can be built, the model keeps its route, with a
    warning.

    Raises:
        ModelNotSupportedError: no route is proven on the copy, or the route of the copy is not proven on the model,
            which is left unpatched.
    """
    short = remove(model)
    known_routes.pop(route_key(model))  # which is the short one
    try:
        route = find_on_small_copy(model)
    except _NoCopyError as error:
        install(model, short)
        warnings.warn(f"patch_model proved isolation on short documents only: {error}", stacklevel=3)
        return
    try:
        find_and_prove(model, only=route)
    except ModelNotSupportedError as error:
        raise ModelNotSupportedError(
            f"{type(model).__name__}: the route that keeps long documents apart in a small copy of the model is not "
            f"proven on the model itself: {error}"
        ) from error
