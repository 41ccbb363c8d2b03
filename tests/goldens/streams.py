"""Packed streams and mixtures: all rows, and the rows after a state that was saved in the middle."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
from goldens.digests import digest_of_rows
from goldens.inputs import LONGEST, documents, related, write_lines
from torch.utils.data import DataLoader

import hf_packing as hfp

_Open = Callable[[], datasets.IterableDataset]
_SHARES = {"web": 0.6, "code": 0.4}


def packed(folder: Path) -> dict[str, str]:
    """Rows of packed streams of JSON lines and of a generator, from 1 and 8 logical streams."""
    found: dict[str, str] = {}
    eight, three = _lines(folder, "eight", 8), _lines(folder, "three", 3)
    for strategy in (
        hfp.BestFit(LONGEST),
        hfp.BestFit(LONGEST, overflow="drop", max_documents=4, seed=5),
        hfp.Bucket((16, 32, LONGEST)),
        hfp.Multipack(LONGEST, window=30),
        hfp.FixedLength(LONGEST),
    ):
        for streams in (None, 1, 8):
            _add(found, f"8 files, {strategy}, streams={streams}", _packed(eight, strategy, streams=streams))
    best_fit = hfp.BestFit(LONGEST)
    _add(found, "3 files, streams=8", _packed(three, best_fit, streams=8))
    _add(found, "3 files, streams=2", _packed(three, best_fit, streams=2))
    _add(found, "generator, streams=4", _packed(_generated, best_fit, streams=4))
    _add(found, "without position_ids", _packed(eight, best_fit, position_ids=False))
    _add(found, "window_packs=1", _packed(eight, best_fit, window_packs=1))
    shared = _opened(folder / "related", [related().to_list()[first::2] for first in range(2)])
    _add(found, "trees", _packed(shared, hfp.BestFit(80), share_prefixes=4, streams=2))
    _add(found, "trees, one window", _packed(shared, hfp.BestFit(80), share_prefixes=True, window_packs=64))
    for streams in (None, 8):
        rows = _packed(eight, best_fit, streams=streams)()
        rows.set_epoch(1)
        found[f"epoch 1, streams={streams}"] = digest_of_rows(rows)
        workers = DataLoader(_packed(eight, best_fit, streams=streams)(), batch_size=None, num_workers=2)
        found[f"2 workers, streams={streams}"] = digest_of_rows(workers)
    return found


def mixed(folder: Path) -> dict[str, str]:
    """Documents of mixtures, and their packed rows."""
    found: dict[str, str] = {}
    web, code = _lines(folder, "web", 4), _lines(folder, "code", 4, number=50, seed=3)
    for stopping in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement"):

        def mixture(stopping: Any = stopping) -> datasets.IterableDataset:
            return hfp.mix({"web": web(), "code": code()}, _SHARES, stopping_strategy=stopping, seed=2)

        _add(found, stopping, mixture)
        _add(found, f"{stopping}, packed", _packed(mixture, hfp.BestFit(LONGEST)))
        _add(found, f"{stopping}, packed, streams=2", _packed(mixture, hfp.BestFit(LONGEST), streams=2))
    return found


def _packed(opened: _Open, strategy: Any, **options: Any) -> _Open:
    return lambda: hfp.pack(opened(), strategy, **{"window_packs": 4, **options})


def _add(found: dict[str, str], case: str, opened: _Open) -> None:
    rows = list(opened())
    found[case] = digest_of_rows(rows)
    middle = len(rows) // 2
    stream, again = opened(), opened()
    for number, _ in enumerate(stream, 1):
        if number == middle:
            break
    again.load_state_dict(stream.state_dict())
    found[f"{case}, resumed after {middle}"] = digest_of_rows(again)


def _lines(folder: Path, name: str, files: int, number: int = 160, seed: int = 0) -> _Open:
    parts = [documents(number, seed)[first::files] for first in range(files)]
    return _opened(folder / name, [[{"input_ids": ids} for ids in part if ids] for part in parts])


def _opened(folder: Path, parts: list[list[dict[str, Any]]]) -> _Open:
    folder.mkdir()
    paths = [write_lines(folder / f"{place}.jsonl", part) for place, part in enumerate(parts)]
    stream = datasets.load_dataset("json", data_files=paths, split="train", streaming=True)
    return lambda: stream


def _generate(parts: list[list[list[int]]]) -> Iterator[dict[str, list[int]]]:
    for part in parts:
        yield from ({"input_ids": ids} for ids in part)


def _generated() -> datasets.IterableDataset:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})
    parts = [documents(160)[first::4] for first in range(4)]
    return datasets.IterableDataset.from_generator(_generate, gen_kwargs={"parts": parts}, features=features)
