"""Padded batches of random documents, and what a model returns for each of their rows, or for the row alone."""

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
    """A padded batch, with the places of the tokens in each row; `extra` columns are padding in all rows."""
    longest = max(map(len, rows)) + extra
    ids, places = torch.full((len(rows), longest), pad), []
    mask = torch.zeros_like(ids)
    for number, tokens in enumerate(rows):
        start = {"right": 0, "left": longest - len(tokens), "both": (longest - len(tokens)) // 2}[side]
        places.append(slice(start, start + len(tokens)))
        ids[number, places[-1]], mask[number, places[-1]] = torch.tensor(tokens, dtype=torch.long), 1
    return {"input_ids": ids, "attention_mask": mask}, places


def outputs_of(model, batch, places, kind):
    """All logits and hidden states of each row, without padding."""
    if kind == CHOICE:
        batch = {name: value[:, None] for name, value in batch.items()}
    found = {name: value for name, value in model(**batch).items() if isinstance(value, torch.Tensor)}
    tokens = batch["input_ids"].shape[-1]
    return [
        [value[number][place] if value.shape[1:2] == (tokens,) else value[number] for value in found.values()]
        for number, place in enumerate(places)
    ]


def alone(model, rows, kind):
    found = []
    for tokens in rows:
        batch, places = padded([tokens], "right", extra=0)
        found += outputs_of(model, batch, places, kind)
    return found
