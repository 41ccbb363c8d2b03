"""Signatures are read from wheels and source distributions as they are; nothing is downloaded here."""

import io
import json
import sys
import tarfile
import zipfile

import pytest

from tools import kernel_signatures
from tools.kernel_signatures import SIGNATURES, Package, function_with, main, read_packages, signature_in

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
