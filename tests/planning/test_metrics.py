"""Lower bounds against exhaustive packing, and L2 against its definition."""

import numpy as np
from any_strategy import many_examples
from hypothesis import given
from hypothesis import strategies as st
from plans import fewest_packs

from hf_packing.planning.metrics import pack_lower_bound


def l2_by_definition(lengths: list[int], capacity: int) -> int:
    bounds = [-(-sum(lengths) // capacity)]
    for a in range(1, capacity // 2 + 1):
        alone = [n for n in lengths if n > capacity - a]
        above_half = [n for n in lengths if capacity / 2 < n <= capacity - a]
        small = [n for n in lengths if a <= n <= capacity / 2]
        rest = sum(small) - (len(above_half) * capacity - sum(above_half))
        bounds.append(len(alone) + len(above_half) + max(0, -(-rest // capacity)))
    return max(bounds)


cases = st.integers(1, 20).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), min_size=1, max_size=8), st.just(capacity))
)


@many_examples
@given(cases)
def test_bound_is_l2_and_never_above_the_fewest_packs(case):
    lengths, capacity = case
    bound = pack_lower_bound(np.bincount(lengths), capacity)
    assert bound == l2_by_definition(lengths, capacity)
    assert bound <= fewest_packs(lengths, capacity)
