"""Random trees."""

from hypothesis import strategies as st


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
