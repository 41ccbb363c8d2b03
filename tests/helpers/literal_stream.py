"""The rows of a packed stream, made with lists in the plainest way, to compare packed streams with."""

from plans import packs_of

from hf_packing.planning.lengths import check_lengths


def literal_rows(documents, strategy, window_packs, most_windows=4) -> list[dict]:
    """Pack documents window by window; see `hf_packing.pack`."""
    left, waiting, ages, number, rows = list(documents), [], [], 0, []
    ended = False
    while not ended:
        window, age = list(waiting), list(ages)
        size = window_packs * strategy.largest_capacity
        most = max(size, min(32 * size, 2**22))
        tokens, new = sum(map(len, waiting)), 0
        while ((new < 1 or tokens < size or len(window) < 16 * window_packs) and tokens < most) or not new:
            if not left:
                ended = True
                break
            tokens, new = tokens + len(left[0]), new + len(left[0])
            window.append(left.pop(0))
            age.append(0)
        plan, is_open, all_wait, _ = strategy.plan_window(check_lengths([len(each) for each in window]), number)
        packs = packs_of(plan)
        capacity = plan.pack_capacity.tolist()
        free = [1 - sum(length for *_, length in pack) / capacity[p] for p, pack in enumerate(packs)]
        may_wait = [p for p in range(len(packs)) if is_open[p]]
        waits: list[int] = []
        for p in sorted(may_wait, key=lambda p: -free[p]):
            few = 4 * (len(waits) + 1) <= len(packs)
            small = 4 * sum(capacity[w] for w in [*waits, p]) <= min(sum(capacity), size)
            if all_wait or (few and small):
                waits.append(p)
            else:
                break
        if not all_wait:
            waits = _send_old(packs, waits, capacity, age, most_windows)
        if ended:
            waits = []
        for p, pack in enumerate(packs):
            if p not in waits:
                rows.append(_row(window, pack, capacity[p] if strategy.has_buckets else None))
        kept = sorted(segment for p in waits for segment in packs[p])
        waiting = [window[document][start : start + length] for document, start, length in kept]
        ages = [age[document] + 1 for document, *_ in kept]
        number += 1
    return rows


def _send_old(packs, waits, capacity, age, most_windows) -> list[int]:
    """Exchange old segments for young ones of packs that go out; return the packs that still wait."""

    def room(p):
        return capacity[p] - sum(length for *_, length in packs[p])

    everywhere = [(p, k) for p in range(len(packs)) for k in range(len(packs[p]))]
    old = [(p, k) for p, k in everywhere if p in waits and age[packs[p][k][0]] >= most_windows]
    young = [(p, k) for p, k in everywhere if p not in waits and age[packs[p][k][0]] < most_windows]
    taken = set()
    waits = list(waits)
    for p, k in sorted(old, key=lambda place: -packs[place[0]][place[1]][2]):
        if p not in waits:
            continue
        length = packs[p][k][2]
        free = [(q, j, packs[q][j][2], n) for n, (q, j) in enumerate(young) if (q, j) not in taken]
        shorter = [each for each in free if each[2] <= length and length - each[2] <= room(each[0])]
        longer = [each for each in free if each[2] > length]
        if shorter:
            q, j, *_ = max(shorter, key=lambda each: (each[2], each[3]))
        elif longer and min(each[2] for each in longer) - length <= room(p):
            q, j, *_ = min(longer, key=lambda each: (each[2], each[3]))
        else:
            waits.remove(p)
            continue
        packs[p][k], packs[q][j] = packs[q][j], packs[p][k]
        taken.add((q, j))
    return waits


def _row(window, pack, bucket) -> dict:
    segments = [window[document][start : start + length] for document, start, length in pack]
    row = {
        "input_ids": [token for segment in segments for token in segment],
        "labels": [label for segment in segments for label in [-100, *segment[1:]]],
        "position_ids": [place for segment in segments for place in range(len(segment))],
        "seq_lengths": [len(segment) for segment in segments],
    }
    return row if bucket is None else {**row, "bucket": bucket}
