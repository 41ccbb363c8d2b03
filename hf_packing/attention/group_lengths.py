"""Decide which segments of a packed row share a module call: those of equal length, or of similar length."""

from collections.abc import Sequence

CALL_OVERHEAD = 8
"""The fixed cost of a module call, expressed as a number of additional segments. A small module spends most of its time
on kernel launches, and a scan on sequential steps. Neither time depends on the number of segments in the call."""

MAX_PADDING = 4
"""A segment is padded to at most this many times its own length."""


def group_equal_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments of equal length, and return the segment indices of each group. The groups are in the order in
    which the lengths first occur in `lengths`."""
    groups: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        groups.setdefault(length, []).append(segment)
    return list(groups.values())


def group_similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group segments of similar length, and return the segment indices of each group.

    Each group is run in one module call, and the groups minimize the total cost of the calls. A call with n segments
    costs `longest * (CALL_OVERHEAD + n)`, since all segments are padded to the length of the longest segment. The
    segments are sorted by length, and dynamic programming finds where to cut the sorted list into groups.
    """
    equal = sorted(group_equal_lengths(lengths), key=lambda group: lengths[group[0]])
    least = [0.0] + [float("inf")] * len(equal)
    cut = [0] * (len(equal) + 1)
    for end in range(1, len(equal) + 1):
        longest, segments = lengths[equal[end - 1][0]], 0
        for start in reversed(range(end)):
            segments += len(equal[start])
            if lengths[equal[start][0]] * MAX_PADDING < longest:
                break
            cost = least[start] + longest * (CALL_OVERHEAD + segments)
            if cost < least[end]:
                least[end], cut[end] = cost, start
    groups = []
    end = len(equal)
    while end:
        groups.append([segment for group in equal[cut[end] : end] for segment in group])
        end = cut[end]
    return groups
