"""Efficient sequence packing without cross-contamination (arXiv 2107.02027): packs, a packed BERT, and packed SQuAD.

    python recipes/reproduce/krell.py
    python recipes/reproduce/krell.py --data squad    # needs no files

Wikipedia: the packs of BERT's data, 16 million sequences of at most 512 tokens, from counts alone. Then a small BERT is
trained three times from the same weights, on the same sequences in the same steps: padded to the full length, packed
and kept apart, and packed without being kept apart. Its text is Wikipedia's, cut into sequences with half those
lengths; its loss is the paper's, the mean over sequences of the mean over the masked tokens of each.

SQuAD: lengths are distributed like those of SQuAD 1.1; tokens and answers are random, since only the speed is measured.
A small BERT answers questions four times over: padded to 384, padded to the longest row of a `--batch`, packed in rows
of 384 with a block-diagonal mask and positions that restart, as in the paper, and with the batches of a token budget,
without padding.
"""

import argparse
import copy
import gzip
import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import Report, Stopwatch, chunks, options, parse, shared_file, small_model, yes_or_no
from tokenizers import Tokenizer
from torch import Tensor
from tqdm.auto import tqdm
from transformers import BertForMaskedLM, BertForQuestionAnswering, PreTrainedModel

import hf_packing as hfp

STRATEGIES = {"SPFHP": hfp.ShortestPackFirst, "LPFHP": hfp.BestFit}
STRATEGIES |= {"NNLSHP": hfp.NonNegativeLeastSquares, "Optimal": hfp.Optimal}
HEURISTICS = ("SPFHP", "LPFHP")
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

LENGTH, HALVED = 512, 256
FIRST, LAST, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
"""Used in place of [CLS], [SEP] and [PAD]."""
MASKED, BECOME_MASK, BECOME_RANDOM = 0.15, 0.8, 0.1
IGNORED = -100
"""Label of a token that is not predicted."""
SHOWN = 8
"""Rows of the loss table."""

SQUAD_PACKS = {
    "SPFHP": {1: 88_641, 2: 45_335, 3: 40_711},
    "LPFHP": {2: 45_335, 3: 40_631, None: 40_631},
    "NNLSHP": {3: 40_778},
}
"""Of the authors' code on their histogram of SQuAD 1.1."""
SQUAD_ROWS, SQUAD_LENGTH, SQUAD_CUT = 88_641, 384, 0.01189
"""Windows of SQuAD 1.1, tokens of the longest, and the share of windows that long: most are parts of longer texts."""
SQUAD_QUANTILES = (
    *(36, 77, 99, 112, 118, 123, 128, 133, 137, 142, 146, 151, 156),
    *(161, 167, 173, 179, 186, 194, 203, 214, 227, 244, 265, 297, 383),
)
"""Length of every 25th of the others, in tokens."""
VOCABULARY, CLOSE = 4096, 1e-4
PADDED, BY_BATCH, PACKED, OURS = "padded to 384", "padded to the longest", "packed in rows of 384", "token budget"

Document = dict[str, np.ndarray]
Row = list[Document]
Batch = tuple[dict[str, Tensor], list[Document]]


def main() -> None:
    wikipedia = {"steps": 100, "packs_per_step": 8, "hidden": 128, "learning_rate": 1e-3}
    parser = options(__doc__, **wikipedia, rows=64, batch=16, rounds=3, squad_hidden=256)
    parser.add_argument("--data", nargs="+", choices=("wikipedia", "squad"), default=["wikipedia", "squad"])
    parser.add_argument("--no-solvers", action="store_true", help="leave out NNLSHP and Optimal, which take seconds")
    toy = {"steps": 6, "packs_per_step": 2, "hidden": 32, "rows": 24, "rounds": 1, "squad_hidden": 32}
    arguments = parse(parser, **toy, no_solvers=True)
    if "wikipedia" in arguments.data:
        source = "that of graphcore/examples, tutorials/blogs_code/packedBERT/histograms.py"
        histogram = json.loads(shared_file("bert_wikipedia_512_histogram.json", source).read_text())
        counts = np.array([0, *histogram["wikipedia_bert_512"]["counts"]])
        title = "Sequence packing without cross-contamination (arXiv 2107.02027)"
        report = Report(title, "numpy", "scipy", "torch", "transformers")
        wikipedia_packs(counts, arguments.no_solvers, report)
        packed_bert(counts, arguments, report)
        report.save(arguments.output / "krell.md")
    if "squad" in arguments.data:
        report = Report("Packed SQuAD (arXiv 2107.02027)", "numpy", "torch", "transformers")
        squad_packs(arguments.no_solvers, report)
        squad_speed(arguments, report)
        report.save(arguments.output / "packed_squad.md")


def wikipedia_packs(counts: np.ndarray, no_solvers: bool, report: Report) -> None:
    todo = [(name, depth) for name in HEURISTICS for depth in DEPTHS]
    todo += [] if no_solvers else [("NNLSHP", 3), ("Optimal", 3), ("Optimal", None)]
    rows, seconds, same, spare = [], {}, True, 0
    for name, depth in tqdm(todo, desc="Planning"):
        with Stopwatch() as watch:
            found = hfp.plan_counts(counts, STRATEGIES[name](LENGTH, max_documents=depth)).metrics()
        seconds[name, depth] = watch.seconds
        paper = PAPER_PACKS.get(name, {}).get(depth)
        efficiency = found.packing_efficiency, paper and found.num_tokens / LENGTH / paper
        rows.append((name, depth or "any", found.num_packs, paper, *efficiency, found.packing_factor))
        same &= name not in HEURISTICS or paper in (None, found.num_packs)
        if name == "Optimal":
            spare = max(spare, found.num_packs - found.lower_bound)
    report.table(
        f"{counts.sum():,} sequences of BERT's Wikipedia data, packs of {LENGTH}",
        ["", "depth", "packs:,", "paper:,", "efficiency:.4%", "paper:.4%", "packing factor:.4f"],
        rows,
    )
    report.say(f"SPFHP and LPFHP need exactly as many packs as in the paper: {yes_or_no(same)}.")
    if not no_solvers:
        report.say(f"""
            NNLSHP needs fewer packs than in the paper: sequences that rounding leaves over are packed together here,
            while the paper gives each of them a pack of its own. Optimal is not in the paper; at depth 3 it takes
            {seconds["Optimal", 3] / seconds["NNLSHP", 3]:.1f} of the time of NNLSHP, and proves that at most {spare} of
            its packs could be saved at either depth.
        """)


def packed_bert(counts: np.ndarray, arguments: argparse.Namespace, report: Report) -> None:
    packs = arguments.steps * arguments.packs_per_step
    drawn = np.random.default_rng(0).choice(len(counts), 3 * packs, p=counts / counts.sum())
    tokenizer = Tokenizer.from_file(str(shared_file("tokenizer.json", "a byte-level BPE of 8192 tokens")))
    rows = in_packs(masked_documents(-(-drawn // 2), tokenizer), hfp.BestFit(HALVED))[:packs]
    losses, seconds = train_in_turn(chunks(rows, arguments.packs_per_step), tokenizer, arguments)
    unpacked, packed, leaking = map(np.array, losses.values())
    sequences, last = sum(map(len, rows)), max(1, arguments.steps // 4)
    shown = np.unique(np.linspace(0, arguments.steps - 1, SHOWN).round().astype(int))
    columns = (unpacked, packed, leaking, packed - unpacked, leaking - unpacked)
    report.table(
        f"A BERT {arguments.hidden} wide, the same {sequences:,} sequences in the same {arguments.steps} steps",
        ["step", *(f"{name}:.5f" for name in losses), "packed - unpacked:+.1e", "not apart - unpacked:+.1e"],
        [(step + 1, *(column[step] for column in columns)) for step in shown],
    )
    late = [column[-last:].mean() for column in columns]
    factor, speed = sequences / packs, seconds["unpacked"] / seconds["packed"]
    report.say(f"""
        Largest difference of a step's loss from the unpacked one: {abs(packed - unpacked).max():.1e} packed,
        {abs(leaking - unpacked).max():.1e} packed and not kept apart. As in the paper, packed training is the same as
        unpacked if sequences are kept apart, count their own positions and weigh the same in the loss; if they are not
        kept apart, it differs. Mean of the last {last} steps: {late[0]:.4f} unpacked, {late[1]:.4f} packed,
        {late[2]:.4f} not kept apart. In the paper, after a whole pre-training, {PAPER_ACCURACY[0]:.1%} of the masked
        tokens are predicted correctly, packed as well as unpacked, and {PAPER_ACCURACY[1]:.1%} if only the positions do
        not restart.

        A pack holds {factor:.2f} sequences. Packed is {speed:.2f} times as fast as padded to {HALVED}, in sequences per
        CPU second (paper: {PAPER_SPEED:.0f} times for BERT-large); that is {speed / factor:.0%} of the packing factor.
    """)


def masked_documents(lengths: np.ndarray, tokenizer: Tokenizer) -> list[Document]:
    """Concatenate the texts, cut them into sequences of these lengths, and mask and number them."""
    source = "the valid and test articles of WikiText-2, one {text} a line"
    with gzip.open(shared_file("wiki.jsonl.gz", source), "rt") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokens = np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    first, last, mask = tokenizer.token_to_id(FIRST), tokenizer.token_to_id(LAST), tokenizer.get_vocab_size()
    ends = np.cumsum(lengths - 2)
    pieces = np.split(np.resize(tokens, ends[-1]), ends[:-1])
    rng = np.random.default_rng(0)
    documents = [masked(np.concatenate([[first], piece, [last]]), mask, rng) for piece in pieces]
    return [document | {"sequence": np.full(lengths[number], number)} for number, document in enumerate(documents)]


def masked(tokens: np.ndarray, mask: int, rng: np.random.Generator) -> Document:
    """Choose 15 % of the tokens to predict: 80 % of them become the mask, 10 % a random token, 10 % stay."""
    inner = np.arange(1, len(tokens) - 1)
    asked = rng.choice(inner, max(1, round(MASKED * len(inner))), replace=False)
    labels = np.full(len(tokens), IGNORED)
    labels[asked] = tokens[asked]
    how = rng.random(len(asked))
    tokens[asked[how < BECOME_MASK]] = mask
    become_random = asked[(how >= BECOME_MASK) & (how < BECOME_MASK + BECOME_RANDOM)]
    tokens[become_random] = rng.integers(0, mask, len(become_random))
    return {"input_ids": tokens, "labels": labels}


def in_packs(documents: Sequence[Document], strategy: Any) -> list[Row]:
    """Return the documents of each pack; all of them fit into one."""
    plan = hfp.plan_packing([len(document["input_ids"]) for document in documents], strategy)
    numbers = np.split(plan.segment_document, plan.pack_offsets[1:-1])
    return [[documents[number] for number in pack] for pack in numbers]


def lay_out(rows: Sequence[Row], length: int, **fills: int) -> dict[str, Tensor]:
    """Concatenate the documents of each row and fill it up; return these columns, int64 [rows, length]."""
    batch = {name: torch.full((len(rows), length), fill) for name, fill in fills.items()}
    for name, values in batch.items():
        for row, documents in zip(values, rows, strict=True):
            whole = np.concatenate([document[name] for document in documents])
            row[: len(whole)] = torch.from_numpy(whole)
    return batch


def train_in_turn(
    steps: Sequence[Sequence[Row]], tokenizer: Tokenizer, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Train three models, alternating step by step; return the loss of every step, and CPU seconds."""
    pad, vocabulary = tokenizer.token_to_id(PAD), tokenizer.get_vocab_size() + 1
    collate = hfp.PackingCollator(keep_first_labels=True)

    def full_rows(rows: Sequence[Row]) -> dict[str, Tensor]:
        batch = lay_out(rows, HALVED, input_ids=pad, labels=IGNORED, sequence=0)
        return {**batch, "attention_mask": (batch["input_ids"] != pad).long()}

    make_batch = {
        "unpacked": lambda rows: full_rows([[document] for document in chain(*rows)]),
        "packed": lambda rows: collate(list(chain(*rows))),
        "packed, not kept apart": full_rows,
    }
    models = {name: small_bert(BertForMaskedLM, arguments.hidden, vocabulary, HALVED, pad) for name in make_batch}
    hfp.patch_model(models["packed"])
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, eps=1e-6)
        for name, model in models.items()
    }
    losses, seconds = {name: [] for name in models}, dict.fromkeys(models, 0.0)
    for rows in tqdm(steps, desc="Training unpacked and packed in turn"):
        for name, model in models.items():
            with Stopwatch() as watch:
                batch = make_batch[name](rows)
                labels, sequence = batch.pop("labels"), batch.pop("sequence")
                loss = mean_over_sequences(model(**batch).logits, labels, sequence)
                loss.backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            losses[name].append(loss.item())
            seconds[name] += watch.seconds
    return losses, seconds


def small_bert(
    architecture: type[PreTrainedModel], hidden: int, vocabulary: int, longest: int, pad: int
) -> PreTrainedModel:
    """Return a model without dropout, since what it draws would depend on the layout."""
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": longest, "intermediate_size": 4 * hidden}
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return small_model(architecture, hidden, 4, **sizes, **no_dropout, pad_token_id=pad)


def mean_over_sequences(logits: Tensor, labels: Tensor, sequence: Tensor) -> Tensor:
    """Average the loss over each sequence, then over sequences; labels and sequence numbers are [rows, tokens]."""
    asked = labels != IGNORED
    losses = F.cross_entropy(logits[asked], labels[asked], reduction="none")
    own = sequence[asked]
    labels_each = torch.bincount(own)
    weights = 1 / labels_each[own] / (labels_each > 0).sum()
    return losses @ weights


def squad_like(rows: int) -> np.ndarray:
    """int32 [rows], tokens of question and context, in ascending order, in windows of at most 384.

    Interpolated between quantiles of SQuAD 1.1, tokenized for BERT: those of the authors' histogram in
    graphcore/examples, tutorials/blogs_code/packedBERT/histograms.py.
    """
    share = (np.arange(rows) + 0.5) / rows / (1 - SQUAD_CUT)
    lengths = np.interp(share, np.linspace(0, 1, len(SQUAD_QUANTILES)), SQUAD_QUANTILES)
    return np.where(share > 1, SQUAD_LENGTH, np.rint(lengths)).astype(np.int32)


def squad_packs(no_solvers: bool, report: Report) -> None:
    lengths, rows = squad_like(SQUAD_ROWS), []
    todo = [(name, *pair) for name, packs in SQUAD_PACKS.items() for pair in packs.items()]
    for name, depth, authors in todo:
        if no_solvers and name not in HEURISTICS:
            continue
        found = hfp.plan_counts(np.bincount(lengths), STRATEGIES[name](SQUAD_LENGTH, max_documents=depth)).metrics()
        factors = found.packing_factor, len(lengths) / authors
        rows.append((name, depth or "any", found.num_packs, authors, found.packing_efficiency, *factors))
    report.table(
        f"{len(lengths):,} lengths like SQuAD's, {lengths.mean():.1f} tokens on average, packs of {SQUAD_LENGTH}",
        ["", "depth", "packs:,", "authors:,", "efficiency:.2%", "packing factor:.3f", "authors:.3f"],
        rows,
    )
    report.say("""
        The lengths lie between quantiles of the authors' histogram, which is not part of the package; "authors" is
        their code on that histogram. It calls the packing factor the speed-up, which is the most that packs can gain
        over rows that are all padded to 384. Batches padded to their longest row, as most trainers make them, leave
        less to gain.
    """)


def squad_speed(arguments: argparse.Namespace, report: Report) -> None:
    lengths = np.random.default_rng(0).permutation(squad_like(arguments.rows))
    batches = squad_batches(lengths, arguments.batch)
    stock = small_bert(BertForQuestionAnswering, arguments.squad_hidden, VOCABULARY, SQUAD_LENGTH, 0)
    models = dict.fromkeys(batches, stock) | {OURS: hfp.patch_model(copy.deepcopy(stock))}
    first, *others = [gradients(models[name], own) for name, own in batches.items()]
    apart = max(float(abs(first - other).max() / abs(first).max()) for other in others)
    rounds = {name: [] for name in batches}
    for _ in tqdm(range(arguments.rounds), desc="Training in turn"):
        for name, own in batches.items():
            with Stopwatch() as watch:
                gradients(models[name], own)
            rounds[name].append(watch.seconds)
    seconds = {name: float(np.median(each)) for name, each in rounds.items()}
    slots = {name: sum(inputs["input_ids"].numel() for inputs, _ in own) for name, own in batches.items()}
    tokens = slots[OURS] = int(lengths.sum())  # the patched model does not compute padding
    columns = ["batches", "slots per token:.2f", "tokens per CPU second:,.0f"]
    report.table(
        f"A BERT {arguments.squad_hidden} wide, forward and backward passes on {len(lengths):,} rows, "
        f"{tokens:,} tokens",
        [*columns, "beside padded to 384:.2f", "beside the longest:.2f"],
        [
            (name, slots[name] / tokens, tokens / own, seconds[PADDED] / own, seconds[BY_BATCH] / own)
            for name, own in seconds.items()
        ],
    )
    report.say(f"""
        The sum of the gradients over all rows is the same in all four: {yes_or_no(apart < CLOSE)}, within {apart:.0e}
        of its largest entry. The packing factor of these rows is {slots[PADDED] / slots[PACKED]:.2f}. Packed in rows of
        384, training is {seconds[PADDED] / seconds[PACKED]:.2f} times as fast as padded to 384; with a token budget and
        without padding, {seconds[PADDED] / seconds[OURS]:.2f} times. This can be more than the packing factor, since
        attention is computed within documents, and not over rows of 384. Medians of {arguments.rounds} rounds, in turn.
        The authors trained on other hardware, so only ratios can be compared.
    """)


def squad_batches(lengths: np.ndarray, size: int) -> dict[str, list[Batch]]:
    """Return the batches of each side: the model's inputs, and the documents in their order."""
    rng = np.random.default_rng(1)
    documents = [{"input_ids": rng.integers(5, VOCABULARY, length)} for length in lengths]
    for number, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        document["answer"] = np.sort(rng.integers(0, length, 2))
        document["position_ids"], document["sequence"] = np.arange(length), np.full(length, number + 1)

    def padded(rows: Sequence[Row], length: int | None = None) -> Batch:
        longest = max(len(document["input_ids"]) for document in chain(*rows))
        ids = lay_out(rows, length or longest, input_ids=0)["input_ids"]
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}, list(chain(*rows))

    def block_diagonal(rows: Sequence[Row]) -> Batch:
        batch = lay_out(rows, SQUAD_LENGTH, input_ids=0, position_ids=0, sequence=0)
        sequence = batch.pop("sequence")
        return {**batch, "attention_mask": (sequence[:, :, None] == sequence[:, None])[:, None]}, list(chain(*rows))

    alone = [[document] for document in documents]
    dataset = datasets.Dataset.from_list([{"input_ids": document["input_ids"]} for document in documents])
    loader = hfp.prepare_dataloader(Accelerator(cpu=True), dataset, hfp.TokenBudget(size * SQUAD_LENGTH // 2))
    by_budget = [[alone[row] for row, is_copy in batch if not is_copy] for batch in loader.plan.micro_batches(rank=0)]
    packs = in_packs(documents, hfp.ShortestPackFirst(SQUAD_LENGTH, max_documents=3))
    return {
        PADDED: [padded(rows, SQUAD_LENGTH) for rows in chunks(alone, size)],
        BY_BATCH: [padded(rows) for rows in chunks(alone, size)],
        PACKED: [block_diagonal(rows) for rows in chunks(packs, max(1, size // 2))],
        OURS: [padded(rows) for rows in by_budget],
    }


def gradients(model: PreTrainedModel, batches: Sequence[Batch]) -> Tensor:
    """Return the gradients of the summed losses of all documents; each loss is over the document's own tokens."""
    model.zero_grad()
    for inputs, documents in batches:
        outputs, used = model(**inputs), inputs["input_ids"] != 0
        lengths = [len(document["input_ids"]) for document in documents]
        losses = [
            F.cross_entropy(own, torch.tensor(document["answer"][end]))
            for end, logits in enumerate((outputs.start_logits, outputs.end_logits))
            for own, document in zip(logits[used].split(lengths), documents, strict=True)
        ]
        torch.stack(losses).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


if __name__ == "__main__":
    main()
