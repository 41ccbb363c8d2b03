"""What doors and other code rely on in other libraries, and what of ours breaks when it changes."""

import inspect
import re
from pathlib import Path

import datasets
import pyarrow as pa
import torch
import transformers
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable
from tiny_models import build
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.data import DataLoader
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    Trainer,
    masking_utils,
    modeling_flash_attention_utils,
)
from transformers.integrations.hub_kernels import is_kernel
from transformers.masking_utils import flash_attention_mask
from transformers.utils.chat_template_utils import render_jinja_template
from trl.trainer import sft_trainer, utils

import hf_packing as hfp
from hf_packing.attention.layout import CACHES
from hf_packing.training.models import prepared_model


def test_fingerprints_indices_tables_and_descriptions_of_a_dataset():
    """rows.cache.fingerprint_of: without it, packed rows cannot be cached by what they were made from."""
    one, same, other = (datasets.Dataset.from_dict({"input_ids": rows}) for rows in ([[1]], [[1]], [[2]]))
    assert isinstance(one._fingerprint, str)
    assert one._fingerprint == same._fingerprint != other._fingerprint
    assert isinstance(Hasher.hash((one._fingerprint, 1)), str)
    # rows.token_columns.row_numbers: without it, a shuffled dataset would be packed in the order of its table.
    dataset = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3]]})
    assert dataset._indices is None
    assert dataset.select([2, 0])._indices.column(0).to_pylist() == [2, 0]
    # rows.pack._pack_split: without it, the packed dataset is not memory-mapped.
    assert callable(MemoryMappedTable.from_file)
    assert {"arrow_table", "split", "fingerprint"} <= set(inspect.signature(datasets.Dataset.__init__).parameters)
    # rows.packing_trace: without it, packed rows that have lost their borders are taken for documents.
    info = datasets.DatasetInfo(description="Mine")
    one, other = (datasets.Dataset.from_dict({"a": [1], "b": [2]}, info=each) for each in (info, None))
    joined = datasets.concatenate_datasets([other, one])
    changed = (joined, one.select_columns("a"), one.map(lambda _: {"c": 1}), one.with_format("torch").shuffle())
    assert [each.info.description for each in changed] == ["Mine"] * 4


def test_loaders_and_models_that_an_accelerator_knows():
    """batch.loader.active_loader: without it, a patched model does not know the dataset that its batch is of."""
    accelerator = Accelerator(cpu=True)
    rows = [{"input_ids": torch.ones(2)}] * 2
    loader = accelerator.prepare(DataLoader(rows, batch_size=2, collate_fn=list))
    assert accelerator.gradient_state.active_dataloader is None
    for _ in loader:
        assert accelerator.gradient_state.active_dataloader is loader
        assert (loader.dataset, loader.collate_fn, loader.batch_sampler.batch_size) == (rows, list, 2)
    # training.models.prepared_model: without it, a loader proves isolation on a model without FSDP's wrapper.
    accelerator, model = Accelerator(cpu=True), build("Llama")
    assert prepared_model(accelerator, model) is model
    wrapper = torch.nn.Module()
    wrapper.module = model
    assert accelerator.prepare(model) is model
    assert accelerator._models == [model]
    accelerator._models[:] = [wrapper]
    assert prepared_model(accelerator, model) is wrapper


def test_batches_of_a_map():
    """rows.map_batch.pack_batch: without it, map hands out Python lists, and stores what it gets back as int64."""
    seen = []
    datasets.Dataset.from_dict({"input_ids": [[1]]}).map(lambda batch: seen.append(batch.pa_table), batched=True)
    assert isinstance(seen[0], pa.Table)
    # rows.map_batch: without their classes a row passes for a batch, without keys_to_format a change is lost.
    seen = []
    dataset = datasets.Dataset.from_dict({"input_ids": [[1]]})
    for batched in (False, True):
        dataset.map(seen.append, batched=batched)
    assert [type(each).__name__ for each in seen] == ["LazyRow", "LazyBatch"]
    assert seen[1].keys_to_format == {"input_ids"}
    seen[1]["labels"] = [[2]]
    assert set(seen[1]) == {"input_ids", "labels"}


def test_attention_of_models_and_flex_attention():
    """attention.function.register: without them, transformers cannot be told of our attention function."""
    assert callable(AttentionInterface.register)
    assert callable(AttentionMaskInterface.register)
    assert "attention_mask" in inspect.signature(flash_attention_mask).parameters
    # attention.flex: without these, masks cannot be made from borders, or would be compiled for each row again.
    (decoding,) = Path(torch.__file__).parent.glob("_inductor/kernel/flex/flex_decoding.py")  # importing it takes long
    assert {"seq_lengths", "full_q_indices", "mask_mod"} <= set(inspect.signature(BlockMask).parameters)
    assert "FORCE_USE_FLEX_ATTENTION" in decoding.read_text("utf-8")
    assert callable(torch._dynamo.mark_static)
    # attention.snapshot.attention_of: without it, a patch cannot be undone or refused.
    assert PreTrainedModel._can_set_attn_implementation is not None
    model = build("Llama")
    assert model._can_set_attn_implementation()
    assert isinstance(model.config._attn_implementation, str)
    assert isinstance(model.config.sub_configs, dict)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation_internal == "eager"


def test_mask_functions_of_windows():
    """attention.function: unless it knows the functions of which a mask is made, such models run segment by segment."""
    model = hfp.patch_model(build("Mistral"))
    assert model.config.sliding_window
    window = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(4))
    route = hfp.check_isolation(model).route
    assert route.name == "varlen", (
        f"Mistral with a window runs {route.name}, since the masks of transformers have changed: {route.tried}; "
        f"a mask of and_masks is made of {inspect.getclosurevars(window).nonlocals}"
    )


OTHER_CACHES = {"decoder_cache", "encoder_cache", "encoder_past_key_values", "padding_cache"}
"""Caches of models that read sound."""


def test_names_of_caches_and_kernels_from_the_hub(monkeypatch):
    """attention.layout.CACHES: under another name, a cache would be dropped, and logits would be wrong."""
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        forwards = re.findall(r"\n    def forward\(\n(.*?)\n    \)", path.read_text("utf-8"), re.DOTALL)
        taken = "\n".join(each for each in forwards if "input_ids" in each)
        found |= set(re.findall(r"^ +(\w+): [^=\n]*Cache", taken, re.MULTILINE))
    assert found >= {"past_buckets_states"}
    assert found & {"cache", "past_key_values"}
    assert found <= {*CACHES, *OTHER_CACHES}
    # attention.kernels.hub_kernel: without it, a model loaded with a hub kernel would run on another one.
    assert is_kernel("kernels-community/flash-attn2")
    assert not any(map(is_kernel, ("sdpa", "flash_attention_2", "hf_packing_varlen", None)))
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", "kernels-community/flash-attn2")
    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_varlen_fn", print)
    functions = modeling_flash_attention_utils.lazy_import_flash_attention("kernels-community/flash-attn2")[0]
    assert functions[1] is print


class Told(torch.utils.data.Dataset):
    epoch = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_loaders_that_are_prepared():
    """sampling.rows.SampledRows: without it, a resumed epoch would have the order of another."""
    dataset = Told()
    batches = [[0], [1, 2], [3]]
    loader = prepare_data_loader(DataLoader(dataset, batch_sampler=batches), num_processes=1, process_index=0)
    loader.set_epoch(3)
    assert dataset.epoch == 3
    skipped = skip_first_batches(loader, 1)
    skipped.set_epoch(4)
    assert dataset.epoch == 4
    assert [batch.tolist() for batch in skipped] == batches[1:]
    # training.loader.PackedLoader: with a remainder, gather_for_metrics would cut the last batches.
    loader = prepare_data_loader(DataLoader(Told(), batch_sampler=[[0, 1, 2], [3]]), num_processes=1, process_index=0)
    list(loader)
    assert loader.remainder == -1


def test_what_trainers_call_and_compute():
    """training.trainer.PackedTrainer: without these, batches and losses would be the trainer's own again."""
    taken = list(inspect.signature(Trainer.get_batch_samples).parameters)
    assert taken == ["self", "epoch_iterator", "num_batches", "device"]
    source = inspect.getsource(Trainer)
    for call in ("self.get_train_dataloader()", "self.get_eval_dataloader(", "self.get_batch_samples("):
        assert call in source
    assert "self.current_gradient_accumulation_steps = " in source
    assert source.count("self._maybe_log_save_evaluate(") == 2
    condition = "if self.control.should_log and self.state.global_step > self._globalstep_last_logged:"
    assert condition in source
    assert "self.model_accepts_loss_kwargs" in source
    # training.trainer: its metrics would see a document that is none, and its loss could not be weighted.
    source = inspect.getsource(sft_trainer)
    assert "self._metrics[" in source
    assert "log_probs" in source or not hasattr(utils, "add_fused_lm_head")  # as before TRL 1.15


def test_what_templates_mark():
    """text.render: without it, the marks of a chat template could not be read."""
    template = "{% for message in messages %}<{% generation %}{{ message.content }}{% endgeneration %}>{% endfor %}"
    chats = [[{"role": "assistant", "content": "ab"}]]
    found = render_jinja_template(chats, chat_template=template, return_assistant_tokens_mask=True)
    assert found == (["<ab>"], [[(1, 3)]])
