"""What it takes to mask documents one by one, so that masks depend on the document, the epoch and the seed alone.

python benchmarks/masking.py

The documents are read and masked as in training: rows of a dataset, in micro-batches of at most 16,384 tokens, by a
call of transformers' collator for each document. Beside it, one call for the whole padded batch, with masks that depend
on the batch, and without reading the rows. Both sides run in turn, on one thread; times are those of the process.
"""

import argparse
import statistics
import time
import warnings
from typing import Any

import datasets
import numpy as np
import torch
from internals import EpochSampler, MaskedRows, Masking, sizes_of
from measure import figure, in_turn, machine, recorded
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

import hf_packing as hfp

WHOLE, WORDS = 1_000, 2_000
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Every other word has two tokens."""
    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    vocabulary |= {f"w{number}" if number < WHOLE else f"##x{number}": number for number in range(len(SPECIAL), WORDS)}
    words = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def documents(number: int, with_offsets: bool) -> datasets.Dataset:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 0.8, number), 3, 400).astype(int)
    texts = [
        " ".join(
            f"w{first}" + f"x{then}" * (then % 2) for first, then in rng.integers((100, WHOLE), (WHOLE, WORDS), (n, 2))
        )
        for n in lengths
    ]
    encoded = tokenizer()(texts, return_special_tokens_mask=True, return_offsets_mapping=with_offsets)
    return datasets.Dataset.from_dict(
        {name: encoded[name] for name in encoded if "type" not in name and "att" not in name}
    )


def padded(rows: list[Any], with_offsets: bool) -> dict[str, torch.Tensor]:
    """The arguments of torch_mask_tokens for a padded batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    special = torch.ones(len(rows), longest, dtype=torch.bool)
    offsets = torch.zeros(len(rows), longest, 2, dtype=torch.long)
    for place, row in enumerate(rows):
        real = slice(len(row["input_ids"]))
        ids[place, real], special[place, real] = (
            torch.tensor(row["input_ids"]),
            torch.tensor(row["special_tokens_mask"]) > 0,
        )
        if with_offsets:
            offsets[place, real] = torch.tensor(row["offset_mapping"])
    return {"inputs": ids, "special_tokens_mask": special} | ({"offset_mapping": offsets} if with_offsets else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=16_384, help="the most tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    print(f"{machine('hf-packing', 'torch', 'transformers')}, 1 thread\n")
    for whole_words in (False, True):
        data = documents(arguments.documents, whole_words)
        collator = DataCollatorForLanguageModeling(tokenizer(), whole_word_mask=whole_words)
        sizes = sizes_of(data)
        sampler = EpochSampler(hfp.TokenBudget(arguments.tokens), sizes)
        rows = MaskedRows(data, sampler, masking=Masking(collator, seed=0))
        micro_batches = list(rows.sampler)
        whole = [padded([data[number] for number, *_ in each], whole_words) for each in micro_batches]
        tokens = int(sizes.tokens.sum())
        masked = sum(int((row["labels"] != -100).sum()) for each in micro_batches for row in rows.__getitems__(each))
        maskable = sum(int((~each["special_tokens_mask"]).sum()) for each in whole)
        sides = {
            "rows read and masked": lambda rows=rows, of=micro_batches: [rows.__getitems__(each) for each in of],
            "the padded batch": lambda collator=collator, of=whole: [
                collator.torch_mask_tokens(**{name: each.clone() for name, each in batch.items()}) for batch in of
            ],
        }
        taken = in_turn(sides, arguments.rounds + 1, time.process_time)
        what = "whole words" if whole_words else "tokens"
        print(f"{what}: {len(data)} documents, {tokens:,} tokens, {masked / maskable:.1%} masked")
        for side, seconds in taken.items():
            milliseconds = [each * 1e3 * 16_384 / tokens for each in seconds[1:]]
            figure(side=side, masked=what, milliseconds=milliseconds)
            print(f"  {side:32}{statistics.median(milliseconds):>8.1f} ms for 16,384 tokens")


if __name__ == "__main__":
    with recorded(__file__):
        main()
