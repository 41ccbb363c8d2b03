"""Random inputs of models: padded batches, and rows of trees."""

import torch

from hf_packing.trees.segments import TreeSegments

LENGTHS = (5, 19, 2, 19, 11)
SEQUENCE, TOKEN = "sequence classification", "token classification"
QUESTION, CHOICE = "question answering", "multiple choice"


def documents(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 120, (length,), generator=generator).tolist() for length in lengths]


def padded(rows, side, extra=3, pad=0):
    longest = max(map(len, rows)) + extra
    ids, places = torch.full((len(rows), longest), pad), []
    mask = torch.zeros_like(ids)
    for number, tokens in enumerate(rows):
        start = {"right": 0, "left": longest - len(tokens), "both": (longest - len(tokens)) // 2}[side]
        places.append(slice(start, start + len(tokens)))
        ids[number, places[-1]], mask[number, places[-1]] = torch.tensor(tokens, dtype=torch.long), 1
    return {"input_ids": ids, "attention_mask": mask}, places


CHAT = TreeSegments((9, 14, 6, 17, 5, 12), (-1, 0, 0, 2, 2, 4))
"""Three turns: each has thinking of its own, and the next turn goes on without it."""


def inputs_of(trees, seed=0, vocabulary=100):
    ids = torch.randint(8, vocabulary, (1, trees.tokens), generator=torch.Generator().manual_seed(seed))
    columns = {"segment_lengths": trees.lengths, "parents": trees.parents}
    return {"input_ids": ids, **{name: torch.tensor(values) for name, values in columns.items()}}
