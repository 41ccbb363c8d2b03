"""Lengths like those of real datasets, drawn from probability distributions."""

import numpy as np

BLOCK = 1 << 22


def log_normal(documents: int, mean: float, deviation: float, longest: int, seed: int = 0) -> np.ndarray:
    """Draw int32 [documents] in blocks, to use little more memory than the result."""
    rng = np.random.default_rng(seed)
    lengths = np.empty(documents, dtype=np.int32)
    for begin in range(0, documents, BLOCK):
        block = lengths[begin : begin + BLOCK]
        block[:] = np.clip(rng.lognormal(mean, deviation, len(block)), 1, longest)
    return lengths


def uniform(documents: int, shortest: int, longest: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(shortest, longest + 1, documents, dtype=np.int32)


def refinedweb_like(documents: int, seed: int = 0) -> np.ndarray:
    """Draw from two log-normals, with the baseline figures of 100 GB of RefinedWeb (arXiv 2407.07495, Table 1)."""
    rng = np.random.default_rng(seed)
    wide = rng.random(documents) < 0.3831637
    mean, deviation = np.where(wide, 5.2399588, 6.2047192), np.where(wide, 1.6609820, 0.8323742)
    return np.clip(np.rint(np.exp(rng.normal(mean, deviation))), 1, 2**18).astype(np.int32)
