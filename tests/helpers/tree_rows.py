"""Rows of trees, built token by token in a trie of dicts, and the documents of such rows, read token by token."""

from itertools import chain

from hypothesis import strategies as st


class _Node:
    def __init__(self, token=None):
        self.token, self.label, self.children, self.ends = token, -100, {}, []


def tree_row(documents, labels=None):
    """Return the columns of a row in which documents share every prefix, and the index of each document of the row.
    Without labels, all tokens but the first of each document are trained on."""
    labels = documents if labels is None else labels
    root = _Node()
    for number, (tokens, wanted) in enumerate(zip(documents, labels, strict=True)):
        node = root
        for place, (token, label) in enumerate(zip(tokens, wanted, strict=True)):
            label = label if place else -100
            node = node.children.setdefault((token, label if label not in (-100, token) else None), _Node(token))
            node.label = label if label != -100 else node.label
        node.ends.append(number)
    row = {name: [] for name in ("tree_input_ids", "tree_labels", "segment_lengths", "parents", "ends", "trained")}
    order = []
    for tree in root.children.values():
        _add(row, order, tree, parent=-1)
    for document, number in enumerate(order):
        for first, length in runs_of(labels[number]):
            row["trained"] += [document, first, length]
    return row, order


def _add(row, order, node, parent):
    segment, tokens = len(row["parents"]), [node]
    while len(node.children) == 1 and not node.ends:
        (node,) = node.children.values()
        tokens.append(node)
    row["tree_input_ids"] += [each.token for each in tokens]
    row["tree_labels"] += [each.label for each in tokens]
    row["segment_lengths"].append(len(tokens))
    row["parents"].append(parent)
    for number in node.ends:
        row["ends"].append(segment)
        order.append(number)
    for child in node.children.values():
        _add(row, order, child, segment)


def runs_of(labels):
    """Return the first place and the length of each run of labels other than -100, without the first token."""
    runs = []
    for place in range(1, len(labels)):
        if labels[place] != -100:
            if runs and sum(runs[-1]) == place:
                runs[-1][1] += 1
            else:
                runs.append([place, 1])
    return runs


def documents_of(row):
    """Return the tokens, the labels, and the path of each document of a row: the indices of its tokens in the row."""
    documents = []
    for end in row["ends"]:
        path = []
        while end >= 0:
            begin = sum(row["segment_lengths"][:end])
            path = [*range(begin, begin + row["segment_lengths"][end]), *path]
            end = row["parents"][end]
        documents.append(([row["tree_input_ids"][place] for place in path], [-100] * len(path), path))
    for run in range(0, len(row["trained"]), 3):
        document, first, length = row["trained"][run : run + 3]
        _, labels, path = documents[document]
        for place in range(first, first + length):
            labels[place] = row["tree_labels"][path[place]]
    return documents


@st.composite
def labeled_documents(draw, most=6, tokens=3):
    """Documents that share prefixes, end inside others or repeat, and their labels, of which some are -100."""
    pieces = draw(st.lists(st.lists(st.integers(1, tokens), min_size=1, max_size=4), min_size=1, max_size=4))
    chosen = st.lists(st.sampled_from(pieces), min_size=1, max_size=most)
    documents = [[*chain(*each)] for each in draw(st.lists(chosen, min_size=1, max_size=most))]
    labels = []
    for document in documents:
        trained = draw(st.one_of(st.just([]), st.just([True]), st.lists(st.booleans(), min_size=1, max_size=5)))
        repeated = (trained * len(document))[: len(document)] or [False] * len(document)
        labels.append([token if used else -100 for token, used in zip(document, repeated, strict=True)])
    return documents, labels


@st.composite
def forests(draw, most=12):
    """Lengths and parents of random trees in depth-first order."""
    lengths, parents, path = [], [], []
    for segment in range(draw(st.integers(1, most))):
        depth = draw(st.integers(0, len(path)))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(segment)
        lengths.append(draw(st.integers(1, 5)))
    return tuple(lengths), tuple(parents)


PROMPT = [11, 5, 9, 30, 31]
DOCUMENTS = [
    [*PROMPT, 7, 8, 21, 3],
    [*PROMPT, 7, 8, 40, 41, 42],
    PROMPT,  # ends inside the others
    [*PROMPT, 7, 8, 21, 3],  # a duplicate, with other labels
    [*PROMPT, 60],
    [50, 51, 52],  # a tree of its own
    [50, 51, 53],  # without labels
    [77],
]
LABELS = [
    [-100] * 5 + [7, 8, 21, 3],
    [-100, 5, 9, 30, -100, 7, -100, 40, 41, 42],
    [-100, -100, 9, 30, 31],
    [-100] * 7 + [21, -100],
    [11, 5, 9, 30, 31, 60],
    [50, 51, 52],
    [-100] * 3,
    [77],
]
OTHER = [[[1, 2, 3, 4], [1, 2, 5]], [[-100, 2, 3, 4], [-100, -100, 5]]]
