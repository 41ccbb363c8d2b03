"""The survey's section about shared prefixes: the tests notice a section that says anything else."""

import os
import re
from dataclasses import replace

import pytest
import torch
from survey_page import IS_CURRENT, PAGE, same_figure, same_reason
from tiers import fast_only, slow

from hf_packing.attention import tree_attention
from hf_packing.attention.find_route import known_routes
from hf_packing.attention.tiny_model import THRESHOLDS, tiny_model
from hf_packing.attention.tree_proof import TREES as PROVEN
from hf_packing.trees.segments import TreeSegments
from tools.survey import trees
from tools.survey.measure import EXACT, Measured
from tools.survey.page import PICTURES, TITLES, TREES, page, with_pictures, with_trees
from tools.survey.pictures import MeasuredPictures
from tools.survey.trees import FOREST, LONGER, MeasuredTrees, measure_all_trees, measure_trees, tree_jobs


@pytest.fixture(autouse=True)
def no_known_routes():
    """Each model finds its own route."""
    known_routes.clear()


SAMPLE = ["gpt2", "llama", "mamba", "xlnet", "bloom", "gemma3_text", "gpt_oss", "jamba", "qwen3_next", "deepseek_v4"]
SAMPLE += ["rwkv", "recurrent_gemma", "prophetnet", "cpmant", "glm_moe_dsa", "phi3 with longrope", "falcon with alibi"]

FIGURE = r"\d+(\.\d+)?e[+-]\d+"

TABLES = (TREES, f"Refused: {TREES.lower()}", f"Not measured: {TREES.lower()}")


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of a table."""
    table = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()[3:] if line]
    return [[cell.strip() for cell in row] for row in rows]


def read_trees(text: str) -> dict[str, tuple[str, list[str]]]:
    """The table and the cells of each causal architecture."""
    return {name: (title, cells) for title in TABLES for name, *cells in rows_of(text, title)}


def read_column(text: str) -> dict[str, str]:
    """The column of trees in the table of causal models."""
    return {name: cells[-2] for name, *cells in rows_of(text, TITLES["causal"])}


def same_cell(one: str, other: str) -> bool:
    figures = re.fullmatch(FIGURE, one) and re.fullmatch(FIGURE, other)
    return same_figure(one, other) if figures else one == other


def disagreement_of_trees(measured: MeasuredTrees, text: str) -> str:
    """What a page says otherwise than what was measured; empty if nothing."""
    (title, cells), said = read_trees(page([], "", trees=[measured]))[measured.name], read_trees(text)
    if said.get(measured.name, ("", []))[0] != title:
        return f"{measured.name}: not in the table {title}"
    others = said[measured.name][1]
    same = len(cells) == len(others) and all(map(same_cell, cells[:-1], others[:-1]))
    same &= same_reason(cells[-1], others[-1])
    if title == TREES:
        same &= read_column(text).get(measured.name) == measured.status
    return "" if same else f"{measured.name}: {cells}, the page has {others}"


def assert_trees_agree(measured: MeasuredTrees) -> None:
    assert measured.status != "WRONG", measured
    if IS_CURRENT:
        assert not disagreement_of_trees(measured, PAGE)


@pytest.mark.parametrize("name", fast_only(SAMPLE, "gpt2", "xlnet"))
def test_a_sample_of_trees(name):
    assert_trees_agree(measure_trees(name))


@pytest.mark.survey
def test_all_trees():
    for measured in measure_all_trees(tree_jobs(), os.cpu_count() or 1):
        assert_trees_agree(measured)


@pytest.mark.skipif(not IS_CURRENT, reason="the page is of another version of transformers")
def test_the_page_has_every_causal_architecture_and_no_tree_is_wrong():
    rows = read_trees(PAGE)
    assert sorted(rows) == sorted(tree_jobs())
    exact = {name: cells for name, (title, cells) in rows.items() if title == TREES}
    assert len(exact) >= 166
    for result, logits, gradients, *_, problem in exact.values():
        assert result.startswith("exact")
        assert not problem
        assert max(float(logits), float(gradients)) <= EXACT or "up to rounding" in result
    refused = {name: cells[1] for name, (title, cells) in rows.items() if title == TABLES[1]}
    unstable = {name for name, reason in refused.items() if "the outputs for a prefix are not stable" in reason}
    packed = {name: reason for name, _, reason in rows_of(PAGE, "Refused: causal language models")}
    assert unstable
    assert all(float(rows[name][1][0]) > 0.01 for name in unstable), "measured without the proof"
    assert set(refused) - unstable == set(packed), "whatever takes packed rows takes trees, or says why not"
    assert all(refused[name][:200] == packed[name][:200] for name in packed)
    said = " ".join(PAGE.split())
    assert f"{len(exact)} are exact, {len(refused)} are refused with the reason, and 0 are wrong" in said
    assert f"{len(unstable)} of those refused have prefixes that are not stable" in said
    column = {name: status for name, status in read_column(PAGE).items() if status}
    assert column == dict.fromkeys(exact, "exact") | dict.fromkeys(unstable, "refused")


LLAMA = Measured("causal", "llama", route="varlen", change=0.0, difference=0.0, gradient=0.0)

GOOD = MeasuredTrees("llama", "exact", {"LlamaMixer": 2}, difference=1e-6, change=0.0, gradient=2e-7)

REFUSED = MeasuredTrees("three", "refused", reason="x not stable", prefix=0.5)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("| llama | exact |", "| lama | exact |"),
        ("| exact | 1e-06 |", "| exact, up to rounding | 1e-06 |"),
        ("| 1e-06 |", "| 1e-03 |"),
        ("| 2e-07 |", "| 2e-03 |"),
        ("2 LlamaMixer", "3 LlamaMixer"),
        ("| exact |  |\n", "|  |  |\n"),
        ("x not stable", "y"),
        ("| 5e-01 |", "| 5e-05 |"),
    ],
)
def test_a_changed_page_of_trees_is_noticed(was, becomes):
    both, masked = [GOOD, REFUSED], Measured("masked", "bert", route="varlen", change=0.0, difference=0.0, gradient=0.0)
    results, pictures = (
        [LLAMA, replace(LLAMA, name="gpt2", route="segments", reason="a | b"), masked],
        [MeasuredPictures("seen")],
    )
    old = [replace(GOOD, name="old"), MeasuredTrees("llama", "refused"), MeasuredTrees("older", "not built")]
    text = with_trees(page(results, "transformers 0", [], pictures, old), both)
    assert "old" not in text
    assert text == page(results, "transformers 0", [], pictures, both)
    assert text == with_pictures(text, pictures)
    assert text == with_trees(with_pictures(page(results, "transformers 0"), pictures), both)
    assert text.index(PICTURES) < text.index(TREES) < text.index(TITLES["causal"])
    assert not any(disagreement_of_trees(each, text) for each in both)
    assert was in text
    assert any(disagreement_of_trees(each, text.replace(was, becomes)) for each in both)


def test_a_wrong_tree_is_shown():
    wrong = MeasuredTrees("llama", "WRONG", {}, 0.3, 0.0, 0.1)
    text = page([LLAMA], "", trees=[wrong, MeasuredTrees("one", "not built", reason="too large")])
    assert read_trees(text) == {
        "llama": (TREES, ["WRONG", "3e-01", "1e-01", "", ""]),
        "one": (TABLES[2], ["too large"]),
    }
    assert read_column(text) == {"llama": "WRONG"}
    assert text.endswith(" |\n")
    assert "Of 1 causal models, 0 are exact, 0 are refused with\nthe reason, and 1 are wrong. 0 of those" in text


def test_which_differences_are_exact():
    assert GOOD.is_exact
    assert not MeasuredTrees("one").is_exact
    for name in ("difference", "change", "gradient"):
        assert not replace(GOOD, **{name: 2 * EXACT}).is_exact
    rounded = replace(GOOD, difference=2 * EXACT, explained=3 * EXACT)
    assert rounded.is_exact
    assert not replace(rounded, change=2 * EXACT).is_exact
    assert not replace(rounded, gradient=2 * EXACT, gradient_in_float64=True).is_exact
    results = [rounded, replace(GOOD, name="one", gradient_in_float64=True)]
    cells = read_trees(page([], "", trees=results))
    assert [cells[name][1][0] for name in ("llama", "one")] == ["exact, up to rounding", "exact, gradients in float64"]


@pytest.mark.parametrize("forest", [FOREST, LONGER])
def test_the_forest_has_all_that_trees_can_have(forest):
    """The survey's own paths are also those of TreeSegments."""
    segments = TreeSegments(forest.lengths, forest.parents)
    assert (forest.lengths, forest.parents) != (PROVEN.lengths, PROVEN.parents)
    for document, end in enumerate(forest.ends):
        assert forest.path(document) == segments.path_of(end).tolist()
    for segment, parent in enumerate(forest.parents):
        begin, end = segments.begins[segment], segments.begins[segments.ends_below[segment]]
        assert forest.outside(segment) == [*range(begin), *range(end, segments.tokens)]
        assert parent < 0 or begin > segments.begins[parent]
    inside = set(forest.ends) - set(segments.leaves)
    assert {0, 3, 7} == inside, "documents end inside others"
    assert set(segments.leaves) < set(forest.ends)
    assert len(set(forest.ends)) == len(forest.ends) - 1, "one document occurs twice"
    assert max(len(forest.above(end)) for end in forest.ends) == 4
    assert forest.lengths[1] == 1
    assert forest.parents.count(1) == 2
    assert forest.parents.count(-1) == 3
    assert segments.leaves[-1] == forest.parents.index(-1, 10), "the last document is alone"
    later = [each for each, parent in enumerate(forest.parents) if parent >= 0 and each != parent + 1]
    assert max(segments.depths[each] for each in later) > 0
    assert max(len(forest.path(document)) for document in range(len(forest.ends))) > max(THRESHOLDS.values())


def break_after_the_proof(monkeypatch, owner, name, fault):
    """Replace a function as soon as a model is patched, so that the proof cannot notice it."""
    patch_model, sound = trees.patch_model, getattr(owner, name)

    def patch_and_break(model, **options):
        monkeypatch.setattr(owner, name, sound)
        patched = patch_model(model, **options)
        monkeypatch.setattr(owner, name, fault)
        return patched

    monkeypatch.setattr(trees, "patch_model", patch_and_break)


attend = tree_attention.attend_along_paths


def to_the_whole_row(query, key, value, *_, scale, **__):
    plain = torch.nn.functional.scaled_dot_product_attention
    return plain(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def with_far_gradients(query, key, value, row, **options):
    return attend(query, key, value, row, **options) + (value.sum() - value.sum().detach()) * 1e-3


def with_far_logits(query, key, value, row, **options):
    return attend(query, key, value, row, **options) + value[:, :, -1:] * 1e-4


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (to_the_whole_row, ["difference", "change", "gradient"]),
        (with_far_gradients, ["gradient"]),
        slow(with_far_logits, ["difference", "change", "gradient"]),
    ],
)
def test_a_wrong_tree_is_noticed(monkeypatch, fault, wrong):
    break_after_the_proof(monkeypatch, tree_attention, "attend_along_paths", fault)
    measured = measure_trees("gpt2")
    assert measured.status == "WRONG"
    assert not measured.reason
    assert [figure for figure in ("difference", "change", "gradient") if getattr(measured, figure) > EXACT] == wrong


def test_a_fault_that_the_proof_notices_is_a_refusal(monkeypatch):
    monkeypatch.setattr(tree_attention, "attend_along_paths", to_the_whole_row)
    measured = measure_trees("gpt2")
    assert measured.status == "refused"
    assert "between a tree and the document alone" in measured.reason


@pytest.mark.parametrize("name", fast_only(["gpt2", "mamba"], "gpt2"))
def test_wrong_paths_are_noticed(monkeypatch, name):
    path_of = TreeSegments.path_of

    def without_a_token(self, segment):
        path = path_of(self, segment)
        return path[path != 2] if len(path) > 20 else path

    break_after_the_proof(monkeypatch, TreeSegments, "path_of", without_a_token)
    assert measure_trees(name).status == "WRONG"


def test_an_error_of_a_patched_model_is_wrong(monkeypatch):
    def fails(*_, **__):
        raise ValueError("no")

    break_after_the_proof(monkeypatch, tree_attention, "attend_along_paths", fails)
    measured = measure_trees("gpt2")
    assert (measured.status, measured.reason) == ("WRONG", "ValueError: no")


def test_gradients_of_trees_in_float64(monkeypatch):
    model = tiny_model("llama", "causal")
    assert trees._difference_in_float64(model, FOREST) <= 1e-6  # rotary positions are float32
    break_after_the_proof(monkeypatch, tree_attention, "attend_along_paths", with_far_gradients)
    assert trees._difference_in_float64(model, FOREST) > 1e-3
