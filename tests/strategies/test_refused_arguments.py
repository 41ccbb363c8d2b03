"""Arguments of strategies and of LengthSchedule that are refused, each by its name."""

import pytest
from any_strategy import strategy_classes

import hf_packing as hfp

BUCKETS = [each for each in strategy_classes() if each.has_buckets]
REFUSED = [
    *((each, {"max_length": value}) for each in strategy_classes(having="max_length") for value in ("8", True, None)),
    *((each, {"max_length": value}) for each in strategy_classes(having="max_length") for value in (0, -3, 2.5, 2**31)),
    *((each, {"bucket_lengths": value}) for each in BUCKETS for value in ((), (4, 2), (2, 2), 2048, "2048")),
    *((each, {"bucket_lengths": [value, 16]}) for each in BUCKETS for value in (0, -1, 2.5, "8", True)),
    *((each, {"max_length": 8, "max_documents": 0}) for each in strategy_classes(having="max_documents")),
    *((each, {"max_length": 8, "overflow": "cut"}) for each in strategy_classes(having="overflow")),
    *((each, {"max_length": 8, "seed": -1}) for each in strategy_classes(having="max_length")),
    *((each, {"seed": -1}) for each in BUCKETS),
    *((hfp.NonNegativeLeastSquares, {"max_length": 8, "max_documents": value}) for value in (None, 2.5)),
    (hfp.FirstCome, {"max_length": 8, "order": "shortest"}),
    (hfp.FirstCome, {"max_length": 8, "seed": None}),
    (hfp.Multipack, {"max_length": 8, "window": 0}),
    (hfp.Multipack, {"max_length": 8, "seed": None}),
    *((hfp.Bucket, {"padding_threshold": value}) for value in (-0.1, 1.5, float("nan"), "0.1", True, None)),
    *((hfp.Optimal, {"max_length": 8, "time_limit": value}) for value in (-1, float("nan"), "60", None, True)),
    *((hfp.LengthSchedule, {"steps": 1, "start": value}) for value in (0, 1.5)),
    (hfp.LengthSchedule, {"start": 1, "steps": 0}),
    (hfp.LengthSchedule, {"start": 8, "steps": 1, "end": 4}),
    (hfp.LengthSchedule, {"start": 8, "steps": 1, "growth": "sudden"}),
]


@pytest.mark.parametrize(("strategy", "arguments"), REFUSED)
def test_an_argument_that_is_refused_is_named(strategy, arguments):
    with pytest.raises(hfp.PackingError, match=f"^{[*arguments][-1]}: expected .* got "):
        strategy(**arguments)
