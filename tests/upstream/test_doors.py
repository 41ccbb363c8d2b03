"""The doors to other libraries: nothing private is used elsewhere, and what a door needs is there."""

import ast
import re
from collections import Counter
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


def test_what_doors_need_is_there():
    assert [*broken_doors()] == []


@pytest.mark.parametrize("place", NEEDED)
def test_a_name_that_is_gone_is_said_with_what_needs_it(place, monkeypatch):
    names, what = NEEDED[place]
    name = names.split()[0]
    monkeypatch.setitem(NEEDED, place, (names.replace(name, f"{name}_of_old", 1), what))
    (said,) = broken_doors()
    library = place.split(":")[0].split(".")[0]
    assert re.fullmatch(rf"{library} [\w.+]+ no longer has {name}_of_old of {place}, needed for {what}", said)


def test_a_place_that_is_gone(monkeypatch):
    monkeypatch.setitem(NEEDED, "torch.nn:Modulus", ("_modules", "a test"))
    (said,) = broken_doors()
    assert said == f"torch {version('torch')} no longer has torch.nn.Modulus, needed for a test"
    assert hfp.versions().endswith(said)


def test_versions_for_a_bug_report():
    lines = hfp.versions().splitlines()
    assert [line.split()[0] for line in lines] == ["hf-packing", *OLDEST]
    assert lines[0] == f"hf-packing {hfp.__version__}"
    assert f"torch {version('torch')} (supported: >=2.9, tested up to {NEWEST['torch']})" in lines


def test_the_newest_versions_are_those_of_the_constraints():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    assert {name: pinned[name] for name in NEWEST} == NEWEST
    assert all(Version(OLDEST[name]) < Version(newest) for name, newest in NEWEST.items())
