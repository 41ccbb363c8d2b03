"""Bucket pre-training is all you need (arXiv 2407.07495): its Table 1, and the order of speeds in its Table 2.

    python recipes/reproduce/bucket_pretraining.py

Table 1: padding, cut documents and documents in a pack, on lengths like RefinedWeb's. Table 2: how fast a model trains
in each bucket when every step has as many tokens; here a small Llama, on buckets an eighth as long as the paper's.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from common import Report, options, parse, yes_or_no
from lengths import refinedweb_like
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import hf_packing as hfp

BUCKETS = (2048, 4096, 8192, 16384)
SMALLER_BUCKETS = (512, 1024)
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
PAPER_SPEED = {2048: 0.246, 4096: 0.105, 8192: 0.0, 16384: -0.116}
"""Table 2, gain in tokens per second over rows of 8192 tokens."""
COMPARED_WITH = 8192
SHRUNK = 8
"""How much shorter the trained buckets are than the paper's."""
VOCABULARY = 256


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15, help="steps in each bucket")
    parser.add_argument(
        "--hidden", type=int, default=128, help="width of the model; attention weighs more in a narrow one"
    )
    arguments = parse(parser, documents=20_000, rounds=3, hidden=32)
    report = Report("Bucket pre-training (arXiv 2407.07495)", "numpy", "torch", "transformers")
    table_1(refinedweb_like(arguments.documents), report)
    table_2(arguments, report)
    report.save(arguments.output / "bucket_pretraining.md")


def table_1(lengths: np.ndarray, report: Report) -> None:
    rows = {}
    strategies = {f"fixed {length}": hfp.FixedLength(length) for length in BUCKETS}
    strategies |= {"multi-bucket": hfp.BucketByLength(BUCKETS), "buckets": hfp.Bucket(BUCKETS)}
    strategies |= {"buckets, 512 and 1024 too": hfp.Bucket((*SMALLER_BUCKETS, *BUCKETS))}
    for name, strategy in tqdm(strategies.items(), desc="Planning"):
        found = hfp.plan_packing(lengths, strategy).metrics()
        rows[name] = found.padding_ratio, found.truncation_ratio, found.concatenation_ratio
        if name == "buckets":
            cut_by_choice = found.num_cut_documents - int((lengths > BUCKETS[-1]).sum())
            rows[f"buckets, {POOL:,} documents at a time"] = in_pools(lengths, strategy)
    report.table(
        f"Table 1, {len(lengths):,} RefinedWeb-like lengths, {lengths.mean():.0f} tokens on average",
        ["", "padding", "paper", "truncation", "paper", "concatenation", "paper"],
        [[name, *beside(figures, PAPER.get(name))] for name, figures in rows.items()],
    )
    fixed, theirs = PAPER["fixed 2048"][2], PAPER["buckets"][2]
    report.say(
        """
        Rows of one length and the multi-bucket baseline: truncation and concatenation match the paper's as far as two
        log-normals can; padding here is in the last row alone, while the paper's is probably that of many files.
        """
    )
    report.say(
        f"""
        Buckets: {(lengths > BUCKETS[-1]).mean():.3%} of the documents are longer than {BUCKETS[-1]} and cut in any
        plan; of the others {cut_by_choice:,} are cut. The paper does not say what share of a pack may stay free, nor
        over how many documents it plans; if few are packed at a time, padding comes closer to its figure.
        """
    )
    report.say(
        f"""
        A concatenation ratio of {theirs} is not possible with these four buckets: no pack is shorter than {BUCKETS[0]}
        tokens, so that a pack has at least as many documents as at fixed {BUCKETS[0]}, {fixed} in the paper's own
        table, unless {1 - theirs / fixed:.0%} were padding. Buckets of 512 and 1024 beside them give
        {found.concatenation_ratio:.2f}.
        """
    )


def beside(ours: tuple[float, ...], papers: tuple[float, ...] | None) -> list[str]:
    """Return our figures, each followed by the paper's."""
    forms = ((".3%", ".2%"), (".3%", ".2%"), (".2f", ".2f"))
    theirs = papers or (None,) * len(ours)
    cells = (
        (f"{own:{form}}", f"{paper:{of_paper}}" if paper else "")
        for own, paper, (form, of_paper) in zip(ours, theirs, forms, strict=True)
    )
    return [cell for pair in cells for cell in pair]


def in_pools(lengths: np.ndarray, strategy: hfp.Bucket) -> tuple[float, float, float]:
    """Pack the documents some at a time, as for streamed data, and return the three figures."""
    pools = np.array_split(lengths, -(-len(lengths) // POOL))
    plans = [hfp.plan_packing(pool, strategy) for pool in tqdm(pools, desc=f"Pools of {POOL}", leave=False)]
    found = [plan.metrics() for plan in plans]
    slots = sum(int(plan.pack_capacity.sum()) for plan in plans)
    return (
        sum(each.num_padding_slots for each in found) / slots,
        sum(each.num_cut_documents for each in found) / len(lengths),
        len(lengths) / sum(each.num_packs for each in found),
    )


def table_2(arguments: argparse.Namespace, report: Report) -> None:
    buckets = [length // SHRUNK for length in BUCKETS]
    seconds = train_in_turn(buckets, arguments.rounds, arguments.hidden)
    reference = seconds[COMPARED_WITH // SHRUNK]
    speed = {bucket: speed_beside(reference, own) for bucket, own in seconds.items()}
    report.table(
        f"Table 2, speed in each bucket beside that of {COMPARED_WITH // SHRUNK}, {max(buckets)} tokens a step",
        ["bucket", "rows a step", "speed", "paper's bucket", "paper"],
        [
            [
                f"{bucket}",
                f"{max(buckets) // bucket}",
                f"{speed[bucket] - 1:+.1%}",
                f"{paper}",
                f"{PAPER_SPEED[paper]:+.1%}",
            ]
            for bucket, paper in zip(buckets, BUCKETS, strict=True)
        ],
    )
    same = sorted(buckets, key=lambda bucket: -speed[bucket]) == buckets
    report.say(
        f"""
        The shorter the rows, the faster, as in the paper: {yes_or_no(same)}. How much faster depends on how much of
        the work is attention, here in a model {arguments.hidden} wide with rows {SHRUNK} times as short. It also
        depends on documents that fill their bucket, as they do here: short documents that are kept apart in a long row
        cost as much as in a short one.
        """
    )


def train_in_turn(buckets: Sequence[int], rounds: int, hidden: int) -> dict[int, list[float]]:
    """Return CPU seconds of every step in each bucket, on documents that fill it, with equal tokens per step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=max(buckets), **sizes)
    model = hfp.patch_model(LlamaForCausalLM(config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng, collate = np.random.default_rng(0), hfp.PackingCollator()
    seconds: dict[int, list[float]] = {bucket: [] for bucket in buckets}
    for number in tqdm(range(rounds + 1), desc="Training in each bucket in turn"):
        for bucket in buckets:
            tokens = rng.integers(0, VOCABULARY, (max(buckets) // bucket, bucket))
            batch = collate([{"input_ids": document} for document in tokens])
            began = time.process_time()
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number:
                seconds[bucket].append(time.process_time() - began)
    return seconds


def speed_beside(reference: list[float], own: list[float]) -> float:
    """Return how many times as fast it is, by the median of the ratios round by round."""
    return statistics.median(theirs / ours for theirs, ours in zip(reference, own, strict=True))


if __name__ == "__main__":
    main()
