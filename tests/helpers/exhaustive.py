"""The fewest packs there are, found by trying everything."""


def fewest_packs(lengths: list[int], capacity: int, limit: int | None = None) -> int:
    """By trying every document in every pack."""
    best = len(lengths)
    most = limit or len(lengths)

    def place(remaining: list[int], packs: list[tuple[int, int]]) -> None:
        nonlocal best
        if len(packs) >= best and remaining:
            return
        if not remaining:
            best = min(best, len(packs))
            return
        length, *rest = remaining
        for i, (room, documents) in enumerate(packs):
            if room >= length and documents < most and packs[i] not in packs[:i]:
                place(rest, [*packs[:i], (room - length, documents + 1), *packs[i + 1 :]])
        place(rest, [*packs, (capacity - length, 1)])

    place(sorted(lengths, reverse=True), [])
    return best
