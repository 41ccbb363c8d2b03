"""Documents whose columns, types and order hypothesis makes up, and the columns that are packed of them."""

from datasets import Dataset, Features, List, Value, concatenate_datasets
from hypothesis import strategies as st
from literal_trie import forests

MASKS = ("completion_mask", "assistant_masks")
TYPES = {"labels": "int64", "completion_mask": "int8", "assistant_masks": "bool", "weights": "float32"}
VALUES = {
    "labels": lambda token: st.sampled_from([token, token, -100, 7]),
    "completion_mask": lambda _: st.integers(0, 1),
    "assistant_masks": lambda _: st.booleans(),
    "weights": lambda _: st.sampled_from([0.5, 0.5, 0.5, 2.0]),
}
VIEWS = [
    lambda rows: rows,
    lambda rows: rows.shuffle(seed=3),
    lambda rows: rows.select([*range(len(rows) - 1, -1, -1), *range(len(rows))]),
    lambda rows: concatenate_datasets([rows, rows.select(range(len(rows) // 2))]),
]


@st.composite
def any_documents(draw):
    columns = {"input_ids": draw(forests())}
    for name, of in VALUES.items():
        if draw(st.booleans()):
            columns[name] = [[draw(of(token)) for token in document] for document in columns["input_ids"]]
    types = TYPES | {"input_ids": draw(st.sampled_from(["uint8", "int32", "int64"]))}
    features = Features({name: List(Value(types[name])) for name in columns})
    return draw(st.sampled_from(VIEWS))(Dataset.from_dict(columns, features=features))


def with_masks_applied(dataset):
    """The columns of documents; where a loss mask is 0, labels are -100, token by token, as in TRL."""
    columns = dataset[:]
    if masks := [columns.pop(name) for name in MASKS if name in columns]:
        ids = columns.pop("input_ids")
        documents = zip(columns.pop("labels", ids), *masks, strict=True)
        labels = [[label if all(bits) else -100 for label, *bits in zip(*each, strict=True)] for each in documents]
        columns = {"input_ids": ids, "labels": labels, **columns}
    return columns
