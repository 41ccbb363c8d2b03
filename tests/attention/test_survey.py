"""The survey: its page tells what is so, and its models show what they are meant to."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from hf_packing.attention.sizes import SETTINGS, THRESHOLDS
from hf_packing.attention.survey.every import all_jobs, measure_every
from hf_packing.attention.survey.measure import EXACT, Measured, feedings, make_documents, measure
from hf_packing.attention.survey.table import KINDS, page
from hf_packing.attention.survey.tiny import architectures, tiny_config, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "SUPPORTED_MODELS.md"

SAMPLE = [
    *(
        ("causal", name)
        for name in ("bart", "bloom", "falcon_h1", "gemma3_text", "gpt_oss", "jamba", "llama", "mamba2")
    ),
    *(("causal", name) for name in ("glm_moe_dsa", "prophetnet", "qwen3_next", "xlnet", "llama with dynamic rope")),
    *(("masked", name) for name in ("bert", "deberta-v2", "fnet", "modernbert", "mra", "roberta")),
]


def read(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Route and modules by kind and architecture, from a page; the route of refused ones is empty."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    kind = ""
    for line in text.splitlines():
        if line.startswith("#"):
            kind = next((kind for kind, title in KINDS.items() if title.lower() in line.lower()), "")
        elif line.startswith("| ") and not line.startswith("| ---") and not line.startswith("| architecture"):
            entries = line.strip("| ").split(" | ")
            if len(entries) > 2:
                found[kind, entries[0]] = (entries[2], entries[3].strip()) if len(entries) > 3 else ("", "")
    return found


def told() -> tuple[dict, bool]:
    """What the page says, and whether it was made with the transformers that is installed."""
    text = PAGE.read_text()
    return read(text), f"transformers {transformers.__version__}" in text


def agrees(measured: Measured) -> None:
    rows, is_current = told()
    if measured.route:
        assert measured.exact, measured
    if is_current and not measured.built:
        _, _, not_measured = PAGE.read_text().partition(f"## Not measured: {KINDS[measured.kind].lower()}")
        assert f"\n| {measured.name} | " in not_measured
    elif is_current:
        route, modules = rows[measured.kind, measured.name]
        assert (route, modules) == (measured.route, ", ".join(f"{n} {kind}" for kind, n in measured.modules.items()))


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_sample_of_the_page(kind, name):
    agrees(measure(kind, name))


@pytest.mark.survey
def test_all_of_the_page():
    for measured in measure_every(all_jobs(), os.cpu_count() or 1):
        agrees(measured)


def test_the_page_has_every_architecture():
    rows, is_current = told()
    if not is_current:
        pytest.skip(f"the page is of another transformers than {transformers.__version__}")
    assert all(job in rows or f"| {job[1]} |" in PAGE.read_text() for job in all_jobs())


def test_a_page_is_read_as_it_was_written():
    results = [
        Measured("causal", "one", True, "leaks", "varlen + segments", {"Mixer": 2}, 0.9, 0.0, 1e-6, 1e-7, "a | b"),
        Measured("masked", "two", True, "leaks", reason="no\nway"),
        Measured("masked", "three", False, reason="too large"),
    ]
    text = page(results, "transformers 0")
    assert read(text) == {("causal", "one"): ("varlen + segments", "2 Mixer"), ("masked", "two"): ("", "")}
    assert "1 of 1 causal and 0 of 1 masked" in text
    assert "| three | too large |" in text


def test_a_figure_that_is_missing_is_not_exact():
    assert not Measured("causal", "one").exact
    assert Measured("causal", "one", change=0.0, difference=EXACT, gradient=0.0).exact
    assert not Measured("causal", "one", change=0.0, difference=0.0, gradient=2 * EXACT).exact
    beyond = Measured("causal", "one", route="varlen", change=0.0, difference=2 * EXACT, gradient=0.0)
    assert not beyond.exact
    assert replace(beyond, explained=3 * EXACT).exact
    assert "(one 2e-04)" in page([replace(beyond, explained=3 * EXACT)], "transformers 0")
    assert "(nowhere)" in page([beyond], "transformers 0")
    assert "all but one (noise)." in page([replace(beyond, unproven="noise")], "transformers 0")


def test_documents_are_longer_than_what_models_look_at():
    assert max(map(len, make_documents(0, (5, 19)))) > max(THRESHOLDS.values())
    assert len(list(feedings(make_documents(0, (5, 6, 3, 8)), labels=True))) == 7


def test_tiny_models():
    assert {"llama", "mamba"} <= set(architectures("causal"))
    assert "bert" in architectures("masked")
    assert not set(SETTINGS) & set(THRESHOLDS)
    assert tiny_config("bert", "causal").is_decoder
    assert tiny_model("llama", "causal", torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match="phi4_multimodal has .* parameters even when its sizes are made small"):
        tiny_model("phi4_multimodal", "causal")


def test_the_same_model_each_time():
    one, other = (tiny_model("qwen2", "causal") for _ in range(2))
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert json.dumps(one.config.to_dict(), default=str) == json.dumps(other.config.to_dict(), default=str)
