"""Packed rows: `pack`, lazy rows, shared prefixes, `map`, `unpack`, streams and mixtures, also resumed."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
from accelerate import Accelerator
from goldens.inputs import (
    LONGEST,
    dataset,
    digest,
    digest_of_batch,
    digest_of_dataset,
    digest_of_rows,
    documents,
    labeled,
    masked,
    related,
    write_lines,
)
from goldens.inside import epochs_of, trees_of
from torch.utils.data import DataLoader

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
    for name, source in {"related": related(), "no labels": related(8, 1).remove_columns("labels")}.items():
        for strategy in strategies:
            for fewest in (True, 4, 1):
                case = f"{name}, {strategy}, share_prefixes={fewest}"
                rows = hfp.pack(source, strategy, share_prefixes=fewest)
                found[case] = digest_of_dataset(rows)
                found[f"{case}, unpacked"] = digest_of_dataset(hfp.unpack(rows))
    found["unrelated"] = digest_of_dataset(hfp.pack(labeled(), hfp.BestFit(80), share_prefixes=True))
    return found


_Open = Callable[[], datasets.IterableDataset]
_SHARES = {"web": 0.6, "code": 0.4}


def packed_streams(folder: Path) -> dict[str, str]:
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
            _add(found, f"8 files, {strategy}, streams={streams}", _packed_stream(eight, strategy, streams=streams))
    best_fit = hfp.BestFit(LONGEST)
    _add(found, "3 files, streams=8", _packed_stream(three, best_fit, streams=8))
    _add(found, "3 files, streams=2", _packed_stream(three, best_fit, streams=2))
    _add(found, "generator, streams=4", _packed_stream(_generated, best_fit, streams=4))
    _add(found, "without position_ids", _packed_stream(eight, best_fit, position_ids=False))
    _add(found, "window_packs=1", _packed_stream(eight, best_fit, window_packs=1))
    shared = _opened(folder / "related", [related().to_list()[first::2] for first in range(2)])
    _add(found, "trees", _packed_stream(shared, hfp.BestFit(80), share_prefixes=4, streams=2))
    _add(found, "trees, one window", _packed_stream(shared, hfp.BestFit(80), share_prefixes=True, window_packs=64))
    for streams in (None, 8):
        rows = _packed_stream(eight, best_fit, streams=streams)()
        rows.set_epoch(1)
        found[f"epoch 1, streams={streams}"] = digest_of_rows(rows)
        workers = DataLoader(_packed_stream(eight, best_fit, streams=streams)(), batch_size=None, num_workers=2)
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
        _add(found, f"{stopping}, packed", _packed_stream(mixture, hfp.BestFit(LONGEST)))
        _add(found, f"{stopping}, packed, streams=2", _packed_stream(mixture, hfp.BestFit(LONGEST), streams=2))
    return found


def _packed_stream(opened: _Open, strategy: Any, **options: Any) -> _Open:
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


def collated_batches(_: Path) -> dict[str, str]:
    """Batches of packed rows, documents and trees, of fixed shapes, and with segments cut by a length schedule."""
    documents = labeled().filter(lambda row: len(row["input_ids"]) > 0)
    strategy = hfp.BestFit(LONGEST)
    kinds = {
        keep: {
            "packs": hfp.pack(documents, strategy, keep_first_labels=keep),
            "packs of tokens": hfp.pack(dataset(), strategy, keep_first_labels=keep),
            "packs without position_ids": hfp.pack(documents, strategy, position_ids=False, keep_first_labels=keep),
            "documents": documents.remove_columns("name"),
            "documents without labels": dataset(longest=LONGEST).filter(lambda row: len(row["input_ids"]) > 0),
            "buckets": hfp.pack(documents, hfp.Bucket((16, 32, LONGEST)), keep_first_labels=keep),
        }
        for keep in (False, True)
    }
    collators = {
        "flat": hfp.PackingCollator(),
        "with first labels": hfp.PackingCollator(keep_first_labels=True),
        "of fixed shapes": hfp.PackingCollator(tokens=420, max_segments=90),
    }
    found = {}
    for shape, collate in collators.items():
        for name, rows in kinds[collate.keep_first_labels].items():
            found[f"{name}, {shape}"] = digest([digest_of_batch(collate(list(rows.select(of)))) for of in _groups()])
    trees = hfp.pack(related(), hfp.BestFit(80), share_prefixes=4)
    found["trees"] = digest([digest_of_batch(hfp.PackingCollator()(list(trees.select(of)))) for of in _groups()])
    plain = dataset(longest=LONGEST)
    cut = hfp.TokenBudget(128, length_schedule=hfp.LengthSchedule(8, 10))
    loaders = {
        "loader of documents": (plain, hfp.TokenBudget(128), {}),
        "loader of documents, split": (dataset(), hfp.TokenBudget(50, overflow="split"), {}),
        "loader of packs": (kinds[False]["packs"], hfp.TokenBudget(2 * LONGEST), {}),
        "loader of buckets": (kinds[False]["buckets"], hfp.BucketBatches(2 * LONGEST), {}),
        "loader of fixed shapes": (plain, hfp.TokenBudget(128), {"tokens": 128, "max_segments": 40}),
        "loader of trees": (trees, hfp.TokenBudget(160), {}),
        "loader of documents that share prefixes": (related(), hfp.TokenBudget(160, share_prefixes=4), {}),
        "loader with segments cut": (plain, cut, {}),
    }
    for name, (rows, batching, options) in loaders.items():
        loader = hfp.prepare_dataloader(Accelerator(cpu=True), rows, batching, **options)
        made = [digest_of_batch(batch) for batch in loader]
        found[name] = f"{len(made)} batches {digest(made)}"
    return found


def _groups() -> list[list[int]]:
    return [[0], [1, 2, 3], [5, 4, 4]]


def planned_epochs(_: Path) -> dict[str, str]:
    """Epochs of both batchings on packed rows, documents and trees, for several ranks and accumulations."""
    long, plain = dataset(300, 2), dataset(300, 2, longest=LONGEST)
    packs, buckets = hfp.pack(long, hfp.BestFit(LONGEST)), hfp.pack(long, hfp.Bucket((16, 32, LONGEST)))
    sharing = hfp.TokenBudget(160, share_prefixes=4)
    cases: dict[str, tuple[Any, Any]] = {
        "packs": (packs, hfp.TokenBudget(2 * LONGEST)),
        "packs, level tokens, seed 3": (packs, hfp.TokenBudget(2 * LONGEST, balance="tokens", seed=3)),
        "packs, at most 20 documents": (packs, hfp.TokenBudget(3 * LONGEST, max_documents=20)),
        "documents": (plain, hfp.TokenBudget(128)),
        "documents, level tokens": (plain, hfp.TokenBudget(128, balance="tokens")),
        "documents, at most 4, seed 1": (plain, hfp.TokenBudget(128, max_documents=4, seed=1)),
        "documents, linear_cost 64": (plain, hfp.TokenBudget(128, linear_cost=64)),
        "documents, length schedule": (plain, hfp.TokenBudget(128, length_schedule=hfp.LengthSchedule(8, 10))),
        "long documents, split": (long, hfp.TokenBudget(50, overflow="split")),
        "long documents, truncate": (long, hfp.TokenBudget(50, overflow="truncate")),
        "long documents, drop": (long, hfp.TokenBudget(50, overflow="drop")),
        "trees in rows": (hfp.pack(related(40), hfp.BestFit(80), share_prefixes=4), hfp.TokenBudget(160)),
        "trees of documents": (trees_of(related(40), sharing), sharing),
        "buckets": (buckets, hfp.BucketBatches(2 * LONGEST)),
        "buckets, short to long": (buckets, hfp.BucketBatches(2 * LONGEST, order="short_to_long", cycles=2, seed=3)),
        "buckets, token budget": (buckets, hfp.TokenBudget(2 * LONGEST)),
        "few documents": (dataset(9, longest=20), hfp.TokenBudget(30)),
    }
    found = {}
    splits = list(itertools.product((1, 2, 8), (1, 4)))
    for name, (rows, batching) in cases.items():
        for (ranks, accumulation), plans in zip(splits, epochs_of(batching, rows, splits), strict=True):
            digests = " ".join(map(_digest, plans))
            found[f"{name}, {ranks} ranks x {accumulation}"] = f"{plans[0].num_micro_batches} micro-batches {digests}"
    return found


def _digest(plan: hfp.EpochPlan) -> str:
    return digest([plan.left_out, plan.bucket, [list(plan.micro_batches(rank)) for rank in range(plan.world_size)]])
