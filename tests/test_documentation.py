"""All Python in the README and in docs is run, page by page; links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from matplotlib import image
from tiny_models import build
from trainers import arguments
from training_process import documents, tokenizer
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp
from hf_packing.strategies.base import registered_strategies
from hf_packing.training.summary import StepCounts

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "recipes").rglob("README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def of_tests(folder):
    """SFTConfig as pages write it, with what a test needs beside."""
    return lambda **changes: arguments(folder, SFTConfig, **changes)


class WithTokenizer(SFTTrainer):
    """Which would be loaded from the hub."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, processing_class=tokenizer(), **kwargs)


def names_of_pages(folder):
    """What pages take for granted."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6, 0.8, 500), 1, 4096).astype(int).tolist()
    tokenised = documents(60)
    accelerator, model = Accelerator(cpu=True), build("Llama")
    shards = np.array_split(np.array(lengths), 2)
    return {
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "SFTTrainer": WithTokenizer,
        "SFTConfig": of_tests(folder),
        "hfp": hfp,
        "np": np,
        "args": arguments(folder, remove_unused_columns=False),
        "model": model,
        "tokenised": tokenised,
        "dataset": tokenised,
        "ds": tokenised,
        "packed": hfp.pack(tokenised, hfp.BestFit(64)),
        "lengths": lengths,
        "all_lengths": np.array(lengths),
        "shard_lengths": shards[1],
        "already_dealt": np.bincount(shards[0], minlength=max(lengths) + 1),
        "accelerator": accelerator,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "epochs": 1,
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if PYTHON.search(page.read_text())], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = names_of_pages(tmp_path)
    for block in PYTHON.findall(page.read_text()):
        if block.startswith(("hfp.compare(lengths", "loader = ")):
            names["lengths"] = names["lengths"][:100]
            names["model"] = build("Llama")
            names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        exec(compile(block, str(page), "exec"), names)
    assert "Traceback" not in capsys.readouterr().out


def test_pages_have_python():
    assert sum(len(PYTHON.findall(page.read_text())) for page in PAGES) > 15


def test_what_a_trainer_logs_is_defined():
    facts = StepCounts()
    facts.add(torch.ones(2, 1, 4, dtype=torch.int64))
    logged = facts.take(max_tokens=4)
    assert len(logged) == 5
    text = (ROOT / "README.md").read_text()
    assert all(f"\n| `{name}` | " in text for name in logged)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_picture_is_that_of_its_script(tmp_path):
    script = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    draw = importlib.util.module_from_spec(script)
    script.loader.exec_module(draw)
    draw.main(tmp_path / "packing.png")
    made, kept = (image.imread(folder / "packing.png") for folder in (tmp_path, ROOT / "docs" / "pictures"))
    assert made.shape == kept.shape
    assert np.abs(made - kept).mean() < 0.02  # fonts differ between machines


def test_every_strategy_has_a_page():
    strategies = registered_strategies()
    assert len(strategies) >= 9
    for name, strategy in strategies.items():
        page = (ROOT / "docs" / "strategies" / f"{name}.md").read_text()
        assert page.startswith(f"# {strategy.__name__}\n")
        assert f"({name}.md)" in (ROOT / "docs" / "strategies" / "README.md").read_text()
