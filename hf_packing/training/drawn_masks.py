"""Mask many documents at once as `DataCollatorForLanguageModeling` does, with random numbers of each document's own.

The collator masks one batch with the draws of one generator, so masks would depend on the batch. Here, the random
numbers of a token are a hash of the document's key, of the token's place in the document, and of what is drawn.
"""

import numpy as np
import numpy.typing as npt
from transformers import DataCollatorForLanguageModeling

from hf_packing.columns import IGNORED_LABEL
from hf_packing.planning.lengths import IntArray

BoolArray = npt.NDArray[np.bool_]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
"""Constants of SplitMix64, a random generator whose n-th number is a hash of n."""

_METHODS = ("torch_mask_tokens", "_calc_word_ids_and_prob_mask", "_whole_word_mask")

CHOSEN, HIDDEN, REPLACED, WORD = range(4)
"""What is drawn for a token: whether it is to be predicted; if so, whether the mask token hides it; if not, whether
another token replaces it, and which."""
_DRAWS = 4


def masks_as_stock(collator: object) -> bool:
    """Return whether a collator masks tokens by the methods of DataCollatorForLanguageModeling."""
    stock = DataCollatorForLanguageModeling
    return isinstance(collator, stock) and all(
        getattr(type(collator), name, None) is getattr(stock, name) for name in _METHODS
    )


def uniform(keys: npt.NDArray[np.uint64], places: IntArray, draw: int) -> npt.NDArray[np.float64]:
    """Return a random number from 0 to 1 for each token, float64 [tokens].

    Args:
        keys: uint64 [tokens]: the key of each token's document.
        places: int64 [tokens]: the place of each token in its document.
        draw: what is drawn, from CHOSEN to WORD.
    """
    mixed = keys + (places.astype(np.uint64) * np.uint64(_DRAWS) + np.uint64(draw + 1)) * _STEP
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX[1]
    mixed ^= mixed >> _SHIFTS[2]
    drawn: npt.NDArray[np.float64] = (mixed >> np.uint64(11)) * 2.0**-53
    return drawn


def draw_masks(
    collator: DataCollatorForLanguageModeling,
    tokens: IntArray,
    lengths: IntArray,
    keys: npt.NDArray[np.uint64],
    special: BoolArray,
    offsets: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Mask documents that lie end to end.

    Args:
        collator: the collator whose settings and tokenizer count.
        tokens: int64 [tokens]: the documents, one after the other.
        lengths: int64 [documents]: number of tokens in each document.
        keys: uint64 [documents]: random keys, which decide the masks.
        special: bool [tokens]: True for tokens that are never masked.
        offsets: int64 [tokens, 2]: first character of each token, and the one after its last, for whole words.

    Returns:
        The tokens with masks, int64 [tokens], and labels, int64 [tokens]: the token that was there, or -100.
    """
    places = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    of_token = np.repeat(keys, lengths)

    def happens(draw: int, rate: float) -> BoolArray:
        return uniform(of_token, places, draw) < rate

    chosen = happens(CHOSEN, collator.mlm_probability) & ~special
    if collator.whole_word_mask:
        begins = _word_begins(offsets, special, places)
        word = np.cumsum(begins) - 1
        chosen = chosen[begins][word] & ~special if begins.any() else begins
    labels = np.where(chosen, tokens, IGNORED_LABEL)
    hidden = chosen & happens(HIDDEN, collator.mask_replace_prob)
    tokenizer = collator.tokenizer
    masked = np.where(hidden, tokenizer.convert_tokens_to_ids(tokenizer.mask_token), tokens)
    if collator.mask_replace_prob < 1 and collator.random_replace_prob > 0:
        rate = collator.random_replace_prob / (1 - collator.mask_replace_prob)
        replaced = chosen & ~hidden & happens(REPLACED, rate)
        words = (uniform(of_token, places, WORD) * len(tokenizer)).astype(np.int64)
        masked = np.where(replaced, words, masked)
    return masked, labels


def _word_begins(offsets: IntArray | None, special: BoolArray, places: IntArray) -> BoolArray:
    """Return which tokens begin a word, bool [tokens]: those after a gap, after a special token, or of a document."""
    assert offsets is not None
    after_gap, after_special = np.ones(len(special), dtype=bool), np.zeros(len(special), dtype=bool)
    after_gap[1:] = offsets[1:, 0] != offsets[:-1, 1]
    after_special[1:] = special[:-1]
    begins: BoolArray = ~special & (after_gap | after_special | (places == 0))
    return begins
