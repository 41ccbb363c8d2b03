"""Packed rows: `pack`, lazy rows, shared prefixes, `map`, `unpack`."""

from pathlib import Path
from typing import Any

import datasets
from goldens.digests import digest_of_dataset, digest_of_rows
from goldens.inputs import LONGEST, dataset, labeled, masked, related

import hf_packing as hfp

_BUCKETS = (16, 32, LONGEST)
_STRATEGIES: list[Any] = [
    hfp.BestFit(LONGEST),
    hfp.BestFit(LONGEST, overflow="truncate", max_documents=3, seed=3),
    hfp.BestFit(LONGEST, overflow="drop", seed=None),
    hfp.Bucket(_BUCKETS),
    hfp.BucketByLength(_BUCKETS, seed=1),
    hfp.Multipack(LONGEST, window=50),
    hfp.ShortestPackFirst(LONGEST),
    hfp.FixedLength(LONGEST),
    hfp.FirstCome(LONGEST),
    hfp.FirstCome(LONGEST, order="dataset"),
]


def packed(folder: Path) -> dict[str, str]:
    """Rows of `pack` and of lazy packs, and the documents that `unpack` restores."""
    sources = {"tokens": dataset(), "labeled": labeled()}
    for name, source in sources.items():
        source.save_to_disk(folder / name)
    found = {}
    for name in sources:
        saved = datasets.load_from_disk(folder / name)
        for strategy in _STRATEGIES:
            rows = hfp.pack(saved, strategy)
            found[f"{name}, {strategy}"] = digest_of_dataset(rows)
            found[f"{name}, {strategy}, lazy"] = digest_of_rows(hfp.pack(saved, strategy, lazy=True))
            found[f"{name}, {strategy}, unpacked"] = digest_of_dataset(hfp.unpack(rows))
    strategy = hfp.BestFit(LONGEST)
    lazy = hfp.pack(datasets.load_from_disk(folder / "labeled"), strategy, lazy=True)
    found["lazy, unpacked"] = digest_of_rows(hfp.unpack(lazy))
    found["lazy, chosen"] = digest_of_rows(lazy.select(range(len(lazy) - 1, 0, -3)))
    for name in ("completion_mask", "assistant_masks"):
        found[name] = digest_of_dataset(hfp.pack(masked(name), strategy))
    found["without position_ids"] = digest_of_dataset(hfp.pack(sources["tokens"], strategy, position_ids=False))
    chosen = sources["labeled"].select([*range(100, 20, -2), 5, 5])
    found["chosen rows"] = digest_of_dataset(hfp.pack(chosen, strategy))
    visible = sources["labeled"].with_format("numpy", columns=["input_ids", "weights"])
    found["visible columns"] = digest_of_dataset(hfp.pack(visible, strategy).with_format(None))
    splits = datasets.DatasetDict({"train": sources["tokens"], "test": dataset(30, 1)})
    for name, rows in hfp.pack(splits, strategy).items():
        found[f"split {name}"] = digest_of_dataset(rows)
    return found


def mapped(_: Path) -> dict[str, str]:
    """Rows of `Dataset.map(strategy)`, and of strategies called with a batch."""
    found = {}
    for name, source in {"tokens": dataset(), "labeled": labeled()}.items():
        for strategy in _STRATEGIES:
            names = source.column_names
            rows = source.map(strategy, batched=True, batch_size=50, remove_columns=names)
            found[f"{name}, {strategy}"] = digest_of_dataset(rows)
            columns = strategy(source[:40])
            found[f"{name}, {strategy}, called"] = digest_of_rows(
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            )
    rows = masked("completion_mask").map(hfp.BestFit(LONGEST), batched=True, remove_columns=["completion_mask"])
    found["completion_mask"] = digest_of_dataset(rows)
    return found


def with_shared_prefixes(_: Path) -> dict[str, str]:
    """Rows of `pack(share_prefixes=...)`, their metrics, and the documents that `unpack` restores."""
    strategies = [hfp.BestFit(80), hfp.BestFit(40, overflow="drop", seed=3), hfp.ShortestPackFirst(80)]
    strategies += [hfp.Multipack(80, window=20), hfp.FirstCome(80, order="dataset")]
    found = {}
    for name, documents in {"related": related(), "no labels": related(8, 1).remove_columns("labels")}.items():
        for strategy in strategies:
            for fewest in (True, 4, 1):
                case = f"{name}, {strategy}, share_prefixes={fewest}"
                rows = hfp.pack(documents, strategy, share_prefixes=fewest)
                found[case] = digest_of_dataset(rows)
                found[f"{case}, unpacked"] = digest_of_dataset(hfp.unpack(rows))
    found["unrelated"] = digest_of_dataset(hfp.pack(labeled(), hfp.BestFit(80), share_prefixes=True))
    return found
