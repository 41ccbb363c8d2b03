"""Documents in rows of trees, compared with the documents alone."""

import torch

from hf_packing.trees.segments import TreeSegments

CHAT = TreeSegments((9, 14, 6, 17, 5, 12), (-1, 0, 0, 2, 2, 4))
"""Three turns: each has thinking of its own, and the next turn goes on without it."""


def inputs_of(trees, seed=0, vocabulary=100):
    ids = torch.randint(8, vocabulary, (1, trees.tokens), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "segment_lengths": torch.tensor(trees.lengths),
        "parents": torch.tensor(trees.parents),
    }


def scores_of(logits, seed):
    generator = torch.Generator().manual_seed(seed)
    return (logits * torch.randn(logits.shape, generator=generator, dtype=torch.float64)).sum()


def gradients_of(model, score):
    model.zero_grad()
    score.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check_documents(stock, model, trees, close, seed=0):
    """Compare each path, also those that end inside others, with the path alone on the unpatched model."""
    batch = inputs_of(trees, seed)
    ends = range(len(trees.lengths))
    paths = [trees.path_of(end) for end in ends]
    alone = [stock(input_ids=batch["input_ids"][:, path], use_cache=False).logits[0].double() for path in paths]
    expected = gradients_of(stock, sum(map(scores_of, alone, ends)))
    logits = model(**batch).logits[0].double()
    scale = float(torch.cat(alone).detach().std())
    for path, one in zip(paths, alone, strict=True):
        assert float((logits[path] - one).detach().abs().max()) <= close * scale
    found = gradients_of(model, sum(scores_of(logits[path], end) for path, end in zip(paths, ends, strict=True)))
    largest = max(float(each.abs().max()) for each in expected.values())
    assert max(float((found[name] - each).abs().max()) for name, each in expected.items()) <= 10 * close * largest
