"""A fleet packs documents that share prefixes while workers and drivers are killed, and files are damaged."""

from collections import Counter

import pytest
from fleet.faults import (
    CAPACITY,
    Faults,
    digest_of,
    digest_of_fleet,
    driver,
    kill_driver,
    names_in,
    pack_here,
    run_driver,
    some_slow,
)
from fleet.related_documents import literal_rows, write_related
from fleet.test_damaged_files import DAMAGE, damage

import hf_packing as hfp
from hf_packing.fleet.inputs import find_inputs
from hf_packing.fleet.pack_files import begin_run
from hf_packing.fleet.plan import load_plan, make_plan
from hf_packing.fleet.store import Store
from hf_packing.fleet.tasks import Task, do_task

pytestmark = pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")

STAGES = {"count": 5, "deal": 5, "gather": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_related(tmp_path_factory.mktemp("related"))


@pytest.fixture(scope="module")
def digest(files):
    """The digest of the rows of one plan for the trees of all files."""
    return digest_of(literal_rows(files, hfp.BestFit(CAPACITY)))


def pattern(files):
    return files[0].replace("0.parquet", "*.parquet")


def pack(files, output, **options):
    return pack_here(files, output, share_prefixes=True, **options)


@pytest.mark.parametrize(("workers", "shards"), some_slow((2, 3), (1, 1), (4, 9)))
def test_any_number_of_workers_and_files(workers, shards, files, digest, tmp_path):
    packed = pack(files, tmp_path / "out", executor=hfp.fleet.local(workers), shards=shards)
    assert digest_of_fleet(tmp_path / "out") == digest
    assert len(packed.files) == shards


def begun(files, output, exchange=True):
    return begin_run(
        find_inputs(files, {}),
        hfp.BestFit(CAPACITY),
        Store(str(output)),
        shards=4 if exchange else None,
        exchange=exchange,
        position_ids=True,
        share_prefixes=True,
        tokenizer=None,
        text_field=None,
        end_documents=True,
        separator=None,
        train_on=None,
        skip_bad=False,
        trust_remote_code=False,
    )


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_trees(exchange, how, files, tmp_path):
    """Trees that are damaged after they were counted are made again, and so is what was made of them."""
    whole = pack(files, tmp_path / "whole", exchange=exchange, shards=4 if exchange else None)
    run = begun(files, tmp_path / "out", exchange)
    assert run.key == whole.key

    def do(stage, tasks):
        for task in tasks:
            do_task(Task(run.store.url, {}, run.key, stage, task))

    do("count", range(5))
    make_plan(run, lambda _: None)
    folder = tmp_path / "out" / ".fleet" / run.key
    damage(folder / "trees-00002", how)
    if exchange:
        do("deal", [2, 4])
        damage(folder / "deal-00002", how)
        damage(folder / "trees-00002", how)
    do("gather", range(load_plan(run).shards))
    again = pack(files, tmp_path / "out", exchange=exchange, shards=4 if exchange else None)
    assert [file.sha256 for file in again.files] == [file.sha256 for file in whole.files]
    assert digest_of_fleet(tmp_path / "out") == digest_of_fleet(tmp_path / "whole")
    assert {name for name in names_in(tmp_path / "out") if ".fleet" in name} == {".fleet/run.json"}


@pytest.mark.slow
def test_workers_killed_in_every_stage(files, digest, tmp_path):
    points = ["begin", "half", "unplaced"]
    kills = [[stage, number, point, "kill"] for stage in ("count", "gather") for number, point in enumerate(points)]
    kills += [["deal", number, point, "kill"] for number, point in enumerate(["begin", "unplaced", "placed"])]
    faults = Faults(tmp_path / "faults", *kills)
    code, _, errors = run_driver(pattern(files), tmp_path / "out", faults, shards=4, share_prefixes=True)
    assert (code, errors) == (0, "")
    assert digest_of_fleet(tmp_path / "out") == digest
    faults.assert_all_happened()
    tries = Counter(faults.tasks("begin"))
    again = {(stage, number) for stage, number, point, _ in faults.faults if point != "placed"}
    assert tries == {(stage, each): 1 + ((stage, each) in again) for stage in STAGES for each in range(STAGES[stage])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "point"),
    [("count", "unplaced"), ("count", "half"), ("deal", "unplaced"), ("gather", "unplaced"), ("gather", "half")],
)
def test_driver_killed_while_a_worker_does_a_task(stage, point, files, digest, tmp_path):
    """The next driver may use other numbers of workers; one with another setting is refused."""
    faults = Faults(tmp_path / "faults", [stage, 2, point, "hold"])
    settings = {"shards": 4, "share_prefixes": True}
    with driver(pattern(files), tmp_path / "out", faults, **settings) as process:
        faults.wait_for_hold(process)
        kill_driver(process)
        with pytest.raises(hfp.PackingError, match="another run has begun, with share_prefixes 16, not 17"):
            pack_here(files, tmp_path / "out", share_prefixes=17)
        code, _, errors = run_driver(pattern(files), tmp_path / "out", faults, **settings, workers=1)
        assert (code, errors) == (0, "")
        assert digest_of_fleet(tmp_path / "out") == digest
    assert faults.tasks("begin").count((stage, 2)) == 2
    assert len(faults.lines("begin")) <= sum(STAGES.values()) + 2
