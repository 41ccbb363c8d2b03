"""What the survey measures, faults that it notices, and the page of supported models: complete, none is wrong."""

import ast
import io
import json
import os
import re
import sys
import tarfile
import zipfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import PartialState
from processes import on_ranks
from tiers import fast_only, rarely
from tree_faults import break_trees, to_the_whole_row, with_far_gradients

import hf_packing as hfp
from hf_packing.attention import function
from hf_packing.attention.kinds.split import TokenExchange, block_of
from hf_packing.attention.kinds.trees import _TREES as PROVEN
from hf_packing.attention.route import known_routes
from hf_packing.trees.segments import TreeSegments
from tools import compare_revisions, kernel_signatures
from tools.compare_revisions import ROOT, WORKLOADS, _time_revision, compare
from tools.kernel_signatures import SIGNATURES, Package, function_with, main, read_packages, signature_in
from tools.size import Size, above_budgets, count_nodes, sizes_of
from tools.survey import measure as measure_module
from tools.survey import pictures, trees
from tools.survey import ranks as ranks_module
from tools.survey.heads import EXACT as EXACT_ROWS
from tools.survey.heads import HEADS, MeasuredHead, head_jobs, measure_head, measure_heads
from tools.survey.measure import (
    EXACT,
    ISOLATED_WITHOUT_CACHE,
    Measured,
    all_jobs,
    feedings,
    make_documents,
    measure,
    measure_all,
)
from tools.survey.page import PICTURES, SPLIT, TITLES, TREES, page, with_pictures, with_ranks, with_trees
from tools.survey.pictures import MeasuredPictures, measure_all_pictures, measure_pictures, picture_jobs
from tools.survey.ranks import RANKS, MeasuredRanks, measure_all_ranks
from tools.survey.steps import StepJob, measure_step, step_jobs
from tools.survey.trees import FOREST, LONGER, MeasuredTrees, measure_all_trees, measure_trees, tree_jobs
from tools.tiny_model import SETTINGS, THRESHOLDS, architectures, tiny_config, tiny_model

PAGE = (ROOT / "docs" / "SUPPORTED_MODELS.md").read_text()
IS_CURRENT = f"transformers {transformers.__version__} " in PAGE

Rows = dict[tuple[str, str], list[str]]
"""The cells of all tables, by the title of the section and the name of the architecture."""
COLUMNS = ("trees", "on 2 ranks")
"""These columns in the tables of models count as sections of their own."""


def rows_of(text: str) -> Rows:
    rows: Rows = {}
    title, columns = "", {}
    for line in text.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| "):
            name, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            if name == "architecture":
                columns = {column: cells.index(column) for column in COLUMNS if column in cells}
            elif name != "---":
                rows |= {(f"{title}: {column}", name): [cells[place]] for column, place in columns.items()}
                cells = [cell for place, cell in enumerate(cells) if place not in columns.values()]
                rows.setdefault((title, name), cells)  # the section of heads has a second table
    return rows


def column_of(kind: str, number: int) -> str:
    return f"{TITLES[kind]}: {COLUMNS[number]}"


def rows_of_measured(measured: Measured | MeasuredPictures | MeasuredTrees | MeasuredRanks) -> Rows:
    if isinstance(measured, MeasuredPictures):
        return rows_of(page([], "", [], [measured]))
    if isinstance(measured, MeasuredTrees | MeasuredRanks):
        on_ranks = isinstance(measured, MeasuredRanks)
        column = column_of(measured.kind if on_ranks else "causal", number=on_ranks)
        in_column = {(column, measured.name): [measured.status]} if measured.status in ("exact", "WRONG") else {}
        return rows_of(page([], "", **{"ranks" if on_ranks else "trees": [measured]})) | in_column
    return rows_of(page([measured], ""))


def disagreements(measured, text: str) -> list[str]:
    said = rows_of(text)
    if isinstance(measured, MeasuredHead):
        key, number = ("Heads", measured.name), HEADS.index(measured.head)
        found, on_page = (rows.get(key, [""] * 4)[number] for rows in (rows_of(page([], "", [measured])), said))
        return [] if found == on_page else [f"{key}: {found}, the page has {on_page}"]
    return [
        f"{key}: {cells}, the page has {said.get(key)}"
        for key, cells in rows_of_measured(measured).items()
        if not _same_cells(cells, said.get(key, []))
    ]


def _same_cells(some: list[str], others: list[str]) -> bool:
    """Whether rows say the same, but for the size of figures, and for numbers in the reason in the last cell."""
    if len(some) != len(others):
        return False
    return same_reason(some[-1], others[-1]) and all(map(_same_cell, some[:-1], others[:-1]))


def _same_cell(one: str, other: str) -> bool:
    figures = [re.fullmatch(r"\d+(\.\d+)?e[+-]\d+", each) for each in (one, other)]
    return same_figure(one, other) if all(figures) else one == other


def masked(reason: str) -> str:
    """A reason without its numbers, which processors round differently, and without what follows from a set's order."""
    return re.sub(r"KeyError: '\w+'", "KeyError", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", reason))


def same_reason(one: str, other: str) -> bool:
    """Whether two reasons are the same but for numbers, which may shift where a long one is cut."""
    if one.endswith("...") or other.endswith("..."):
        one, other = masked(one[:-10]), masked(other[:-10])
        shorter = min(len(one), len(other))
        return one[:shorter] == other[:shorter]
    return masked(one) == masked(other)


def same_figure(one: str, other: str) -> bool:
    sizes = [max(float(each), 1e-6) for each in (one, other)]
    return max(sizes) <= 100 * min(sizes) and (sizes[0] > EXACT) == (sizes[1] > EXACT)


MEASURES = {
    **{kind: partial(measure, kind) for kind in ("causal", "masked")},
    **{head: partial(measure_head, head) for head in HEADS},
    "pictures": measure_pictures,
    "trees": measure_trees,
}
SAMPLES = {
    "causal": "bart bloom falcon_h1 gemma3_text glm_moe_dsa gpt_oss jamba llama mamba2 musicgen prophetnet qwen3_next "
    "xlnet",
    "masked": "bert deberta-v2 fnet modernbert mobilebert mra roberta",
    HEADS[0]: "albert distilbert fnet llama xlnet canine gte ibert mobilebert",
    HEADS[1]: "gpt2 funnel qwen3_moe",
    HEADS[2]: "bert splinter modernbert t5",
    HEADS[3]: "roformer convbert big_bird",
    "pictures": "llava idefics3 mistral3 llava_next qwen2_vl gemma3 git mllama hunyuan_vl",
    "trees": "gpt2 llama mamba xlnet bloom gemma3_text gpt_oss jamba qwen3_next deepseek_v4 rwkv recurrent_gemma "
    "prophetnet cpmant glm_moe_dsa",
}
SAMPLE = [(kind, name) for kind, names in SAMPLES.items() for name in names.split()]
SAMPLE += [("causal", "llama with dynamic rope"), ("trees", "phi3 with longrope"), ("trees", "falcon with alibi")]
FAST = [("causal", "llama"), ("trees", "gpt2")]


@pytest.fixture(autouse=True)
def no_known_routes():
    known_routes.clear()


@pytest.fixture
def one_layer(monkeypatch):
    """For laws about the measuring, not about the model that is measured."""
    monkeypatch.setattr(trees, "tiny_model", partial(tiny_model, num_hidden_layers=1))


def assert_agrees(measured):
    wrong = measured.route and not measured.exact if hasattr(measured, "exact") else measured.status == "WRONG"
    assert not wrong, measured
    if IS_CURRENT:
        assert not disagreements(measured, PAGE)


OFTEN = {
    "causal": "llama bloom jamba glm_moe_dsa qwen3_next",
    "masked": "bert mobilebert mra",
    HEADS[0]: "xlnet canine mobilebert",
    HEADS[1]: "gpt2 funnel",
    HEADS[2]: "splinter t5",
    HEADS[3]: "big_bird",
    "pictures": "llava qwen2_vl mllama",
    "trees": "gpt2 mamba deepseek_v4 prophetnet",
}


def in_tiers(sample):
    often = [each for each in sample if each[1] in OFTEN[each[0]].split()]
    return [*fast_only(often, *FAST), *rarely(each for each in sample if each not in often)]


@pytest.mark.parametrize(("kind", "name"), in_tiers(SAMPLE))
def test_a_sample_of_the_page(kind, name):
    assert_agrees(MEASURES[kind](name))


EVERYTHING = [(measure_all, all_jobs), (measure_heads, head_jobs)]
EVERYTHING += [(measure_all_pictures, picture_jobs), (measure_all_trees, tree_jobs)]
EVERYTHING += [(lambda jobs, _: measure_all_ranks(jobs), all_jobs)]


@pytest.mark.survey
@pytest.mark.parametrize(("measure_jobs", "jobs"), EVERYTHING)
def test_all_of_the_page(measure_jobs, jobs):
    for measured in measure_jobs(jobs(), os.cpu_count() or 1):
        assert_agrees(measured)


def measure_on_two_ranks(folder):
    """Measure three architectures, then one of them without the gradients of exchanged tokens."""
    PartialState(cpu=True)
    block_of(RANKS)
    jobs = [("causal", "gpt2"), ("masked", "bart"), ("causal", "bloom")]
    found = [ranks_module.measure_on_ranks(*job) for job in jobs]
    exchange = TokenExchange.__call__
    TokenExchange.__call__ = lambda self, tensor, axis: exchange(self, tensor.detach(), axis)
    found.append(ranks_module.measure_on_ranks("causal", "gpt2"))
    (folder / f"{PartialState().process_index}.json").write_text(json.dumps([asdict(each) for each in found]))


@pytest.mark.slow
def test_rows_on_two_ranks_are_exact_refused_or_wrong(tmp_path):
    on_ranks(measure_on_two_ranks, tmp_path, ranks=RANKS)
    for rank in range(RANKS):
        found = [MeasuredRanks(**each) for each in json.loads((tmp_path / f"{rank}.json").read_text())]
        *exact, refused, wrong = found
        for each in found[:-1]:
            assert_agrees(each)
        assert [each.status for each in found] == ["exact", "exact", "refused", "WRONG"]
        assert max(*(max(each.difference, each.gradient) for each in exact), wrong.difference) < 1e-12
        assert "BloomAttention gets a tensor with a value for each pair of tokens" in refused.reason
        assert wrong.gradient > 1e-3


@pytest.mark.survey
def test_processes_that_end_are_started_anew():
    """No architecture has a list as its name, so it ends the processes."""
    found = measure_all_ranks([("causal", "gpt2"), ("causal", []), ("causal", "bloom")])
    assert [each.status for each in found] == ["exact", "WRONG", "refused"]
    assert "unhashable" in found[1].reason


def test_documents_are_long_and_gradients_exact(monkeypatch):
    assert max(map(len, make_documents(0, (5, 19)))) > max(THRESHOLDS.values())
    assert len(list(feedings(make_documents(0, (5, 6, 3, 8)), labels=True))) == 7
    model, documents = tiny_model("llama", "causal", num_hidden_layers=1), make_documents(0, [5, 9])
    assert measure_module._difference_in_float64(model, documents) <= 1e-6  # rotary positions are float32
    monkeypatch.setattr(measure_module, "patch_model", lambda model: model)
    assert measure_module._difference_in_float64(model, documents) > 1e-3
    model = tiny_model("llama", "causal", num_hidden_layers=1)
    assert trees._difference_in_float64(model, FOREST) <= 1e-6  # rotary positions are float32


@pytest.mark.slow
def test_a_batch_of_pictures_whose_padding_stays_is_noticed(monkeypatch):
    """Patching does nothing, so the backbone gets the padding."""
    monkeypatch.setattr(pictures, "patch_model", lambda model, **_: model)
    measured = measure_pictures("llava")
    assert measured.status == "WRONG"
    assert "the backbone got 188 tokens" in measured.reason


@pytest.mark.parametrize("forest", [FOREST, LONGER])
def test_the_forest_has_all_that_trees_can_have(forest):
    """The survey's own paths are also those of TreeSegments."""
    segments = TreeSegments(forest.lengths, forest.parents)
    assert (forest.lengths, forest.parents) != (PROVEN.lengths, PROVEN.parents)
    for document, end in enumerate(forest.ends):
        assert forest.path(document) == segments.path_of(end).tolist()
    assert set(forest.ends) - set(segments.leaves) == {0, 3, 7}, "documents end inside others"
    assert len(set(forest.ends)) == len(forest.ends) - 1, "one document occurs twice"
    assert max(len(forest.above(end)) for end in forest.ends) == 4
    assert (forest.lengths[1], forest.parents.count(1), forest.parents.count(-1)) == (1, 2, 3)
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


@pytest.mark.usefixtures("one_layer")
def test_a_wrong_tree_is_noticed(monkeypatch):
    break_after_the_proof(monkeypatch, function, "attend_exactly", with_far_gradients)
    measured = measure_trees("gpt2")
    assert (measured.status, measured.reason) == ("WRONG", "")
    assert measured.gradient > EXACT >= max(measured.difference, measured.change)


@pytest.mark.usefixtures("one_layer")
def test_a_fault_that_the_proof_notices_is_a_refusal(monkeypatch):
    break_trees(monkeypatch, to_the_whole_row)
    measured = measure_trees("gpt2")
    assert measured.status == "refused"
    assert "changing one segment of a tree changed" in measured.reason


current = pytest.mark.skipif(not IS_CURRENT, reason="the page is of another version of transformers")

FIGURES = {"change": 0.0, "difference": 2e-6, "gradient": 3e-7}
LLAMA = Measured("causal", "llama", stock=ISOLATED_WITHOUT_CACHE, route="varlen", packed_share=1.0, **FIGURES)
BLOOM = replace(LLAMA, name="bloom", stock="leaks", route="segments", modules={"BloomAttention": 4}, packed_share=0.92)
REFUSED = Measured("masked", "two", stock="leaks", reason="no route: the logits differ by 1.8, and more")
FOUR = [LLAMA, BLOOM, REFUSED, Measured("masked", "three", False, reason="too large")]
SEEN = [
    MeasuredPictures("seen", "exact", difference=1e-15, gradient=1e-8),
    MeasuredPictures("unseen", "refused", reason="x wrong"),
]
ON_RANKS = [
    MeasuredRanks("causal", "llama", "exact", "", 1e-15, 3e-16),
    MeasuredRanks("causal", "bloom", "refused", "x pairs"),
    MeasuredRanks("masked", "two", "refused", "x pairs"),
]
GROWN = [
    MeasuredTrees("llama", "exact", {"LlamaMixer": 2}, difference=1e-6, change=0.0, gradient=2e-7),
    MeasuredTrees("cut", "refused", reason="x not stable", prefix=0.5),
]


def column(text, kind, number):
    """What a column says of those models of a kind of which it says something."""
    title = column_of(kind, number)
    return {name: cells[0] for (table, name), cells in rows_of(text).items() if table == title and cells[0]}


def read(text, title):
    titles = (title, f"Refused: {title.lower()}", f"Not measured: {title.lower()}")
    return {name: (table, cells) for (table, name), cells in rows_of(text).items() if table in titles}


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("| bloom |", "| blom |"),
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
        ("| seen |", "| seem |"),
        ("| seen | exact |", "| seen | as unpatched |"),
        ("1e-15", "1e-03"),
        ("1e-08", "1e-03"),
        ("x wrong", "y"),
        ("| llama | exact |", "| lama | exact |"),
        ("| exact | 1e-06 |", "| exact, up to rounding | 1e-06 |"),
        ("| 1e-06 |", "| 1e-03 |"),
        ("| 2e-07 |", "| 2e-03 |"),
        ("2 LlamaMixer", "3 LlamaMixer"),
        ("| exact | exact |  |\n", "|  | exact |  |\n"),
        ("| exact | exact |  |\n", "| exact | WRONG |  |\n"),
        ("x pairs", "y"),
        ("x not stable", "y"),
        ("| 5e-01 |", "| 5e-05 |"),
    ],
)
def test_a_changed_page_is_noticed(was, becomes):
    text, everything = page(FOUR, "transformers 0", [], SEEN, GROWN, ON_RANKS), [*FOUR, *SEEN, *GROWN, *ON_RANKS]
    assert was in text
    assert not any(disagreements(each, text) for each in everything)
    assert any(disagreements(each, text.replace(was, becomes)) for each in everything)


def test_pages_of_few_and_other_numbers():
    text = page(FOUR, "transformers 0").replace("1.8", "17")
    assert not any(disagreements(each, text) for each in FOUR)
    text = page([*FOUR, replace(LLAMA, name="one", reason="a | b", route="segments")], "transformers 0")
    assert "3 of 3 causal and 0 of 1 masked" in text
    assert "| 2e-06 | 3e-07 | a \\| b |" in text
    assert "| three | too large |" in text
    assert "This works for 3 of 3 causal and 1 of 2 masked models" in text
    untested = replace(LLAMA, name="one", route="", stock="isolated", reason="isolation cannot be tested, since")
    text = page([*FOUR, untested], "transformers 0")
    assert "Before patching, 0 of the 3 models in which it can be tested" in text
    assert "| one | isolation cannot be tested |" in text


def test_sections_are_replaced_and_of_the_installed_versions():
    others = [[replace(each[0], name="old")] for each in (SEEN, GROWN, ON_RANKS[1:])]
    text = page(FOUR, "transformers 0", [], SEEN, GROWN, ON_RANKS)
    for old in (page(FOUR, "transformers 0", [], *others), page(FOUR, "transformers 0")):
        assert text == with_trees(with_pictures(with_ranks(with_trees(old, GROWN), ON_RANKS), SEEN), GROWN)
    assert "old" not in text
    assert text.index(TITLES["causal"]) < text.index(PICTURES) < text.index(TREES) < text.index(SPLIT)
    pinned = dict(re.findall(r"(?m)^(transformers|torch)==([\d.]+)", (ROOT / "constraints.txt").read_text()))
    assert f"transformers {pinned['transformers']} and torch {pinned['torch']}, on CPU" in PAGE


@current
def test_the_page_has_every_architecture_and_none_is_wrong():
    for kind, title in TITLES.items():
        rows = read(PAGE, title)
        assert sorted(rows) == sorted(name for job, name in all_jobs() if job == kind)
        figures = [cells[-3:-1] for table, cells in rows.values() if table == title]
        assert figures
        assert all(max(map(float, each)) <= EXACT for each in figures)


@current
def test_the_page_has_every_head_and_none_is_wrong():
    rows = {name: cells for (title, name), cells in rows_of(PAGE).items() if title == "Heads"}
    cells = [rows.get(name, [""] * 4)[HEADS.index(head)] for head, name in head_jobs()]
    assert {cell.partition(",")[0] for cell in cells} == {"exact", "refused", "cannot run alone", ""}
    for number, (head, fewest) in enumerate(zip(HEADS, (112, 93, 68, 27), strict=True)):
        assert sum(row[number].startswith("exact") for row in rows.values()) >= fewest, head


@current
def test_the_page_has_every_architecture_with_pictures_and_none_is_wrong():
    rows = read(PAGE, PICTURES)
    assert sorted(rows) == picture_jobs()
    taken = {name: cells for name, (title, cells) in rows.items() if title == PICTURES}
    exact = [name for name, cells in taken.items() if cells[0] == "exact"]
    assert set(taken) - set(exact) == {"hunyuan_vl"}
    assert taken["hunyuan_vl"][0] == "as unpatched"
    assert all(float(figure) <= EXACT_ROWS for name in exact for figure in taken[name][1:3])
    assert len(exact) >= 40


@current
def test_the_page_has_every_causal_architecture_and_no_tree_is_wrong():
    rows = read(PAGE, TREES)
    assert sorted(rows) == sorted(tree_jobs())
    exact = {name: cells for name, (title, cells) in rows.items() if title == TREES}
    assert len(exact) >= 166
    for result, logits, gradients, *_, problem in exact.values():
        assert result.startswith("exact")
        assert not problem
        assert max(float(logits), float(gradients)) <= EXACT or "up to rounding" in result
    refused = {name: cells for name, (title, cells) in rows.items() if title.startswith("Refused")}
    unstable = {name for name, (_, reason) in refused.items() if "the outputs for a prefix are not stable" in reason}
    causal = read(PAGE, TITLES["causal"])
    packed = {name: cells[-1] for name, (title, cells) in causal.items() if title.startswith("Refused")}
    assert unstable
    assert all(float(refused[name][0]) > 0.01 for name in unstable), "measured without the proof"
    assert set(refused) - unstable == set(packed), "whatever takes packed rows takes trees, or says why not"
    assert all(refused[name][1][:200] == packed[name][:200] for name in packed)
    assert column(PAGE, "causal", 0) == dict.fromkeys(exact, "exact") | dict.fromkeys(unstable, "refused")


@current
def test_the_page_has_every_architecture_on_two_ranks_and_none_is_wrong():
    statuses = []
    for kind, title in TITLES.items():
        refused = {
            name: cells[0]
            for (table, name), cells in rows_of(PAGE).items()
            if table == f"Refused: {SPLIT.lower()}, {title.lower()}"
        }
        taken, found = read(PAGE, title), column(PAGE, kind, 1)
        assert set(found) == {name for name, (table, _) in taken.items() if table == title}
        packed = {name for name, (table, _) in taken.items() if table.startswith("Refused")}
        assert set(refused) == {name for name, status in found.items() if status == "refused"} | packed
        assert not any(re.match(r"\w+(Error|Exception): ", reason) for reason in refused.values())
        statuses += found.values()
    assert set(statuses) == {"exact", "refused"}
    assert statuses.count("exact") >= 190


def test_what_is_wrong_is_shown():
    heads = [
        MeasuredHead(HEADS[0], "one", "WRONG", "varlen", right=0.3),
        MeasuredHead(HEADS[1], "one", "exact", "varlen", right=0.0, stock_right=0.4),
    ]
    text = page([], "", heads)
    assert rows_of(text)["Heads", "one"] == ["WRONG", "exact", "", ""]
    assert "0 of 1 for sequence classification, 1 of 1 for token classification" in text
    assert "| one | token classification | 4e-01 |" in text
    text = page([], "", [], [MeasuredPictures("one", "WRONG", 0.3, 0.1)])
    assert read(text, PICTURES) == {"one": (PICTURES, ["WRONG", "3e-01", "1e-01", ""])}
    assert "0 are refused with\nthe reason, and 1 are wrong" in text
    trees = [MeasuredTrees("llama", "WRONG", {}, 0.3, 0.0, 0.1), MeasuredTrees("one", "not built", reason="too large")]
    ranks = [MeasuredRanks("causal", "llama", "WRONG", "", 0.3, 0.1)]
    text = page([LLAMA], "", trees=trees, ranks=ranks)
    assert read(text, TREES) == {
        "llama": (TREES, ["WRONG", "3e-01", "1e-01", "", ""]),
        "one": (f"Not measured: {TREES.lower()}", ["too large"]),
    }
    assert column(text, "causal", 0) == column(text, "causal", 1) == {"llama": "WRONG"}
    assert rows_of(text)[f"Wrong: {SPLIT.lower()}, {TITLES['causal'].lower()}", "llama"] == ["3e-01"]
    assert text.endswith(" |\n")
    assert "Of 1 causal models, 0 are exact, 0 are refused with\nthe reason, and 1 are wrong. 0 of those" in text


@pytest.mark.parametrize(
    ("job", "note"),
    [
        pytest.param(StepJob("causal", "llama", "bfloat16"), "", marks=pytest.mark.slow),
        pytest.param(StepJob("sequence classification", "bert", "float32"), "", marks=pytest.mark.slow),
        (StepJob("question answering", "bert", "float32", "own"), ", of equal length, since padding changes the loss"),
        pytest.param(
            StepJob("token classification", "axk2", "float32", "own"),
            ", of equal length, since padding changes the loss",
            marks=pytest.mark.slow,
        ),
        pytest.param(StepJob("token classification", "big_bird", "float32", "own"), "", marks=pytest.mark.slow),
    ],
)
def test_steps_are_proven(job, note):
    """The logits of padding count in the loss of a question's answer. Layers of AXK2 that choose keys choose padding,
    too, if a batch has more tokens than they choose. BigBird makes new layers in its forward on short rows."""
    assert job in step_jobs()
    found = measure_step(job)
    assert (found.status, found.reason, found.note) == ("proven", "", note)
    assert max(found.loss, found.gradient) < (0.05 if job.dtype == "bfloat16" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        StepJob("question answering", "markuplm", "bfloat16", "own"),
        StepJob("sequence classification", "phimoe", "bfloat16"),
    ],
)
def test_steps_that_differ_by_rounding_are_proven(job):
    """Gradients that nearly cancel: of embeddings that all tokens share, and of a router."""
    found = measure_step(job)
    assert (found.status, found.reason) == ("proven", "")
    assert found.gradient > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "status", "reason"),
    [
        (
            StepJob("question answering", "umt5", "float32", "own"),
            "refused",
            "ModelNotSupportedError: model: expected modules that can run on the rows of each length separately, 1 "
            "rows of 4 tokens, but one fails: Expected input batch_size (1) to match target batch_size (8).. Train "
            "the model on padded batches without hf_packing",
        ),
        (
            StepJob("masked", "funnel", "float32"),
            "refused",
            "ModelNotSupportedError: model: expected modules that can run on each document alone, of 4 to 13 tokens, "
            "but one fails: output with shape [1, 4, 2, 1] doesn't match the broadcast shape [1, 4, 2, 2]. Train the "
            "model on padded batches without hf_packing",
        ),
        (
            StepJob("masked", "bart", "float32"),
            "refused",
            "PackingError: BartModel: the tensor 1.decoder_input_ids of shape [1, 75] did not occur when the model was "
            "patched, so its token axis is unknown; call the model with the usual inputs of training. A model that "
            "makes inputs of the labels, as those with an encoder and a decoder do, cannot train on packed rows",
        ),
        (
            StepJob("multiple choice", "nystromformer", "bfloat16"),
            "not compared",
            ", whose loss changes with padding",
        ),
        (StepJob("multiple choice", "mobilebert", "float32"), "not compared", ", whose loss changes with padding"),
    ],
)
def test_steps_that_cannot_be_proven(job, status, reason):
    found = measure_step(job)
    assert (found.status, found.reason or found.note) == (status, reason)


def test_which_differences_are_exact():
    for measured in (replace(LLAMA, difference=EXACT), GROWN[0]):
        assert measured.is_exact if isinstance(measured, MeasuredTrees) else measured.exact
    for name in ("difference", "change", "gradient"):
        assert not replace(LLAMA, **{name: 2 * EXACT}).exact
        assert not replace(GROWN[0], **{name: 2 * EXACT}).is_exact
    assert not Measured("causal", "one").exact
    assert not MeasuredTrees("one").is_exact
    rounded = replace(GROWN[0], difference=2 * EXACT, explained=3 * EXACT)
    assert rounded.is_exact
    assert not replace(rounded, change=2 * EXACT).is_exact
    assert not replace(rounded, gradient=2 * EXACT, gradient_in_float64=True).is_exact
    rows = read(page([], "", trees=[rounded, replace(GROWN[0], name="one", gradient_in_float64=True)]), TREES)
    assert [rows[name][1][0] for name in ("llama", "one")] == ["exact, up to rounding", "exact, gradients in float64"]
    beyond = Measured("causal", "one", route="varlen", change=0.0, difference=2 * EXACT, gradient=0.0)
    assert replace(beyond, explained=3 * EXACT).exact


def test_medians_of_rounds_in_turn(monkeypatch):
    order = []

    def timed(root, names):
        order.append(root)
        return dict.fromkeys(names, float(len(order)))

    monkeypatch.setattr(compare_revisions, "_time_revision", timed)
    other = Path("other")
    assert compare(other, ["plan"], 3) == {"plan": (3.0, 4.0)}  # 2, 3 and 6 against 1, 4 and 5
    assert order == [ROOT, other, other, ROOT, ROOT, other]


@pytest.mark.slow
def test_a_tree_is_timed_in_a_process_of_its_own():
    assert _time_revision(ROOT, ["plan"])["plan"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "collate", "read", "patch"])
def test_workloads_run(name):
    WORKLOADS[name][1](hfp)()


def test_docstrings_and_line_breaks_are_not_counted():
    plain = "def f(a):\n    return g(a, 1)\n"
    documented = '"""A module."""\ndef f(a):\n    """Say."""\n    return g(\n        a,\n        1,\n    )\n'
    assert count_nodes(ast.parse(plain)) == count_nodes(ast.parse(documented))
    with_text = count_nodes(ast.parse(plain + 'x = "text"\n'))
    assert with_text == count_nodes(ast.parse(plain)) + 4
    assert with_text == count_nodes(ast.parse(documented + 'x = "text"\n"""A field."""\n'))


def test_folders_and_functions_with_a_single_use():
    sources = {
        "hf_packing/__init__.py": "from hf_packing.rows.a import once\n",
        "hf_packing/rows/a.py": "def once(): ...\ndef twice(): ...\ndef __len__(): ...\n",
        "hf_packing/rows/deep/b.py": "once()\ntwice() + twice()\n",
        "tests/test_a.py": "def test_a():\n    once()\n",
    }
    found = sizes_of(sources)
    assert list(found) == ["hf_packing", "hf_packing/rows", "tests"]
    rows = found["hf_packing/rows"]
    assert (rows.files, rows.lines, rows.functions, rows.single_use) == (2, 5, 3, 1)
    assert found["tests"].functions == 1
    assert Size(1, 2, 3, 4, 5) + Size(1, 1, 1, 1, 1) == Size(2, 3, 4, 5, 6)


def test_rooms_above_their_budgets():
    sizes = {name: Size(nodes=1500) for name in ("hf_packing", "hf_packing/rows", "hf_packing/new", "tests")}
    assert above_budgets(sizes, {"hf_packing": 1500, "hf_packing/rows": 1499, "hf_packing/gone": 7}) == [
        "hf_packing/rows: expected at most 1,499 nodes, got 1,500",
        "hf_packing/new: expected at most 0 nodes, got 1,500",
    ]


def test_tiny_models_are_small_and_their_weights_large_where_values_are_free():
    assert {"llama", "mamba"} <= set(architectures("causal"))
    assert "bert" in architectures("masked")
    assert not set(SETTINGS) & set(THRESHOLDS)
    assert tiny_config("bert", "causal").is_decoder
    assert tiny_model("llama", "causal", torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match="phi4_multimodal has .* parameters even with small settings, expected"):
        tiny_model("phi4_multimodal", "causal")
    model = tiny_model("mamba2", "causal")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert all(parameter.std() > 0.05 for parameter in parameters.values() if parameter.dim() >= 2)
    assert all((parameter == 1).all() for name, parameter in parameters.items() if name.endswith("norm.weight"))


SOURCE = """
from typing import overload

@overload
def attend(q: int) -> int: ...

def attend(q: "Tensor", k=(-1, -1), *, scale: float | None = None, **more): return attend

class Mask:
    def __init__(self, blocks, size=SIZE): ...
"""


def test_signatures_are_read_and_kept():
    assert signature_in(SOURCE, "attend") == "q, k=(-1, -1), *, scale=None, **more"
    assert signature_in(SOURCE, "Mask.__init__") == "self, blocks, size=SIZE"
    assert signature_in(SOURCE, "Mask.attend") is None
    assert signature_in(SOURCE, "absent") is None
    function = function_with("q, *, scale=None", lambda given: given)
    assert function(1, scale=2) == {"q": 1, "scale": 2}
    for wrong in ({"q": 1, "softcap": 2}, {}):
        with pytest.raises(TypeError, match="softcap|q"):
            function(**wrong)


@pytest.mark.parametrize("is_source", [False, True])
def test_what_is_read_of_a_package(monkeypatch, is_source):
    def download(_, version, folder):
        archive = folder / ("flash-1.tar.gz" if is_source else "flash-1.whl")
        text = SOURCE if version == "1.2.0" else "def other(): ..."
        if is_source:
            with tarfile.open(archive, "w:gz") as made:
                member = tarfile.TarInfo("flash-1/flash/interface.py")
                member.size = len(text)
                made.addfile(member, io.BytesIO(text.encode()))
        else:
            with zipfile.ZipFile(archive, "w") as made:
                made.writestr("flash/interface.py", text)
        return archive

    package = Package("flash", "1.0", {"flash attend": ("flash/interface.py", "attend")}, is_source)
    monkeypatch.setattr(kernel_signatures, "PACKAGES", (package,))
    monkeypatch.setattr(kernel_signatures, "_versions", lambda _: ["1.2.0", "1.1.3", "1.1.0", "0.9"])
    monkeypatch.setattr(kernel_signatures, "_download", download)
    assert read_packages() == {"flash attend": {"1.2.0": "q, k=(-1, -1), *, scale=None, **more"}}


def test_the_command_says_whether_signatures_are_new(monkeypatch, capsys):
    known = json.loads(SIGNATURES.read_text())
    monkeypatch.setattr(sys, "argv", ["kernel_signatures"])
    monkeypatch.setattr(kernel_signatures, "read_packages", lambda: known)
    assert main() == 0
    assert "as in kernel_signatures.json" in capsys.readouterr().out
    changed = known | {"torch varlen_attn": known["torch varlen_attn"] | {"9.0.0": "query, key, value"}}
    monkeypatch.setattr(kernel_signatures, "read_packages", lambda: changed)
    assert main() == 1
    assert "not as in kernel_signatures.json: torch varlen_attn" in capsys.readouterr().out
