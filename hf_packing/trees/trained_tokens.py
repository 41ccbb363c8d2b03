"""The tokens of a row of trees that each document trains on.

A document trains on runs of its own tokens. In the row, the tokens of a run may lie in several segments of the
document's path. `trained_pieces` cuts the runs at the segments, so that the tokens of each piece are contiguous.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.lengths import count_ranges, indices_in_ranges
from hf_packing.trees.segments import Places, TreeSegments

Pieces = npt.NDArray[np.int64]
"""Parts of runs, int64 [pieces, 3]: the index of the document, the index of the first token in the row, and the number
of tokens."""


def trained_pieces(trees: TreeSegments, ends: npt.NDArray[Any], trained: npt.NDArray[Any]) -> Pieces:
    """Return where the tokens that documents train on are in the row.

    Args:
        trees: the segments of the row.
        ends: integers [documents], the segment in which each document ends.
        trained: integers [runs, 3]: the document, the place in the document at which the run begins, and the number of
            tokens. Every run lies within its document.

    Example:
        >>> trees = TreeSegments((3, 2, 1), (-1, 0, 0))
        >>> trained_pieces(trees, np.array([1, 2]), np.array([[0, 2, 3], [1, 1, 3]])).tolist()
        [[0, 3, 2], [1, 5, 1], [0, 2, 1], [1, 1, 2]]
    """
    document, first, length = trained.T.astype(np.int64)
    end, segment = first + length, np.asarray(ends, np.int64)[document]
    parents = np.array(trees.parents, np.int64)
    found = [np.empty((0, 3), np.int64)]
    while len(document):  # one segment further up in each round, for all runs that are not finished
        depth = trees.depths[segment]
        begin = np.maximum(first, depth)
        pieces = np.stack([document, trees.begins[segment] + begin - depth, end - begin], axis=1)
        found.append(pieces[end > begin])
        above = first < depth
        document, first, segment = document[above], first[above], parents[segment[above]]
        end = np.minimum(end, depth)[above]
    return np.concatenate(found)


def num_training(pieces: Pieces, tokens: int) -> npt.NDArray[np.int64]:
    """Return the number of documents that train on each token of the row, int64 [tokens].

    Args:
        pieces: the result of `trained_pieces`.
        tokens: the number of tokens of the row.
    """
    _, begin, length = pieces.T
    return count_ranges(begin, length, tokens)


def tokens_of_documents(pieces: Pieces) -> tuple[Places, Places]:
    """Return the document and the index in the row of every token that a document trains on.

    Args:
        pieces: the result of `trained_pieces`.

    Returns:
        Two arrays, int64 [tokens of all pieces]. A token is in the arrays once for each document that trains on it.
    """
    document, begin, length = pieces.T
    return np.repeat(document, length), indices_in_ranges(begin, length)
