"""The public namespace, imports, and other packages: their oldest versions, and their names that are not public."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import peft
import pytest
from tiny_models import build
from trainers import trainer_of
from transformers import (
    Trainer,
)
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.checks import OLDEST, refuse_older

PACKAGE = Path(hfp.__file__).parent

HEAVY = ["torch", "datasets", "transformers", "accelerate", "trl", "pyarrow", "scipy", "matplotlib"]

FLOORS = [
    ["errors", "files", "versioned", "columns", "checks"],
    ["upstream"],
    ["planning"],
    ["strategies"],
    ["trees", "rows"],
    ["text", "streams", "fleet"],
    ["batch", "sampling"],
    ["attention"],
    ["training"],
    ["report"],
    ["cli"],
]
"""From the ground up; a module imports from its own floor and from those below."""

UPWARD = {
    ("strategies/base.py", "hf_packing.rows.map_batch"),  # a strategy is called by `datasets.map`
    ("rows/pack.py", "hf_packing.streams.logical"),
}
"""What a function imports from a floor above, when it is called."""

THIRD_PARTY = {
    "errors": set(),
    "files": {"fsspec"},
    "versioned": set(),
    "columns": {"numpy"},
    "checks": {"numpy", "packaging"},
    "upstream": {"numpy", "packaging", "pyarrow", "torch", "datasets", "transformers", "accelerate", "trl", "peft"},
    "planning": {"numpy"},
    "strategies": {"numpy", "scipy", "tqdm"},
    "trees": {"numpy", "pyarrow", "datasets"},
    "rows": {"numpy", "pyarrow", "datasets"},
    "text": {
        *("numpy", "pyarrow", "datasets", "fsspec", "huggingface_hub", "tokenizers", "transformers"),
        "trl",  # its chat templates for training
    },
    "streams": {"numpy", "pyarrow", "datasets", "fsspec"},
    "fleet": {"numpy", "pyarrow", "fsspec", "ray", "tqdm"},
    "batch": {"numpy", "torch"},
    "sampling": {"numpy", "pyarrow", "datasets", "torch"},
    "attention": {"numpy", "torch", "transformers", "accelerate", "flash_attn", "flash_attn_interface", "tqdm"},
    "training": {"numpy", "torch", "transformers", "accelerate", "datasets"},
    "report": {"numpy", "datasets", "jinja2", "matplotlib"},
    "cli": {"pyarrow", "tqdm", "datasets", "torch", "transformers"},
}


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


LOADED = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"


def test_importing_and_planning_load_nothing_heavy():
    assert python(f"import hf_packing; {LOADED}") == "[]"
    code = f"import hf_packing as hfp; hfp.plan_packing([1, 2], hfp.BestFit(4)).metrics(); {LOADED}"
    assert python(code) == "[]"


@pytest.mark.slow
def test_that_the_import_test_would_see_torch():
    assert "torch" in python(f"import torch; import hf_packing; {LOADED}")


def test_namespace():
    assert sorted(hfp.__all__) == hfp.__all__
    assert {*hfp._HOME_OF, "fleet"} == set(hfp.__all__)
    for name in hfp._HOME_OF:
        assert getattr(hfp, name).__name__ == name
        assert getattr(hfp, name).__doc__
    assert {name for name in dir(hfp) if not name.startswith("__")} == set(hfp.__all__)
    with pytest.raises(AttributeError, match="module 'hf_packing' has no attribute 'Bestfit'"):
        hfp.Bestfit  # noqa: B018


@cache
def imports_of(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {f"{node.module}" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_imports_only_go_down():
    assert "hf_packing.planning.plan" in imports_of(PACKAGE / "planning" / "table.py")
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "__init__.py":
            continue
        home = file.relative_to(PACKAGE).with_suffix("").parts[0]
        floor = next(number for number, names in enumerate(FLOORS) if home in names)
        allowed = {name for names in FLOORS[: floor + 1] for name in names}
        for name in imports_of(file):
            top, *inner = name.split(".")
            if top == "hf_packing":
                is_upward = (file.relative_to(PACKAGE).as_posix(), name) in UPWARD
                assert is_upward or not inner or inner[0] in allowed, f"{file} imports {name}"
            elif top not in sys.stdlib_module_names:
                assert top in THIRD_PARTY[home], f"{file} imports {name}"


def modules() -> dict[str, Path]:
    dotted = {file: ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for file, name in dotted.items()}


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    sorter, found, left = TopologicalSorter(imported), [], dict(imported)
    while True:
        try:
            sorter.prepare()
        except CycleError as error:
            circle = error.args[1]
            found.append(circle)
            left = {name: others - set(circle) for name, others in left.items() if name not in circle}
            sorter = TopologicalSorter(left)
        else:
            return found


def test_no_two_modules_import_each_other():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not circles({"a": {"b", "c"}, "b": {"c"}})
    files = modules()
    assert len(files) > 80
    called = {name for _, name in UPWARD}
    inside = {name: imports_of(file) & files.keys() - called for name, file in files.items() if name != "hf_packing"}
    assert sum(map(len, inside.values())) > 200
    assert not circles(inside)


@pytest.mark.parametrize("room", ["attention"])
def test_a_facade_is_the_only_door(room):
    callers = [file for name, file in modules().items() if not name.startswith(f"hf_packing.{room}")]
    doors = {name for file in callers for name in imports_of(file) if name.startswith(f"hf_packing.{room}")}
    assert doors == {f"hf_packing.{room}"}


def test_errors_are_what_callers_catch_and_types_are_installed():
    assert issubclass(hfp.PackingError, ValueError)
    assert issubclass(hfp.MissingDependencyError, ImportError)
    assert issubclass(hfp.ModelNotSupportedError, hfp.PackingError)
    assert (PACKAGE / "py.typed").is_file()


ROOT = Path(__file__).parents[1]


def test_files_that_name_the_version_agree():
    assert f"\nversion: {hfp.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    newest, *_ = re.findall("^## (?!Unreleased$).*$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert re.search(r"[\d.]+\w*", newest)[0] == hfp.__version__


def test_they_are_in_the_documentation_and_those_of_the_project():
    page = (ROOT / "docs" / "COMPATIBILITY.md").read_text("utf-8")
    table = page.split("| package | oldest version |")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.MULTILINE)) == OLDEST
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    lowest = dict(re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)[",]', text))
    assert {name: version for name, version in lowest.items() if name in OLDEST} == OLDEST


@pytest.fixture
def old(monkeypatch):
    found = metadata.version

    def make_old(**versions):
        monkeypatch.setattr("hf_packing.checks.version", lambda name: versions.get(name) or found(name))
        refuse_older.cache_clear()

    yield make_old
    refuse_older.cache_clear()


def test_older_versions_are_refused(old, monkeypatch):
    for installed in ("2.8.0+cpu", "1.13"):
        old(torch=installed)
        message = f'torch: expected version >=2.9, got {installed}; pip install "torch>=2.9"'
        with pytest.raises(hfp.PackingError, match=re.escape(message)):
            refuse_older("torch")
    for installed in (OLDEST["torch"], "2.9.0", "2.10.1+cu128", "3.0.0.dev20261101"):
        old(torch=installed)
        refuse_older("torch")
    old(datasets="5.0.0")
    message = 'datasets: expected version >=4.8.0,!=5.0.0, got 5.0.0; pip install "datasets>=4.8.0,!=5.0.0"'
    with pytest.raises(hfp.PackingError, match=re.escape(message)):
        refuse_older("datasets")
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
        assert line.startswith(f"{package}: expected version >={OLDEST[package]}")
        assert "got 0.9.1; pip install" in line


@pytest.mark.filterwarnings("default::FutureWarning")  # PEFT uses names that transformers has renamed
def test_peft_is_refused_where_it_wraps_a_model(old):
    model = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    old(peft="0.17.1")
    hfp.patch_model(build("Llama"))
    with pytest.raises(hfp.PackingError, match=f"peft: expected version >={OLDEST['peft']}, got 0.17.1"):
        hfp.patch_model(model)


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL does, too
@pytest.mark.parametrize("batching", [hfp.TokenBudget(64), None])
def test_trl_is_refused_where_a_trainer_is_attached(old, tmp_path, batching):
    of_transformers, of_trl = (trainer_of(tmp_path / kind.__name__, kind) for kind in (Trainer, SFTTrainer))
    old(trl="1.3.0")
    hfp.attach(of_transformers, batching)
    with pytest.raises(hfp.PackingError, match=f"trl: expected version >={OLDEST['trl']}, got 1.3.0"):
        hfp.attach(of_trl, batching)
