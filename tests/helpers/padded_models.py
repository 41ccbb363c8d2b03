"""Padded batches of random documents."""

import torch

LENGTHS = (5, 19, 2, 19, 11)
SEQUENCE, TOKEN, QUESTION, CHOICE = (
    *("sequence classification", "token classification"),
    *("question answering", "multiple choice"),
)


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
