"""Column generation: optimal where that can be checked, better than best fit where it should be, and it says how."""

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.optimize
from exhaustive import fewest_packs
from hypothesis import example, given
from hypothesis import strategies as st
from lengths import log_normal

import hf_packing as hfp
from hf_packing.strategies import column_generation
from hf_packing.strategies import optimal as of_optimal
from hf_packing.strategies.column_generation import fill_columns, generate_columns

limits = st.one_of(st.none(), st.integers(1, 4))


@st.composite
def eight_documents(draw):
    capacity = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, capacity), min_size=1, max_size=8)), capacity


@given(eight_documents(), limits)
@example(([14, 14, 14, 9, 8, 8, 8, 4], 30), None)
def test_fewest_packs_of_up_to_eight_documents(case, limit):
    lengths, capacity = case
    metrics = hfp.plan_packing(lengths, hfp.Optimal(capacity, max_documents=limit)).metrics()
    assert metrics.num_packs == fewest_packs(lengths, capacity, limit)
    assert metrics.lower_bound <= metrics.num_packs


@given(st.lists(st.integers(0, 30), min_size=1, max_size=24), limits)
def test_never_more_packs_than_best_fit_nor_fewer_than_proven(counts, limit):
    capacity = len(counts)
    options = {"max_documents": limit}
    table = hfp.plan_counts([0, *counts], hfp.Optimal(capacity, **options))
    best_fit = hfp.plan_counts([0, *counts], hfp.BestFit(capacity, **options))
    assert best_fit.metrics().lower_bound <= table.metrics().lower_bound <= table.num_packs <= best_fit.num_packs
    assert table.cuts.counts().tolist() == best_fit.cuts.counts().tolist()
    assert table.patterns.segments_per_pack().max(initial=0) <= (limit or capacity)
    assert (table.patterns.tokens_per_pack() <= capacity).all()


def efficiency(counts, packing):
    metrics = hfp.plan_counts(counts, packing).metrics()
    assert metrics.num_packs >= metrics.lower_bound
    return metrics.packing_efficiency


scales = pytest.mark.parametrize("scale", [4, pytest.param(1, marks=pytest.mark.slow)])
"""What all lengths are divided by."""


@scales
def test_narrow_lengths_where_best_fit_is_far_from_optimal(rng, scale):
    narrow = np.bincount(rng.integers(300 // scale, 700 // scale + 1, 200_000))
    assert efficiency(narrow, hfp.BestFit(2048 // scale)) < 0.96
    assert efficiency(narrow, hfp.Optimal(2048 // scale)) >= 0.999


@scales
def test_orcamath_like_lengths(scale):
    counts = np.bincount(log_normal(200_000, 5.9 - np.log(scale), 0.45, 1024 // scale))
    assert efficiency(counts, hfp.BestFit(1024 // scale)) < 0.991
    table = hfp.plan_counts(counts, hfp.Optimal(1024 // scale))
    assert table.metrics().packing_efficiency >= 0.999
    assert table.num_packs <= 1.0001 * table.metrics().lower_bound
    assert "column generation" in table.note


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "packs"), [(None, 8_135_760), (3, 8_146_000)])
def test_bert_wikipedia(bert_wikipedia, limit, packs):
    table = hfp.plan_counts(bert_wikipedia, hfp.Optimal(512, max_documents=limit))
    assert table.metrics().lower_bound <= table.num_packs <= packs
    assert table.num_packs <= 1.00001 * table.metrics().lower_bound


@pytest.mark.parametrize(("limit", "value"), [("_MAX_SLOTS", 100), ("_MAX_UNITS", 500)])
def test_lengths_are_rounded_up_if_they_are_many_or_packs_are_long(rng, monkeypatch, limit, value):
    monkeypatch.setattr(of_optimal, limit, value)
    counts = np.bincount(np.append(rng.integers(300, 701, 20_000), [2048] * 5))
    best_fit = hfp.plan_counts(counts, hfp.BestFit(2048))
    table = hfp.plan_counts(counts, hfp.Optimal(2048))
    assert table.num_packs < 0.98 * best_fit.num_packs
    assert "to which 402 were rounded up" in table.note
    assert table.metrics().lower_bound >= best_fit.metrics().lower_bound


def test_whole_packs_are_dived_for_to_the_bound(monkeypatch):
    """Rounding the fractions once leaves 752 packs here; few steps of the dive bring 750."""
    filled = []

    def watched(*arguments):
        filled.append(fill_columns(*arguments))
        return filled[-1]

    monkeypatch.setattr(of_optimal, "fill_columns", watched)
    counts = np.bincount(np.random.default_rng(1).integers(60, 140, 3000))
    table = hfp.plan_counts(counts, hfp.Optimal(400))
    assert table.num_packs == table.metrics().lower_bound == 750
    assert hfp.plan_counts(counts, hfp.BestFit(400)).num_packs > 750
    assert 1 < len(filled) < 13  # before the first step and after each


@st.composite
def documents_and_slots(draw):
    capacity = draw(st.integers(5, 60))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=4, max_size=9))
    return lengths, capacity, draw(st.integers(1, 4)), draw(st.sampled_from([5, 1 << 17])), draw(limits)


@given(documents_and_slots())
@example(([6, 6, 6, 6, 6, 6, 6, 5], 20, 1, 1 << 17, None))
def test_what_slots_prove_holds_for_the_documents(case):
    """However few slots, in whatever unit: the bound is never above the fewest packs there are."""
    lengths, capacity, most_slots, most_units, limit = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_optimal, "_MAX_SLOTS", most_slots)
        patch.setattr(of_optimal, "_FEWEST_SLOTS", most_slots)
        patch.setattr(of_optimal, "_MAX_UNITS", most_units)
        counts = np.bincount(lengths)
        tokens, problem = of_optimal.slots_wanted(counts, capacity, limit)
    assert problem.demand.sum() == len(lengths)
    assert tokens[-1] >= max(lengths)
    deadline = time.monotonic() + 60
    start = np.eye(len(tokens), dtype=int)
    relaxation, duals = generate_columns(problem, start, deadline, [].append)
    assert relaxation is not None
    assert relaxation.finished
    assert duals.bound <= relaxation.objective + 1e-6
    bound = of_optimal._proven_bound(counts, tokens, problem, duals)
    assert bound <= fewest_packs(lengths, capacity, limit)


def test_a_grouped_bound_proves_more_than_volume(rng, monkeypatch):
    monkeypatch.setattr(of_optimal, "_MAX_SLOTS", 60)
    counts = np.bincount(rng.integers(512, 1025, 20_000))
    best_fit, optimal = (hfp.plan_counts(counts, s) for s in (hfp.BestFit(2048), hfp.Optimal(2048)))
    assert optimal.metrics().lower_bound > 1.02 * best_fit.metrics().lower_bound
    assert optimal.metrics().lower_bound <= optimal.num_packs < best_fit.num_packs


def test_no_time_where_best_fit_is_optimal_already():
    table = hfp.plan_counts([0, 0, 0, 0, 5], hfp.Optimal(8))
    assert (table.num_packs, table.note) == (3, "best fit, since no plan can have fewer packs")


@pytest.mark.parametrize("seconds", [0, 1e-9])
def test_a_time_limit_of_nothing_returns_best_fit_and_says_so(rng, seconds):
    lengths = rng.integers(300, 701, 5000)
    with pytest.warns(UserWarning, match="of a simpler strategy: best fit, since the time limit of .* s was too short"):
        plan = hfp.plan_packing(lengths, hfp.Optimal(2048, time_limit=seconds))
    assert plan.num_packs == hfp.plan_packing(lengths, hfp.BestFit(2048)).num_packs
    assert "time limit" in plan.note
    assert plan.metrics().lower_bound == hfp.plan_packing(lengths, hfp.BestFit(2048)).metrics().lower_bound


def test_a_time_limit_ends_the_search_early(monkeypatch):
    """On a clock that moves a second whenever somebody looks at it."""
    clock, given = itertools.count(), []
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    linprog = scipy.optimize.linprog

    def watched(*arguments, options, **others):
        given.append(options["time_limit"])
        return linprog(*arguments, options=options, **others)

    monkeypatch.setattr(scipy.optimize, "linprog", watched)
    counts = np.bincount(log_normal(10**5, 4.5, 0.45, 256))
    table = hfp.plan_counts(counts, hfp.Optimal(256, time_limit=40))
    assert all(0 <= seconds < 40 for seconds in given)
    assert next(clock) < 60
    assert "rounds, stopped by the time limit of 40 s" in table.note
    assert table.num_packs < hfp.plan_counts(counts, hfp.BestFit(256)).num_packs


def test_columns_do_not_come_and_go_for_ever():
    """These lengths once made column generation drop and find the same columns again and again."""
    plan = hfp.plan_packing([74, 12, 12, 2, 25, 9, 27, 39, 98, 2, 33, 63, 4], hfp.Optimal(100, time_limit=float("inf")))
    assert plan.num_packs == 4
    assert plan.note == "column generation on 11 lengths, 4 rounds"


def test_one_short_document_does_not_make_a_limit_matter(rng):
    counts = np.bincount(np.append(rng.integers(15, 36, 5_000), 1))
    limited, free = (
        hfp.plan_counts(counts, hfp.Optimal(103, max_documents=limit, time_limit=600)) for limit in (50, None)
    )
    assert of_optimal.slots_wanted(counts, 103, 50)[1].max_documents is None
    assert limited.num_packs == free.num_packs


def test_a_limit_that_is_too_much_work(monkeypatch, rng):
    monkeypatch.setattr(of_optimal, "_TOO_MUCH", 1000)
    counts = np.bincount(rng.integers(30, 71, 2000))
    with pytest.warns(UserWarning, match="of a simpler strategy: best fit, since max_documents=4 needs too much time"):
        table = hfp.plan_counts(counts, hfp.Optimal(200, max_documents=4))
    assert "since max_documents=4 needs too much time or memory for column generation" in table.note
    assert table.num_packs == hfp.plan_counts(counts, hfp.BestFit(200, max_documents=4)).num_packs


@given(eight_documents(), limits)
def test_few_documents_solved_exactly(case, limit):
    lengths, capacity = case
    made = of_optimal.fewest_packs_of_few(np.bincount(lengths), capacity, limit, time.monotonic() + 60)
    assert made.num_packs == fewest_packs(lengths, capacity, limit)
    assert made.counts().tolist() == np.bincount(lengths).tolist()
    assert made.tokens_per_pack().max() <= capacity
    assert made.segments_per_pack().max() <= (limit or capacity)


def test_few_documents_are_solved_exactly_where_the_dive_falls_short(monkeypatch):
    dive = column_generation.dive
    monkeypatch.setattr(of_optimal, "dive", lambda *given: dive(*given[:-1], 0.0))  # one that is out of time at once
    lengths = np.random.default_rng(7).integers(10, 35, 30)
    exact = hfp.plan_packing(lengths, hfp.Optimal(70))
    monkeypatch.setattr(of_optimal, "_FEW_SEGMENTS", 0)
    short = hfp.plan_packing(lengths, hfp.Optimal(70))
    assert exact.num_packs < short.num_packs
    assert exact.metrics().lower_bound == exact.num_packs


WITHOUT_SCIPY = """
import sys
sys.modules["scipy"] = None
import hf_packing as hfp
hfp.plan_packing([3, 2], hfp.BestFit(4))
for strategy in (hfp.Optimal, hfp.NonNegativeLeastSquares):
    try:
        hfp.plan_packing([3, 2], strategy(4))
    except hfp.MissingDependencyError as error:
        print(error)
"""


def test_scipy_is_loaded_only_when_it_is_needed():
    """Where it is missing, the error has the line that installs it."""
    said = subprocess.run([sys.executable, "-c", WITHOUT_SCIPY], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        f'{name} needs scipy, which is not installed; run pip install "hf-packing[optimal]"'
        for name in ("Optimal", "NonNegativeLeastSquares")
    ]
