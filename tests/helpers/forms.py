"""Documents in batches of every form, and their outputs and gradients compared with those of the documents alone."""

import inspect
from typing import NamedTuple

import torch
from model_inputs import CHAT, CHOICE, LENGTHS, documents, inputs_of, padded
from training_by_hand import largest_difference

import hf_packing as hfp


class Batch(NamedTuple):
    """Inputs of a model, the documents in them, and the row and the columns in which each document is."""

    inputs: dict
    documents: list
    places: list


def packed(rows=None, **shapes):
    rows = rows or documents()
    inputs = hfp.PackingCollator(**shapes)([{"input_ids": tokens} for tokens in rows])
    del inputs["labels"]
    ends = torch.tensor(list(map(len, rows))).cumsum(0).tolist()
    return Batch(inputs, rows, [(0, slice(end - len(tokens), end)) for tokens, end in zip(rows, ends, strict=True)])


def two_rows():
    """Two packed rows of one length, which are told by their positions."""
    rows = documents(lengths=(5, 19, 2, 14, 12))
    first, second = packed(rows[:3]), packed(rows[3:])
    inputs = {
        name: torch.cat([each.inputs[name] for each in (first, second)]) for name in ("input_ids", "position_ids")
    }
    return Batch(inputs, rows, [*first.places, *((1, columns) for _, columns in second.places)])


def padded_rows(side, lengths=LENGTHS):
    rows = [[*tokens[:-1], 2] for tokens in documents(lengths=lengths)]  # BART reads the end token
    inputs, places = padded(rows, side)
    return Batch(inputs, rows, [*enumerate(places)])


def tree(trees=CHAT, seed=0):
    """The document of every segment ends with it, also inside of others."""
    inputs = inputs_of(trees, seed)
    paths = [trees.path_of(end) for end in range(len(trees.lengths))]
    return Batch(inputs, [inputs["input_ids"][0, path].tolist() for path in paths], [(0, path) for path in paths])


def without_padding():
    """Rows of one length, and nothing that tells of documents."""
    rows = documents(lengths=(9, 9, 9))
    return Batch({"input_ids": torch.tensor(rows)}, rows, [(number, slice(None)) for number in range(3)])


FORMS = {
    "packed": packed,
    "two packed rows": two_rows,
    "a fixed shape": lambda: packed(tokens=99, max_segments=9),
    **{side: lambda side=side: padded_rows(side) for side in ("right", "left", "both")},
    "right, none short": lambda: padded_rows("right", (7, 20, 12, 7)),
    "no padding": without_padding,
    "a tree": tree,
}


def outputs_of(model, batch, kind="causal"):
    """All logits and hidden states of each document."""
    inputs = batch.inputs
    if kind == CHOICE:
        inputs = {name: value[:, None] for name, value in inputs.items()}
    found = [value for value in model(**inputs).values() if isinstance(value, torch.Tensor)]
    tokens = inputs["input_ids"].shape[-1]
    return [
        [value[row, columns] if value.shape[1:2] == (tokens,) else value[row] for value in found]
        for row, columns in batch.places
    ]


def alone(model, rows, kind="causal"):
    """The same of each document in a batch of its own, without an attention mask, on a model without a patch."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    batches = [Batch({"input_ids": torch.tensor([tokens]), **options}, [tokens], [(0, slice(None))]) for tokens in rows]
    return [outputs for batch in batches for outputs in outputs_of(model, batch, kind)]


def gradients_of(model, outputs):
    """Of the sum of all outputs, each multiplied by a random number."""
    generator = torch.Generator().manual_seed(1)
    flat = [each for document in outputs for each in document]
    model.zero_grad()
    sum((each * torch.randn(each.shape, generator=generator).double()).sum() for each in flat).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check(stock, model, batch, kind="causal", close=1e-12):
    """Compare outputs and gradients of the documents of a batch with those of the stock model for each of them."""
    expected, found = alone(stock, batch.documents, kind), outputs_of(model, batch, kind)
    check_gradients(gradients_of(model, found), gradients_of(stock, expected), close)
    scale = max(1.0, *(float(each.detach().abs().max()) for document in expected for each in document))
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape
            assert float((one - other).detach().abs().max()) <= close * scale


def check_gradients(found, expected, close=1e-12):
    assert largest_difference(found, expected) <= close
