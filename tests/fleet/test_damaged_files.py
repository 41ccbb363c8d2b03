"""A fleet that was killed goes on where files were damaged or have changed, or says which."""

import json
import os
import shutil

import pytest
from fleet.faults import (
    CAPACITY,
    Faults,
    digest_of,
    digest_of_fleet,
    digest_of_pack,
    driver,
    kill_driver,
    names_in,
    pack_here,
    some_slow,
    write_other_rows,
    write_shards,
)
from fleet.fleet_rows import packed_by_pack, rows_of
from written_rows import write_lines

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.fleet.run import Settings, open_run
from hf_packing.fleet.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")


@pytest.fixture(scope="module")
def killed(shards, tmp_path_factory):
    """Return a function from a stage to the folder of a run whose driver was killed in this stage."""
    folder, made = tmp_path_factory.mktemp("killed"), {}

    def killed_in(stage):
        if stage not in made:
            faults = Faults(folder / f"faults-{stage}", [stage, 2, "begin", "hold"])
            output = made[stage] = folder / stage
            with driver(f"{shards[0].parent}/*.parquet", output, faults, shards=4, workers=1) as process:
                faults.wait_for_hold(process)
                kill_driver(process)
        return made[stage]

    return killed_in


@pytest.fixture
def stopped_in(killed, tmp_path):
    """Return a function that copies what a driver has left that was killed in a stage."""

    def copied(stage):
        shutil.copytree(killed(stage), tmp_path / "out")
        return tmp_path / "out"

    return copied


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :]


DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: content[:0],
    "flipped": flip,
    "huge index": lambda content: b"\0" * 15 + b"\x3f" + content[16:],
    "negative index": lambda content: b"\xff" * 16 + content[16:],
    "deleted": None,
}


def damage(file, how):
    if DAMAGE[how] is None:
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(DAMAGE[how](content))
        assert file.read_bytes() != content


PARTS = {
    "count": ["inputs", "count-00001"],
    "deal": ["inputs", "count-00000", "count-00004", "before", "plan", "deal-00001"],
    "gather": ["inputs", "count-00002", "before", "plan", "deal-00000", "deal-00005", "packed-00001"],
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize(("stage", "name"), [(stage, name) for stage, names in PARTS.items() for name in names])
def test_damaged_intermediate_files(stage, name, how, shards, digest, stopped_in):
    output = stopped_in(stage)
    (file,) = (output / ".fleet").glob(f"*/{name}")
    damage(file, how)
    pack_here(shards, output)
    assert digest_of_fleet(output) == digest


@pytest.mark.parametrize("how", ["cut", "empty", "deleted"])
def test_damaged_output_file(how, shards, digest, stopped_in):
    output = stopped_in("gather")
    damage(min(output.glob("packed-*.parquet")), how)
    pack_here(shards, output)
    assert digest_of_fleet(output) == digest


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_run(how, shards, digest, stopped_in):
    output = stopped_in("deal")
    file = output / ".fleet" / "run.json"
    damage(file, how)
    if how != "deleted":
        with pytest.raises(PackingError, match=r"output: expected a run of hf_packing .*run.json' cannot be read"):
            pack_here(shards, output)
        file.unlink()
    pack_here(shards, output)
    assert digest_of_fleet(output) == digest


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("stage", ["count", "deal"])
def test_damaged_tokens(stage, how, tokenizer, tmp_path):
    words = ["one", "two", "three", "four"]
    files = [tmp_path / f"{number}.jsonl" for number in range(4)]
    for number, file in enumerate(files):
        write_lines(file, [{"text": " ".join(words[: 1 + row % 4] * 9)} for row in range(5 + 9 * number)])
    known = {"shards": 2, "tokenizer": tokenizer, "end_documents": False}
    whole = pack_here(files, tmp_path / "whole", **known)
    assert whole.num_rows > 2

    faults = Faults(tmp_path / "faults", [stage, 1, "half" if stage == "count" else "placed", "hold"])
    listed = [str(file) for file in files]
    with driver(json.dumps(listed), tmp_path / "out", faults, workers=1, **known) as process:
        faults.wait_for_hold(process)
        kill_driver(process)
    # the file of tokens that is needed next
    (file,) = (tmp_path / "out" / ".fleet").glob(f"*/tokens-{1 if stage == 'count' else 2:05d}")
    damage(file, how)
    pack_here(files, tmp_path / "out", **known)
    assert digest_of_fleet(tmp_path / "out") == digest_of_fleet(tmp_path / "whole")


def test_all_files_damaged_at_once(shards, digest, stopped_in):
    output = stopped_in("gather")
    files = [file for file in output.rglob("*") if file.is_file() and file.name != "run.json"]
    assert len(files) >= 20
    for number, file in enumerate(sorted(files)):
        damage(file, ["cut", "empty", "deleted"][number % 3])
    pack_here(shards, output)
    assert digest_of_fleet(output) == digest


@pytest.fixture
def changed(shards, tmp_path):
    """One of the files to pack, with other rows; it is put back after the test."""
    content, stat = shards[1].read_bytes(), shards[1].stat()
    write_other_rows(shards[1], tmp_path / "other")
    yield shards[1]
    shards[1].write_bytes(content)
    os.utime(shards[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("stage", ["count", "deal", "gather"])
def test_an_input_that_changed_before_the_run_went_on(stage, lost, stopped_in, shards, changed):
    output = stopped_in(stage)
    if lost:
        (file,) = (output / ".fleet").glob("*/count-00001")
        file.unlink()
    if lost and stage == "count":  # nothing is known of the file yet
        pack_here(shards, output)
        assert digest_of_fleet(output) == digest_of_pack(shards)
        return
    with pytest.raises(PackingError, match=rf"{changed}: expected the file .*; pack changed files into a new folder"):
        pack_here(shards, output)
    assert not (output / "manifest.json").exists()


def test_an_input_that_changed_after_the_run(shards, digest, tmp_path, request):
    pack_here(shards, tmp_path / "out")
    whole = names_in(tmp_path / "out")
    changed = request.getfixturevalue("changed")
    with pytest.raises(PackingError, match=f"{changed}: expected the file that was packed, .* into a new folder"):
        pack_here(shards, tmp_path / "out")
    assert names_in(tmp_path / "out") == whole
    assert digest_of_fleet(tmp_path / "out") == digest


@pytest.mark.parametrize("stage", some_slow("deal", "count", "gather"))
def test_an_input_that_changes_during_the_run(stage, tmp_path):
    shards = write_shards(tmp_path / "shards")
    faults = Faults(tmp_path / "faults", [stage, 1, "unplaced", "hold"])
    with driver(f"{shards[0].parent}/*.parquet", tmp_path / "out", faults, shards=4) as process:
        faults.wait_for_hold(process)
        write_other_rows(shards[1], tmp_path / "other")
        faults.release()
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith(f"PackingError: {shards[1]}: expected the file that was counted")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_output_files_of_another_plan_are_made_again(stopped_in, shards, digest, monkeypatch):
    output, other = stopped_in("gather"), hfp.BestFit(CAPACITY, seed=1)
    assert list(output.glob("packed-*.parquet"))
    run = open_run(Store(str(output)))
    run.store.remove(run.file("plan"))
    monkeypatch.setattr(Settings, "build_strategy", lambda _: other)  # as Optimal may, if its time runs out
    pack_here(f"{shards[0].parent}/*.parquet", output)
    monkeypatch.undo()
    assert digest_of_fleet(output) == digest_of(rows_of(packed_by_pack(shards, other))) != digest
