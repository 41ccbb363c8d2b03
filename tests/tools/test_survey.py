"""What the survey measures: samples of the page, and faults that it notices."""

import os
from functools import partial

import pytest
from survey_page import IS_CURRENT, PAGE, disagreements
from tiers import fast_only, slow
from tree_faults import break_trees, to_the_whole_row, with_far_gradients

from hf_packing.attention import function
from hf_packing.attention.exact import attend_exactly
from hf_packing.attention.route import known_routes
from hf_packing.attention.tree_proof import TREES as PROVEN
from hf_packing.trees.segments import TreeSegments
from tools.survey import measure as measure_module
from tools.survey import pictures, trees
from tools.survey.heads import HEADS, head_jobs, measure_head, measure_heads
from tools.survey.measure import EXACT, all_jobs, feedings, make_documents, measure, measure_all
from tools.survey.pictures import measure_all_pictures, measure_pictures, picture_jobs
from tools.survey.trees import FOREST, LONGER, measure_all_trees, measure_trees, tree_jobs
from tools.tiny_model import THRESHOLDS, tiny_model

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
    HEADS[0]: "albert distilbert fnet llama xlnet canine",
    HEADS[1]: "gpt2 funnel qwen3_moe",
    HEADS[2]: "bert splinter modernbert",
    HEADS[3]: "roformer convbert big_bird",
    "pictures": "llava idefics3 mistral3 llava_next qwen2_vl gemma3 git mllama hunyuan_vl",
    "trees": "gpt2 llama mamba xlnet bloom gemma3_text gpt_oss jamba qwen3_next deepseek_v4 rwkv recurrent_gemma "
    "prophetnet cpmant glm_moe_dsa",
}
SAMPLE = [(kind, name) for kind, names in SAMPLES.items() for name in names.split()]
SAMPLE += [("causal", "llama with dynamic rope"), ("trees", "phi3 with longrope"), ("trees", "falcon with alibi")]
FAST = [
    ("causal", "llama"),
    (HEADS[0], "distilbert"),
    ("trees", "gpt2"),
]


@pytest.fixture(autouse=True)
def no_known_routes():
    """Each model finds its own route."""
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


@pytest.mark.parametrize(("kind", "name"), fast_only(SAMPLE, *FAST))
def test_a_sample_of_the_page(kind, name):
    assert_agrees(MEASURES[kind](name))


@pytest.mark.survey
@pytest.mark.parametrize(
    ("measure_jobs", "jobs"),
    [
        (measure_all, all_jobs),
        (measure_heads, head_jobs),
        (measure_all_pictures, picture_jobs),
        (measure_all_trees, tree_jobs),
    ],
)
def test_all_of_the_page(measure_jobs, jobs):
    for measured in measure_jobs(jobs(), os.cpu_count() or 1):
        assert_agrees(measured)


def test_gradients_in_float64(monkeypatch):
    model, documents = tiny_model("llama", "causal", num_hidden_layers=1), make_documents(0, [5, 9])
    assert measure_module._difference_in_float64(model, documents) <= 1e-6  # rotary positions are float32
    monkeypatch.setattr(measure_module, "patch_model", lambda model: model)
    assert measure_module._difference_in_float64(model, documents) > 1e-3


def test_documents_are_longer_than_what_models_look_at():
    assert max(map(len, make_documents(0, (5, 19)))) > max(THRESHOLDS.values())
    assert len(list(feedings(make_documents(0, (5, 6, 3, 8)), labels=True))) == 7


def padding_stays(monkeypatch):
    """Patching does nothing, so the backbone gets the padding."""
    monkeypatch.setattr(pictures, "patch_model", lambda model, **_: model)


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


def with_far_logits(query, key, value, row, **options):
    return attend_exactly(query, key, value, row, **options) + value[:, :, -1:] * 1e-4


path_of = TreeSegments.path_of


def without_a_token(self, segment):
    path = path_of(self, segment)
    return path[path != 2] if len(path) > 20 else path


ATTENTION, PATHS = (function, "attend_exactly"), (TreeSegments, "path_of")


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(
    ("place", "fault", "wrong", "reason"),
    [
        slow(ATTENTION, to_the_whole_row, ["difference", "change", "gradient"], ""),
        (ATTENTION, with_far_gradients, ["gradient"], ""),
        slow(ATTENTION, with_far_logits, ["difference", "change", "gradient"], ""),
        (PATHS, without_a_token, [], "RuntimeError: split_with_sizes expects"),
    ],
)
def test_a_wrong_tree_is_noticed(monkeypatch, place, fault, wrong, reason):
    break_after_the_proof(monkeypatch, *place, fault)
    measured = measure_trees("gpt2")
    assert measured.status == "WRONG"
    assert measured.reason.startswith(reason)
    assert bool(measured.reason) == bool(reason)
    assert [figure for figure in ("difference", "change", "gradient") if getattr(measured, figure) > EXACT] == wrong


def test_gradients_of_trees_in_float64():
    model = tiny_model("llama", "causal", num_hidden_layers=1)
    assert trees._difference_in_float64(model, FOREST) <= 1e-6  # rotary positions are float32


@pytest.mark.usefixtures("one_layer")
def test_a_fault_that_the_proof_notices_is_a_refusal(monkeypatch):
    break_trees(monkeypatch, to_the_whole_row)
    measured = measure_trees("gpt2")
    assert measured.status == "refused"
    assert "changing one segment of a tree changed" in measured.reason
