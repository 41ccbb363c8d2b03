"""One row for each strategy, with bounds shared where they hold."""

import pytest
from datasets import Dataset

import hf_packing as hfp

LENGTHS = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2, 40]


def test_rows_and_tables_in_order():
    strategies = [hfp.BestFit(30), hfp.Optimal(30), hfp.Bucket((10, 30)), hfp.FixedLength(30)]
    rows = hfp.compare(LENGTHS, strategies)
    assert [row.strategy for row in rows] == strategies
    for row, strategy in zip(rows, strategies, strict=True):
        plan = hfp.plan_packing(LENGTHS, strategy)
        assert row.metrics.num_packs == plan.num_packs
        assert row.note == plan.note
        assert row.seconds > 0
    assert rows[2].gap is None
    assert len(rows[1:]) == 3
    text = repr(hfp.compare(LENGTHS, [hfp.BestFit(30, overflow="drop"), hfp.Bucket((10, 30), seed=1)]))
    header, best_fit, bucket = text.splitlines()
    assert header.split() == [
        "padding", "truncation", "dropped", "concatenation", "packs", "above", "bound", "seconds"
    ]  # fmt: skip
    assert best_fit.startswith("BestFit(30, overflow='drop')  25.000%      0.000%  30.769%")
    assert bucket.startswith("Bucket((10, 30), seed=1)")
    assert len({len(line) for line in (header, best_fit, bucket)}) == 1


def test_a_bound_that_one_strategy_proves_holds_for_the_others(rng):
    lengths = rng.integers(60, 140, 3000)
    alone = hfp.compare(lengths, [hfp.BestFit(400)])[0]
    best_fit, optimal, limited, longer = hfp.compare(
        lengths, [hfp.BestFit(400), hfp.Optimal(400), hfp.BestFit(400, max_documents=3), hfp.BestFit(401)]
    )
    assert best_fit.metrics.lower_bound == optimal.metrics.lower_bound
    assert best_fit.gap == best_fit.metrics.num_packs / optimal.metrics.lower_bound - 1 > optimal.gap
    assert limited.metrics.lower_bound == 1000
    assert limited.gap < alone.gap + 1
    assert longer.metrics.lower_bound == hfp.plan_packing(lengths, hfp.BestFit(401)).metrics().lower_bound


def test_bounds_without_documents_and_without_a_limit():
    limited, free = hfp.compare([1] * 12, [hfp.BestFit(12, max_documents=2), hfp.BestFit(12)])
    assert limited.metrics.lower_bound == 6
    assert (free.metrics.lower_bound, free.metrics.num_packs, free.gap) == (1, 1, 0.0)
    assert hfp.compare([], [hfp.BestFit(8)])[0].gap == 0
    column = Dataset.from_dict({"length": [5, 3]})["length"]
    assert hfp.compare(column, (strategy for strategy in [hfp.BestFit(8)]))[0].metrics.num_packs == 1


@pytest.mark.parametrize("strategies", [[], hfp.BestFit(8), "best fit", None, [hfp.BestFit]])
def test_bad_strategies(strategies):
    with pytest.raises(hfp.PackingError, match="^strateg(y|ies): expected .*, got "):
        hfp.compare([1, 2], strategies)
