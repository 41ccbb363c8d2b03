"""The demo and the notebook, run as a user runs them, and the documents that they are run on."""

import copy
import json
import os

import common
import nbformat
import numpy as np
import pytest
import quickstart
import torch
from nbclient import NotebookClient
from processes import HANGS, RECIPES, run_script
from recipe_inputs import chats, prompts, texts, write
from tiers import fast_only

import hf_packing as hfp


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


def numbers_after(text, words):
    found = [each.strip(",%") for each in text.split(words, 1)[1].split("\n")[0].split()]
    return [float(each.replace(",", "")) for each in found if each[0].isdigit()]


@pytest.mark.slow
def test_quickstart(tmp_path):
    data, output = write(tmp_path / "text.jsonl", texts()), tmp_path / "output"
    flags = ("--data", data, "--max_length", 256, "--steps", 2, "--output_dir", output)
    done = run_script(RECIPES / "quickstart.py", *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = done.stdout
    assert "300 documents, " in said
    rows = {name: numbers_after(said, name)[0] for name in ("padding, 16 a batch", "FixedLength(256)", "BestFit(256)")}
    assert rows["padding, 16 a batch"] == 300 > rows["BestFit(256)"] >= rows["FixedLength(256)"]
    assert numbers_after(said, "packed into ")[0] == rows["BestFit(256)"]
    assert said.index("stock model: isolated=False") < said.index("patched model: isolated=True")
    assert "times as fast (medians of 2 steps)" in said
    first, last, *packed = numbers_after(said, "loss of the first and of the last step: ")
    assert packed == pytest.approx([first, last], abs=1e-3)
    assert last < first
    assert f"picture: {output}/report.png" in said
    assert (output / "report.png").stat().st_size > 10_000
    assert said.index("seconds in all") < said.index("Next:")


@pytest.mark.parametrize("rows", fast_only([prompts(80), chats(80)], prompts(80)), ids=["prompts", "chats"])
def test_both_sides_take_the_same_documents_in_turn(rows, tmp_path, monkeypatch):
    taken, threads = [], set()

    def recorded(name, collate):
        def call(rows):
            taken.append((name, [row["input_ids"] for row in rows]))
            threads.add(torch.get_num_threads())
            return collate(rows)

        return call

    padding, packing = quickstart.DataCollatorForSeq2Seq, hfp.PackingCollator
    monkeypatch.setattr(quickstart, "DataCollatorForSeq2Seq", lambda *given: recorded("padded", padding(*given)))
    monkeypatch.setattr(hfp, "PackingCollator", lambda: recorded("packed", packing()))
    torch.set_num_threads(2)
    data = write(tmp_path / "rows.jsonl", rows)
    _, losses = quickstart.main(["--data", str(data), "--steps", "3", "--output_dir", str(tmp_path / "output")])
    assert [name for name, _ in taken] == ["padded", "packed"] * 3
    assert all(padded == packed for (_, padded), (_, packed) in zip(taken[::2], taken[1::2], strict=True))
    assert len({str(ids) for _, ids in taken}) == 3
    assert losses["packed"] == pytest.approx(losses["padded"], abs=1e-3)
    assert losses["packed"][0] == pytest.approx(losses["padded"][0], abs=1e-5)
    assert threads == {1}


def test_a_busy_machine_does_not_change_what_the_demo_says():
    """It slows the second half of the demo to a third, and one step to a tenth."""
    lengths = np.full((8, 16), 10)
    idle = {"padded": [5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0, 6.0], "packed": [1.0] * 8}
    busy = {"padded": [5.0, 6.0, 5.0, 6.0, 15.0, 18.0, 15.0, 60.0], "packed": [1.0] * 4 + [3.0] * 4}
    said = [quickstart.speeds(lengths, seconds) for seconds in (idle, busy)]
    assert all(each.endswith("5.5 times as fast") for each in said)
    after_three_steps = {name: seconds[:3] for name, seconds in idle.items()}
    assert quickstart.speeds(lengths, after_three_steps).startswith("padded 32, packed 160 tokens per ")


def test_what_does_not_fit(tmp_path):
    def says(row, *flags):
        data = write(tmp_path / "rows.jsonl", [row])
        with pytest.raises((ValueError, hfp.PackingError)) as refused:
            quickstart.main(["--data", str(data), "--output_dir", str(tmp_path / "output"), *flags])
        return str(refused.value)

    assert "--documents_per_step: expected at most 1, which fit a row, got 16" in says({"text": "a" * 99})
    assert "--steps: expected an integer from 1, got 0" in says({"text": "a"}, "--steps", "0")
    assert "got the fields body" in says({"body": "a"})
    with pytest.raises(ValueError, match="--data: expected a file ending in .jsonl"):
        quickstart.main(["--data", __file__])
    with pytest.raises(ValueError, match="--data: expected a file or a dataset's name, got 'nowhere.jsonl'"):
        quickstart.main(["--data", "nowhere.jsonl"])


@pytest.mark.slow
def test_documents_of_the_standard_library():
    functions = common.functions()["text"][:]
    assert len(functions) > 10_000
    assert all("def " in function for function in functions)


def test_functions_after_a_form_feed_are_cut_where_they_stand(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text("def one():\n    pass\n\f\ndef two():\n    return 2\n")
    monkeypatch.setattr("common.sysconfig.get_paths", lambda: {"stdlib": tmp_path})
    assert common.functions()["text"][:] == ["def one():\n    pass\n", "def two():\n    return 2\n"]


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch):
    """The committed outputs are those of a run; HF_PACKING_WRITE_PAGES=1 writes them anew."""
    monkeypatch.setenv("PYTHONPATH", f"{RECIPES}{os.pathsep}{RECIPES.parent}")
    file = RECIPES / "quickstart.ipynb"
    book = nbformat.read(file, as_version=4)
    committed, metadata = [kinds_of_outputs(cell) for cell in book.cells], copy.deepcopy(book.metadata)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=HANGS, startup_timeout=HANGS, resources=folder, record_timing=False).execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert printed.index("isolated: no") < printed.index("isolated: yes")
    assert 0 < numbers_after(printed, "packed: ")[0] < numbers_after(printed, "padded: ")[0]
    assert sum("image/png" in kinds for cell in book.cells for kinds in kinds_of_outputs(cell)) == 3
    for cell in book.cells:
        if cell.cell_type == "code":  # not the progress bars
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    if os.environ.get("HF_PACKING_WRITE_PAGES"):
        book.metadata = metadata
        file.write_text(json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n")  # a cell is one line
    else:
        assert [kinds_of_outputs(cell) for cell in book.cells] == committed


def kinds_of_outputs(cell):
    return [sorted(output.get("data", [output.output_type])) for output in cell.get("outputs", [])]
