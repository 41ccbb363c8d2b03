"""Two drivers with one output folder do not disturb each other; drivers with different settings are told apart."""

from contextlib import ExitStack
from itertools import product

import pytest
from fleet.faults import (
    Faults,
    digest_of_fleet,
    digest_of_pack,
    driver,
    names_in,
    pack_here,
    run_driver,
    some_slow,
    wait_until,
)

from hf_packing.errors import PackingError

pytestmark = pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")


def start_together(folder, files, output, settings, faults):
    """Return the exit codes, what was printed, and the errors of drivers that start at the same time."""
    folder.mkdir()
    with ExitStack() as stack:
        drivers = [
            stack.enter_context(driver(files, output, faults, shards=4, ready=str(folder), **each)) for each in settings
        ]
        wait_until(lambda: len(list(folder.glob("ready-*"))) == len(drivers))
        (folder / "start").touch()
        printed = [process.communicate() for process in drivers]
        return [(process.returncode, *each) for process, each in zip(drivers, printed, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("time", range(6))
def test_two_drivers_that_start_together(time, shards, digest, tmp_path):
    faults = Faults(tmp_path / "faults")
    done = start_together(tmp_path / "ready", f"{shards[0].parent}/*.parquet", tmp_path / "out", [{}, {}], faults)
    assert [(code, errors) for code, _, errors in done] == [(0, ""), (0, "")], time
    assert done[0] == done[1]
    assert digest_of_fleet(tmp_path / "out") == digest
    begun = faults.lines("begin")
    assert len({pid for *_, pid in begun}) > 6  # the workers of both drivers
    assert {name for name in names_in(tmp_path / "out") if ".fleet" in name} == {".fleet/run.json"}


@pytest.mark.slow
def test_two_drivers_with_different_settings(shards, digest, tmp_path):
    settings = [{}, {"capacity": 64}]
    done = start_together(tmp_path / "ready", f"{shards[0].parent}/*.parquet", tmp_path / "out", settings, None)
    codes = [code for code, *_ in done]
    assert sorted(codes) == [0, 1]
    assert "expected a new folder, or the folder of this run" in done[codes.index(1)][2]
    assert 'another run has begun, with strategy "BestFit(' in done[codes.index(1)][2]
    assert digest_of_fleet(tmp_path / "out") == (digest if codes[0] == 0 else digest_of_pack(shards, 64))


@pytest.mark.parametrize(
    ("stage", "point"),
    some_slow(("deal", "unplaced"), *product(["count", "gather"], ["begin", "unplaced", "placed"]), ("deal", "begin")),
)
def test_a_driver_that_another_one_overtakes(stage, point, shards, digest, tmp_path):
    """The other driver completes the run, and removes the files that a worker of this one is about to read."""
    faults = Faults(tmp_path / "faults", [stage, 2, point, "hold"])
    with driver(f"{shards[0].parent}/*.parquet", tmp_path / "out", faults, shards=4, workers=1) as process:
        faults.wait_for_hold(process)
        packed = pack_here(shards, tmp_path / "out")
        whole = names_in(tmp_path / "out")
        assert {name for name in whole if ".fleet" in name} == {".fleet/run.json"}
        faults.release()
        printed, errors = process.communicate()
    assert (process.returncode, printed.strip(), errors) == (0, packed.key, "")
    assert digest_of_fleet(tmp_path / "out") == digest
    assert names_in(tmp_path / "out").keys() == whole.keys()


def test_a_driver_comes_after_the_run_is_complete(shards, digest, tmp_path):
    packed = pack_here(shards, tmp_path / "out")
    whole = names_in(tmp_path / "out")
    assert pack_here(shards, tmp_path / "out") == packed
    assert names_in(tmp_path / "out") == whole
    with pytest.raises(PackingError, match="another run has begun, with shards 4, not 2; choose another folder"):
        pack_here(shards, tmp_path / "out", shards=2)
    assert run_driver(f"{shards[0].parent}/*.parquet", tmp_path / "out", shards=4) == (0, packed.key, "")
    assert names_in(tmp_path / "out") == whole
    assert digest_of_fleet(tmp_path / "out") == digest
