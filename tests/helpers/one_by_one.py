"""Best fit and first fit, one document after the other: the packs, as lists of lengths."""


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Each document, the longest first, goes into the fullest pack that holds it."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        pack = max((pack for pack in packs if sum(pack) + length <= capacity), key=sum, default=None)
        if pack is None:
            packs.append([length])
        else:
            pack.append(length)
    return packs


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Each document, the longest first, goes into the first pack that holds it."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        pack = next((pack for pack in packs if sum(pack) + length <= capacity), None)
        if pack is None:
            packs.append([length])
        else:
            pack.append(length)
    return packs
