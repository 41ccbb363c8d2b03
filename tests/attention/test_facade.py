"""The attention room has one door, and a route says what it is in one line."""

import ast
from pathlib import Path

import torch

import hf_packing
from hf_packing import attention
from hf_packing.attention.by_segment import ModulePlan
from hf_packing.attention.route import InputFormat, Method, Route

PACKAGE = Path(hf_packing.__file__).parent
NOT_OF_THE_DOOR = ("hf_packing.attention.survey.tiny", "hf_packing.attention.tiny_model")
"""Tiny models of any architecture, for `hf-packing check NAME`."""


def imported_by(file: Path) -> set[str]:
    return {node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)}


def test_other_rooms_import_from_the_package_alone():
    for file in PACKAGE.rglob("*.py"):
        if "attention" not in file.relative_to(PACKAGE).parts:
            inner = {name for name in imported_by(file) if name.startswith("hf_packing.attention.")}
            assert inner <= set(NOT_OF_THE_DOOR), file


def test_every_name_is_there():
    assert sorted(attention.__all__) == attention.__all__
    assert all(hasattr(attention, name) for name in attention.__all__)


def test_a_route_in_one_line_and_in_several():
    plans = tuple(ModulePlan.record(f"layers.{i}.mixer", torch.nn.Identity(), 41) for i in range(2))
    for plan in plans:
        plan.kind = "Mixer"
    route = Route(Method("packed_varlen", InputFormat()), plans, 0.5, unproven="it draws random numbers there")
    assert repr(route) == "Route('varlen + segments', modules={'Mixer': 2}, packed_share=0.50)"
    assert route.describe().splitlines() == [
        "route: varlen + segments, 50% of the parameters stay packed",
        "by segment: 2 Mixer",
        "training mode not proven: it draws random numbers there",
    ]
