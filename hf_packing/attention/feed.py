"""How a packed row is told to a model: which arguments beside the tokens it is given."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention.nested import rebuild
from hf_packing.attention.row import PackedRow
from hf_packing.columns import CU_SEQ_LENS, IGNORED_LABEL, MAX_LENGTHS, SEQ_IDX
from hf_packing.errors import PackingError

BORDERS = (*CU_SEQ_LENS, *MAX_LENGTHS, SEQ_IDX)

UNDERSTOOD = (*BORDERS, "position_ids", "attention_mask", "use_cache")
"""What has been read, so that a model that does not take it need not."""


@dataclass(frozen=True)
class Feed:
    """What a model is given beside the tokens.

    Args:
        positions: position_ids that restart at every segment; without them the model counts by itself.
        borders: cu_seq_lens_q/k, max_length_q/k and seq_idx.
        mask_of_ones: an attention_mask that hides nothing, so that no model looks for packed documents by itself.
        one_row: several packed rows are laid end to end, and caches are refused.
    """

    positions: bool = True
    borders: bool = True
    mask_of_ones: bool = False
    one_row: bool = False

    def __call__(self, forward: "Signature", inputs: dict[str, Any], row: PackedRow) -> dict[str, Any]:
        """The keyword arguments for a forward, from those that its caller gave."""
        inputs = {name: value for name, value in inputs.items() if name not in BORDERS}
        if self.one_row:
            refuse_caches(inputs)
            inputs["use_cache"] = False
        else:
            inputs = {"use_cache": False, **inputs}
        given = inputs.pop("position_ids", None)
        if self.positions:
            inputs["position_ids"] = in_every_row(given, row)
        elif given is not None and not torch.equal(in_every_row(given, row), row.position_ids):
            raise PackingError(
                "position_ids: expected positions that restart at 0 in every segment, since this model is given none, "
                f"got {given.flatten().tolist()[:8]}..."
            )
        if forward.takes_types_from_a_table and inputs.get("token_type_ids") is None:
            inputs["token_type_ids"] = torch.zeros_like(row.position_ids)
        if self.mask_of_ones:
            inputs["attention_mask"] = torch.ones(row.rows, row.tokens, dtype=torch.long, device=row.cu_seq_lens.device)
        if self.borders:
            inputs |= {"cu_seq_lens_q": row.cu_seq_lens, "cu_seq_lens_k": row.cu_seq_lens}
            inputs |= {"max_length_q": row.longest, "max_length_k": row.longest, "seq_idx": row.seq_idx}
        if self.one_row and row.rows > 1 and not row.is_one_segment_each:
            if isinstance(keep := inputs.get("logits_to_keep"), Tensor) or keep:
                raise PackingError(f"logits_to_keep: expected none with several packed rows, got {keep}")
            inputs = {name: end_to_end(name, value, row) for name, value in inputs.items()}
        return {name: value for name, value in inputs.items() if name not in UNDERSTOOD or forward.takes(name)}


class Signature:
    """The arguments that a module's forward takes."""

    def __init__(self, module: nn.Module) -> None:
        self.where = type(module).__name__
        parameters = parameters_of_forward(module)
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        has_a_table = any(name.endswith("token_type_ids") for name, _ in module.named_buffers())
        self.takes_types_from_a_table = has_a_table and self.takes("token_type_ids")
        """Of BERT's kind: token types that nobody gives are cut from a table as long as the longest document."""

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def by_name(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.names):
            raise PackingError(
                f"forward: expected at most {len(self.names)} arguments without their names, {self.where} was given "
                f"{len(args)}"
            )
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def parameters_of_forward(module: nn.Module) -> list[inspect.Parameter]:
    """Of the forward; of the one it overrides, where it only passes on whatever it is given."""
    inherited = [vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls)]
    own = list(inspect.signature(module.forward).parameters.values())
    others = (list(inspect.signature(forward).parameters.values())[1:] for forward in inherited)
    return next((each for each in (own, *others) if not any(p.kind is p.VAR_POSITIONAL for p in each)), own)


def in_every_row(position_ids: Tensor | None, row: PackedRow) -> Tensor:
    """The positions that were given, for every row; those of the borders where none were."""
    if position_ids is None:
        return row.position_ids
    return position_ids.expand(row.rows, -1) if position_ids.ndim == 2 else position_ids


def refuse_caches(inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        if (name == "use_cache" and value) or not isinstance(value, (Tensor, int, float, str, type(None))):
            raise PackingError(
                f"{name}: expected none on a model that is given packed rows end to end, got "
                f"{value if isinstance(value, bool) else type(value).__name__}; to generate: "
                "with hf_packing.unpatch_model(model): model.generate(...)"
            )


def end_to_end(name: str, value: Any, row: PackedRow) -> Any:
    """[rows, tokens, ...] -> [1, rows * tokens, ...].

    Raises:
        PackingError: labels that a causal model would predict from the end of the row before.
    """
    if not isinstance(value, Tensor) or value.shape[:2] != (row.rows, row.tokens):
        return value
    if name == "labels" and bool((value[1:, 0] != IGNORED_LABEL).any()):
        raise PackingError(
            f"labels: expected {IGNORED_LABEL} at the first token of every packed row, or a single row, on a model "
            "that is given packed rows end to end"
        )
    return value.reshape(1, row.rows * row.tokens, *value.shape[2:])


def in_rows(value: Any, row: PackedRow) -> Any:
    """[1, rows * tokens, ...] -> [rows, tokens, ...], for every such tensor in what a model has returned."""

    def fold(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, row.rows * row.tokens):
            return leaf.reshape(row.rows, row.tokens, *leaf.shape[2:])
        return leaf

    return rebuild(value, fold)
