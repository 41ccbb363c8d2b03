"""Reorder the branches of a tree of documents, so that it can be cut where little is repeated."""

from dataclasses import dataclass, field

from hf_packing.planning.lengths import IntArray


@dataclass(eq=False)
class _Branching:
    """A place at which documents branch off."""

    depth: int
    """Number of tokens above the branching."""
    branches: list["_Branching | int"] = field(default_factory=list)
    """What is below: further branchings, and single documents by their place in the tree."""
    size: int = 0
    """Number of tokens below the branching; shared tokens count once."""


def smallest_first(length: IntArray, shared: IntArray) -> tuple[list[int], list[int]]:
    """Return the documents of a tree in an order that visits small branches before large ones.

    In a chat, each turn is a small branch, and all later turns are a large one. With small branches first, a cut after
    the first turns repeats only the few tokens above them.

    Args:
        length: integers [documents]: length of each document of the tree, in tokens.
        shared: integers [documents]: number of tokens that each document shares with the one before it.

    Returns:
        The places of the documents in the new order, and the number of tokens that each then shares with the one before
        it. The order is depth-first, too.
    """
    lengths = length.tolist()
    root = _branchings(lengths, shared.tolist())
    order, taken = [], []
    waiting: list[tuple[_Branching | int, int]] = [(root, 0)]
    while waiting:
        branch, above = waiting.pop()
        if isinstance(branch, int):
            order.append(branch)
            taken.append(above)
            continue
        sizes = [_end_of(each, lengths) for each in branch.branches]
        ranked = sorted(range(len(sizes)), key=sizes.__getitem__)
        waiting += [(branch.branches[number], branch.depth) for number in ranked[:0:-1]]
        waiting.append((branch.branches[ranked[0]], above))
    return order, taken


def _branchings(lengths: list[int], shared: list[int]) -> _Branching:
    """Return the root of the branchings of a tree, with the sizes of all branchings."""
    path = [_Branching(0)]
    last: _Branching | int = 0
    for document in range(1, len(lengths)):
        depth = shared[document]
        last = _close(path, depth, last, lengths)
        if path[-1].depth < depth:
            path.append(_Branching(depth))
        _add(path[-1], last, lengths)
        last = document
    root = path[0]
    last = _close(path, 0, last, lengths)
    _add(root, last, lengths)
    return root


def _close(path: list[_Branching], depth: int, last: _Branching | int, lengths: list[int]) -> _Branching | int:
    """Complete the branchings that are deeper than `depth`, with `last` as their last branch; return the topmost."""
    while path[-1].depth > depth:
        _add(path[-1], last, lengths)
        last = path.pop()
    return last


def _end_of(branch: _Branching | int, lengths: list[int]) -> int:
    """Return the number of tokens of a branch, with those above it."""
    return lengths[branch] if isinstance(branch, int) else branch.depth + branch.size


def _add(branching: _Branching, branch: _Branching | int, lengths: list[int]) -> None:
    branching.branches.append(branch)
    branching.size += _end_of(branch, lengths) - branching.depth
