"""The inner modules that run once on a whole packed row, inside a module that runs segment by segment."""

from dataclasses import dataclass

from hf_packing.attention.token_axes import Path


@dataclass(frozen=True)
class RunAhead:
    """An inner module, such as an input projection, that runs once on the whole packed row. Then the outer module runs
    segment by segment, and uses the inner module's output.

    Args:
        name: the inner module's name, relative to the outer module.
        source: where the inner module's input comes from: either the path of an argument of the outer module, or the
            name of another `RunAhead`, whose output is the input.
    """

    name: str
    source: Path | str


@dataclass(frozen=True)
class RunAfter:
    """The last module inside another module, such as an output projection. The outer module runs segment by segment
    without it. Then the inner module runs once on the whole packed row, and computes the outer module's output.

    Args:
        name: the inner module's name, relative to the outer module.
        output: path of the inner module's output in the nested output of the outer module.
    """

    name: str
    output: Path
