"""`pack` of a fleet: run all stages of a run, by any engine, and go on where an earlier driver has stopped."""

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.fleet.count import check_unchanged, load_count, masks_of
from hf_packing.fleet.engines import Executor, local
from hf_packing.fleet.gather import load_packed_file
from hf_packing.fleet.in_order import in_order
from hf_packing.fleet.inputs import find_inputs, has_tokens, identity_of
from hf_packing.fleet.manifest import MANIFEST, PackedCorpus, read_manifest, write_manifest
from hf_packing.fleet.parts import DamagedFileError
from hf_packing.fleet.plan import Plan, counts_of, make_plan
from hf_packing.fleet.run import WORK, Run, Texts, claim_run, settings_of, write_names
from hf_packing.fleet.store import Store
from hf_packing.fleet.tasks import Task, damaged, is_done
from hf_packing.fleet.tokenizer import save_tokenizer
from hf_packing.planning.lengths import check_whole_number
from hf_packing.strategies.base import CountingStrategy, Strategy, check_strategy, registered_strategies

PROGRESS = f"{WORK}/progress.json"
_SECONDS_BETWEEN_WRITES = 2.0


def pack_files(
    files: str | Path | Sequence[str | Path],
    strategy: Strategy,
    output: str | Path,
    *,
    shards: int | None = None,
    executor: Executor | None = None,
    exchange: bool = True,
    position_ids: bool = True,
    tokenizer: Any = None,
    text_field: str | None = None,
    end_documents: bool = True,
    separator: str | None = None,
    skip_bad: bool = False,
    trust_remote_code: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PackedCorpus:
    """Pack many files with one plan, by processes of one or many machines. Each row is written exactly once.

    The rows of the output files, in order, are the rows that `hf_packing.pack` makes of all files. Workers, nodes and
    the driver may die at any time: the same call goes on with what is missing.

    Args:
        files: parquet or Arrow files with `input_ids` and other token columns; or, with a tokenizer, files of texts,
            prompts or chats as for `hf-packing pack`. A list in its order, or a folder or a pattern such as
            "s3://bucket/*.parquet", whose files are sorted by name.
        strategy: a strategy that needs only counts of lengths, such as BestFit(4096).
        output: folder for the packed rows, local or a URL of fsspec. All workers must reach it.
        shards: number of output files; None to have one for about 33 million tokens.
        executor: `hf_packing.fleet.local(workers)` or `hf_packing.fleet.ray(address)`; None for local processes, one
            per core.
        exchange: whether documents of different files may share a pack. With False, each file is packed by itself into
            one output file, and the result says how many more packs there are.
        position_ids: whether packed rows get a column `position_ids`.
        tokenizer: a name on the hub, a folder, a tokenizer.json file, or a fast tokenizer of transformers; None if the
            rows of the files have input_ids.
        text_field: name of the field with the text; None to use the first of text, prompt and messages that a row has.
        end_documents: whether to append the end-of-sequence token to texts.
        separator: the text between a prompt and a completion; None for a line break.
        skip_bad: whether to leave out, and count, rows that cannot be read or used; False to raise an error.
        trust_remote_code: whether to run code that comes with the tokenizer.
        storage_options: arguments for file systems that are not local, such as {"endpoint_url": ...}.

    Returns:
        PackedCorpus: the output files and the metrics of the plan. Warnings say what was left out, dropped, skipped or
        applied.

    Raises:
        PackingError: an argument is wrong, a file cannot be packed or has changed since its documents were counted,
            or another run has begun in the output folder.
    """
    store, strategy = Store(str(output), dict(storage_options or {})), check_counting(strategy)
    inputs = find_inputs(files, store.options)
    if shards is not None:
        check_whole_number("shards", shards)
        if not exchange:
            raise PackingError(
                f"shards: expected None with exchange=False, which packs each file by itself, got {shards}"
            )
    run = begin_run(
        inputs,
        strategy,
        store,
        shards=shards,
        exchange=exchange,
        position_ids=position_ids,
        tokenizer=tokenizer,
        text_field=text_field,
        end_documents=end_documents,
        separator=separator,
        skip_bad=skip_bad,
        trust_remote_code=trust_remote_code,
    )
    packed = drive(run, local() if executor is None else executor)
    for change in packed.changes():
        warnings.warn(f"pack {change}", stacklevel=2)
    return packed


def check_counting(strategy: Any) -> CountingStrategy:
    """Return a strategy that needs only counts of lengths.

    Raises:
        PackingError: the strategy needs the order of the documents, or is no strategy.
    """
    check_strategy(strategy)
    if not isinstance(strategy, CountingStrategy):
        counting = [each.__name__ for each in registered_strategies().values() if issubclass(each, CountingStrategy)]
        raise PackingError(
            f"strategy: expected a strategy that needs only counts of lengths ({', '.join(counting)}), got "
            f"{strategy!r}, which needs the order of the documents of all files"
        )
    return strategy


def begin_run(
    inputs: Sequence[str],
    strategy: Strategy,
    store: Store,
    *,
    shards: int | None,
    exchange: bool,
    position_ids: bool,
    tokenizer: Any,
    text_field: str | None,
    end_documents: bool,
    separator: str | None,
    skip_bad: bool,
    trust_remote_code: bool,
) -> Run:
    """Begin a run, or go on with it. The arguments are those of `pack_files`."""
    texts = None
    if tokenizer is not None or not all(map(has_tokens, inputs)):
        texts = Texts(
            tokenizer="" if tokenizer is None else save_tokenizer(store, tokenizer, trust_remote_code),
            text_field=text_field,
            end_documents=end_documents,
            separator=separator,
            skip_bad=skip_bad,
        )
    settings = settings_of(strategy, shards=shards, exchange=exchange, position_ids=position_ids, texts=texts)
    run = claim_run(store, inputs, settings)
    if not store.exists(MANIFEST):
        write_names(run, inputs)
    return run


def drive(run: Run, executor: Executor) -> PackedCorpus:
    """Do what is missing of a run, and return the packed corpus."""
    if (packed := _complete(run)) is not None:
        return packed
    try:
        return finish(run, _do_stages(run, executor))
    except (DamagedFileError, PackingError, OSError) as error:
        # another driver may have completed the run meanwhile, and removed the files that this one was reading
        if (packed := _complete(run)) is not None:
            return packed
        if isinstance(error, DamagedFileError):
            raise damaged(run, error) from None
        raise


def _complete(run: Run) -> PackedCorpus | None:
    """Return the packed corpus, without intermediate files, if a run is complete.

    Raises:
        PackingError: the output folder has another packed corpus, or a file has changed since.
    """
    packed = read_manifest(run.store)
    if packed is None:
        return None
    if packed.key != run.key:
        raise PackingError(f"output: expected a new folder, but {run.store.url!r} has a packed corpus of another run")
    for _ in in_order(lambda known: _check_identity(run, *known), packed.inputs):
        pass
    _clean_up(run, len(packed.files))
    return packed


def _do_stages(run: Run, executor: Executor) -> Plan:
    """Do what is missing of all stages, and return the plan."""
    with _progress(run) as bar:
        counted = list(in_order(lambda number: _is_counted(run, number), range(run.num_inputs)))
        _do(run, executor, "count", counted, bar)
        with bar("plan", run.num_inputs) as seen:
            plan = make_plan(run, seen)
        if (more := plan.num_packs - plan.together["packs"]) > 0:
            warnings.warn(
                f"exchange: with False, files make {plan.num_packs:,} packs, {more / plan.together['packs']:.2%} more "
                "than with one plan",
                stacklevel=4,
            )
        if run.settings.exchange:
            _do(run, executor, "deal", _done(run, "deal", run.num_inputs), bar)
        _do(run, executor, "gather", _done(run, "gather", plan.shards), bar)
    return plan


def finish(run: Run, plan: Plan) -> PackedCorpus:
    """Write the manifest of a run whose tasks are all done, and remove intermediate files.

    Raises:
        PackingError: an output file is missing, or a file has changed.
    """
    counted = []
    left_out: dict[str, None] = {}
    masks: dict[str, None] = {}
    skipped: list[str] = []
    num_skipped = 0
    for each, _ in in_order(lambda number: counts_of(run, number), range(run.num_inputs)):
        counted.append((each.name, list(each.identity)))
        left_out |= dict.fromkeys(each.left_out)
        masks |= dict.fromkeys(masks_of(each))
        num_skipped += len(each.skipped)
        skipped += each.skipped[: 1 - len(skipped)]
    try:
        files = list(in_order(lambda number: load_packed_file(run, number), range(plan.shards)))
    except DamagedFileError as error:
        raise PackingError(f"output: expected all output files, but {error.name!r} is gone or damaged") from None
    packed = PackedCorpus(
        output=run.store.url,
        key=run.key,
        version=hf_packing.__version__,
        strategy=run.settings.strategy,
        exchange=run.settings.exchange,
        files=files,
        inputs=counted,
        totals=plan.totals,
        packs_together=plan.together["packs"],
        columns=list(plan.columns),
        left_out=list(left_out),
        loss_masks=list(masks),
        skipped=num_skipped,
        first_skipped=skipped[0] if skipped else "",
        note=plan.note,
    )
    write_manifest(run.store, packed)
    _clean_up(run, plan.shards)
    return packed


def num_done(run: Run, stage: str, number: int) -> int:
    """Return how many of a stage's tasks are done."""
    return sum(_done(run, stage, number))


_Bar = Callable[[str, int], Any]


def _done(run: Run, stage: str, number: int) -> list[bool]:
    """Return for each of a stage's tasks whether it is done."""
    return list(in_order(lambda each: is_done(run, stage, each), range(number)))


def _do(run: Run, executor: Executor, stage: str, done: Sequence[bool], bar: _Bar) -> None:
    """Do the tasks of a stage that are not done."""
    with bar(stage, len(done)) as seen:

        def missing() -> Iterator[Task]:
            for each, is_there in enumerate(done):
                if is_there:
                    seen(1)
                else:
                    yield Task(run.store.url, run.store.options, run.key, stage, each)

        for _ in executor.run(missing()):
            seen(1)


@contextmanager
def _progress(run: Run) -> Iterator[_Bar]:
    """Context manager: show the progress of stages, and write it to the store from time to time.

    Yields:
        A context manager for a stage and its number of tasks, which yields a function that adds tasks that are done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:

        @contextmanager
        def stage_bar(stage: str, number: int) -> Iterator[Callable[[int], None]]:
            task = shown.add_task(stage, total=number)
            done, written = 0, 0.0

            def seen(more: int) -> None:
                nonlocal done, written
                done += more
                shown.advance(task, more)
                if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
                    _write_progress(run, stage, done, number)
                    written = time.monotonic()

            yield seen
            _write_progress(run, stage, done, number)

        yield stage_bar


def _write_progress(run: Run, stage: str, done: int, of: int) -> None:
    known = {"key": run.key, "stage": stage, "done": done, "of": of, "time": round(time.time())}
    with suppress(OSError):  # the rows matter more, and need no room for this file
        run.store.put(PROGRESS, json.dumps(known).encode())


def _is_counted(run: Run, number: int) -> bool:
    """Return whether a file has been counted. Raise PackingError if it has changed since."""
    try:
        counted, _ = load_count(run, number)
    except DamagedFileError:
        run.store.remove(run.file("count", number))
        return False
    check_unchanged(run, counted)
    return True


def _check_identity(run: Run, name: str, identity: Sequence[Any]) -> None:
    if (now := identity_of(name, run.store.options)) != list(identity):
        raise PackingError(
            f"{name}: expected the file that was packed, with size and last change {list(identity)}, got {now}; pack "
            f"changed files into a new folder. The rows in {run.store.url!r} are complete, and of the file as it was: "
            f"{MANIFEST} lists them"
        )


def _clean_up(run: Run, shards: int) -> None:
    """Remove intermediate files, except run.json, which names the run."""
    run.store.remove(PROGRESS)
    if not run.store.is_local and run.store.exists(run.file("inputs")):  # the last to be removed
        numbers = {"count": run.num_inputs, "packed": shards}
        numbers |= {"deal": run.num_inputs} if run.settings.exchange else {}
        numbers |= {"tokens": run.num_inputs} if run.settings.texts is not None else {}
        names = [run.file(stage, each) for stage, number in numbers.items() for each in range(number)]
        for _ in in_order(run.store.remove, [run.file("plan"), run.file("before"), *names]):
            pass
        run.store.remove(run.file("inputs"))
    run.store.remove_local_folders(f"{WORK}/{run.key}")
