"""The optimizers: optimal where that can be checked, or beside slow versions; their knapsack and their packs."""

import itertools
import subprocess
import sys
import time
from itertools import combinations_with_replacement

import numpy as np
import pytest
import scipy.optimize
from any_strategy import many_examples
from hypothesis import example, given
from hypothesis import strategies as st
from lengths import log_normal
from plans import fewest_packs
from scipy import optimize

import hf_packing as hfp
from hf_packing.strategies import nnls
from hf_packing.strategies import optimal as of_optimal
from hf_packing.strategies.column_generation import fill_columns, generate_columns, most_valuable_packs

limits = st.one_of(st.none(), st.integers(1, 4))
NARROW, ORCAMATH = "narrow lengths", "lengths like OrcaMath's"


@st.composite
def eight_documents(draw):
    capacity = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, capacity), min_size=1, max_size=8)), capacity


@given(eight_documents(), limits)
@example(([14, 14, 14, 9, 8, 8, 8, 4], 30), None)
@example(([6, 16, 7, 17, 8, 10], 38), 3)  # one pack more than the fewest
def test_the_fewest_packs_of_eight_documents_but_for_one(case, limit):
    lengths, capacity = case
    metrics = hfp.plan_packing(lengths, hfp.Optimal(capacity, max_documents=limit)).metrics()
    fewest = fewest_packs(lengths, capacity, limit)
    assert metrics.lower_bound <= fewest <= metrics.num_packs <= fewest + 1


def test_the_fewest_packs_of_eight_documents_are_rarely_missed(rng):
    missed = 0
    for _ in range(300):
        capacity = int(rng.integers(20, 41))
        lengths = rng.integers(1, capacity // 2 + 1, 8).tolist()
        plan = hfp.plan_packing(lengths, hfp.Optimal(capacity))
        missed += plan.num_packs > fewest_packs(lengths, capacity, None)
    assert missed <= 5


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


@pytest.mark.parametrize(("lengths", "most"), [(NARROW, 0.96), (ORCAMATH, 0.991)])
def test_lengths_where_best_fit_is_far_from_optimal(rng, lengths, most):
    """`most` is what best fit does not reach."""
    scale = 4  # all lengths are divided by it, for speed
    if lengths == NARROW:
        capacity, drawn = 2048 // scale, rng.integers(300 // scale, 700 // scale + 1, 200_000)
    else:
        capacity, drawn = 1024 // scale, log_normal(200_000, 5.9 - np.log(scale), 0.45, 1024 // scale)
    best_fit, table = (hfp.plan_counts(np.bincount(drawn), each(capacity)) for each in (hfp.BestFit, hfp.Optimal))
    assert best_fit.metrics().packing_efficiency < most
    assert table.metrics().packing_efficiency >= 0.999
    assert table.metrics().lower_bound <= table.num_packs <= 1.0001 * table.metrics().lower_bound
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


def test_the_dive_reaches_the_bound(monkeypatch):
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
    relaxation, duals = generate_columns(problem, start, deadline)
    assert relaxation is not None
    assert relaxation.finished
    assert duals.bound <= relaxation.packs.sum() + 1e-6
    bound = of_optimal._proven_bound(counts, tokens, problem, duals)
    assert bound <= fewest_packs(lengths, capacity, limit)


def test_no_more_rounds_than_needed():
    table = hfp.plan_counts([0, 0, 0, 0, 5], hfp.Optimal(8))
    assert (table.num_packs, table.note) == (3, "best fit, since no plan can have fewer packs")
    # These lengths once made column generation drop and find the same columns again and again.
    plan = hfp.plan_packing([74, 12, 12, 2, 25, 9, 27, 39, 98, 2, 33, 63, 4], hfp.Optimal(100, time_limit=float("inf")))
    assert plan.num_packs == 4
    assert plan.note == "column generation on 11 lengths, 4 rounds"


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


def test_limits_that_are_too_much_work_and_bounds_of_groups(monkeypatch, rng):
    monkeypatch.setattr(of_optimal, "_TOO_MUCH", 1000)
    counts = np.bincount(rng.integers(30, 71, 2000))
    with pytest.warns(UserWarning, match="of a simpler strategy: best fit, since max_documents=4 needs too much time"):
        table = hfp.plan_counts(counts, hfp.Optimal(200, max_documents=4))
    assert "since max_documents=4 needs too much time or memory for column generation" in table.note
    assert table.num_packs == hfp.plan_counts(counts, hfp.BestFit(200, max_documents=4)).num_packs
    monkeypatch.undo()
    monkeypatch.setattr(of_optimal, "_MAX_SLOTS", 60)
    counts = np.bincount(rng.integers(512, 1025, 20_000))
    best_fit, optimal = (hfp.plan_counts(counts, s) for s in (hfp.BestFit(2048), hfp.Optimal(2048)))
    assert optimal.metrics().lower_bound > 1.02 * best_fit.metrics().lower_bound
    assert optimal.metrics().lower_bound <= optimal.num_packs < best_fit.num_packs


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


def all_packs(slots, capacity, limit):
    for size in range(1, limit + 1):
        for pack in combinations_with_replacement(range(len(slots)), size):
            if sum(slots[i] for i in pack) <= capacity:
                yield pack


def full_packs(lengths, capacity, limit):
    """Each way to fill a pack exactly, as indices of lengths, ascending."""
    return [pack for pack in all_packs(lengths, capacity, limit) if sum(lengths[i] for i in pack) == capacity]


lengths_of_a_pack = st.integers(1, 24).flatmap(
    lambda c: st.tuples(st.sets(st.integers(1, c), max_size=c).map(sorted), st.just(c))
)


@many_examples
@given(lengths_of_a_pack, st.integers(1, 4))
def test_all_ways_to_fill_a_pack_of_the_lengths_that_occur(case, limit):
    lengths, capacity = case
    ways = nnls._full_packs(np.array(lengths, np.int64), capacity, limit).tolist()
    found = [tuple(sorted(number - 1 for number in way if number)) for way in ways]
    assert sorted(found) == sorted(full_packs(lengths, capacity, limit))


@many_examples
@given(st.lists(st.integers(0, 50), min_size=10, max_size=24), st.integers(1, 3))
def test_as_close_to_the_counts_as_with_all_columns(counts, limit):
    capacity, lengths = len(counts), 1 + np.flatnonzero(counts)
    demand, weight = np.array(counts)[lengths - 1], np.where(lengths <= 8, 0.09, 1.0)
    packs_of_all = full_packs(lengths.tolist(), capacity, limit)
    columns = np.array([[pack.count(slot) for pack in packs_of_all] for slot in range(len(lengths))])
    columns = columns.reshape(len(lengths), len(packs_of_all))
    expected = optimize.nnls(columns * weight[:, None], demand * weight)[0] if columns.size else np.zeros(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnls, "_FEWEST_TRIED", 2)  # so that columns are added in many rounds
        patch.setattr(nnls, "_SHARE_TRIED", 0)
        ways = nnls._full_packs(lengths, capacity, limit)
        used, packs = nnls._least_squares(np.append(0, demand), np.append(0, weight), ways, scipy.optimize.nnls)
    assert (packs >= 0).all()
    ours, theirs = used[1:] @ packs, columns @ expected
    far, as_far = (np.linalg.norm((each - demand) * weight) for each in (ours, theirs))
    if far < as_far - 1e-5:  # with all columns at once, scipy sometimes ends before the closest point
        return
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("capacity", [512, 4096, 32_768, 131_072])
def test_least_squares_need_the_lengths_that_occur_alone(capacity):
    """Long rows take no time, as long as few lengths occur; it took minutes for rows of 4,096."""
    strategy = hfp.NonNegativeLeastSquares(capacity)
    assert hfp.plan_packing([capacity - 5, 5], strategy).num_packs == 1
    assert hfp.plan_packing([capacity // 4] * 4 + [capacity // 2] * 2, strategy).num_packs == 2
    assert hfp.plan_packing([capacity // 4] * 7, strategy).num_packs == 3  # three in a pack do not fill it
    thirds = [capacity // 2, capacity // 3, capacity - capacity // 2 - capacity // 3] * 100
    assert hfp.plan_packing(thirds, strategy).num_packs == 100
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 30)
    plan, best_fit = (hfp.plan_packing(lengths, each) for each in (strategy, hfp.BestFit(capacity, max_documents=3)))
    assert plan.num_packs == best_fit.num_packs


@pytest.mark.slow
def test_published_pack_count_of_bert_wikipedia(bert_wikipedia):
    assert hfp.plan_counts(bert_wikipedia, hfp.NonNegativeLeastSquares(512)).num_packs <= 8_155_059


def test_limits_that_allow_too_many_ways_to_fill_a_pack():
    with pytest.raises(
        hfp.PackingError,
        match=r"at most 2\*\*23 ways to fill .*, got max_length=512 and max_documents=6 for 512 lengths; ",
    ):
        hfp.plan_packing(range(1, 513), hfp.NonNegativeLeastSquares(512, max_documents=6))
    assert hfp.plan_packing([5, 3], hfp.NonNegativeLeastSquares(8, max_documents=10**6)).num_packs == 1


@many_examples
@given(
    st.integers(3, 14).flatmap(
        lambda c: st.tuples(st.sets(st.integers(2, c), min_size=1, max_size=4).map(sorted), st.just(c))
    ),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_most_valuable_packs(case, worth, limit):
    slots, capacity = case
    value = np.array(worth[: len(slots)])
    packs = list(all_packs(slots, capacity, limit or capacity // slots[0]))
    most, columns = most_valuable_packs(value, np.array(slots), capacity, limit)
    assert most == pytest.approx(max(sum(value[i] for i in pack) for pack in packs), abs=1e-9)
    for slot in range(len(slots)):
        best = max(sum(value[i] for i in pack) for pack in packs if slot in pack)
        column = columns[:, slot]
        assert column[slot] >= 1
        assert column @ np.array(slots) <= capacity
        assert column.sum() <= (limit or capacity)
        assert column @ value == pytest.approx(best, abs=1e-9)


def fill_slot_by_slot(packs, columns, slots, lengths, capacity):
    """Fills: documents go into slots one at a time, then into the pack with the least room, then into new ones."""
    contents, free = [], {slot: [] for slot in range(len(slots))}
    for column in range(columns.shape[1]):
        first = len(contents)
        contents += [[] for _ in range(packs[column])]
        for slot in range(len(slots)):
            free[slot].insert(0, [first + n for n in range(packs[column]) for _ in range(columns[slot, column])])
    free = {slot: [pack for column in of_columns for pack in column] for slot, of_columns in free.items()}
    waiting = sorted(lengths, reverse=True)
    for slot, longest in enumerate(slots):
        shorter = slots[slot - 1] if slot else 0
        for length in [n for n in waiting if shorter < n <= longest][: len(free[slot])]:
            contents[free[slot].pop(0)].append(length)
            waiting.remove(length)
    for slot in reversed(range(len(slots))):
        for length in [n for n in waiting if n <= slots[slot]][: len(free[slot])]:
            contents[free[slot].pop(0)].append(length)
            waiting.remove(length)
    contents = [pack for pack in contents if pack]
    for length in waiting:
        fitting = [pack for pack in contents if sum(pack) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            contents.append([length])
    return sorted(map(sum, contents))


@st.composite
def columns_and_documents(draw):
    capacity = draw(st.integers(2, 20))
    slots = sorted(draw(st.sets(st.integers(1, capacity), min_size=1, max_size=5)))
    ways = list(all_packs(slots, capacity, 4))
    chosen = draw(st.lists(st.sampled_from(ways), min_size=1, max_size=5))
    columns = np.array([[way.count(slot) for way in chosen] for slot in range(len(slots))])
    packs = np.array(draw(st.lists(st.integers(0, 4), min_size=len(chosen), max_size=len(chosen))))
    lengths = draw(st.lists(st.integers(1, slots[-1]), min_size=1, max_size=40))
    return packs, columns, slots, lengths, capacity


@many_examples
@given(columns_and_documents())
def test_columns_are_filled_as_slot_by_slot(case):
    packs, columns, slots, lengths, capacity = case
    made = fill_columns(packs, columns, np.array(slots), np.bincount(lengths), capacity, None)
    assert made.counts().tolist() == np.bincount(lengths).tolist()
    fills = np.repeat(made.tokens_per_pack(), made.packs)
    assert fills.max() <= capacity
    assert sorted(fills.tolist()) == fill_slot_by_slot(packs, columns, slots, lengths, capacity)
