"""Documents to mask, and the collator, tokenizer and model for them."""

import datasets
import numpy as np
import torch
from patched_models import patched_tiny
from tokenizers import Tokenizer, models
from trainers import documents_in, on_each_batch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

CLS, SEP, MASK = 2, 3, 4
WORD_TOKENS = 3


def tokenizer(vocabulary=99):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(5, vocabulary))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    special = dict(zip(("pad", "unk", "cls", "sep", "mask"), names, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, **{f"{name}_token": token for name, token in special.items()})


TOKENIZER = tokenizer()


def collator(whole_words=False, **options):
    if whole_words:
        options |= {"mask_replace_prob": 1, "random_replace_prob": 0}
    return DataCollatorForLanguageModeling(TOKENIZER, whole_word_mask=whole_words, **options)


def documents(number=40, columns=("input_ids",), longest=40):
    """No two documents are alike; words have WORD_TOKENS tokens."""
    rng = np.random.default_rng(5)
    rows = []
    for length in rng.integers(2, longest, number):
        ids = [CLS, *rng.integers(5, 99, length).tolist(), SEP]
        special = [1, *[0] * length, 1]
        words = [[place + place // WORD_TOKENS, place + place // WORD_TOKENS + 1] for place in range(length)]
        rows.append({"input_ids": ids, "special_tokens_mask": special, "offset_mapping": [[0, 0], *words, [0, 0]]})
    return datasets.Dataset.from_list(rows).select_columns(list(columns))


def hidden(row, share=0.3):
    """80 % of what is asked for is hidden, 10 % another token, 10 % kept."""
    ids = np.array(row["input_ids"])
    rng = np.random.default_rng(int(ids.sum()))
    asked, how = rng.random(len(ids)) < share, rng.random(len(ids))
    given = np.where(how < 0.8, MASK, np.where(how < 0.9, rng.integers(5, 99, len(ids)), ids))
    return {"input_ids": np.where(asked, given, ids), "labels": np.where(asked, ids, -100)}


def bert():
    return patched_tiny("bert", "masked", torch.float64)


def on_each_document(trainer, call):
    def see(batch):
        for ids, labels in zip(documents_in(batch), documents_in(batch, "labels"), strict=True):
            if set(labels) - {-100}:
                call(int(trainer.state.epoch or 0), ids, labels)

    on_each_batch(trainer, see)
