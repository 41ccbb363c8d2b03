"""Permutations evaluated place by place: bijections, even, and different from key to key."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_packing.planning.scramble import derive_key, keys_for, scramble


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_bijection(size, key):
    places = scramble(np.arange(size), np.array([size]), np.array([key], dtype=np.uint64))
    assert sorted(places.tolist()) == list(range(size))


@given(
    st.integers(1, 2**40),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**40), min_size=2, max_size=20, unique=True),
)
def test_large_ranges_stay_in_range_and_apart(size, key, indices):
    indices = sorted({index % size for index in indices})
    places = scramble(np.array(indices), np.array([size]), np.array([key], dtype=np.uint64))
    assert len(set(places.tolist())) == len(indices)
    assert places.min() >= 0
    assert places.max() < size


def test_each_element_may_have_its_own_size_and_key():
    sizes, indices = np.array([5, 9, 1, 1000]), np.array([4, 0, 0, 999])
    keys = keys_for(np.arange(4), derive_key(7, "test"))
    together = scramble(indices, sizes, keys)
    one_by_one = [int(scramble(indices[i : i + 1], sizes[i : i + 1], keys[i : i + 1])[0]) for i in range(4)]
    assert together.tolist() == one_by_one


def test_every_place_is_equally_likely():
    trials = 20_000
    keys = keys_for(np.arange(trials), derive_key(0, "test"))
    for size in (2, 3, 5, 7, 16):
        for index in range(size):
            seen = np.bincount(scramble(np.full(trials, index), np.array([size]), keys), minlength=size)
            expected = trials / size
            assert ((seen - expected) ** 2 / expected).sum() < 60, (size, index)


def test_purposes_have_keys_of_their_own():
    assert len({int(derive_key(seed, purpose)) for seed in range(3) for purpose in ("packs", "documents")}) == 6
