"""Best-fit decreasing as arXiv 2404.10830 gives it: a segment tree over the room that packs have left."""

import numpy as np
from tqdm.auto import tqdm


def best_fit_packs(lengths: np.ndarray, max_length: int) -> int:
    """Return how many packs the paper's algorithm needs; it runs in Python, as for the paper's figures.

    Documents longer than max_length are cut into full packs and a remainder. Leaf r of the tree holds r where a pack
    with room r exists, else 0, and each node holds the larger of its children. The search for a piece of w tokens goes
    down from the root, and left where the left child is at least w.

    Args:
        lengths: integers [documents], tokens.
        max_length: tokens a pack holds.
    """
    full, rest = np.divmod(lengths, max_length)
    counts = np.bincount(rest[rest > 0], minlength=max_length + 1)
    pieces = np.repeat(np.arange(max_length, 0, -1), counts[:0:-1])
    leaves = 1 << int(max_length).bit_length()
    tree = [0] * (2 * leaves)
    tree[leaves + max_length] = max_length
    update_parents(tree, leaves + max_length)
    bins_with_room: list[list[list[int]]] = [[] for _ in range(max_length + 1)]
    packs = int(full.sum())
    for piece in tqdm(pieces.tolist(), desc="The paper's best-fit decreasing", unit=" pieces", unit_scale=True):
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < piece:
                node += 1
        room = node - leaves
        if bins_with_room[room]:
            items = bins_with_room[room].pop()
            items.append(piece)
        else:
            items = [piece]
            packs += 1
        if not bins_with_room[room] and room < max_length:
            tree[node] = 0
            update_parents(tree, node)
        left = room - piece
        if left:
            bins_with_room[left].append(items)
            if not tree[leaves + left]:
                tree[leaves + left] = left
                update_parents(tree, leaves + left)
    return packs


def update_parents(tree: list[int], node: int) -> None:
    """Update the nodes above, up to the root or until nothing changes."""
    while node > 1:
        node //= 2
        larger = max(tree[2 * node], tree[2 * node + 1])
        if tree[node] == larger:
            return
        tree[node] = larger
