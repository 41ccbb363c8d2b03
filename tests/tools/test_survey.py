"""The survey: its page says what is measured, and the tests notice a page that says anything else."""

import os
import re
from dataclasses import replace

import pytest
from survey_page import IS_CURRENT, PAGE, ROOT, same_figure, same_reason
from tiers import fast_only

from hf_packing.attention.find_route import known_routes
from hf_packing.attention.tiny_model import THRESHOLDS, tiny_model
from tools.survey import measure as measure_module
from tools.survey.heads import HEADS, MeasuredHead, head_jobs, measure_head, measure_heads
from tools.survey.measure import (
    EXACT,
    ISOLATED_WITHOUT_CACHE,
    KINDS,
    Measured,
    all_jobs,
    feedings,
    make_documents,
    measure,
    measure_all,
)
from tools.survey.page import TITLES, page

Rows = dict[tuple[str, str], list[str]]
"""The cells of a page by section and architecture."""

SAMPLE = [("causal", "bloom"), ("causal", "llama"), ("causal", "mamba2"), ("causal", "musicgen"), ("masked", "bert")]
SLOW_SAMPLE = [
    *(("causal", name) for name in ("bart", "falcon_h1", "gemma3_text", "gpt_oss", "jamba", "glm_moe_dsa")),
    *(("causal", name) for name in ("prophetnet", "qwen3_next", "xlnet", "llama with dynamic rope")),
    *(("masked", name) for name in ("deberta-v2", "fnet", "modernbert", "mobilebert", "mra", "roberta")),
]


@pytest.fixture(autouse=True)
def no_known_routes():
    """Each model finds its own route."""
    known_routes.clear()


def read(text: str) -> Rows:
    rows: Rows = {}
    section, has_trees = "", " | trees | " in text
    for line in text.splitlines():
        if line.startswith("## "):  # tables of other heads are read by `read_heads`
            section = line.removeprefix("## ")
        elif (
            section.endswith("language models")
            and line.startswith("| ")
            and not line.startswith(("| ---", "| architecture |"))
        ):
            name, *cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
            if has_trees and section == TITLES["causal"]:
                del cells[-2]  # tests of trees read it
            rows[section, name] = cells
    return rows


def read_heads(text: str) -> dict[str, list[str]]:
    """The cells of the table of heads by architecture."""
    table = text.partition("\n## Heads\n")[2].partition("\n## ")[0]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()[3:] if line]
    return {name: [cell.strip() for cell in cells] for name, *cells in rows}


def disagreement(measured: Measured, text: str) -> str:
    """What a page says otherwise than what was measured; empty if nothing."""
    ((section, name), found) = next(iter(read(page([measured], "")).items()))
    said = read(text).get((section, name))
    if said is None:
        return f"no row for {name} in {section}"
    if len(said) != len(found):
        return f"{name}: {found}, the page has {said}"
    *cells, reason = found
    *cells_said, reason_said = said
    if len(cells) > 4:
        figures, cells = cells[-2:], cells[:-2]
        figures_said, cells_said = cells_said[-2:], cells_said[:-2]
        if not all(map(same_figure, figures, figures_said)):
            return f"{name}: {figures}, the page has {figures_said}"
    if cells != cells_said or not same_reason(reason, reason_said):
        return f"{name}: {[*cells, reason]}, the page has {[*cells_said, reason_said]}"
    return ""


def assert_agrees(measured: Measured) -> None:
    assert not measured.route or measured.exact, measured
    if IS_CURRENT:
        assert not disagreement(measured, PAGE)


@pytest.mark.parametrize(("kind", "name"), fast_only(SAMPLE, ("causal", "llama")))
def test_a_sample_of_the_page(kind, name):
    assert_agrees(measure(kind, name))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), SLOW_SAMPLE)
def test_a_larger_sample_of_the_page(kind, name):
    assert_agrees(measure(kind, name))


@pytest.mark.survey
def test_all_of_the_page():
    for measured in measure_all(all_jobs(), os.cpu_count() or 1):
        assert_agrees(measured)


LLAMA = Measured(
    kind="causal",
    name="llama",
    stock="leaks unless use_cache=False",
    route="varlen",
    packed_share=1.0,
    change=0.0,
    difference=2e-6,
    gradient=3e-7,
)
BLOOM = replace(LLAMA, name="bloom", stock="leaks", route="segments", modules={"BloomAttention": 4}, packed_share=0.92)
REFUSED = Measured("masked", "two", stock="leaks", reason="no route: the logits differ by 1.8, and more")
NOT_BUILT = Measured("masked", "three", False, reason="too large")
FOUR = [LLAMA, BLOOM, REFUSED, NOT_BUILT]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("| llama |", "| lama |"),
        ("leaks unless use_cache=False", "isolated"),
        ("| varlen |", "| segments |"),
        ("4 BloomAttention", "3 BloomAttention"),
        ("92%", "93%"),
        ("2e-06", "2e-04"),
        ("3e-07", "3e-03"),
        ("Causal language models", "Masked language models"),
        ("Refused: masked", "Masked"),
        ("no route", "no way"),
        ("Not measured: masked", "Refused: masked"),
        ("too large", "too small"),
        ("| three | too large |", ""),
    ],
)
def test_a_changed_page_is_noticed(was, becomes):
    text = page(FOUR, "transformers 0")
    assert not any(disagreement(each, text) for each in FOUR)
    assert was in text
    assert any(disagreement(each, text.replace(was, becomes)) for each in FOUR)


def test_other_numbers_in_a_reason_are_not():
    text = page(FOUR, "transformers 0").replace("1.8", "17")
    assert not any(disagreement(each, text) for each in FOUR)


def test_the_page_is_of_the_versions_that_are_installed_for_the_tests():
    pinned = dict(re.findall(r"(?m)^(transformers|torch)==([\d.]+)", (ROOT / "constraints.txt").read_text()))
    assert f"transformers {pinned['transformers']} and torch {pinned['torch']}, on CPU" in PAGE


def test_the_summary_of_the_page_counts_its_rows():
    rows = read(PAGE)
    taken = {kind: [cells for (section, _), cells in rows.items() if section == TITLES[kind]] for kind in KINDS}
    refused = {kind: sum(section == f"Refused: {TITLES[kind].lower()}" for section, _ in rows) for kind in KINDS}
    both = [cells for kind in KINDS for cells in taken[kind]]
    parts = [f"{len(taken[kind])} of {len(taken[kind]) + refused[kind]} {kind}" for kind in KINDS]
    assert f"After patching, {parts[0]} and {parts[1]} models are exact" in PAGE
    varlen = sum(route == "varlen" for _, route, *_ in both)
    assert f"{varlen} models take only the `varlen` route." in PAGE
    assert f"The other {len(both) - varlen} run a median of " in PAGE
    stock = [cells[0] for (section, _), cells in rows.items() if "Not measured" not in section]
    isolated, without_cache = stock.count("isolated"), stock.count(ISOLATED_WITHOUT_CACHE)
    assert f"{isolated} of {len(both) + sum(refused.values())} models isolate documents as they are called" in PAGE
    assert f"and {isolated + without_cache} with use_cache=False" in PAGE
    assert all(float(figure) <= EXACT for *_, logits, gradients, _ in both for figure in (logits, gradients))


@pytest.mark.skipif(not IS_CURRENT, reason="the page is of another version of transformers")
def test_the_page_has_every_architecture():
    rows = read(PAGE)
    titles = {title.lower(): kind for kind, title in TITLES.items()}
    found = sorted((titles[section.lower().rpartition(": ")[2]], name) for section, name in rows)
    assert found == sorted(all_jobs())


def test_a_page_of_few():
    text = page([*FOUR, replace(LLAMA, name="one", reason="a | b", route="segments")], "transformers 0")
    assert "2 of 3 causal" not in text
    assert "3 of 3 causal and 0 of 1 masked" in text
    assert "| 2e-06 | 3e-07 | a \\| b |" in text
    assert "| three | too large |" in text


def test_a_figure_that_is_missing_is_not_exact():
    assert not Measured("causal", "one").exact
    assert Measured("causal", "one", change=0.0, difference=EXACT, gradient=0.0).exact
    assert not Measured("causal", "one", change=0.0, difference=0.0, gradient=2 * EXACT).exact
    beyond = Measured("causal", "one", route="varlen", change=0.0, difference=2 * EXACT, gradient=0.0)
    assert not beyond.exact
    assert replace(beyond, explained=3 * EXACT).exact
    assert "causes them; such models: one 2e-04." in page([replace(beyond, explained=3 * EXACT)], "transformers 0")
    assert "causes them; such models: none." in page([beyond], "transformers 0")
    assert "all but one (noise)." in page([replace(beyond, unproven="noise")], "transformers 0")
    assert "does not jump: one." in page([replace(beyond, gradient_in_float64=True)], "transformers 0")


def test_gradients_in_float64(monkeypatch):
    model, documents = tiny_model("llama", "causal"), make_documents(0, [5, 9])
    assert measure_module._difference_in_float64(model, documents) <= 1e-6  # rotary positions are float32
    monkeypatch.setattr(measure_module, "patch_model", lambda model: model)
    assert measure_module._difference_in_float64(model, documents) > 1e-3


def test_documents_are_longer_than_what_models_look_at():
    assert max(map(len, make_documents(0, (5, 19)))) > max(THRESHOLDS.values())
    assert len(list(feedings(make_documents(0, (5, 6, 3, 8)), labels=True))) == 7


SAMPLE_OF_HEADS = [
    *((HEADS[0], name) for name in ("albert", "distilbert", "fnet", "llama", "xlnet", "canine")),
    *((HEADS[1], name) for name in ("gpt2", "funnel", "qwen3_moe")),
    *((HEADS[2], name) for name in ("bert", "splinter", "modernbert")),
    *((HEADS[3], name) for name in ("roformer", "convbert", "big_bird")),
]


def assert_head_agrees(measured: MeasuredHead) -> None:
    assert measured.status != "WRONG", measured
    if IS_CURRENT:
        here, said = (read_heads(text).get(measured.name) for text in (page([], "", [measured]), PAGE))
        number = HEADS.index(measured.head)
        assert (said[number] if said else "") == (here[number] if here else ""), measured


@pytest.mark.parametrize(("head", "name"), fast_only(SAMPLE_OF_HEADS, (HEADS[0], "albert"), (HEADS[0], "distilbert")))
def test_a_sample_of_heads(head, name):
    assert_head_agrees(measure_head(head, name))


@pytest.mark.survey
def test_all_heads():
    for measured in measure_heads(head_jobs(), os.cpu_count() or 1):
        assert_head_agrees(measured)


@pytest.mark.skipif(not IS_CURRENT, reason="the page is of another version of transformers")
def test_the_page_has_every_head_and_none_is_wrong():
    rows = read_heads(PAGE)
    cells = [rows.get(name, [""] * 4)[HEADS.index(head)] for head, name in head_jobs()]
    assert {cell.partition(",")[0] for cell in cells} == {"exact", "refused", "cannot run alone", ""}
    for number, (head, fewest) in enumerate(zip(HEADS, (112, 93, 68, 27), strict=True)):
        exact = sum(row[number].startswith("exact") for row in rows.values())
        assert exact >= fewest, head
        assert f"{exact} of {exact + sum(row[number] == 'refused' for row in rows.values())} for {head}" in PAGE


def test_a_wrong_head_is_shown():
    wrong = MeasuredHead(HEADS[0], "one", "WRONG", "varlen", right=0.3)
    only_right = MeasuredHead(HEADS[1], "one", "exact", "varlen", right=0.0, stock_right=0.4)
    text = page([], "", [wrong, only_right])
    assert read_heads(text)["one"] == ["WRONG", "exact, right only", "", ""]
    assert "0 of 1 for sequence classification, 1 of 1 for token classification" in text
    assert "| one | token classification | 4e-01 |" in text
