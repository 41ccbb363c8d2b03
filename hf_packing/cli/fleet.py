"""`hf-packing fleet`: pack many files by processes of one or many machines, or one task at a time in array jobs."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from hf_packing.cli.flags import strategy_named
from hf_packing.cli.screen import out, print_json, say
from hf_packing.errors import PackingError
from hf_packing.fleet.drive import drive, finish, num_done
from hf_packing.fleet.engines import Executor, local, ray
from hf_packing.fleet.inputs import find_inputs
from hf_packing.fleet.manifest import PackedCorpus, read_manifest
from hf_packing.fleet.pack_files import begin_run
from hf_packing.fleet.parts import DamagedFileError
from hf_packing.fleet.plan import Plan, load_plan, make_plan
from hf_packing.fleet.run import Run, open_run
from hf_packing.fleet.store import Store
from hf_packing.fleet.tasks import Task, do_task
from hf_packing.strategies.base import check_counting
from hf_packing.text.read import find_files


def run(given: argparse.Namespace) -> int:
    """Do one command of `hf-packing fleet`, and return the exit code, 0."""
    _COMMANDS[given.command](given)
    return 0


def _pack(given: argparse.Namespace) -> None:
    say_packed(drive(_begun(given), _executor_of(given)), given.json)


def pack_with_engine(given: argparse.Namespace) -> None:
    """Pack the files of `hf-packing pack --engine`, and print what was packed.

    Raises:
        PackingError: a flag of `hf-packing pack` has no effect on files that an engine packs.
    """
    for flag in ("split", "overwrite"):
        if getattr(given, flag):
            raise PackingError(f"--{flag}: expected no --{flag} with --engine, which packs files into a new folder")
    given.data = find_files(given.data, given.glob) if given.glob else [given.data]
    _pack(given)


def _executor_of(given: argparse.Namespace) -> Executor:
    """Return the engine that the flags --engine, --workers and --address name.

    Raises:
        PackingError: a flag has no effect on this engine.
    """
    if given.engine == "ray":
        if given.workers is not None:
            raise PackingError(f"--workers: expected no number of workers with --engine ray, got {given.workers}")
        return ray(given.address)
    if given.address is not None:
        raise PackingError(f"--address: expected an address only with --engine ray, got {given.address!r}")
    return local(given.workers)


def say_packed(packed: PackedCorpus, as_json: bool) -> None:
    """Print what was packed: as text, or as JSON with the metrics of the plan."""
    if as_json:
        facts = {name: value for name, value in asdict(packed).items() if name not in ("totals", "inputs")}
        print_json(facts | {"rows": packed.num_rows} | vars(packed.metrics()))
        return
    say(out, str(packed))
    say(out, f"written: {packed.output}; read the rows with hf_packing.fleet.open({packed.output!r})")


def _storage_options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the values of --storage-option, which are JSON or else text, by name.

    Raises:
        PackingError: a value has no name.
    """
    options: dict[str, Any] = {}
    for each in given.storage_option:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise PackingError(f"--storage-option: expected NAME=VALUE, got {each!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _begun(given: argparse.Namespace) -> Run:
    strategy = check_counting(
        strategy_named(given.strategy, given.max_length), "the order of the documents of all files"
    )
    store = Store(str(given.output), _storage_options_of(given))
    return begin_run(
        find_inputs(given.data[0] if len(given.data) == 1 else given.data, store.options),
        strategy,
        store,
        shards=given.shards,
        exchange=not given.alone,
        position_ids=True,
        share_prefixes=given.share_prefixes,
        tokenizer=given.tokenizer,
        text_field=given.field,
        end_documents=not given.no_eos,
        separator=given.separator,
        train_on=given.train_on,
        skip_bad=given.skip_bad,
        trust_remote_code=given.trust_remote_code,
    )


def _begin(given: argparse.Namespace) -> None:
    run = _begun(given)
    _say_stage(given, {"key": run.key, "count": run.num_inputs}, f"begun: {run.num_inputs} tasks to count")


def _do_one(given: argparse.Namespace) -> None:
    run = _run_of(given)
    stage, tasks = given.command, run.num_inputs
    if stage == "gather":
        tasks = _plan_of(run).shards
    if given.task >= tasks:
        raise PackingError(f"--task: expected a number from 0 to {tasks - 1}, got {given.task}")
    do_task(Task(run.store.url, run.store.options, run.key, stage, given.task))
    _say_stage(given, {"stage": stage, "task": given.task}, f"done: {stage} {given.task}")


def _plan(given: argparse.Namespace) -> None:
    run = _run_of(given)
    counted = num_done(run, "count", run.num_inputs)
    if counted < run.num_inputs:
        raise PackingError(f"OUTPUT: expected all {run.num_inputs} files to be counted, got {counted}")
    plan = make_plan(run, lambda _: None)
    metrics = plan.metrics
    deals = run.num_inputs if run.settings.exchange else 0
    _say_stage(
        given,
        {"deal": deals, "gather": plan.shards} | vars(metrics),
        f"planned: {metrics.num_packs:,} packs, padding {metrics.padding_ratio:.2%}; {deals} tasks to deal, then "
        f"{plan.shards} to gather",
    )


def _finish(given: argparse.Namespace) -> None:
    run = _run_of(given)
    packed = read_manifest(run.store)
    say_packed(finish(run, _plan_of(run)) if packed is None else packed, given.json)


def _status(given: argparse.Namespace) -> None:
    run = _run_of(given)
    packed = read_manifest(run.store)
    if packed is not None:
        say_packed(packed, given.json)
        return
    stages = {"count": [num_done(run, "count", run.num_inputs), run.num_inputs]}
    try:
        plan = load_plan(run)
    except DamagedFileError:
        planned = False
    else:
        planned = True
        if run.settings.exchange:
            stages["deal"] = [num_done(run, "deal", run.num_inputs), run.num_inputs]
        stages["gather"] = [num_done(run, "gather", plan.shards, plan), plan.shards]
    lines = [f"{stage}: {done:,} of {number:,} tasks done" for stage, (done, number) in stages.items()]
    lines.insert(1, "plan: done" if planned else "plan: not done")
    _say_stage(given, {"key": run.key, "planned": planned, "stages": stages}, "\n".join(lines))


def _say_stage(given: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    if given.json:
        print_json(facts)
    else:
        say(out, text)


def _run_of(given: argparse.Namespace) -> Run:
    return open_run(Store(str(given.output), _storage_options_of(given)))


def _plan_of(run: Run) -> Plan:
    try:
        return load_plan(run)
    except DamagedFileError:
        raise PackingError("OUTPUT: expected a run with a plan; run hf-packing fleet plan first") from None


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "pack": _pack,
    "begin": _begin,
    "count": _do_one,
    "plan": _plan,
    "deal": _do_one,
    "gather": _do_one,
    "finish": _finish,
    "status": _status,
}
