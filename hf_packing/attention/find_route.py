"""Find the fastest way that is proven to keep documents apart in a model, and leave it installed."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.attention.inspect_model import Signature, configurations, pad_token_of
from hf_packing.attention.patched_forward import attention_of, install, is_patched, put_back, take_out
from hf_packing.attention.probe import Probe, in_two_rows
from hf_packing.attention.proof import (
    Exam,
    documents_alone,
    documents_alone_in_training,
    prove_isolation,
    refuse_a_loss_across_borders,
    sees_its_labels,
    takes_padding_for_tokens,
)
from hf_packing.attention.route import WAYS, Route, Way, packed_share
from hf_packing.attention.search import Search
from hf_packing.attention.varlen import NAME, NAME_WITH_SIGHT, Observed, observe
from hf_packing.errors import ModelNotSupportedError

known_routes: dict[Any, Route] = {}
"""Found in this process, by architecture and configuration."""


def key_of(model: PreTrainedModel) -> Any:
    """What a route depends on: two models with the same can take the same. A search looks further than the proof of a
    known route, so modules that somebody has exchanged count."""
    own = model.config._attn_implementation
    kinds = tuple((name, type(module)) for name, module in model.named_modules())
    settings = tuple(sorted(settings_of(config) for config in configurations(model)))
    return kinds, settings, own, model.dtype, model.device.type


def settings_of(config: PreTrainedConfig) -> str:
    settings = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    return repr(sorted(settings.items(), key=str))


SHARING_CALLS = (9, 14, 9, 14)
"""Tokens of the documents of a second proof, some of which share a call where they may."""


class LostSightError(ModelNotSupportedError):
    """A window or chunk that only the attention mask knows."""


class SeveralRowsError(ModelNotSupportedError):
    """Documents are kept apart in one packed row, and not in a batch of several."""


def find_and_prove(model: PreTrainedModel) -> None:
    """Install a route that is proven, one that is known of the same architecture before all others.

    However it ends otherwise, by an interruption too, the model is as it was before.
    """
    before = attention_of(model)
    try:
        exams = [documents_alone(model, Probe(model)), documents_alone(model, Probe(model, 1, SHARING_CALLS))]
        exams.append(in_rows_of_two(exams[1]))
        rounding = exams[0].probe.rounding
        exams.append(documents_alone_in_training(model, rounding))
        padding = padding_alone(model, rounding)
        put_back(before)
        width = exams[0].references[0].logits[0].shape[-1]
        sees_labels = sees_its_labels(exams[0].probe, width)
        route = proven_route(model, before, exams)
        for exam in (exams[0], exams[-1]):
            refuse_a_loss_across_borders(exam.probe, width)
        refused = pad_token_of(model) if padding is not None and takes_padding_for_tokens(padding) else None
        if sees_labels or refused is not None:
            take_out(model)
            install(model, replace(route, refused_token=refused, sees_labels=sees_labels), before)
    except BaseException:
        if is_patched(model):
            take_out(model)
        put_back(before)
        raise


def in_rows_of_two(exam: Exam) -> Exam:
    """The same documents in a batch of two packed rows."""
    probe = Probe(exam.probe.model, 1, exam.probe.lengths, in_two_rows)
    probe.rounding = exam.probe.rounding
    return replace(exam, probe=probe, rows=2)


def padding_alone(model: PreTrainedModel, rounding: float | None) -> Exam | None:
    """Documents with pad tokens inside; None where there is no such token, or a model alone does not take it."""
    if (token := pad_token_of(model)) is None:
        return None
    probe = Probe(model, 2)
    probe.rounding = rounding
    for document in probe.documents:
        document[2] = document[-1] = token
    with suppress(ModelNotSupportedError):
        return documents_alone(model, probe, gradients=False)
    return None


def proven_route(model: PreTrainedModel, before: list[tuple[PreTrainedConfig, Any]], exams: list[Exam]) -> Route:
    """The fastest that is proven, installed."""
    key = key_of(model)
    if (known := known_routes.get(key)) is not None:
        with suppress(ModelNotSupportedError, AttributeError):
            return prove_route(model, known, before, exams)
    failure: ModelNotSupportedError | None = None
    failures: list[str] = []
    for way in ways_for(model):
        if way.attention == NAME_WITH_SIGHT and not isinstance(failure, LostSightError):
            continue
        try:
            known_routes[key] = find_route(model, way, before, exams, tuple(dict.fromkeys(failures)))
            return known_routes[key]
        except ModelNotSupportedError as error:
            failure = error
            failures.append(f"{'with borders in its attention' if way.attention else 'by segment'}: {error}")
    raise ModelNotSupportedError(f"{type(model).__name__}: " + "; ".join(dict.fromkeys(failures)))


def ways_for(model: PreTrainedModel) -> Iterator[Way]:
    """The ways that differ for this model, the fastest first."""
    signature = Signature(model)
    takes_borders = signature.takes("cu_seq_lens_q")
    takes_positions = any("position_ids" in Signature(each).names for each in (model, model.base_model))
    tried = set()
    for way in WAYS:
        if way.attention and not model._can_set_attn_implementation():
            continue
        borders, positions = way.feed.borders and takes_borders, way.feed.positions and takes_positions
        feeds = [replace(way.feed, borders=borders, positions=positions)]
        if way.feed.mask_of_ones and not takes_positions:
            feeds.insert(0, replace(feeds[0], mask_of_ones=False))  # without positions nobody looks for documents
        for feed in feeds:
            if (own := Way(way.attention, feed)) not in tried:
                tried.add(own)
                yield own


def find_route(
    model: PreTrainedModel,
    way: Way,
    before: list[tuple[PreTrainedConfig, Any]],
    exams: list[Exam],
    tried: tuple[str, ...],
) -> Route:
    """The route of one way, installed and proven; or ModelNotSupportedError, and the model as it was."""
    install(model, Route(way, (), 1.0), before)
    probe = exams[0].probe
    search = Search(model, probe.row)
    try:
        with probe.quiet():
            with observe() as observed:
                steps = tuple(search.run(lambda **options: probe.packed(probe.documents, **options)))
            refuse_what_was_observed(way, observed)
    except ModelNotSupportedError:
        raise
    except Exception as error:
        raise ModelNotSupportedError(f"it cannot be called on a packed row: {error}") from error
    finally:
        take_out(model)
    if steps:
        way = replace(way, feed=replace(way.feed, one_row=True))
    route = Route(way, steps, packed_share(model, steps), tried)
    try:
        return prove_route_for_all_rows(model, route, before, exams)
    except ModelNotSupportedError as error:
        failure = error
    reasons = [str(failure)]
    if steps:
        reasons.append(f"by segment ran {', '.join(f'{n} {kind}' for kind, n in route.modules.items())}")
    for name, reason in list(search.uncuttable.items())[:2]:
        kind = type(model.get_submodule(name)).__name__
        reasons.append(f"{kind} ({name}) cannot run on a segment alone, {reason}")
    raise ModelNotSupportedError("; ".join(reasons)) from failure


def prove_route_for_all_rows(
    model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]], exams: list[Exam]
) -> Route:
    """As `prove_route`; where only one row keeps documents apart, several are laid end to end."""
    try:
        return prove_route(model, route, before, exams)
    except SeveralRowsError:
        if route.way.feed.one_row:
            raise
        way = replace(route.way, feed=replace(route.way.feed, one_row=True))
        return prove_route(model, replace(route, way=way), before, exams)


def prove_route(
    model: PreTrainedModel, route: Route, before: list[tuple[PreTrainedConfig, Any]], exams: list[Exam]
) -> Route:
    """Install a route, and leave it there only if it is proven; with what could not be."""
    unproven = "; ".join(exam.unproven for exam in exams if exam.unproven)
    route = route if route.unproven == unproven else replace(route, unproven=unproven)
    install(model, route, before)
    try:
        for exam in exams:
            with exam.probe.quiet():
                prove_isolation(exam)
    except BaseException as error:
        take_out(model)
        if not isinstance(error, Exception):
            raise
        known = isinstance(error, ModelNotSupportedError)
        if exam.rows > 1:
            reason = str(error) if known else f"it cannot be called on several packed rows: {error}"
            raise SeveralRowsError(reason) from error
        if known:
            raise
        raise ModelNotSupportedError(f"it cannot be called on a packed row: {error}") from error
    return route


def refuse_what_was_observed(way: Way, observed: Observed) -> None:
    if way.attention and not observed.calls:
        raise ModelNotSupportedError("it never called the attention function that was set")
    if way.attention == NAME and (lost := [sight for sight in observed.sights if sight.window not in observed.windows]):
        raise LostSightError(f"{' and '.join(sorted(map(str, lost)))} is only in its attention mask")
