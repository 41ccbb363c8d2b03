"""Choose the sources of the documents of a mixture, so that each source has its share of the tokens.

A document of n tokens is due when its source should have given x + n / 2 tokens, after x tokens that it has given. The
next document is the one that is due first. So the tokens of a source differ from its share by about half a document,
as often above as below, whatever the lengths of its documents are. Logical streams begin at different places between
two documents, so that their differences cancel, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Balance:
    """The tokens, or labels, that were counted of each source since its share was given."""

    total: list[int] | None = None
    """What was counted of each source; None if counting begins with the next document."""
    paused: int | None = None
    """The source whose document was the last, if the document counted nothing."""

    def choose(
        self,
        shares: Sequence[float],
        counts: Mapping[int, Sequence[int]],
        most: int,
        phases: Sequence[float],
    ) -> tuple[list[int], int | None]:
        """Choose the sources of the next documents, until the documents at hand of a source end.

        After a document that counts nothing, another source is next, so that a source with many such documents in a row
        does not keep the others from their turns.

        Args:
            shares: the share of each source.
            counts: what counts of each document at hand of a source, in their order; empty if the source has ended.
            most: the largest number of documents to choose.
            phases: the place between two documents, from 0 to 1, at which each source begins.

        Returns:
            The sources of the documents, in order; and a source that is due but has ended, or None.
        """
        if self.total is None:
            first = [next(iter(counts.get(source, ())), 0) for source in range(len(shares))]
            self.total = [
                0 if phase == 0.5 else round((phase - 0.5) * count / (1 - share))
                for phase, count, share in zip(phases, first, shares, strict=True)
            ]
        total = self.total
        chosen: list[int] = []
        used = dict.fromkeys(sorted(counts), 0)

        def due(source: int) -> float:
            following = counts[source][used[source]] if counts[source] else 0
            return (total[source] + following / 2) / shares[source]

        at = {source: due(source) for source in used}
        while len(chosen) < most:
            source = min(at, key=at.__getitem__)
            if source == self.paused:
                others = [each for each in at if each != source and counts[each]]
                source = min(others, key=at.__getitem__, default=source)
            if not counts[source]:
                return chosen, source
            counted = counts[source][used[source]]
            self.paused = None if counted else source
            total[source], used[source] = total[source] + counted, used[source] + 1
            chosen.append(source)
            if used[source] == len(counts[source]):
                break
            at[source] = due(source)
        return chosen, None


def phases_of(shares: Sequence[float], number: int, of: int, seed: int) -> list[float]:
    """Return where between two documents each source begins in one of several parts of a mixture.

    The parts begin at evenly spaced places, each source in another order. The source with the largest share makes up
    for the others.

    Args:
        shares: the share of each source.
        number: the number of the part.
        of: the number of parts.
        seed: seed of the orders.
    """
    phases = [
        (int(np.random.default_rng([seed, source, of]).permutation(of)[number]) + 0.5) / of
        for source in range(len(shares))
    ]
    phases[shares.index(max(shares))] = 0.5
    return phases
