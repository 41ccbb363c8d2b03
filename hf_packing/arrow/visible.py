"""The columns that the format of a dataset shows: a trainer does not see the others, so neither does packing."""

from collections.abc import Iterable
from typing import Any

from hf_packing.arrow.columns import ATTENTION_MASK, PACKED_ONLY
from hf_packing.arrow.token_column import is_token_type
from hf_packing.errors import PackingError


def visible_columns(dataset: Any) -> list[str]:
    """The columns that are left by `with_format(columns=[...])`, and an attention_mask, which is only checked.

    Args:
        dataset: a Dataset.

    Returns:
        their names, in the order of the dataset.

    Raises:
        PackingError: the borders of packed rows are hidden, which would then pass for documents.
    """
    form, schema = dataset.format, dataset.data.table.schema
    if form["output_all_columns"]:
        return list(schema.names)
    hidden = {name for name in schema.names if name not in form["columns"]}
    borders = [name for name in PACKED_ONLY if name in schema.names]
    if borders and hidden.issuperset(borders):
        raise PackingError(
            f"column {borders[0]!r}: expected among the columns of the format, {form['columns']} hide where the "
            "documents of packed rows begin; show it, or remove it if rows are not packed"
        )
    if ATTENTION_MASK in hidden and is_token_type(schema.field(ATTENTION_MASK).type):
        hidden.remove(ATTENTION_MASK)
    return [name for name in schema.names if name not in hidden]


def check_made_columns_are_shown(dataset: Any, made: Iterable[str]) -> None:
    """Refuse a `map` whose packed rows would hide what packing made: it keeps the format of the documents.

    Args:
        dataset: that is mapped.
        made: columns of packed rows that say something else than those without them would.

    Raises:
        PackingError: the format hides one of the same name.
    """
    form = dataset.format
    names = [name for name in made if name in dataset.column_names and name not in form["columns"]]
    if names and form["type"] != "custom" and not form["output_all_columns"]:
        raise PackingError(
            f"column {names[0]!r}: expected none of that name, or one that the format of the dataset shows; map keeps "
            f"the format, {form['columns']}, which would hide {names[0]!r} of packed rows as well: remove the column, "
            "or call pack, which shows all that it made"
        )
