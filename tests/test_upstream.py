"""Names of other libraries that are not public, and what of ours breaks when they change."""

import inspect

import datasets
import pyarrow as pa
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable
from tiny_models import build
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask


def test_fingerprint_of_a_dataset():
    """cache.fingerprint_of: without it, packed rows cannot be cached by what they were made from."""
    one, same, other = (datasets.Dataset.from_dict({"input_ids": rows}) for rows in ([[1]], [[1]], [[2]]))
    assert isinstance(one._fingerprint, str)
    assert one._fingerprint == same._fingerprint != other._fingerprint
    assert isinstance(Hasher.hash((one._fingerprint, 1)), str)


def test_indices_of_a_dataset():
    """dataset.row_numbers: without it, a shuffled dataset would be packed in the order of its table."""
    dataset = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3]]})
    assert dataset._indices is None
    assert dataset.select([2, 0])._indices.column(0).to_pylist() == [2, 0]


def test_a_dataset_takes_a_table_from_a_file_and_a_fingerprint():
    """dataset.pack_one: without it, the packed dataset is not memory-mapped."""
    assert callable(MemoryMappedTable.from_file)
    assert {"arrow_table", "split", "fingerprint"} <= set(inspect.signature(datasets.Dataset.__init__).parameters)


def test_the_batch_of_a_map_holds_an_arrow_table():
    """arrow.batch.pack_batch: without it, map hands out Python lists, and stores what it gets back as int64."""
    seen = []
    datasets.Dataset.from_dict({"input_ids": [[1]]}).map(lambda batch: seen.append(batch.pa_table), batched=True)
    assert isinstance(seen[0], pa.Table)


def test_attention_and_mask_interfaces():
    """varlen.register: without them, transformers cannot be told of our attention function."""
    assert callable(AttentionInterface.register)
    assert callable(AttentionMaskInterface.register)
    assert "attention_mask" in inspect.signature(flash_attention_mask).parameters


def test_attention_implementation_of_a_model():
    """patch.attention_of and patch.refuse_what_is_known_to_fail: without them, a patch cannot be undone or refused."""
    assert PreTrainedModel._can_set_attn_implementation is not None
    model = build("Llama")
    assert model._can_set_attn_implementation()
    assert isinstance(model.config._attn_implementation, str)
    assert isinstance(model.config.sub_configs, dict)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation_internal == "eager"
