"""Efficient sequence packing without cross-contamination (arXiv 2107.02027): the efficiency table, and a packed BERT.

    python recipes/reproduce/krell.py

The table uses the lengths of BERT's Wikipedia data, 16 million sequences of at most 512 tokens, from counts alone. The
BERT is a small one with random weights, trained on text of Wikipedia cut into sequences with half those lengths.
"""

import argparse
import gzip
import json
import time

import numpy as np
from common import Report, options, parse, shared_file, yes_or_no
from packed_bert import Run, make_corpus, train
from tokenizers import Tokenizer
from tqdm.auto import tqdm

import hf_packing as hfp

LENGTH = 512
HALVED = 2
DEPTHS = (1, 2, 3, 4, 8, 12, 16, None)
"""Most sequences in a pack."""
PAPER_PACKS = {
    "SPFHP": {1: 16_279_552, 2: 10_101_683, 3: 9_094_695, 4: 8_658_996, 8: 8_224_673, 16: 8_166_708},
    "LPFHP": {1: 16_279_552, 2: 10_099_081, 3: 9_090_154, 4: 8_657_119, 8: 8_207_569, 12: 8_149_619, 16: 8_140_006}
    | {None: 8_138_483},
    "NNLSHP": {3: 8_155_059},
}
"""Packs by depth, from the paper and, for LPFHP, from its authors' code on the same histogram."""
PAPER_SPEED = 2.0
"""BERT-large, second phase."""
PAPER_ACCURACY = (0.721, 0.718)
"""Share of masked tokens predicted correctly, with positions that restart and with positions that do not."""
SHOWN = 8
"""Rows of the loss table."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--packs-per-step", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--no-solvers", action="store_true", help="leave out NNLSHP and Optimal, which take seconds")
    arguments = parse(parser, steps=6, packs_per_step=2, hidden=32, no_solvers=True)
    histogram = shared_file(
        "bert_wikipedia_512_histogram.json", "that of graphcore/examples, tutorials/blogs_code/packedBERT/histograms.py"
    )
    counts = np.array([0, *json.loads(histogram.read_text())["wikipedia_bert_512"]["counts"]])
    report = Report(
        "Sequence packing without cross-contamination (arXiv 2107.02027)", "numpy", "scipy", "torch", "transformers"
    )
    efficiency(counts, arguments.no_solvers, report)
    packed_bert(counts, arguments, report)
    report.save(arguments.output / "krell.md")


def efficiency(counts: np.ndarray, no_solvers: bool, report: Report) -> None:
    todo = [("SPFHP", depth, hfp.ShortestPackFirst(LENGTH, max_documents=depth)) for depth in DEPTHS]
    todo += [("LPFHP", depth, hfp.BestFit(LENGTH, max_documents=depth)) for depth in DEPTHS]
    if not no_solvers:
        todo += [("NNLSHP", 3, hfp.NonNegativeLeastSquares(LENGTH))]
        todo += [("Optimal", depth, hfp.Optimal(LENGTH, max_documents=depth)) for depth in (3, None)]
    rows, seconds, same, spare = [], {}, True, 0
    for name, depth, strategy in tqdm(todo, desc="Planning"):
        began = time.process_time()
        found = hfp.plan_counts(counts, strategy).metrics()
        seconds[name, depth] = time.process_time() - began
        paper = PAPER_PACKS.get(name, {}).get(depth)
        of_tokens = found.num_tokens / LENGTH
        same &= name not in ("SPFHP", "LPFHP") or paper in (None, found.num_packs)
        if name == "Optimal":
            spare = max(spare, found.num_packs - found.lower_bound)
        rows.append(
            [
                name,
                str(depth or "any"),
                f"{found.num_packs:,}",
                f"{paper:,}" if paper else "",
                f"{found.packing_efficiency:.4%}",
                f"{of_tokens / paper:.4%}" if paper else "",
                f"{found.packing_factor:.4f}",
            ]
        )
    report.table(
        f"{counts.sum():,} sequences of BERT's Wikipedia data, packs of {LENGTH}",
        ["", "depth", "packs", "paper", "efficiency", "paper", "packing factor"],
        rows,
    )
    report.say(f"SPFHP and LPFHP need exactly as many packs as in the paper: {yes_or_no(same)}.")
    if not no_solvers:
        report.say(
            f"""
            NNLSHP needs fewer packs than in the paper: sequences that rounding leaves over are packed together here,
            while the paper gives each of them a pack of its own. Optimal is not in the paper; at depth 3 it takes
            {seconds["Optimal", 3] / seconds["NNLSHP", 3]:.1f} of the time of NNLSHP, and proves that at most {spare} of
            its packs could be saved at either depth.
            """
        )


def packed_bert(counts: np.ndarray, arguments: argparse.Namespace, report: Report) -> None:
    with gzip.open(
        shared_file("wiki.jsonl.gz", "the valid and test articles of WikiText-2, one {text} a line"), "rt"
    ) as file:
        texts = [json.loads(line)["text"] for line in file]
    tokenizer = Tokenizer.from_file(str(shared_file("tokenizer.json", "a byte-level BPE of 8192 tokens")))
    packs = arguments.steps * arguments.packs_per_step
    drawn = np.random.default_rng(0).choice(len(counts), 3 * packs, p=counts / counts.sum())
    corpus = make_corpus(texts, tokenizer, -(-drawn // HALVED), LENGTH // HALVED)
    runs = train(corpus, arguments.steps, arguments.packs_per_step, arguments.hidden, arguments.learning_rate)
    trained = [len(pack) for pack in corpus.packs[:packs]]
    unpacked, packed, leaking = runs.values()
    report.table(
        f"A BERT {arguments.hidden} wide, the same {sum(trained):,} sequences in the same {arguments.steps} steps",
        ["step", *runs, "packed - unpacked", "not apart - unpacked"],
        [
            [
                str(step + 1),
                *(f"{run.losses[step]:.5f}" for run in runs.values()),
                f"{packed.losses[step] - unpacked.losses[step]:+.1e}",
                f"{leaking.losses[step] - unpacked.losses[step]:+.1e}",
            ]
            for step in np.unique(np.linspace(0, arguments.steps - 1, SHOWN).round().astype(int))
        ],
    )
    last = max(1, arguments.steps // 4)

    def late(run: Run) -> float:
        return float(np.mean(run.losses[-last:]))

    factor, speed = float(np.mean(trained)), unpacked.seconds / packed.seconds
    report.say(
        f"""
        Largest difference of a step's loss from the unpacked one: {apart(packed, unpacked):.1e} packed,
        {apart(leaking, unpacked):.1e} packed and not kept apart. As in the paper, packed training is the same as
        unpacked if sequences are kept apart, count their own positions and weigh the same in the loss; if they are not
        kept apart, it differs. Mean of the last {last} steps: {late(unpacked):.4f} unpacked, {late(packed):.4f} packed,
        {late(leaking):.4f} not kept apart. In the paper, after a whole pre-training, {PAPER_ACCURACY[0]:.1%} of
        the masked tokens are predicted correctly, packed as well as unpacked, and {PAPER_ACCURACY[1]:.1%} if only the
        positions do not restart.
        """
    )
    report.say(
        f"""
        A pack holds {factor:.2f} sequences. Packed is {speed:.2f} times as fast as padded to {corpus.length}, in
        sequences per CPU second (paper: {PAPER_SPEED:.0f} times for BERT-large); that is {speed / factor:.0%} of the
        packing factor.
        """
    )


def apart(run: Run, other: Run) -> float:
    return float(np.abs(np.subtract(run.losses, other.losses)).max())


if __name__ == "__main__":
    main()
