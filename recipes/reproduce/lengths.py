"""Document lengths distributed like those of RefinedWeb and of SQuAD."""

import numpy as np

WIDE_SHARE = 0.3831637
NARROW, WIDE = (6.2047192, 0.8323742), (5.2399588, 1.6609820)
"""Mean and deviation of the logarithms."""
LONGEST = 1 << 18
BLOCK = 1 << 22

SQUAD_ROWS, SQUAD_LONGEST = 88_641, 384
SQUAD_CUT = 0.01189
"""Share of windows with 384 tokens: almost all are parts of longer texts."""
SQUAD_QUANTILES = (
    *(36, 77, 99, 112, 118, 123, 128, 133, 137, 142, 146, 151, 156),
    *(161, 167, 173, 179, 186, 194, 203, 214, 227, 244, 265, 297, 383),
)
"""Length of every 25th of the others, in tokens."""


def refinedweb_like(documents: int, seed: int = 0) -> np.ndarray:
    """int32 [documents], tokens, from two log-normals.

    They were fitted to Table 1 of arXiv 2407.07495: cut every 2048, 4096, 8192 or 16384 tokens, they have the same
    shares of cut documents as 100 GB of RefinedWeb. Drawn in blocks, to use little more memory than the result.
    """
    rng = np.random.default_rng(seed)
    lengths = np.empty(documents, dtype=np.int32)
    for begin in range(0, documents, BLOCK):
        block = lengths[begin : begin + BLOCK]
        wide = rng.random(len(block)) < WIDE_SHARE
        mean, deviation = np.where(wide, WIDE[0], NARROW[0]), np.where(wide, WIDE[1], NARROW[1])
        block[:] = np.clip(np.rint(np.exp(rng.normal(mean, deviation))), 1, LONGEST)
    return lengths


def squad_like(rows: int = SQUAD_ROWS) -> np.ndarray:
    """int32 [rows], tokens of question and context, in ascending order, in windows of at most 384.

    Interpolated between quantiles of SQuAD 1.1, tokenized for BERT: those of the histogram in graphcore/examples,
    tutorials/blogs_code/packedBERT/histograms.py, of the authors of arXiv 2107.02027.
    """
    share = (np.arange(rows) + 0.5) / rows / (1 - SQUAD_CUT)
    lengths = np.interp(share, np.linspace(0, 1, len(SQUAD_QUANTILES)), SQUAD_QUANTILES)
    return np.where(share > 1, SQUAD_LONGEST, np.rint(lengths)).astype(np.int32)
