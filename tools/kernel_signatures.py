"""Read the signatures of attention kernels from the packages that users install, and write what each version takes.

    python -m tools.kernel_signatures                      # compare with the committed signatures, exit with 1 if new
    python -m tools.kernel_signatures --write              # write the signatures, and tables in docs/COMPATIBILITY.md
    python -m tools.kernel_signatures --write --hub FOLDER # also those in a clone of huggingface/kernels-community
    python -m tools.kernel_signatures --tables             # write the tables only, from the committed signatures

Each package is downloaded by pip into a temporary folder, one version after the other: wheels of torch (about 1 GB in
all) and kernels, and sources of flash-attn, which also contain flash-attn 3. No package is installed. The signatures
are in tests/attention/kernel_signatures.json, and tests call functions that have them.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from tools.internals import OLDEST, Call, VarlenKernel

ROOT = Path(__file__).parents[1]

SIGNATURES = ROOT / "tests" / "attention" / "kernel_signatures.json"

PAGE = ROOT / "docs" / "COMPATIBILITY.md"

MARKS = "<!-- kernels: written by python -m tools.kernel_signatures -->", "<!-- end of kernels -->"

Signatures = dict[str, str]
"""The signatures of a function by version, as the text between the parentheses, without annotations. A version that
does not have the function is left out."""


@dataclass(frozen=True)
class Package:
    """A package to read, with the functions and the files that define them."""

    name: str
    oldest: str
    """The oldest version; of each minor version since then, the newest release is read."""
    functions: dict[str, tuple[str, str]]
    """From the name in the table to the end of the file's path, and the function's name in it."""
    is_source: bool = False
    """Whether to read the source distribution rather than a wheel."""
    has_releases: bool = True
    """False if there are only pre-releases."""


PACKAGES = (
    Package(
        "torch",
        OLDEST["torch"],
        {
            "torch varlen_attn": ("torch/nn/attention/varlen.py", "varlen_attn"),
            "torch flex_attention": ("torch/nn/attention/flex_attention.py", "flex_attention"),
            "torch BlockMask": ("torch/nn/attention/flex_attention.py", "BlockMask.__init__"),
        },
    ),
    Package(
        "flash-attn",
        "2.8",
        {
            "flash-attn 2": ("/flash_attn/flash_attn_interface.py", "flash_attn_varlen_func"),
            "flash-attn 3": ("/hopper/flash_attn_interface.py", "flash_attn_varlen_func"),
        },
        is_source=True,
    ),
    Package(
        "flash-attn-4",
        "4.0.0b36",
        {"flash-attn 4": ("/cute/interface.py", "flash_attn_varlen_func")},
        has_releases=False,
    ),
    Package("kernels", "0.11", {"kernels get_kernel": (".py", "get_kernel")}),
)

_WHEELS = ("macosx_11_0_arm64", "macosx_14_0_arm64", "manylinux2014_x86_64", "any")
"""Platforms of the smallest wheels that contain the same Python files as all others."""


def read_packages() -> dict[str, Signatures]:
    """Download the packages, and return the signatures of their functions by package."""
    found: dict[str, Signatures] = {}
    for package in PACKAGES:
        versions = _versions(package)
        for version in newest_of_each_minor(versions, package.oldest, not package.has_releases):
            with tempfile.TemporaryDirectory() as folder:
                archive = _download(package, version, Path(folder))
                for name, (ending, function) in package.functions.items():
                    for text in _texts(archive, ending):
                        if (signature := signature_in(text, function)) is not None:
                            found.setdefault(name, {})[version] = signature
            print(package.name, version, flush=True)
    return found


def _versions(package: Package) -> list[str]:
    out = _pip("index", "versions", *[] if package.has_releases else ["--pre"], package.name)
    listed = re.search(r"Available versions: (.*)", out)
    assert listed, f"pip lists no versions of {package.name}: {out}"
    return listed[1].split(", ")


def newest_of_each_minor(versions: list[str], oldest: str, prereleases: bool = False) -> list[str]:
    """Return the newest release of each minor version, from the oldest on, without builds such as 2.13.0+cpu."""
    newest: dict[tuple[int, ...], Version] = {}
    for version in map(Version, versions):
        if version >= Version(oldest) and version.is_prerelease == prereleases and version.local is None:
            minor = version.release[:2]
            newest[minor] = max(version, newest.get(minor, version))
    return [str(newest[minor]) for minor in sorted(newest)]


def _download(package: Package, version: str, folder: Path) -> Path:
    if package.is_source:  # without isolation, since the setup of flash-attn imports torch
        kind = ["--no-binary", ":all:", "--no-build-isolation"]
    else:
        kind = ["--only-binary", ":all:", "--python-version", "3.11"]
        kind += [each for platform in _WHEELS for each in ("--platform", platform)]
    _pip("download", "--no-cache-dir", "--no-deps", *kind, "--dest", str(folder), f"{package.name}=={version}")
    return next(folder.iterdir())


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def _texts(archive: Path, ending: str) -> Iterator[str]:
    """Yield the texts of all files in a wheel or a source distribution whose paths have an ending."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(ending):
                    yield wheel.read(name).decode()
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.name.endswith(ending) and (file := source.extractfile(member)) is not None:
                yield file.read().decode()


def read_hub(clone: Path) -> dict[str, Signatures]:
    """Return the signatures in a clone of huggingface/kernels-community."""
    commit = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    found: dict[str, Signatures] = {}
    for name in ("flash-attn2", "flash-attn3", "vllm-flash-attn3"):
        path = f"{name}/torch-ext/{name.replace('-', '_')}/flash_attn_interface.py"
        shown = ["git", "-C", str(clone), "show", f"HEAD:{path}"]
        text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        signature = signature_in(text, "flash_attn_varlen_func")
        assert signature is not None, path
        found[f"kernels-community/{name}"] = {commit: signature}
    return found


def signature_in(text: str, function: str) -> str | None:
    """Return the arguments of a function, or of a method such as `BlockMask.__init__`, in the text of a Python file.

    Of overloads, the last definition counts. Annotations are left out.

    Example:
        >>> signature_in("def attend(q, k: int = 3, *, scale=None): ...", "attend")
        'q, k=3, *, scale=None'
    """
    *classes, name = function.split(".")
    body: list[Any] = ast.parse(text).body
    for each in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each), [])
    defined = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not defined:
        return None
    arguments = defined[-1].args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def function_with(signature: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a function with exactly the given signature, which calls `body` with a dictionary of its arguments."""
    names: dict[str, Any] = {"body": body}
    exec(f"def kernel({signature}):\n    return body(locals())", names)
    made: Callable[..., Any] = names["kernel"]
    return made


CASES = {"plain": (), "window": ("window",), "soft cap": ("softcap",), "sinks": ("sinks",), "dropout": ("dropout",)}
"""Kinds of attention calls, and what they ask for."""


def call(*asked: str, **changes: Any) -> Call:
    """Return the `Call` of attention in bfloat16 that asks for these options, with the given changes."""
    return Call(torch.bfloat16, 64, asked)._replace(**changes)


def kernel_with(name: str, signature: str) -> VarlenKernel:
    """Return the entry of the table of kernels for a function with the given signature."""
    function = function_with(signature, lambda arguments: arguments)
    return VarlenKernel(name, lambda: function, is_torch=name.startswith("torch"))


def tables(signatures: dict[str, Signatures]) -> str:
    """Return two tables in Markdown: which calls each kernel takes, and what runs with torch alone."""
    lines = ["| kernel | versions read | " + " | ".join(CASES) + " | grouped heads |", "|---" * 8 + "|"]
    hub = [name for name in signatures if name.startswith("kernels-community/")]
    for name in (*hub, "flash-attn 4", "flash-attn 3", "flash-attn 2", "torch varlen_attn"):
        lines += _rows(name, signatures[name])
    flex = ["yes"] * 4 + ["no"]
    has_mask = sorted(set(signatures["torch flex_attention"]) & set(signatures["torch BlockMask"]), key=Version)
    lines.append(f"| FlexAttention | {_span(has_mask)} | {' | '.join(flex)} | yes |")
    lines += ["", "| torch, with no other package | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    runs = {version: _runs_with_torch_alone(signatures, version) for version in has_mask}
    for group in _equal_neighbors(runs):
        lines.append(f"| {_span(group)} | {' | '.join(runs[group[0]])} |")
    return "\n".join(lines)


def _rows(name: str, versions: dict[str, str]) -> Iterator[str]:
    """Yield a row for each group of successive versions that take the same calls."""
    cells = {version: _cells(kernel_with(name, signature)) for version, signature in versions.items()}
    for group in _equal_neighbors(cells):
        yield f"| {name} | {_span(group)} | {' | '.join(cells[group[0]])} |"


def _cells(kernel: VarlenKernel) -> list[str]:
    cells = ["no" if kernel.refusal(call(*case)) else "yes" for case in CASES.values()]
    return [*cells, "are repeated" if kernel.is_torch and "grouped" not in kernel.arguments else "yes"]


def _runs_with_torch_alone(signatures: dict[str, Signatures], version: str) -> list[str]:
    own = signatures["torch varlen_attn"].get(version)
    kernel = kernel_with("torch varlen_attn", own) if own else None
    takes = [kernel is not None and not kernel.refusal(call(*case)) for case in CASES.values()]
    others = ["FlexAttention" if "dropout" not in case else "by segment" for case in CASES.values()]
    return ["varlen_attn" if taken else other for taken, other in zip(takes, others, strict=True)]


def _equal_neighbors(cells: dict[str, list[str]]) -> list[list[str]]:
    groups: list[list[str]] = []
    for version in cells:
        if groups and cells[groups[-1][0]] == cells[version]:
            groups[-1].append(version)
        else:
            groups.append([version])
    return groups


def _span(versions: list[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def with_tables(page: str, signatures: dict[str, Signatures]) -> str:
    """Return the text of the page with the current tables between its two marks."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{tables(signatures)}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the signatures and the tables")
    parser.add_argument("--tables", action="store_true", help="write the tables from the committed signatures")
    parser.add_argument("--hub", type=Path, help="a clone of github.com/huggingface/kernels-community")
    arguments = parser.parse_args()
    known = json.loads(SIGNATURES.read_text()) if SIGNATURES.exists() else {}
    if arguments.tables:
        PAGE.write_text(with_tables(PAGE.read_text(), known))
        return 0
    found = known | read_packages() | (read_hub(arguments.hub) if arguments.hub else {})
    print(tables(found))
    if arguments.write:
        SIGNATURES.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(with_tables(PAGE.read_text(), found))
        return 0
    new = [name for name in found if found[name] != known.get(name)]
    print(f"\nnot as in {SIGNATURES.name}: {', '.join(new)}" if new else f"\nas in {SIGNATURES.name}")
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main())
