"""Bucket pre-training is all you need (arXiv 2407.07495): its Table 1, and the order of speeds in its Table 2.

    python recipes/reproduce/bucket_pretraining.py

Table 1: padding, cut documents and documents in a pack, on lengths like RefinedWeb's. Table 2: how fast a model trains
in each bucket when every step has as many tokens; here a small Llama, on buckets an eighth as long as the paper's. It
takes as many steps in each bucket as there are rounds; attention weighs more in a narrower model.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from common import Report, Stopwatch, options, parse, refinedweb_like, small_model, yes_or_no
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM

import hf_packing as hfp

BUCKETS, SMALLER_BUCKETS = (2048, 4096, 8192, 16384), (512, 1024)
POOL = 1000
"""Documents packed at a time, in the variant that does not pack all at once."""
PAPER = {
    "fixed 2048": (0.0003, 0.2839, 2.85),
    "fixed 4096": (0.0005, 0.1565, 5.70),
    "fixed 8192": (0.0008, 0.0826, 11.39),
    "fixed 16384": (0.001, 0.0425, 22.74),
    "multi-bucket": (0.0007, 0.268, 3.78),
    "buckets": (0.0028, 0.0018, 2.31),
}
"""Table 1: padding, truncation, concatenation."""
PAPER_GAIN = (0.246, 0.105, 0.0, -0.116)
"""Table 2: for each bucket, the gain in tokens per second over rows of 8192 tokens."""
COMPARED_WITH, SHRUNK = BUCKETS.index(8192), 8
"""The trained buckets are this many times shorter than the paper's."""
VOCABULARY = 256


def main() -> None:
    parser = options(__doc__, documents=1_000_000, rounds=15, hidden=128)
    arguments = parse(parser, documents=20_000, rounds=3, hidden=32)
    report = Report("Bucket pre-training (arXiv 2407.07495)", "numpy", "torch", "transformers")
    table_1(refinedweb_like(arguments.documents), report)
    table_2(arguments.rounds, arguments.hidden, report)
    report.save(arguments.output / "bucket_pretraining.md")


def table_1(lengths: np.ndarray, report: Report) -> None:
    pools, all_buckets = np.array_split(lengths, -(-len(lengths) // POOL)), (*SMALLER_BUCKETS, *BUCKETS)
    found = {f"fixed {length}": figures(hfp.FixedLength(length), [lengths]) for length in BUCKETS}
    found["multi-bucket"] = figures(hfp.BucketByLength(BUCKETS), [lengths])
    found["buckets"] = figures(hfp.Bucket(BUCKETS), [lengths])
    found[f"buckets, {POOL:,} documents at a time"] = figures(hfp.Bucket(BUCKETS), pools)
    found["buckets, 512 and 1024 too"] = figures(hfp.Bucket(all_buckets), [lengths])
    report.table(
        f"Table 1, {len(lengths):,} RefinedWeb-like lengths, {lengths.mean():.0f} tokens on average",
        ["", "padding:.3%", "paper:.2%", "truncation:.3%", "paper:.2%", "concatenation:.2f", "paper:.2f"],
        [[name, *chain(*zip(ours, PAPER.get(name, [None] * 3), strict=True))] for name, ours in found.items()],
    )
    longer = (lengths > BUCKETS[-1]).mean()
    cut_by_choice = round((found["buckets"][1] - longer) * len(lengths))
    fixed, theirs = PAPER["fixed 2048"][2], PAPER["buckets"][2]
    report.say(f"""
        Rows of one length and the multi-bucket baseline: truncation and concatenation match the paper's as far as two
        log-normals can; padding here is in the last row alone, while the paper's is probably that of many files.

        Buckets: {longer:.3%} of the documents are longer than {BUCKETS[-1]} and cut in any plan; of the others
        {cut_by_choice:,} are cut. The paper does not say what share of a pack may stay free, nor over how many
        documents it plans; if few are packed at a time, padding comes closer to its figure.

        A concatenation ratio of {theirs} is not possible with these four buckets: no pack is shorter than {BUCKETS[0]}
        tokens, so that a pack has at least as many documents as at fixed {BUCKETS[0]}, {fixed} in the paper's own
        table, unless {1 - theirs / fixed:.0%} were padding. Buckets of 512 and 1024 beside them give
        {found["buckets, 512 and 1024 too"][2]:.2f}.
    """)


def figures(strategy: object, pools: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Pack each pool of lengths by itself, and return padding, truncation and concatenation over all of them."""
    plans = [hfp.plan_packing(pool, strategy) for pool in tqdm(pools, desc=f"Planning with {strategy}", leave=False)]
    slots = sum(int(plan.pack_capacity.sum()) for plan in plans)
    found = [plan.metrics() for plan in plans]
    documents, packs = sum(each.num_documents for each in found), sum(each.num_packs for each in found)
    padding, cut = sum(each.num_padding_slots for each in found), sum(each.num_cut_documents for each in found)
    return padding / slots, cut / documents, documents / packs


def table_2(rounds: int, hidden: int, report: Report) -> None:
    """Train in each bucket in turn, on documents that fill it, with equal tokens per step."""
    buckets = [length // SHRUNK for length in BUCKETS]
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 3 * hidden, "max_position_embeddings": max(buckets)}
    model = hfp.patch_model(small_model(LlamaForCausalLM, hidden, 2, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng, collate, seconds = np.random.default_rng(0), hfp.PackingCollator(), np.zeros((rounds + 1, len(buckets)))
    for number in tqdm(range(rounds + 1), desc="Training in each bucket in turn"):
        for place, bucket in enumerate(buckets):
            tokens = rng.integers(0, VOCABULARY, (max(buckets) // bucket, bucket))
            batch = collate([{"input_ids": document} for document in tokens])
            with Stopwatch() as watch:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seconds[number, place] = watch.seconds
    seconds = seconds[1:]  # the first round warms up
    gains = np.median(seconds[:, [COMPARED_WITH]] / seconds, axis=0) - 1
    report.table(
        f"Table 2, speed in each bucket beside that of {buckets[COMPARED_WITH]}, {max(buckets)} tokens a step",
        ["bucket", "rows a step", "speed:+.1%", "paper's bucket", "paper:+.1%"],
        zip(buckets, [max(buckets) // bucket for bucket in buckets], gains, BUCKETS, PAPER_GAIN, strict=True),
    )
    same = all(np.diff(gains) < 0)
    report.say(f"""
        The shorter the rows, the faster, as in the paper: {yes_or_no(same)}. How much faster depends on how much of
        the work is attention, here in a model {hidden} wide with rows {SHRUNK} times as short. It also depends on
        documents that fill their bucket, as they do here: short documents that are kept apart in a long row cost as
        much as in a short one.
    """)


if __name__ == "__main__":
    main()
