"""The oldest versions of other packages: those of pyproject.toml, and refused by name where they matter."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import peft
import pytest
from tiny_models import build
from trainers import trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.checks import OLDEST, refuse_older

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed

ROOT = Path(__file__).parents[1]


def test_they_are_in_the_documentation_and_those_of_the_project():
    page = (ROOT / "docs" / "COMPATIBILITY.md").read_text("utf-8")
    table = page.split("| package | oldest version |")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.MULTILINE)) == OLDEST
    assert {name: version for name, version in minima().items() if name in OLDEST} == OLDEST


def minima():
    """The lower bounds in pyproject.toml, by package."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return dict(re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)"', text))


@pytest.fixture
def old(monkeypatch):
    """A function that makes installed versions of packages old ones."""
    found = metadata.version

    def make_old(**versions):
        monkeypatch.setattr("hf_packing.checks.version", lambda name: versions.get(name) or found(name))
        refuse_older.cache_clear()

    yield make_old
    refuse_older.cache_clear()


def test_older_versions_are_refused(old, monkeypatch):
    for installed in ("2.8.0+cpu", "1.13"):
        old(torch=installed)
        message = f'torch: expected version 2.9 or newer, got {installed}; pip install "torch>=2.9"'
        with pytest.raises(hfp.PackingError, match=re.escape(message)):
            refuse_older("torch")
    for installed in (OLDEST["torch"], "2.9.0", "2.10.1+cu128", "3.0.0.dev20261101"):
        old(torch=installed)
        refuse_older("torch")
    monkeypatch.setitem(OLDEST, "no-such-package", "1.0")
    refuse_older("no-such-package")


FIRST_NAMES = {
    "numpy": "plan_packing",
    "pyarrow": "pack",
    "datasets": "mix",
    "torch": "TokenBudget",
    "transformers": "patch_model",
    "accelerate": "prepare_dataloader",
}

OLD = f"""
from importlib import metadata
import hf_packing as hfp
found = metadata.version
for package, name in {FIRST_NAMES}.items():
    metadata.version = lambda each: "0.9.1" if each == package else found(each)
    try:
        getattr(hfp, name)
    except hfp.PackingError as error:
        print(error)
"""


def test_the_first_name_that_needs_a_package_refuses_it():
    said = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, check=True).stdout.splitlines()
    for package, line in zip(FIRST_NAMES, said, strict=True):
        assert line.startswith(f"{package}: expected version {OLDEST[package]} or newer, got 0.9.1; pip install")


def test_peft_is_refused_where_it_wraps_a_model(old):
    model = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    old(peft="0.17.1")
    hfp.patch_model(build("Llama"))
    with pytest.raises(hfp.PackingError, match=f"peft: expected version {OLDEST['peft']} or newer, got 0.17.1"):
        hfp.patch_model(model)


@pytest.mark.parametrize("batching", [hfp.TokenBudget(64), None])
def test_trl_is_refused_where_a_trainer_is_attached(old, tmp_path, batching):
    of_transformers, of_trl = (trainer_of(tmp_path / kind.__name__, kind) for kind in (Trainer, SFTTrainer))
    old(trl="1.9.2")
    hfp.attach(of_transformers, batching)
    with pytest.raises(hfp.PackingError, match=f"trl: expected version {OLDEST['trl']} or newer, got 1.9.2"):
        hfp.attach(of_trl, batching)
