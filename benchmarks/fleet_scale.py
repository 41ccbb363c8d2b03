"""A trillion tokens in 100,000 files, packed by a fleet of 1,000 workers: what it takes, by formula and by program.

python benchmarks/fleet_scale.py

By formula: an output file is gathered from a part of every dealt file, and a part takes two reads of a range of bytes,
of which the second has 4 bytes a token, 12 a segment and 24 more. With F files and O output files, F * O parts are
read: where that is more than there are segments, most parts are empty, and requests take all the time. Larger files,
and thus fewer, have larger parts, but workers need more memory. Parts would also be larger in an exchange of two
levels, which the fleet does not have: deal each file into sqrt(O) ranges of output files, deal those again for each of
sqrt(F) groups of files, and gather from the groups. That is F * sqrt(O) + sqrt(F) * O parts, for which all tokens are
written and read once more. Hours are those of 1,000 workers with 16 requests at a time, each of 20 ms, as of an object
store. A worker holds one file, or one output file.

By program: the real driver, with tasks that only leave files as real tasks do: counts of real size, empty files for
deal and gather. The driver stops in the middle of the last stage, and is started again. Then tiny files are really
dealt and gathered, for the price of a part.
"""

import argparse
import json
import math
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import internals
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from internals import (
    TOKENS_IN_A_SHARD,
    Counted,
    LengthCounts,
    PackedFile,
    Run,
    Store,
    Task,
    count,
    count_lengths,
    deal,
    gather,
    identity_of,
    load_plan,
    make_plan,
    write_parts,
)
from lengths import refinedweb_like
from measure import figure, machine, recorded

import hf_packing as hfp

ROW = 4096
TOKENS_IN_A_FILE = 10**7
WORKERS, REQUESTS_AT_A_TIME, SECONDS_OF_A_REQUEST = 1000, 16, 0.02
BYTES_OF_A_WORKER = 12
"""Memory that deal and gather take for each token of their file, measured with files of 3 to 50 million tokens."""
HISTOGRAMS = 64
"""Different histograms, which files have in turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--parts", type=int, default=200, help="tiny files, and output files, for the price of a part")
    parser.add_argument("--folder", help="where to write, instead of a temporary folder")
    arguments = parser.parse_args()
    print(f"{machine('hf-packing', 'pyarrow', 'numpy')}\n")
    histograms = [histogram(seed) for seed in range(HISTOGRAMS)]
    documents, lengths = np.mean([(each.documents.sum(), len(each.length)) for each in histograms], axis=0)
    by_formula(arguments.files, documents, lengths)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        by_program(Path(folder), arguments.files, histograms)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        price_of_a_part(Path(folder), arguments.parts)


def histogram(seed: int) -> LengthCounts:
    """Count documents of each length in a file of about 10 million tokens, with lengths as in web texts."""
    lengths = refinedweb_like(TOKENS_IN_A_FILE // 250, seed)
    return count_lengths(lengths[: int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), TOKENS_IN_A_FILE))])


def by_formula(files: int, documents_in_a_file: float, lengths_in_a_file: float) -> None:
    tokens, documents = files * TOKENS_IN_A_FILE, files * documents_in_a_file
    segments, outputs = documents + tokens / ROW, -(-tokens // TOKENS_IN_A_SHARD)
    groups, ranges = math.isqrt(files), math.isqrt(outputs)
    once = 4 * tokens + 12 * segments
    ways = {f"{files:,} files, {outputs:,} output files": (files * outputs, 1, min(files, outputs))}
    for less in (10, 100):
        few, few_outputs = max(1, files // less), max(1, 3 * outputs // less)
        ways[f"{few:,} files, {few_outputs:,} output files"] = (few * few_outputs, 1, min(few, few_outputs))
    levels = files * ranges + groups * outputs
    ways[f"two levels, {groups:,} groups, {ranges:,} ranges"] = (levels, 2, min(files, outputs, groups * ranges))
    print(f"by formula: {tokens:.2g} tokens, {documents:.2g} documents, {segments:.2g} segments\n")
    columns = ("parts", "segments", "bytes", "TB moved", "TB index", "reads", "a worker", "hours", "GB")
    print(f"{'':40}{''.join(f'{name:>11}' for name in columns)}")
    for way, (parts, times, tasks) in ways.items():
        index, moved = 48 * parts, times * once + 48 * parts
        hours = 2 * parts / WORKERS / REQUESTS_AT_A_TIME * SECONDS_OF_A_REQUEST / 3600
        memory = BYTES_OF_A_WORKER * tokens / tasks
        row = f"{way:40}{parts:>11.1e}{times * segments / parts:>11,.3g}{times * once / parts:>11,.0f}"
        row += f"{2 * moved / 1e12:>11.1f}{index / 1e12:>11.3f}{2 * parts:>11.1e}{2 * parts / WORKERS:>11.1e}"
        print(f"{row}{hours:>11.3f}{memory / 1e9:>11.1f}")
        figure(way=way, parts=parts, bytes_of_a_part=times * once / parts, reads=2 * parts, hours=hours, memory=memory)
    print("segments and bytes: of a part; moved: read and written; a worker: reads of one; GB: memory of one")
    counts = 16 * lengths_in_a_file * files
    print(f"\ndocuments of each length: {counts / 1e9:.1f} GB counted, and as much in all earlier files, in `before`")


@dataclass(frozen=True)
class CountedStore(Store):
    """A store that counts what is asked of it."""

    requests: Counter[str] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock)

    def size(self, name: str) -> int | None:
        self._count(name)
        return super().size(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        self._count(name)
        return super().read(name, begin, end)

    def remove(self, name: str) -> None:
        self._count(name)
        super().remove(name)

    def _count(self, name: str) -> None:
        with self._lock:
            self.requests[Path(name).name.split("-")[0]] += 1


class StoppedError(Exception):
    """The driver has died."""


class Stubs:
    """Leaves files as tasks do, and tells how long that takes.

    Args:
        run: the run.
        names: the files to pack.
        histograms: the documents of each length in the files, which have them in turn.
        stop_at: the number of the output file at which the driver dies.
    """

    def __init__(self, run: Run, names: list[str], histograms: list[LengthCounts], stop_at: int | None) -> None:
        self._run, self._store, self._names, self._histograms = run, Store(run.store.url), names, histograms
        self._stop_at, self._plan = stop_at, None
        self.began: dict[str, float] = {}
        self.seconds: Counter[str] = Counter()
        self.tasks: Counter[str] = Counter()

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        for task in tasks:
            began = time.perf_counter()
            self.began.setdefault(task.stage, began)
            if task.stage == "gather" and task.number == self._stop_at:
                raise StoppedError
            getattr(self, task.stage)(task.number)
            self.seconds[task.stage] += time.perf_counter() - began
            self.tasks[task.stage] += 1
            yield task

    def count(self, number: int) -> None:
        counts, name = self._histograms[number % len(self._histograms)], self._names[number]
        known = Counted(
            name=name,
            identity=identity_of(name, {}),
            documents=int(counts.documents.sum()),
            columns={"input_ids": "int32"},
            left_out=[],
        )
        parts = [[json.dumps(asdict(known)).encode()], [counts.length.astype("<i8")], [counts.documents.astype("<i8")]]
        write_parts(self._store, self._run.file("count", number), parts, 3)

    def deal(self, number: int) -> None:
        self._store.put(self._run.file("deal", number), b"")

    def gather(self, number: int) -> None:
        self._plan = self._plan or load_plan(self._run)
        name = self._run.output(number, self._plan.shards)
        self._store.put(name, b"")
        known = PackedFile(
            name=name, rows=1, tokens=1, trained_tokens=1, size=0, sha256="0" * 64, plan=self._plan.checksum
        )
        self._store.put(self._run.file("packed", number), json.dumps(asdict(known)).encode())


def by_program(folder: Path, files: int, histograms: list[LengthCounts]) -> None:
    (folder / "in").mkdir()
    names = [f"{folder}/in/{number:06d}.parquet" for number in range(files)]
    for name in names:
        Path(name).touch()
    distinct = np.mean([len(each.length) for each in histograms])
    print(f"\nby program: {files:,} files of 10 million tokens, {distinct:,.0f} different lengths in a file\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outputs = -(-files * TOKENS_IN_A_FILE // TOKENS_IN_A_SHARD)
    total = drive(folder, names, histograms, "the first driver", outputs // 2)
    work = folder / "out" / ".fleet" / json.loads((folder / "out" / ".fleet" / "run.json").read_text())["key"]
    sizes = {name: (work / name).stat().st_size for name in ("plan", "before")}
    total += drive(folder, names, histograms, "the second driver", None)
    sizes["manifest"] = (folder / "out" / "manifest.json").stat().st_size
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(", ".join(f"{name} {size / 1e6:,.2f} MB" for name, size in sizes.items()))
    print(f"both drivers: {total:.0f} s (bar: 600), peak memory {after / 1024:,.0f} MB (bar: 2,000),", end=" ")
    print(f"of which {before / 1024:,.0f} before")
    figure(files=files, seconds=total, peak_memory=after << 10, memory_before=before << 10, sizes=sizes)


def drive(folder: Path, names: list[str], histograms: list[LengthCounts], who: str, stop_at: int | None) -> float:
    """Run a driver, and return how many seconds it took without the tasks."""
    began = time.perf_counter()
    store = CountedStore(str(folder / "out"))
    run = begin_run(names, store, None)
    stubs = Stubs(run, names, histograms, stop_at)
    with suppress(StoppedError):
        internals.drive(run, stubs)
    whole = time.perf_counter() - began
    seconds = whole - sum(stubs.seconds.values())
    first = ", ".join(f"{stage} {at - began:.1f} s" for stage, at in stubs.began.items())
    asked = ", ".join(f"{name} {number:,}" for name, number in store.requests.most_common(5))
    print(f"{who}: {seconds:.1f} s without {sum(stubs.tasks.values()):,} tasks; tasks begin: {first}")
    requests = sum(store.requests.values())
    minutes = requests * SECONDS_OF_A_REQUEST / REQUESTS_AT_A_TIME / 60
    print(f"    {requests / len(names):.1f} requests to the output folder for each file, {asked}:", end=" ")
    print(f"{minutes:.0f} minutes in an object store")
    figure(who=who, seconds=seconds, with_tasks=whole, tasks=stubs.tasks, requests=store.requests)
    return seconds


def begin_run(names: list[str], store: Store, shards: int | None) -> Run:
    return internals.begin_run(
        names,
        hfp.BestFit(ROW),
        store,
        shards=shards,
        exchange=True,
        position_ids=True,
        share_prefixes=False,
        tokenizer=None,
        text_field=None,
        end_documents=True,
        separator=None,
        train_on=None,
        skip_bad=False,
        trust_remote_code=False,
    )


def price_of_a_part(folder: Path, number: int) -> None:
    """Deal and gather files so small that parts are almost empty."""
    names = []
    for each in range(number):
        ids = pa.array([[1] * ROW] * 4, pa.list_(pa.int32()))
        names.append(f"{folder}/{each}.parquet")
        pq.write_table(pa.table({"input_ids": ids}), names[-1])
    run = begin_run(names, Store(str(folder / "out")), number)
    microseconds = {}
    stages: dict[str, Callable[[Run, int], None]] = {"count": count, "deal": deal, "gather": gather}
    for stage, task in stages.items():
        began = time.perf_counter()
        for each in range(number):
            task(run, each)
        microseconds[stage] = 1e6 * (time.perf_counter() - began) / number**2
        if stage == "count":
            make_plan(run, lambda _: None)
    print(f"\na part of {number:,} by {number:,}: {microseconds['deal']:.0f} microseconds to deal, ", end="")
    print(f"{microseconds['gather']:.0f} to gather, on a local disk")
    figure(parts=number**2, microseconds=microseconds)


if __name__ == "__main__":
    with recorded(__file__):
        main()
