"""TokenBudget: law 7 for any ranks, accumulation and epoch; a hard cap; level work; steps that any ranks share."""

import re
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from any_strategy import few_examples
from hypothesis import assume, given
from hypothesis import strategies as st
from tiers import fast_only

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of_documents, sizes_of_packs

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=150)


@given(
    lengths=LENGTHS,
    world_size=st.integers(1, 64),
    accumulation=st.integers(1, 8),
    max_tokens=st.sampled_from([40, 41, 50, 80, 200]),
    seed=st.integers(0, 9),
    balance=st.sampled_from(["attention", "tokens"]),
    max_documents=st.one_of(st.none(), st.integers(1, 6)),
    align_tokens=st.sampled_from([1, 1, 10, 16]),
)
def test_ranks_share_every_epoch_exactly(lengths, world_size, accumulation, **limits):
    lengths, multiple, max_tokens = np.array(lengths), limits["align_tokens"], limits["max_tokens"]
    limits["max_tokens"] = -(-max_tokens // multiple) * multiple + max_tokens % multiple
    sizes, budget = sizes_of_documents(lengths), hfp.TokenBudget(**limits)
    wanted = dict.fromkeys(np.flatnonzero(lengths).tolist(), 1)
    if len(wanted) < world_size:
        with pytest.raises(PackingError, match=f"at least one row for each of {world_size} ranks"):
            budget.plan(sizes, Epoch(0, world_size))
        return
    plans = [budget.plan(sizes, Epoch(epoch, world_size, accumulation)) for epoch in range(3)]
    assert len({plan.num_micro_batches for plan in plans}) == 1
    for epoch, plan in enumerate(plans):
        batches = [list(plan.micro_batches(rank)) for rank in range(world_size)]
        assert {len(of_rank) for of_rank in batches} == {plan.num_micro_batches}
        assert all(batch for of_rank in batches for batch in of_rank)
        rows = [row for of_rank in batches for batch in of_rank for row in batch]
        assert Counter(row for row, is_copy in rows if not is_copy) == wanted
        assert plan.num_copies == sum(is_copy for _, is_copy in rows) < world_size
        assert not plan.num_copies or np.diff(plan.offsets).max() == 1  # no micro-batch could be divided
        assert plan.is_copy.dtype == bool
        assert (-(-plan.per_micro_batch(lengths) // multiple) * multiple).max() <= budget.max_tokens
        most = budget.max_documents
        assert most is None or plan.per_micro_batch(sizes.segments).max() <= most
        assert plan.left_out.tolist() == np.flatnonzero(lengths == 0).tolist()
        work = [[sum(lengths[row] for row, _ in of_rank[n]) for of_rank in batches] for n in range(len(batches[0]))]
        assert plan.per_micro_batch(sizes.tokens).tolist() == work
        copied = plan.per_micro_batch(sizes.tokens, plan.is_copy).sum(axis=1)
        busy = [(sum(step) - copies) / world_size / max(step) for step, copies in zip(work, copied, strict=True)]
        assert plan.utilization(sizes.tokens) == pytest.approx(np.mean(busy))
        again = budget.plan(sizes, Epoch(epoch, world_size, accumulation))
        assert [list(again.micro_batches(rank)) for rank in range(world_size)] == batches


@pytest.mark.parametrize(
    ("rows", "in_micro_batch", "world_size", "copies"),
    [(1600, 1, 1, 0), (1600, 1, 64, 0), (1601, 1, 64, 63), (2, 1, 2, 0), (128, 2, 64, 0), (2560, 2, 64, 0)],
)
def test_rows_of_equal_length_have_copies_for_the_last_step_only(rows, in_micro_batch, world_size, copies):
    plan = hfp.TokenBudget(4096).plan(sizes_of_documents(np.full(rows, 4096 // in_micro_batch)), Epoch(0, world_size))
    assert plan.num_micro_batches == -(-rows // in_micro_batch // world_size)
    assert plan.num_copies == copies


def test_documents_and_their_pieces_are_limited():
    sizes = sizes_of_documents(np.array([100, 7, 7, 7]))
    plan = hfp.TokenBudget(10, overflow="split", max_documents=1).plan(sizes)
    assert plan.num_micro_batches == 13
    assert np.diff(plan.offsets).tolist() == [1] * 13
    sizes = sizes_of_packs(np.full(7, 2), np.array([0, 2, 5, 7]))
    fitted = hfp.TokenBudget(10, max_documents=2, overflow="drop").fit(sizes)
    assert (fitted.kept.tolist(), fitted.left_out.tolist(), fitted.lost_tokens) == ([0, 2], [1], 6)
    plain = hfp.TokenBudget(16384, linear_cost=2, match_documents_per_step=64)
    numpy = hfp.TokenBudget(np.int32(16384), linear_cost=np.float64(2), match_documents_per_step=np.int64(64))
    assert repr(plain) == repr(numpy)


def lognormal(documents, rng, longest=16384):
    return np.clip(rng.lognormal(6, 1.2, documents), 1, longest).astype(int)


@pytest.fixture
def sizes(rng):
    return sizes_of_documents(lognormal(20_000, rng))


def test_work_is_level_which_packs_dealt_at_random_are_not(sizes, rng):
    plan = hfp.TokenBudget(16384).plan(sizes, Epoch(0, 8))
    number = rng.permutation(len(plan.offsets) - 1)
    parts = [plan.rows[plan.offsets[n] : plan.offsets[n + 1]] for n in number]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    shuffled = replace(plan, rows=np.concatenate(parts), offsets=offsets)
    assert shuffled.utilization(sizes.squared_lengths) < 0.5
    plan = hfp.TokenBudget(16384).plan(sizes, Epoch(0, 8))
    costliest = np.bincount(plan.per_micro_batch(sizes.squared_lengths).argmax(1), minlength=8)
    assert costliest.max() < 2.5 * costliest.mean()
    packs = hfp.plan_packing(lognormal(20_000, rng), hfp.BestFit(16384))
    sizes = sizes_of_packs(packs.segment_length, packs.pack_offsets)
    plan = hfp.TokenBudget(65536).plan(sizes, Epoch(0, 32))
    cost = 6 * 2048 * plan.per_micro_batch(sizes.tokens) + plan.per_micro_batch(sizes.squared_lengths)
    assert plan.num_micro_batches < 10
    assert (cost.mean(axis=1) / cost.max(axis=1)).mean() > 0.96


def pairs(plan):
    batches = np.split(plan.rows, plan.offsets[1:-1])
    return {(a, b) for batch in batches for a in batch.tolist() for b in batch.tolist() if a < b}


@pytest.mark.parametrize("documents", [300, 5000])
def test_what_meets_is_new_in_every_epoch(documents, rng):
    sizes = sizes_of_documents(lognormal(documents, rng, longest=4096))
    budget = hfp.TokenBudget(8192)
    first, second = (pairs(budget.plan(sizes, Epoch(epoch))) for epoch in range(2))
    assert len(first & second) < 0.2 * len(first)


@pytest.mark.parametrize(
    ("overflow", "kept", "lost"), [("drop", [3, 2], 9), ("truncate", [3, 2, 4], 5), ("split", [3, 2, 4, 4, 1], 0)]
)
@pytest.mark.parametrize("limits", [{"max_tokens": 4}, {"max_tokens": 9, "max_length": 4}])
def test_overflow(overflow, kept, lost, limits):
    budget = hfp.TokenBudget(**limits, overflow=overflow)
    sizes = sizes_of_documents(np.array([3, 9, 2, 0]))
    rows = budget.fit(sizes)
    assert sorted(rows.sizes.tokens[rows.kept]) == sorted(kept)
    assert rows.lost_tokens == lost
    plan = budget.plan(sizes)
    assert plan.left_out.tolist() == ([1, 3] if overflow == "drop" else [3])


@given(
    lengths=st.lists(st.integers(1, 40), min_size=4, max_size=60),
    world_size=st.integers(1, 4),
    accumulation=st.integers(1, 6),
    documents=st.integers(1, 80),
    max_tokens=st.integers(40, 200),
    max_documents=st.one_of(st.none(), st.integers(1, 6)),
)
def test_what_is_said_to_be_possible_is(lengths, world_size, accumulation, documents, max_tokens, max_documents):
    sizes = sizes_of_documents(np.array(lengths))

    def refusal(documents):
        budget = hfp.TokenBudget(max_tokens, max_documents=max_documents, match_documents_per_step=documents)
        try:
            budget.plan(sizes, Epoch(0, world_size, accumulation))
        except PackingError as error:
            return str(error)
        return ""

    if message := refusal(documents):
        assert message.startswith("match_documents_per_step: expected ")
        said = [range(int(low), int(high) + 1) for low, high in re.findall(r"expected from (\d+) to (\d+)", message)]
        possible = [other for other in range(1, len(lengths) + 1) if not refusal(other)]
        assert list(chain.from_iterable(said)) == possible


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(1, 4)), min_size=1, max_size=60),
    world_size=st.integers(1, 8),
    accumulation=st.integers(1, 3),
    max_patches=st.one_of(st.none(), st.integers(30, 60)),
    max_documents=st.one_of(st.none(), st.integers(4, 12)),
)
def test_patches_are_limited_beside_tokens_and_documents(rows, world_size, accumulation, max_patches, max_documents):
    tokens, patches, documents = np.array(rows).T
    sizes = replace(sizes_of_documents(tokens), segments=documents, patches=patches)
    assume(len(tokens) >= world_size)
    for epoch in range(2):
        budget = hfp.TokenBudget(50, max_patches=max_patches, max_documents=max_documents)
        plan = budget.plan(sizes, Epoch(epoch, world_size, accumulation))
        assert sorted(plan.rows[~plan.is_copy].tolist()) == list(range(len(tokens)))
        assert max_patches is None or plan.per_micro_batch(patches).max() <= max_patches
        assert plan.per_micro_batch(tokens).max() <= 50
        assert max_documents is None or plan.per_micro_batch(sizes.segments).max() <= max_documents


def test_patches_fill_micro_batches_and_are_limited_and_in_the_fingerprint():
    """Two pictures of 30 patches in each micro-batch, and texts of five times 8 tokens beside them."""
    pictures, texts = np.full(40, 10), np.full(100, 8)
    sizes = sizes_of_documents(np.concatenate([pictures, texts]))
    sizes = replace(sizes, patches=np.repeat([30, 0], [40, 100]))
    assert hfp.TokenBudget(60, max_patches=60).plan(sizes).num_micro_batches == 20
    sizes = replace(sizes_of_documents(np.array([5, 6, 7])), patches=np.array([0, 90, 4]))
    assert hfp.TokenBudget(50, max_patches=60, overflow="drop").fit(sizes).left_out.tolist() == [1]
    assert sizes.fingerprint != replace(sizes, patches=np.array([0, 4, 90])).fingerprint
    assert sizes.fingerprint != replace(sizes, patches=None).fingerprint


BUCKETS = np.array([8, 16, 32])
BATCHINGS = st.one_of(
    st.builds(
        hfp.TokenBudget,
        st.sampled_from([40, 41, 80, 200]),
        balance=st.sampled_from(["attention", "tokens"]),
        align_tokens=st.sampled_from([1, 20]),
        max_documents=st.one_of(st.none(), st.integers(1, 6)),
        seed=st.integers(0, 9),
    ),
    st.builds(
        hfp.BucketBatches,
        st.sampled_from([32, 64, 128]),
        seed=st.integers(0, 9),
        align_tokens=st.sampled_from([1, 16]),
    ),
    st.builds(hfp.BucketBatches, st.sampled_from([32, 64]), order=st.just("short_to_long"), cycles=st.integers(1, 3)),
)


def sizes_for(batching, lengths):
    """The sizes of documents, or of packs that have one document and a bucket each."""
    if isinstance(batching, hfp.TokenBudget):
        return sizes_of_documents(np.array(lengths))
    lengths = np.minimum(lengths, 32)
    return sizes_of_packs(lengths, np.arange(len(lengths) + 1), BUCKETS[np.searchsorted(BUCKETS, lengths)])


def steps_of(plan, accumulation):
    """The rows of each optimizer step, a Counter without copies; counted micro-batch by micro-batch."""
    steps = []
    for first in range(0, plan.num_micro_batches, accumulation):
        numbers = range(first, min(first + accumulation, plan.num_micro_batches))
        rows = [row for number in numbers for rank in range(plan.world_size) for row in plan.micro_batch(number, rank)]
        steps.append(Counter(row for row, is_copy in rows if not is_copy))
    return steps


def micro_batches_of(plan, accumulation, step):
    numbers = range(step * accumulation, (step + 1) * accumulation)
    return Counter(
        frozenset(row for row, _ in plan.micro_batch(number, rank))
        for number in numbers
        for rank in range(plan.world_size)
    )


@given(BATCHINGS, st.lists(st.integers(1, 40), min_size=1, max_size=150), st.sampled_from([1, 2, 4, 6, 8, 12, 64]))
def test_steps_are_those_of_any_split_into_ranks_and_accumulation(batching, lengths, slots):
    check_steps(batching, sizes_for(batching, lengths), slots)


@few_examples
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=24, max_size=90),
    st.sampled_from([2, 4, 6, 12]),
    st.integers(0, 9),
)
def test_steps_of_packed_rows_and_of_a_number_of_documents(packs, slots, seed):
    sizes = sizes_of_packs(np.concatenate(packs), np.cumsum([0, *map(len, packs)]))
    check_steps(hfp.TokenBudget(60, max_documents=8, seed=seed), sizes, slots)
    documents = sum(map(len, packs))
    matched = hfp.TokenBudget(2000, match_documents_per_step=-(-documents // 2), seed=seed)
    assert len(check_steps(matched, sizes, slots)) == 2


def check_steps(batching, sizes, slots):
    """Compare the steps of all splits into ranks and accumulation, and return them."""
    wanted = batching.plan(sizes, Epoch(1, 1, slots))
    steps = steps_of(wanted, slots)
    assert sum(steps, Counter()) == Counter(range(len(sizes)))
    assert all(steps)
    for ranks in (ranks for ranks in range(2, slots + 1) if slots % ranks == 0 and ranks <= len(sizes)):
        accumulation = slots // ranks
        plan = batching.plan(sizes, Epoch(1, ranks, accumulation))
        assert steps_of(plan, accumulation) == steps
        for step in range(len(steps) - 1):
            assert micro_batches_of(plan, accumulation, step) == micro_batches_of(wanted, slots, step)
    return steps


def test_steps_have_all_micro_batches_and_large_ones_stay_level(rng, monkeypatch):
    sizes = sizes_of_documents(np.clip(rng.lognormal(3, 1, 3000), 1, 500).astype(int))
    for slots in (1, 8, 64):
        plan = hfp.TokenBudget(500).plan(sizes, Epoch(0, 1, slots))
        assert plan.num_micro_batches % slots == 0
        assert plan.num_micro_batches < hfp.TokenBudget(500).plan(sizes).num_micro_batches + slots
    monkeypatch.setattr("hf_packing.sampling.fill._MOST_REDISTRIBUTED", 4)
    sizes = sizes_of_documents(np.clip(rng.lognormal(6, 1.2, 4000), 1, 4096).astype(int))
    budget = hfp.TokenBudget(4096, linear_cost=0)
    steps = steps_of(budget.plan(sizes, Epoch(0, 1, 10)), 10)
    assert sum(steps, Counter()) == Counter(range(4000))
    assert steps_of(budget.plan(sizes, Epoch(0, 5, 2)), 2) == steps
    assert budget.plan(sizes, Epoch(0, 2, 5)).utilization(sizes.squared_lengths) > 0.95


@pytest.mark.parametrize(("ranks", "accumulation"), fast_only([(8, 1), (4, 2), (8, 4), (2, 16)], (8, 1), (8, 4)))
@pytest.mark.parametrize("balance", ["attention", "tokens"])
def test_ranks_have_equal_work_with_accumulation(rng, ranks, accumulation, balance):
    sizes = sizes_of_documents(np.clip(rng.lognormal(6, 1.2, 40_000), 1, 16384).astype(int))
    plan = hfp.TokenBudget(16384, balance=balance, linear_cost=0).plan(sizes, Epoch(0, ranks, accumulation))
    of_row = sizes.squared_lengths if balance == "attention" else sizes.tokens
    assert plan.utilization(of_row) > 0.98
    in_step = plan.per_micro_batch(of_row).reshape(-1, accumulation, ranks).sum(axis=1)
    assert (in_step.mean(axis=1) / in_step.max(axis=1)).mean() > 0.99


def test_ranks_have_equal_work_with_accumulation_in_buckets(rng):
    plan = hfp.plan_packing(np.clip(rng.lognormal(6, 1.2, 30_000), 1, 16384).astype(int), hfp.Bucket())
    sizes = sizes_of_packs(plan.segment_length, plan.pack_offsets, plan.pack_capacity)
    for accumulation in (1, 8, 32):
        epoch = hfp.BucketBatches(16384).plan(sizes, Epoch(0, 8, accumulation))
        assert epoch.utilization(sizes.tokens) > 0.99
        assert epoch.utilization(sizes.squared_lengths) > 0.98


def test_a_checkpoint_of_other_arguments_is_refused():
    sizes = sizes_of_documents(np.array([3, 4, 2, 1]))
    saved = RankBatchSampler(hfp.TokenBudget(8), sizes).plan_inputs()
    RankBatchSampler(hfp.TokenBudget(8), sizes).check_can_resume(saved)
    with pytest.raises(hfp.PackingError, match="max_length: expected None, as .* got 4"):
        RankBatchSampler(hfp.TokenBudget(8, max_length=4), sizes).check_can_resume(saved)
