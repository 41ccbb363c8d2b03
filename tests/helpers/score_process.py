"""One of the processes of test_score: scores documents, and writes what it got.

torchrun --nproc-per-node 2 score_process.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from patched_models import patched_tiny

import hf_packing as hfp

LENGTHS = (5, 30, 0, 1, 12, 44, 2, 19, 7)


def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(8, 120, length).tolist() for length in LENGTHS]


def related_documents():
    """Documents that share prefixes, in several rows of 50 tokens."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, 120, length).tolist() for length in (20, 33)]
    return [prompts[number % 2] + rng.integers(8, 120, 3 + number).tolist() for number in range(8)]


def main(folder):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for name, rows, share in (("packed", documents(), False), ("trees", related_documents(), True)):
        model = patched_tiny("llama", "causal", torch.float64)
        scores = hfp.score(model, rows, max_tokens=50, hidden="mean", share_prefixes=share)
        np.savez(
            folder / f"{name}-{accelerator.process_index}.npz",
            log_likelihood=scores.log_likelihood,
            num_tokens=scores.num_tokens,
            greedy=scores.greedy,
            hidden=scores.hidden,
        )
    one = hfp.score(patched_tiny("llama", "causal", torch.float64), documents()[:1])  # fewer rows than processes
    assert one.num_tokens.tolist() == [LENGTHS[0] - 1]
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
