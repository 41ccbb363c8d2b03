"""Documents that share prefixes, and the number of tokens of their trie, literally."""

from typing import Any

from hypothesis import strategies as st

Document = tuple[Any, ...]


def common_prefix(documents: list[Document]) -> int:
    together = 0
    while all(len(document) > together for document in documents) and len({each[together] for each in documents}) == 1:
        together += 1
    return together


def tokens_of_trie(documents: list[Document], least: int = 1, kept: int = 0) -> int:
    """Return the number of tokens of a trie, below the first `kept` tokens, which all documents have in common.
    A branching that is fewer than `least` tokens below another one moves up to it."""
    if not documents:
        return 0
    if len(documents) == 1:
        return len(documents[0]) - kept
    depth = common_prefix(documents)
    here = depth if depth - kept >= least else kept
    ended = [document for document in documents if len(document) == depth]
    branches: dict[Any, list[Document]] = {}
    for document in documents:
        if len(document) > depth:
            branches.setdefault(document[depth], []).append(document)
    below = sum(len(document) - here for document in ended)
    return here - kept + below + sum(tokens_of_trie(branch, least, here) for branch in branches.values())


@st.composite
def forests(draw: Any, max_documents: int = 14, longest: int = 12) -> list[list[int]]:
    """Documents over few tokens: many begin alike, are equal, end inside others, or are empty."""
    documents: list[list[int]] = []
    for _ in range(draw(st.integers(0, max_documents))):
        prefix: list[int] = []
        if documents and draw(st.booleans()):
            prefix = draw(st.sampled_from(documents))
            prefix = prefix[: draw(st.integers(0, len(prefix)))]
        documents.append([*prefix, *draw(st.lists(st.integers(0, 2), max_size=longest - len(prefix)))])
    return documents
