"""The rows of a packed stream, made with lists in the plainest way, to compare packed streams with."""

import numpy as np

from hf_packing.planning.lengths import check_lengths


def literal_rows(documents, strategy, window_packs, most_windows=4) -> list[dict]:
    """Pack documents window by window; see `hf_packing.pack`."""
    left, waiting, ages, number, rows = list(documents), [], [], 0, []
    ended = False
    while not ended:
        window, age = list(waiting), list(ages)
        missing = max(window_packs * strategy.largest_capacity - sum(map(len, waiting)), 1)
        while missing > 0 and not ended:
            if not left:
                ended = True
                break
            missing -= len(left[0])
            window.append(left.pop(0))
            age.append(0)
        plan, is_open, all_wait = strategy.plan_window(check_lengths([len(each) for each in window]), number)
        packs = [
            [
                (int(plan.segment_document[s]), int(plan.segment_start[s]), int(plan.segment_length[s]))
                for s in range(plan.pack_offsets[p], plan.pack_offsets[p + 1])
            ]
            for p in range(plan.num_packs)
        ]
        capacity = plan.pack_capacity.tolist()
        free = [1 - sum(length for *_, length in pack) / capacity[p] for p, pack in enumerate(packs)]
        may_wait = [
            p
            for p in range(len(packs))
            if is_open[p] and (all_wait or max(age[document] for document, *_ in packs[p]) < most_windows)
        ]
        waits: list[int] = []
        for p in sorted(may_wait, key=lambda p: -free[p]):
            few = 4 * (len(waits) + 1) <= len(packs)
            small = 4 * sum(capacity[w] for w in [*waits, p]) <= sum(capacity)
            if all_wait or (few and small):
                waits.append(p)
            else:
                break
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


def _row(window, pack, bucket) -> dict:
    segments = [window[document][start : start + length] for document, start, length in pack]
    row = {
        "input_ids": [token for segment in segments for token in segment],
        "labels": [label for segment in segments for label in [-100, *segment[1:]]],
        "position_ids": [place for segment in segments for place in range(len(segment))],
        "seq_lengths": [len(segment) for segment in segments],
    }
    return row if bucket is None else {**row, "bucket": bucket}


def as_lists(row) -> dict:
    return {name: np.asarray(values).tolist() for name, values in row.items()}
