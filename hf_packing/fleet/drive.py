"""The driver: do the tasks of a run that are not done, stage by stage, and write the manifest."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.fleet.count import check_unchanged, load_count, masks_of
from hf_packing.fleet.engines import Executor
from hf_packing.fleet.gather import load_packed_file
from hf_packing.fleet.in_order import in_order
from hf_packing.fleet.inputs import identity_of
from hf_packing.fleet.manifest import MANIFEST, PackedCorpus, read_manifest, write_manifest
from hf_packing.fleet.parts import DamagedFileError
from hf_packing.fleet.plan import Plan, counts_of, make_plan
from hf_packing.fleet.progress import PROGRESS, Bar, showing_progress
from hf_packing.fleet.run import WORK, Run
from hf_packing.fleet.tasks import Task, damaged, is_done


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
    with showing_progress(run) as bar:
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
        _do(run, executor, "gather", _done(run, "gather", plan.shards, plan), bar)
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
    splits: dict[str, int] = {}
    num_skipped = 0
    for each, _ in in_order(lambda number: counts_of(run, number), range(run.num_inputs)):
        counted.append((each.name, list(each.identity)))
        left_out |= dict.fromkeys(each.left_out)
        masks |= dict.fromkeys(masks_of(each))
        for name, number in each.splits.items():
            splits[name] = splits.get(name, 0) + number
        num_skipped += len(each.skipped)
        skipped += each.skipped[: 1 - len(skipped)]
    try:
        files = list(in_order(lambda number: load_packed_file(run, number, plan), range(plan.shards)))
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
        share_prefixes=run.settings.share_prefixes,
        splits=splits,
        shared_between=plan.shared_between,
        skipped=num_skipped,
        first_skipped=skipped[0] if skipped else "",
        note=plan.note,
    )
    write_manifest(run.store, packed)
    _clean_up(run, plan.shards)
    return packed


def num_done(run: Run, stage: str, number: int, plan: Plan | None = None) -> int:
    """Return how many of a stage's tasks are done."""
    return sum(_done(run, stage, number, plan))


def _done(run: Run, stage: str, number: int, plan: Plan | None = None) -> list[bool]:
    """Return for each of a stage's tasks whether it is done."""
    return list(in_order(lambda each: is_done(run, stage, each, plan), range(number)))


def _do(run: Run, executor: Executor, stage: str, done: Sequence[bool], bar: Bar) -> None:
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
        numbers |= {"trees": run.num_inputs} if run.settings.share_prefixes is not None else {}
        names = [run.file(stage, each) for stage, number in numbers.items() for each in range(number)]
        for _ in in_order(run.store.remove, [run.file("plan"), run.file("before"), *names]):
            pass
        run.store.remove(run.file("inputs"))
    run.store.remove_local_folders(f"{WORK}/{run.key}")
