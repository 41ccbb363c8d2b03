"""A small BERT trained three times from the same weights, on the same sequences in the same steps.

Padded to the full length, packed and kept apart, and packed without being kept apart. The loss is the paper's: the mean
over sequences of the mean over the masked tokens of each.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm.auto import tqdm
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

import hf_packing as hfp
from hf_packing.columns import IGNORED_LABEL

FIRST, LAST, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
"""Used in place of [CLS], [SEP] and [PAD]."""
MASKED, BECOME_MASK, BECOME_RANDOM = 0.15, 0.8, 0.1

Document = dict[str, np.ndarray]


@dataclass(frozen=True)
class Corpus:
    """Sequences, masked once, and the packs they are in."""

    documents: list[Document]
    """input_ids with masked tokens, and labels."""
    packs: list[np.ndarray]
    """The documents of each pack."""
    vocabulary: int
    pad: int
    length: int
    """Tokens of a full row."""


def make_corpus(texts: Sequence[str], tokenizer: Tokenizer, lengths: np.ndarray, row_length: int) -> Corpus:
    """Concatenate the texts, cut them into sequences of these lengths, mask them, and pack them best fit."""
    first, last, pad = map(tokenizer.token_to_id, (FIRST, LAST, PAD))
    mask = tokenizer.get_vocab_size()
    rng = np.random.default_rng(0)
    text = np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(list(texts))])
    ends = np.cumsum(lengths - 2)
    pieces = np.split(np.resize(text, ends[-1]), ends[:-1])
    documents = [masked(np.concatenate([[first], piece, [last]]), mask, rng) for piece in pieces]
    plan = hfp.plan_packing(lengths, hfp.BestFit(row_length))
    packs = np.split(plan.segment_document, plan.pack_offsets[1:-1])
    return Corpus(documents, packs, mask + 1, pad, row_length)


def masked(tokens: np.ndarray, mask: int, rng: np.random.Generator) -> Document:
    """Choose 15 % of the tokens to predict: 80 % of them become the mask, 10 % a random token, 10 % stay."""
    inner = np.arange(1, len(tokens) - 1)
    asked = rng.choice(inner, max(1, round(MASKED * len(inner))), replace=False)
    labels = np.full(len(tokens), IGNORED_LABEL)
    labels[asked] = tokens[asked]
    how = rng.random(len(asked))
    tokens[asked[how < BECOME_MASK]] = mask
    become_random = asked[(how >= BECOME_MASK) & (how < BECOME_MASK + BECOME_RANDOM)]
    tokens[become_random] = rng.integers(0, mask, len(become_random))
    return {"input_ids": tokens, "labels": labels}


def new_model(corpus: Corpus, hidden: int) -> BertForMaskedLM:
    """Return a model with the same weights at every call; no dropout, since its draws would depend on the layout."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=corpus.vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=corpus.length,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        pad_token_id=corpus.pad,
    )
    return BertForMaskedLM(config)


def rows_of(corpus: Corpus, rows: Sequence[Sequence[int]]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Rows padded to the full length: the model's inputs, the labels, and the sequence of every token."""
    shape = len(rows), corpus.length
    ids, labels = torch.full(shape, corpus.pad), torch.full(shape, IGNORED_LABEL)
    sequence = torch.zeros(shape, dtype=torch.int64)
    number = 0
    for row, documents in enumerate(rows):
        begin = 0
        for document in documents:
            tokens = corpus.documents[document]
            place = slice(begin, begin + len(tokens["input_ids"]))
            ids[row, place] = torch.from_numpy(tokens["input_ids"])
            labels[row, place] = torch.from_numpy(tokens["labels"])
            sequence[row, place] = number
            begin, number = place.stop, number + 1
    return {"input_ids": ids, "attention_mask": (ids != corpus.pad).long()}, labels, sequence


def padded(corpus: Corpus, packs: Sequence[np.ndarray]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    return rows_of(corpus, [[document] for pack in packs for document in pack])


def packed(corpus: Corpus, packs: Sequence[np.ndarray]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    collate = hfp.PackingCollator(keep_first_labels=True)
    batch = collate([corpus.documents[document] for pack in packs for document in pack])
    return batch, batch.pop("labels"), batch["seq_idx"].long()


def mean_over_sequences(logits: Tensor, labels: Tensor, sequence: Tensor) -> Tensor:
    """Average the loss over each sequence, then over sequences; labels and sequence numbers are [rows, tokens]."""
    asked = labels != IGNORED_LABEL
    losses = F.cross_entropy(logits[asked], labels[asked], reduction="none")
    own = sequence[asked]
    labels_each = torch.bincount(own)
    weights = 1 / labels_each[own] / (labels_each > 0).sum()
    return losses @ weights


@dataclass
class Run:
    """A model, how packs become its batches, and the losses and time of its steps."""

    model: PreTrainedModel
    make_batch: Callable[[Corpus, Sequence[np.ndarray]], tuple[dict[str, Tensor], Tensor, Tensor]]
    learning_rate: float
    losses: list[float] = field(default_factory=list)
    seconds: float = 0
    """CPU time of this process, so that other processes do not count."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, eps=1e-6)

    def step(self, corpus: Corpus, packs: Sequence[np.ndarray]) -> None:
        began = time.process_time()
        batch, labels, sequence = self.make_batch(corpus, packs)
        loss = mean_over_sequences(self.model(**batch).logits, labels, sequence)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.process_time() - began
        self.losses.append(loss.item())


def train(corpus: Corpus, steps: int, packs_per_step: int, hidden: int, learning_rate: float) -> dict[str, Run]:
    """Train all three models, alternating step by step."""
    runs = {
        "unpacked": Run(new_model(corpus, hidden).train(), padded, learning_rate),
        "packed": Run(hfp.patch_model(new_model(corpus, hidden)).train(), packed, learning_rate),
        "packed, not kept apart": Run(new_model(corpus, hidden).train(), rows_of, learning_rate),
    }
    for step in tqdm(range(steps), desc="Training unpacked and packed in turn"):
        packs = corpus.packs[step * packs_per_step : (step + 1) * packs_per_step]
        for run in runs.values():
            run.step(corpus, packs)
    return runs
