"""Efficient sequence packing without cross-contamination (arXiv 2107.02027) on SQuAD: packs, and the speed of training.

    python recipes/reproduce/packed_squad.py

Lengths are distributed like those of SQuAD 1.1; tokens and answers are random, since only the speed is measured. A
small BERT answers questions four times over: padded to 384, padded to the longest row of a batch, packed in rows of 384
with a block-diagonal mask and positions that restart, as in the paper, and with the batches of a token budget, without
padding.
"""

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from common import Report, options, parse, yes_or_no
from lengths import SQUAD_LONGEST, squad_like
from torch import Tensor
from tqdm.auto import tqdm
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedModel

import hf_packing as hfp
from hf_packing.sampling.row_sizes import sizes_of_documents
from hf_packing.sampling.sampler import RankBatchSampler

AUTHORS_PACKS = {
    ("SPFHP", 1): 88_641,
    ("SPFHP", 2): 45_335,
    ("SPFHP", 3): 40_711,
    ("LPFHP", 2): 45_335,
    ("LPFHP", 3): 40_631,
    ("LPFHP", None): 40_631,
    ("NNLSHP", 3): 40_778,
}
"""Of the authors' code on their histogram of SQuAD 1.1."""
VOCABULARY = 4096
CLOSE = 1e-4
PADDED, BY_BATCH, PACKED, OURS = "padded to 384", "padded to the longest", "packed in rows of 384", "token budget"

Batch = tuple[dict[str, Tensor], list[tuple[int, int, slice]]]
"""The model's inputs, and for each document its number, its row and its place in the row."""


@dataclass
class Side:
    """A model, its batches, and the time of their forward and backward passes."""

    model: PreTrainedModel
    batches: list[Batch]
    slots: int
    """Places of the batches that the encoder computes, padding included."""
    seconds: list[float]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch that is padded to its longest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--no-solvers", action="store_true", help="leave out NNLSHP, which takes seconds")
    arguments = parse(parser, rows=24, rounds=1, hidden=32, no_solvers=True)
    report = Report("Packed SQuAD (arXiv 2107.02027)", "numpy", "torch", "transformers")
    packs(arguments.no_solvers, report)
    speed(arguments, report)
    report.save(arguments.output / "packed_squad.md")


def packs(no_solvers: bool, report: Report) -> None:
    counts = np.bincount(squad_like(), minlength=SQUAD_LONGEST + 1)
    todo = [("SPFHP", depth, hfp.ShortestPackFirst(SQUAD_LONGEST, max_documents=depth)) for depth in (1, 2, 3)]
    todo += [("LPFHP", depth, hfp.BestFit(SQUAD_LONGEST, max_documents=depth)) for depth in (2, 3, None)]
    if not no_solvers:
        todo += [("NNLSHP", 3, hfp.NonNegativeLeastSquares(SQUAD_LONGEST))]
    rows = []
    for name, depth, strategy in todo:
        found, authors = hfp.plan_counts(counts, strategy).metrics(), AUTHORS_PACKS[name, depth]
        numbers = f"{found.num_packs:,}", f"{authors:,}", f"{found.packing_efficiency:.2%}"
        rows.append(
            [name, str(depth or "any"), *numbers, f"{found.packing_factor:.3f}", f"{counts.sum() / authors:.3f}"]
        )
    report.table(
        f"{counts.sum():,} lengths like SQuAD's, {np.dot(counts, np.arange(len(counts))) / counts.sum():.1f} tokens on "
        f"average, packs of {SQUAD_LONGEST}",
        ["", "depth", "packs", "authors", "efficiency", "packing factor", "authors"],
        rows,
    )
    report.say(
        """
        The lengths lie between quantiles of the authors' histogram, which is not part of the package; "authors" is
        their code on that histogram. It calls the packing factor the speed-up, which is the most that packs can gain
        over rows that are all padded to 384. Batches padded to their longest row, as most trainers make them, leave
        less to gain.
        """
    )


def speed(arguments: argparse.Namespace, report: Report) -> None:
    lengths = np.random.default_rng(0).permutation(squad_like(arguments.rows))
    rng = np.random.default_rng(1)
    documents = [rng.integers(5, VOCABULARY, length) for length in lengths]
    answers = [np.sort(rng.integers(0, length, 2)) for length in lengths]
    found = sides(documents, arguments)
    gradients = [compute(side, answers) for side in found.values()]
    largest = max(float(each.abs().max()) for each in gradients[0])
    apart = max(
        float((one - other).abs().max()) / largest
        for others in gradients[1:]
        for one, other in zip(gradients[0], others, strict=True)
    )
    for _ in tqdm(range(arguments.rounds), desc="Training in turn"):
        for side in found.values():
            began = time.process_time()
            compute(side, answers)
            side.seconds.append(time.process_time() - began)
    tokens = int(lengths.sum())
    seconds = {name: float(np.median(side.seconds)) for name, side in found.items()}
    report.table(
        f"A BERT {arguments.hidden} wide, forward and backward passes on {len(lengths):,} rows, {tokens:,} tokens",
        ["batches", "slots per token", "tokens per CPU second", "beside padded to 384", "beside the longest"],
        [
            [
                name,
                f"{side.slots / tokens:.2f}",
                f"{tokens / seconds[name]:,.0f}",
                *(f"{seconds[other] / seconds[name]:.2f}" for other in (PADDED, BY_BATCH)),
            ]
            for name, side in found.items()
        ],
    )
    gain, factor = seconds[PADDED] / seconds[OURS], len(lengths) / (found[PACKED].slots / SQUAD_LONGEST)
    report.say(
        f"""
        The sum of the gradients over all rows is the same in all four: {yes_or_no(apart < CLOSE)}, within {apart:.0e}
        of its largest entry. The packing factor of these rows is {factor:.2f}. Packed in rows of 384, training is
        {seconds[PADDED] / seconds[PACKED]:.2f} times as fast as padded to 384; with a token budget and without padding,
        {gain:.2f} times. This can be more than the packing factor, since attention is computed within documents, and
        not over rows of 384. Medians of {arguments.rounds} rounds, in turn. The authors trained on other hardware, so
        only ratios can be compared.
        """
    )


def sides(documents: Sequence[np.ndarray], arguments: argparse.Namespace) -> dict[str, Side]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=SQUAD_LONGEST,
        hidden_dropout_prob=0,  # what it draws would depend on the layout
        attention_probs_dropout_prob=0,
    )
    stock = BertForQuestionAnswering(config).train()
    unpadded = hfp.patch_model(copy.deepcopy(stock))
    lengths = np.array([len(each) for each in documents])
    plan = hfp.plan_packing(lengths, hfp.ShortestPackFirst(SQUAD_LONGEST, max_documents=3))
    all_packs = np.split(plan.segment_document, plan.pack_offsets[1:-1])
    budget = arguments.batch * SQUAD_LONGEST // 2
    planned = RankBatchSampler(hfp.TokenBudget(budget), sizes_of_documents(lengths))
    by_budget = [[number for number, is_copy in batch if not is_copy] for batch in planned]
    in_order = chunks(list(range(len(documents))), arguments.batch)
    few_packs = chunks(list(all_packs), max(1, arguments.batch // 2))
    padded = [alone(documents, rows, SQUAD_LONGEST) for rows in in_order]
    by_batch = [alone(documents, rows, max(lengths[rows])) for rows in in_order]
    packed = [in_packs(documents, rows) for rows in few_packs]
    ours = [alone(documents, rows, max(lengths[rows])) for rows in by_budget]

    def slots(batches: list[Batch]) -> int:
        return sum(batch["input_ids"].numel() for batch, _ in batches)

    return {
        PADDED: Side(stock, padded, slots(padded), []),
        BY_BATCH: Side(stock, by_batch, slots(by_batch), []),
        PACKED: Side(stock, packed, slots(packed), []),
        OURS: Side(unpadded, ours, int(lengths.sum()), []),
    }


def chunks(values: list, size: int) -> list[list]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def alone(documents: Sequence[np.ndarray], numbers: Sequence[int], length: int) -> Batch:
    """A batch with a document in every row, padded to a length."""
    ids = torch.zeros(len(numbers), int(length), dtype=torch.long)
    places = [(number, row, slice(0, len(documents[number]))) for row, number in enumerate(numbers)]
    for number, row, place in places:
        ids[row, place] = torch.from_numpy(documents[number])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}, places


def in_packs(documents: Sequence[np.ndarray], all_packs: Sequence[np.ndarray]) -> Batch:
    """A batch with a pack in every row: each document sees itself alone and counts its own positions."""
    ids, positions, document = torch.zeros(3, len(all_packs), SQUAD_LONGEST, dtype=torch.long)
    places = []
    for row, pack in enumerate(all_packs):
        begin = 0
        for number in pack.tolist():
            place = slice(begin, begin + len(documents[number]))
            ids[row, place] = torch.from_numpy(documents[number])
            positions[row, place], document[row, place] = torch.arange(len(documents[number])), number + 1
            places.append((number, row, place))
            begin = place.stop
    mask = (document[:, :, None] == document[:, None])[:, None]
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask}, places


def compute(side: Side, answers: Sequence[np.ndarray]) -> list[Tensor]:
    """Return the gradients of the summed losses of all documents; each loss is over the document's own tokens."""
    side.model.zero_grad()
    for batch, places in side.batches:
        outputs = side.model(**batch)
        losses = [
            F.cross_entropy(logits[row, place], torch.tensor(token))
            for number, row, place in places
            for logits, token in zip((outputs.start_logits, outputs.end_logits), answers[number], strict=True)
        ]
        torch.stack(losses).sum().backward()
    return [parameter.grad.clone() for parameter in side.model.parameters() if parameter.grad is not None]


if __name__ == "__main__":
    main()
