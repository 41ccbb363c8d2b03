"""Masks drawn for many documents at once: those of transformers' collator, if it had the same random numbers."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masking_process import TOKENIZER, collator
from transformers import DataCollatorForLanguageModeling

from hf_packing.training.drawn_masks import CHOSEN, HIDDEN, REPLACED, WORD, draw_masks, masks_as_stock, uniform


@st.composite
def documents(draw):
    """Lengths, keys, tokens, which of them are special, and the first and last character of each."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    total = sum(lengths)
    special = rng.random(total) < 0.2
    gaps = rng.random(total) < 0.4
    ends = np.cumsum(np.where(special, 0, 1) + gaps)
    offsets = np.stack([ends - 1, ends], 1)
    offsets[special] = 0
    return lengths, rng.integers(0, 2**64, len(lengths), dtype=np.uint64), rng.integers(5, 99, total), special, offsets


def stock_with_our_numbers(given, tokens, special, offsets, key, monkeypatch):
    """What the collator's own method returns for one document, with random numbers of `uniform`."""
    draws = iter((CHOSEN, HIDDEN, REPLACED))
    keys, places = np.full(len(tokens), key), np.arange(len(tokens))

    def bernoulli(rates, generator):  # noqa: ARG001
        return torch.from_numpy(uniform(keys, places, next(draws)) < rates[0].double().numpy())[None].float()

    def randint(high, shape, dtype, generator):  # noqa: ARG001
        return torch.from_numpy((uniform(keys, places, WORD) * high).astype(np.int64)).view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "bernoulli", bernoulli)
        patch.setattr(torch, "randint", randint)
        ids, labels = given.torch_mask_tokens(
            torch.from_numpy(tokens.copy())[None], torch.from_numpy(special)[None], torch.from_numpy(offsets)[None]
        )
    return ids[0].numpy(), labels[0].numpy()


OPTIONS = (
    {},
    {"mask_replace_prob": 0.0, "random_replace_prob": 1.0},
    {"mask_replace_prob": 1.0, "random_replace_prob": 0.0},
    {"whole_words": True},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_to_the_collator_with_the_same_random_numbers(options, monkeypatch):
    ours = collator(mlm_probability=0.4, **options)
    seen = []

    @settings(max_examples=60, deadline=None)
    @given(documents())
    def check(case):
        lengths, keys, tokens, special, offsets = case
        found = draw_masks(ours, tokens, np.array(lengths), keys, special, offsets)
        borders = np.cumsum(lengths)[:-1]
        parts = zip(*(np.split(each, borders) for each in (tokens, special, offsets)), keys, strict=True)
        expected = [stock_with_our_numbers(ours, *part, monkeypatch) for part in parts]
        for which in range(2):
            np.testing.assert_array_equal(found[which], np.concatenate([each[which] for each in expected]))
        seen.append((found[1] != -100).mean())

    check()
    assert 0 < np.mean(seen) < 1


def test_numbers_of_splitmix64():
    """The first outputs of the published generator for the seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    draws = [(number // 4, number % 4) for number in range(5)]
    found = [uniform(np.zeros(1, np.uint64), np.array([place]), draw)[0] for place, draw in draws]
    assert found == [(number >> 11) / 2**53 for number in expected]


def test_numbers_are_uniform_and_independent():
    keys = np.arange(2000, dtype=np.uint64).repeat(50)
    places = np.tile(np.arange(50), 2000)
    drawn = np.stack([uniform(keys, places, draw) for draw in range(4)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.array([np.histogram(each, 20, (0, 1))[0] for each in drawn])
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)
    grid = drawn[0].reshape(2000, 50)
    for one, other in ((drawn[0], drawn[1]), (grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(one.size)


class OwnMasks(DataCollatorForLanguageModeling):
    def torch_mask_tokens(self, inputs, **columns):
        return super().torch_mask_tokens(inputs, **columns)


class OwnWords(DataCollatorForLanguageModeling):
    _whole_word_mask = staticmethod(partial(DataCollatorForLanguageModeling._whole_word_mask))


def test_methods_of_the_users_are_called():
    assert masks_as_stock(collator())
    assert masks_as_stock(type("Other", (DataCollatorForLanguageModeling,), {})(TOKENIZER))
    assert not masks_as_stock(OwnMasks(TOKENIZER))
    assert not masks_as_stock(OwnWords(TOKENIZER))
    assert not masks_as_stock(object())
