"""Rows on several ranks: every token once, no more than fit, level work; and what ranks send, token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_packing.planning.lengths import offsets_of
from hf_packing.planning.rank_layout import lay_out, plan_exchange


@st.composite
def rows(draw, longest=60):
    """The lengths of a row's documents, a number of ranks, and a number of tokens per rank that is enough for them."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=12))
    ranks = draw(st.integers(1, 9))
    return lengths, ranks, -(-sum(lengths) // ranks) + draw(st.sampled_from([0, 0, 1, 7, 1000]))


LINEAR_COSTS = st.sampled_from([0, 3, 12288.0, 1e12])
LIMITS = {
    "is_causal": st.booleans(),
    "window": st.one_of(st.none(), st.integers(1, 70)),
    "chunk": st.one_of(st.none(), st.integers(1, 70)),
}


def sent(exchange, ranks):
    """The number of tokens that each rank (row) sends each other one (column)."""
    total = np.zeros((ranks, ranks), np.int64)
    np.add.at(total, (exchange.sender, exchange.receiver), exchange.spans.length)
    return total * (1 - np.eye(ranks, dtype=np.int64))


@given(row=rows(), linear_cost=LINEAR_COSTS)
def test_every_token_is_on_one_rank(row, linear_cost):
    lengths, ranks, max_tokens = row
    layout = lay_out(*row, linear_cost)
    places = [layout.places(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(places).tolist()) == list(range(sum(lengths)))
    assert layout.tokens.tolist() == [len(of_rank) for of_rank in places]
    assert layout.tokens.max() <= max_tokens
    assert all((np.diff(of_rank) > 0).all() for of_rank in places)  # in the order of the row
    assert layout.attention_cost.sum() == sum(length**2 for length in lengths)
    assert layout.lengths.tolist() == lengths


@given(row=rows(), linear_cost=LINEAR_COSTS)
def test_a_piece_is_all_that_a_rank_holds_in_a_row_of_a_document(row, linear_cost):
    layout = lay_out(*row, linear_cost)
    assert layout.pieces.length.min() > 0
    borders = np.append(0, np.cumsum(row[0]))
    for rank in range(layout.num_ranks):
        places = layout.places(rank)
        begins = (np.diff(places, prepend=-2) != 1) | np.isin(places, borders)
        assert begins.sum() == (layout.rank == rank).sum()
    held = layout.pieces.document * layout.num_ranks + layout.rank
    assert np.bincount(held).max() <= 2
    ranks_of = [len(np.unique(layout.rank[layout.pieces.document == document])) for document in range(len(row[0]))]
    assert layout.num_split == sum(number > 1 for number in ranks_of)


@given(row=rows(), linear_cost=LINEAR_COSTS)
def test_documents_of_little_work_are_whole_unless_no_rank_has_room(row, linear_cost):
    lengths, ranks, max_tokens = row
    layout = lay_out(*row, linear_cost)
    work = [linear_cost * length + length**2 for length in lengths]
    for document, length in enumerate(lengths):
        on_ranks = np.unique(layout.rank[layout.pieces.document == document])
        if 3.001 * work[document] * ranks < sum(work) and len(on_ranks) > 1:
            assert (max_tokens - layout.tokens).max() < length


@given(row=rows(longest=120), linear_cost=LINEAR_COSTS)
def test_no_rank_is_empty_if_documents_are_enough_for_all(row, linear_cost):
    lengths, ranks, _ = row
    if len(lengths) >= ranks or max(lengths) >= ranks * ranks:
        assert lay_out(*row, linear_cost).tokens.min() > 0


@given(row=rows(), linear_cost=LINEAR_COSTS)
def test_equal_rows_have_equal_layouts(row, linear_cost):
    lengths, ranks, max_tokens = row
    first, second = lay_out(*row, linear_cost), lay_out(np.array(lengths, np.int32), ranks, max_tokens, linear_cost)
    assert first.rank.tolist() == second.rank.tolist()
    for name in ("document", "start", "length"):
        assert getattr(first.pieces, name).tolist() == getattr(second.pieces, name).tolist()


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_one_rank_holds_the_row_as_it_is(lengths):
    layout = lay_out(lengths, 1, sum(lengths))
    assert layout.places(0).tolist() == list(range(sum(lengths)))
    assert (layout.pieces.length.tolist(), layout.num_split) == (lengths, 0)
    assert sent(plan_exchange(layout), 1).tolist() == [[0]]


def test_pieces_of_a_row():
    """A document in four chunks on two ranks, then small ones where there is the least work."""
    layout = lay_out([16, 4, 4], 2, 12)
    pieces = layout.pieces
    of_rank = [
        *zip(*(each.tolist() for each in (layout.rank, pieces.document, pieces.start, pieces.length)), strict=True)
    ]
    assert of_rank == [(0, 0, 0, 4), (0, 0, 12, 4), (0, 1, 0, 4), (1, 0, 4, 8), (1, 2, 0, 4)]


def evenness(work):
    return work.mean() / work.max()


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_long_document_is_level(ranks):
    layout = lay_out([16384 * ranks], ranks, 16384)
    assert layout.tokens.tolist() == [16384] * ranks
    assert len(set(layout.attention_cost.tolist())) == 1
    ends = np.arange(1, ranks + 1) * 16384
    assert evenness(ends**2 - (ends - 16384) ** 2) < 0.7 or ranks == 2  # equal slices would be uneven


def full_row(ranks, rng):
    """A row that is full to the last token: a long document, some longer than a rank holds, many short ones."""
    long = [3 * 16384 + 500, 20_000, 17_000]
    short = rng.lognormal(7, 1, 1000).astype(int).clip(1, 8000)
    rest = ranks * 16384 - sum(long)
    short = short[: np.searchsorted(np.cumsum(short), rest)].tolist()
    return [*long, *short, rest - sum(short)]


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("linear_cost", [0, 12288.0, 1e12])
def test_a_full_row_of_many_documents_is_level(ranks, linear_cost, rng):
    layout = lay_out(full_row(ranks, rng), ranks, 16384, linear_cost)
    assert layout.tokens.tolist() == [16384] * ranks
    work = linear_cost * layout.tokens + layout.attention_cost
    assert evenness(work) > (0.95 if linear_cost else 0.9)  # linear layers take the same time for every token


def test_few_documents_are_split_if_short_ones_level_the_work(rng):
    layout = lay_out(full_row(8, rng), 8, 16384)
    split = np.flatnonzero(
        [len(np.unique(layout.rank[layout.pieces.document == document])) > 1 for document in range(9)]
    )
    assert split.tolist() == [0, 1, 2]


def literal_needs(layout, is_causal, window, chunk):
    """The places that each rank holds, and those that its tokens attend to, token by token."""
    begin = offsets_of(layout.lengths)
    at = np.arange(begin[-1])
    document = np.searchsorted(begin, at, side="right") - 1
    position = at - begin[document]
    sees = document[:, None] == document
    sees &= (position[:, None] >= position) if is_causal else True
    sees &= (abs(position[:, None] - position) < window) if window else True
    sees &= (position[:, None] // chunk == position // chunk) if chunk else True
    held = map(layout.places, range(layout.num_ranks))
    return [(set(places.tolist()), set(np.flatnonzero(sees[places].any(axis=0)).tolist()), sees) for places in held]


@given(row=rows(), linear_cost=LINEAR_COSTS, **LIMITS)
def test_ranks_send_each_other_what_their_tokens_attend_to(row, linear_cost, is_causal, window, chunk):
    layout = lay_out(*row, linear_cost)
    exchange = plan_exchange(layout, is_causal=is_causal, window=window, chunk=chunk)
    literal = literal_needs(layout, is_causal, window, chunk)
    begin = offsets_of(layout.lengths)
    for receiver, (_, needs, _) in enumerate(literal):
        own = exchange.spans.take(np.flatnonzero(exchange.receiver == receiver))
        senders = exchange.sender[exchange.receiver == receiver]
        got = []
        for document, start, length, sender in zip(own.document, own.start, own.length, senders, strict=True):
            places = range(begin[document] + start, begin[document] + start + length)
            assert literal[sender][0].issuperset(places)
            got += places
        assert got == sorted(needs)  # in the order of the row, and none twice
        for sender, (holds, _, _) in enumerate(literal):
            assert sent(exchange, row[1])[sender, receiver] == (len(needs & holds) if sender != receiver else 0)
    assert exchange.num_received == sent(exchange, row[1]).sum()


@given(row=rows(), linear_cost=LINEAR_COSTS, **LIMITS)
def test_pieces_see_what_their_tokens_attend_to(row, linear_cost, is_causal, window, chunk):
    layout = lay_out(*row, linear_cost)
    seen = plan_exchange(layout, is_causal=is_causal, window=window, chunk=chunk).seen
    begin, sees = offsets_of(layout.lengths), literal_needs(layout, is_causal, window, chunk)[0][2]
    for piece, document in enumerate(layout.pieces.document):
        tokens = begin[document] + layout.pieces.start[piece] + np.arange(layout.pieces.length[piece])
        expected = begin[document] + seen.start[piece] + np.arange(seen.length[piece])
        assert np.flatnonzero(sees[tokens].any(axis=0)).tolist() == expected.tolist()


def test_the_literal_needs_would_show_an_error():
    layout = lay_out([16], 2, 8)
    assert literal_needs(layout, True, None, None)[0][1] == set(range(16))
    assert literal_needs(layout, True, 3, None)[0][1] == {0, 1, 2, 3, 10, 11, 12, 13, 14, 15}
    assert literal_needs(layout, True, None, 4)[1][1] == set(range(4, 12))


def test_only_tokens_in_the_window_are_sent():
    """A window of 4,096 in a document of 131,072 tokens: every rank gets what is just before its two chunks."""
    layout = lay_out([131_072], 8, 16_384)
    received = sent(plan_exchange(layout, window=4096), 8).sum(axis=0)
    assert received.tolist() == [4095] + [2 * 4095] * 6 + [4095]
    assert sent(plan_exchange(layout), 8).sum() == 0.75 * 7 * 131_072
