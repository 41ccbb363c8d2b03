"""Find the fastest route that is proven to keep packed documents apart in a model, and install that route.

The methods are tried in order, from the fastest to the most general. For each, a search finds the modules that have to
run segment by segment, and the route is proven on two rows, one of them in training mode.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.cases import RowCase, examine_in_training
from hf_packing.attention.forward import install, remove, unpatched_on_error
from hf_packing.attention.kernels import kernel_of, switched_off
from hf_packing.attention.model import Signature, has_vocabulary, pad_token_of
from hf_packing.attention.own_loss import model_sees_labels, refuse_loss_across_borders
from hf_packing.attention.proof import prove, require
from hf_packing.attention.route import (
    Facts,
    Method,
    Route,
    known_routes,
    methods_for,
    packed_share,
    route_key,
    route_of,
)
from hf_packing.attention.runs import NoLanguageModelError, NotCallableError, Runner
from hf_packing.attention.search import Search
from hf_packing.attention.small_copy import small_copy_of
from hf_packing.attention.unpadding_proof import prove_unpadding
from hf_packing.errors import ModelNotSupportedError

_LENGTHS_WITH_PADS, _PLACES_OF_PADS = (18, 9, 9), [2, 17, 20, 26, 29, 35]
"""Lengths of documents with pad tokens, and where these stand: in the third and in the last place of each."""

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
    """Return the cases of a proof: a row in evaluation mode, and one in training mode, with the outputs of documents
    alone. Gradients are computed in training mode or, if that is not possible, in evaluation mode."""
    case = RowCase(runner)
    middle = case.trees.tokens - case.lengths[-1] // 2
    case.others[middle] = case.tokens[middle]  # the logits of this token show that a leak would be noticed
    case.examine()
    training = RowCase(runner, training=True, lengths=_LENGTHS_IN_TRAINING)
    examine_in_training(training, case)
    return [case, training]


def _treats_pad_as_padding(like: RowCase) -> bool:
    """Return whether a patched model treats pad tokens in a document as padding. Documents that contain pad tokens then
    have different logits in packed rows and in a row of their own."""
    token = pad_token_of(like.model)
    if token is None:
        return False
    case = RowCase(like.runner, lengths=_LENGTHS_WITH_PADS, seed=1)
    case.tokens[_PLACES_OF_PADS] = token
    case.replacements = []
    try:
        case.examine()
        return bool(prove(case).problem)
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
    for method in methods_for(model, cases[0].runner.called):
        if method.attention and f"with varlen attention: {_NEVER_CALLED}" in failures:
            continue
        try:
            known_routes[key] = _search_and_prove(method, cases, tuple(failures))
            return known_routes[key]
        except ModelNotSupportedError as error:
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
    model, case = cases[0].model, cases[0]
    route: Route | None = None
    with _called_with(method, case) as forward:
        forward()
        if method.attention and not kernel_of(model):
            raise ModelNotSupportedError(_NEVER_CALLED)
    for thorough in (False, True):
        search = Search(model, case.row, thorough)
        with _called_with(method, case) as forward:
            plans = tuple(search.run(forward))
        if route is not None and route.by_segment == plans:
            break
        route = Route(method, plans, packed_share(model, plans), tried)
        try:
            return _prove(route, cases)
        except ModelNotSupportedError as error:
            failure = error
    reasons = [str(failure)]
    if plans:
        modules = Counter(plan.kind for plan in plans)
        reasons.append(f"modules that ran by segment: {', '.join(f'{n} {kind}' for kind, n in modules.items())}")
    for name, reason in list(search.unsliceable.items())[:2]:
        kind = type(model.get_submodule(name)).__name__
        reasons.append(f"{kind} ({name}) cannot run on a single segment: {reason}")
    raise ModelNotSupportedError("; ".join(reasons)) from failure


@contextmanager
def _called_with(method: Method, case: RowCase) -> Iterator[Callable[..., Any]]:
    """Context manager: within the block, a model is called with a method. The model is left unpatched.

    Attention is exact meanwhile: a kernel that is wrong would look like a module that has to run by segment.

    Yields:
        A function that runs the model on the row of a case. Its arguments are those of `RowCase.outputs`.

    Raises:
        ModelNotSupportedError: the model cannot be called on a packed row.
    """
    install(case.model, Route(method, (), 1.0))
    try:
        with case.undisturbed(), switched_off():
            yield partial(case.outputs, case.tokens)
    except ModelNotSupportedError:
        raise
    except Exception as error:  # custom model code may raise anything
        raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    finally:
        remove(case.model)


def _prove(route: Route, cases: list[RowCase]) -> Route:
    """Install a route, prove that it keeps documents apart, and return it with the facts that the proof has found. If
    the proof fails, raise ModelNotSupportedError, and leave the model unpatched."""
    route = replace(route, facts=Facts(unproven="; ".join(case.unproven for case in cases if case.unproven)))
    with unpatched_on_error(cases[0].model):
        install(cases[0].model, route)
        try:
            for case in cases:
                if case.known:
                    require(case)
        except ModelNotSupportedError:
            raise
        except Exception as error:  # custom model code may raise anything
            raise ModelNotSupportedError(f"the model cannot be called on a packed row: {error}") from error
    return route


def find_on_small_copy(model: PreTrainedModel) -> Route:
    """Find and prove a route on a small copy of a model, and return it as a route for the model itself, which is not
    run.

    Raises:
        ModelNotSupportedError: no copy can be built; or no route can be proven on the copy; or a module that runs
            segment by segment in the copy has another class in the model, or is missing there.
    """
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
            break
        except ModelNotSupportedError as error:
            if isinstance(error, NoLanguageModelError):
                raise
            failure = error
    if (route := route_of(copy)) is None:
        raise ModelNotSupportedError(f"on a small copy of the model: {failure}") from failure
    own = dict(model.named_modules())
    for plan in route.by_segment:
        found = type(own.get(plan.name))
        if plan.kind not in [each.__name__ for each in found.__mro__]:
            raise ModelNotSupportedError(
                f"{type(model).__name__}: patch_model found a route on a small copy of the model, but the route does "
                f"not fit the model itself; expected {plan.name} to be of class {plan.kind} as in the copy, got "
                f"{found.__name__}"
            )
    refused = None if route.facts.refused_token is None else pad_token_of(model)  # the copy has smaller token ids
    facts = replace(route.facts, refused_token=refused)
    return replace(route, packed_share=packed_share(model, route.by_segment), facts=facts)


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
        find_and_prove(model, only=find_on_small_copy(model))
    except _NoCopyError as error:
        install(model, short)
        warnings.warn(f"patch_model proved isolation on short documents only: {error}", stacklevel=3)
