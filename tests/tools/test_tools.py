"""Tools: comparing revisions, counting sizes, reading signatures of kernels, making tiny models."""

import ast
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import hf_packing as hfp
from tools import compare_revisions, kernel_signatures
from tools.compare_revisions import ROOT, WORKLOADS, _time_revision, compare
from tools.kernel_signatures import SIGNATURES, Package, function_with, main, read_packages, signature_in
from tools.size import Size, count_nodes, sizes_of
from tools.tiny_model import SETTINGS, THRESHOLDS, architectures, tiny_config, tiny_model


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
