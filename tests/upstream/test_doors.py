"""The doors to other libraries: nothing private is used elsewhere, and what the package needs of them is there.

`python -m pytest -c /dev/null --noconftest tests/upstream/test_doors.py` tests this in any environment with pytest.
What is not there any more, `hfp.versions()` says too, without a clone.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from accelerate import Accelerator
from packaging.version import Version

import hf_packing as hfp
from hf_packing.checks import NEWEST, OLDEST
from hf_packing.upstream import NEEDED, broken_doors

PACKAGE = Path(hfp.__file__).parent
ROOT = Path(__file__).parents[2]
LIBRARIES = ("accelerate", "datasets", "peft", "torch", "transformers", "trl")
PRIVATE = re.compile(r"_[a-zA-Z]\w*")

OWNERS = (
    *(torch.nn.Module(), torch.ones(1), torch.nn.Dropout()),
    *(transformers.PreTrainedConfig(), transformers.PreTrainedModel, transformers.Trainer),
    *(datasets.Dataset.from_dict({"a": [1]}), datasets.IterableDataset, Accelerator(cpu=True)),
)
NAMES_OF_UPSTREAM = {name for owner in OWNERS for name in dir(owner) if PRIVATE.fullmatch(name)}
NOT_OF_LIBRARIES = {"_replace", "_fields", "_exit"}
"""Of named tuples, and of os."""


source_read_once = cache(inspect.getsource)


@pytest.fixture(autouse=True)
def sources_are_read_once(monkeypatch):
    monkeypatch.setattr(inspect, "getsource", source_read_once)


def trees():
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text("utf-8")) for file in PACKAGE.rglob("*.py")}


def own_names(found):
    """Private names that the package defines itself."""
    own = set()
    for node in (node for tree in found.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                own.add(name)
    return own


def offences(tree, own):
    """Uses of private names of other libraries, of their versions, and of stack frames: lines and what stands there."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if PRIVATE.fullmatch(name) and name not in own | NOT_OF_LIBRARIES:
                yield node.lineno, name
            case ast.Attribute(attr="_getframe" | "currentframe" | "f_back" | "f_locals" | "__version__" as name):
                if not (name == "__version__" and ast.unparse(node) == "hf_packing.__version__"):
                    yield node.lineno, name
            case ast.Constant(value=str(name)) if name in NAMES_OF_UPSTREAM - own:
                yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in LIBRARIES:
                for name in (*module.split("."), *(each.name for each in names)):
                    if PRIVATE.fullmatch(name):
                        yield node.lineno, name
            case ast.ImportFrom(module="packaging.version"):
                yield node.lineno, "packaging.version"


def test_private_names_and_versions_are_used_in_doors_alone():
    found = trees()
    own = own_names(found)
    in_doors = Counter()
    for file, tree in found.items():
        here = [*offences(tree, own)]
        if file.startswith("upstream/"):
            in_doors.update(name for _, name in here)
        else:
            assert not here, f"{file}: a private name, a version or a frame of another library: {here}"
    assert len(in_doors) > 40
    assert in_doors.keys() - {"packaging.version", "__version__", "_patch_chunked_ce_lm_head", "_C"} <= needed()


def needed():
    named = [name for place, (names, _) in NEEDED.items() for name in (place, *names.split())]
    return {"_timeout"}.union(*(re.split("[.:]", name) for name in named))


def test_that_an_offence_would_be_seen():
    code = "from torch._dynamo import x\nmodule._modules\ngetattr(y, '_forward_hooks')\ndatasets.__version__\n"
    assert [name for _, name in sorted(offences(ast.parse(code), set()))] == [
        *("_dynamo", "_modules", "_forward_hooks"),
        "__version__",
    ]


def names_in_submodules(tree):
    """What a file uses of submodules of libraries whose names all count as public: submodules, and names in them."""
    modules = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in LIBRARIES:
                for name in (each.name for each in names):
                    if (place := f"{module}.{name}") in NEEDED:
                        modules[name] = place
                    elif "." in module and not module.startswith("torch."):  # which documents its submodules
                        yield module, name
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id=module)) if module in modules:
                yield modules[module], name


def test_names_in_submodules_are_among_what_we_need():
    used = {each for tree in trees().values() for each in names_in_submodules(tree)}
    assert len(used) > 40
    assert ("transformers.masking_utils", "find_packed_sequence_indices") in used
    needed_here = {(place, name) for place, (names, _) in NEEDED.items() for name in names.split()}
    assert used <= needed_here


def test_what_we_need_is_there():
    assert [*broken_doors()] == []


@pytest.mark.parametrize("place", NEEDED)
def test_a_name_that_is_gone_is_said_with_what_needs_it(place, monkeypatch):
    library = place.split(":")[0].split(".")[0]
    pytest.importorskip(library)
    (names, what), gone = NEEDED[place], {*broken_doors()}
    name = names.split()[0]
    monkeypatch.setitem(NEEDED, place, (names.replace(name, f"{name}_of_old", 1), what))
    (said,) = {*broken_doors()} - gone
    assert re.fullmatch(rf"{library} [\w.+]+ no longer has {name}_of_old of {place}, needed for {what}", said)


REMOVABLE = [(place, name) for place, (names, _) in NEEDED.items() if ":" not in place for name in names.split()]
"""The names in modules."""


@pytest.mark.parametrize(("place", "name"), REMOVABLE, ids=[f"{place}.{name}" for place, name in REMOVABLE])
def test_each_name_that_is_removed_from_a_module_is_said(place, name, monkeypatch):
    module = pytest.importorskip(place)
    gone = {*broken_doors()}
    monkeypatch.delattr(module, name)
    said = {*hfp.versions().splitlines()} & {*broken_doors()} - gone
    assert any(f"no longer has {name} of {place}, needed for" in each for each in said)
    assert all(name in each for each in said)  # places inside of it are gone, too


def test_libraries_that_cannot_be_imported_without_a_name():
    """In a new process, where the loss of a name breaks imports of other libraries, too."""
    program = (
        "import transformers.trainer_utils as module; del module.get_last_checkpoint\n"
        "import hf_packing as hfp; print(hfp.versions())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert "no longer has get_last_checkpoint of transformers.trainer_utils, needed for" in done.stdout, done.stderr
    assert "no longer has transformers.Trainer, or cannot import it, needed for" in done.stdout


def test_versions_are_said_before_any_library_is_imported():
    program = f"import sys, hf_packing.upstream; print(sorted({set(LIBRARIES)} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_library_that_is_not_installed_has_no_broken_doors(monkeypatch):
    gone = [*broken_doors()]
    monkeypatch.setitem(NEEDED, "nothing_of_this_name.module", ("name", "a test"))
    assert [*broken_doors()] == gone


def test_a_place_that_is_gone(monkeypatch):
    gone = {*broken_doors()}
    monkeypatch.setitem(NEEDED, "torch.nn:Modulus", ("_modules", "a test"))
    (said,) = {*broken_doors()} - gone
    assert said == f"torch {version('torch')} no longer has torch.nn.Modulus, or cannot import it, needed for a test"
    assert hfp.versions().endswith(said)


def test_versions_for_a_bug_report():
    lines = [line for line in hfp.versions().splitlines() if "no longer has" not in line]
    assert [line.split()[0] for line in lines] == ["hf-packing", *OLDEST]
    assert lines[0] == f"hf-packing {hfp.__version__}"
    assert f"torch {version('torch')} (supported: >=2.9, tested up to {NEWEST['torch']})" in lines


def test_the_newest_versions_are_those_of_the_constraints():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    assert {name: pinned[name] for name in NEWEST} == NEWEST
    assert all(Version(OLDEST[name]) < Version(newest) for name, newest in NEWEST.items())
