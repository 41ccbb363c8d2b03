"""The survey's section about texts and pictures: the tests notice a section that says anything else."""

import os
from dataclasses import replace

import pytest
from survey_page import IS_CURRENT, PAGE, same_figure, same_reason
from tiers import fast_only

from hf_packing.attention.find_route import known_routes
from tools.survey import pictures
from tools.survey.heads import EXACT
from tools.survey.measure import Measured
from tools.survey.page import PICTURES, page, with_pictures
from tools.survey.pictures import MeasuredPictures, measure_all_pictures, measure_pictures, picture_jobs


@pytest.fixture(autouse=True)
def no_known_routes():
    """Each model finds its own route."""
    known_routes.clear()


SAMPLE = [
    "llava",
    "idefics3",
    "mistral3",
    "llava_next",
    "qwen2_vl",
    "gemma3",
    "git",
    "mllama",
    "hunyuan_vl",
]

TABLES = (PICTURES, f"Refused: {PICTURES.lower()}", f"Not measured: {PICTURES.lower()}")


def read_pictures(text: str) -> dict[str, tuple[str, list[str]]]:
    """The table and the cells of each architecture that sees pictures."""
    found = {}
    for title in TABLES:
        table = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()[3:] if line]
        found |= {name: (title, [cell.strip() for cell in cells]) for name, *cells in rows}
    return found


def disagreement_of_pictures(measured: MeasuredPictures, text: str) -> str:
    """What a page says otherwise than what was measured; empty if nothing."""
    (title, cells), said = read_pictures(page([], "", [], [measured]))[measured.name], read_pictures(text)
    if said.get(measured.name, ("", []))[0] != title:
        return f"{measured.name}: not in the table {title}"
    others = said[measured.name][1]
    if title != PICTURES:
        same = same_reason(cells[0], others[0])
    else:
        same = cells[0] == others[0] and all(map(same_figure, cells[1:3], others[1:3]))
    return "" if same else f"{measured.name}: {cells}, the page has {others}"


def assert_pictures_agree(measured: MeasuredPictures) -> None:
    assert measured.status != "WRONG", measured
    if IS_CURRENT:
        assert not disagreement_of_pictures(measured, PAGE)


@pytest.mark.parametrize("name", fast_only(SAMPLE, "git"))
def test_a_sample_of_pictures(name):
    assert_pictures_agree(measure_pictures(name))


@pytest.mark.survey
def test_all_pictures():
    for measured in measure_all_pictures(picture_jobs(), os.cpu_count() or 1):
        assert_pictures_agree(measured)


@pytest.mark.skipif(not IS_CURRENT, reason="the page is of another version of transformers")
def test_the_page_has_every_architecture_with_pictures_and_none_is_wrong():
    rows = read_pictures(PAGE)
    assert sorted(rows) == picture_jobs()
    taken = {name: cells for name, (title, cells) in rows.items() if title == PICTURES}
    exact = [name for name, cells in taken.items() if cells[0] == "exact"]
    assert set(taken) - set(exact) == {"hunyuan_vl"}
    assert taken["hunyuan_vl"][0] == "as unpatched"
    assert all(float(figure) <= EXACT for name in exact for figure in taken[name][1:3])
    assert len(exact) >= 40
    refused = sum(title == TABLES[1] for title, _ in rows.values())
    assert f"Of {len(taken) + refused} models, {len(exact)} are exact, {refused} are refused" in PAGE


LLAMA = Measured("causal", "llama", route="varlen", change=0.0, difference=0.0, gradient=0.0)

GOOD = MeasuredPictures("one", "exact", difference=1e-15, gradient=1e-8)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [("| one |", "| two |"), ("exact |", "as unpatched |"), ("1e-15", "1e-03"), ("1e-08", "1e-03"), ("x wrong", "y")],
)
def test_a_changed_page_of_pictures_is_noticed(was, becomes):
    both = [GOOD, MeasuredPictures("three", "refused", reason="x wrong")]
    text = with_pictures(page([LLAMA], "transformers 0", [], [replace(GOOD, name="old")]), both)
    assert "| old |" not in text
    assert text == page([LLAMA], "transformers 0", [], both)
    assert not any(disagreement_of_pictures(each, text) for each in both)
    assert was in text
    assert any(disagreement_of_pictures(each, text.replace(was, becomes)) for each in both)


def padding_stays(monkeypatch):
    """Patching does nothing, so the backbone gets the padding."""
    monkeypatch.setattr(pictures, "patch_model", lambda model: model)


def wrong_order(monkeypatch):
    """Batches of several documents get the pictures in the wrong order."""
    whole = pictures.batch_of

    def shuffled(model, documents, *others):
        batch, places = whole(model, documents, *others)
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].flip(0)
        return batch, places

    monkeypatch.setattr(pictures, "batch_of", shuffled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "status", "reason"),
    [(padding_stays, "WRONG", "the backbone got 188 tokens"), (wrong_order, "as unpatched", "")],
)
def test_a_wrong_batch_of_pictures_is_noticed(monkeypatch, break_it, status, reason):
    break_it(monkeypatch)
    measured = measure_pictures("llava")
    assert measured.status == status
    assert reason in measured.reason


def test_a_wrong_model_with_pictures_is_shown():
    wrong = MeasuredPictures("one", "WRONG", 0.3, 0.1)
    text = page([], "", [], [wrong])
    assert read_pictures(text)["one"] == (PICTURES, ["WRONG", "3e-01", "1e-01", ""])
    assert "0 are refused with\nthe reason, and 1 are wrong" in text
