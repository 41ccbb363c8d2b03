"""The loss in chunks inside of DDP and FSDP, on two processes with different documents."""

import json
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from chunks import WHOLE, chunks_of
from patched_models import patched
from processes import on_ranks
from tiny_models import build
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from training_by_hand import largest_difference

import hf_packing as hfp
from hf_packing.training import head as module

pytestmark = pytest.mark.slow

DOCUMENTS = ([[11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34]], [[41, 42, 43]])
"""The documents of the second process fit into one chunk."""
STEPS = 2
"""More than one, since wrappers keep state from step to step."""


def sharded(model, *groups, **options):
    """FSDP2 on every layer, on groups of modules, and on the rest."""
    policy = {"mp_policy": options.pop("mp_policy")} if "mp_policy" in options else {}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    for group in groups:
        fully_shard(group, **options, **policy)
    return fully_shard(model, **policy)


def first_version(model, *kinds):
    policy = ModuleWrapPolicy(set(kinds)) if kinds else None
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=True, auto_wrap_policy=policy, device_id=cpu)


def as_accelerate(model):
    """The units that accelerate makes; the last norm and the output layer stay in memory for the backward pass."""
    fully_shard(model.model.embed_tokens)
    return sharded(model, [model.model.norm, model.lm_head], reshard_after_forward=False)


IN_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
CASES = {
    "DDP": lambda model: DistributedDataParallel(model),
    "DDP that looks for unused weights": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "DDP with a static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "FSDP2, head in the root": sharded,
    "FSDP2, head alone": lambda model: sharded(model, model.lm_head),
    "FSDP2, head alone and kept": lambda model: sharded(model, model.lm_head, reshard_after_forward=False),
    "FSDP2, norm and head": lambda model: sharded(model, [model.model.norm, model.lm_head]),
    "FSDP2 as accelerate does": as_accelerate,
    "FSDP2, tied": lambda model: sharded(
        model, [model.model.norm, model.model.embed_tokens, model.lm_head], reshard_after_forward=False
    ),
    "FSDP2 in bfloat16": lambda model: sharded(model, [model.model.norm, model.lm_head], mp_policy=IN_BFLOAT16),
    "FSDP1, head in the root": lambda model: first_version(model, type(model.model.layers[0])),
    "FSDP1, head alone": lambda model: first_version(model, torch.nn.Linear),
}


def gradients_of(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {name: each.grad.clone() for name, each in model.named_parameters()}
    return {name: getattr(each.grad, "full_tensor", each.grad.clone)() for name, each in model.named_parameters()}


def result_of(case, batch, tokens):
    inner = hfp.patch_model(build("Llama", tie_word_embeddings=True)) if "tied" in case else patched()
    with chunks_of(tokens, inner) as chunks, patch.object(module, "_warn_once") as warn:
        model = CASES[case](inner.train())
        for _ in range(STEPS):
            model.zero_grad()
            loss = hfp.compute_loss(model, batch, num_items_in_batch=5)
            loss.backward()
    in_chunks = tokens == 3 and case != "FSDP1, head alone"
    assert [of_chunk for _, of_chunk in chunks[-1:]] == [3] * in_chunks
    return loss.item(), gradients_of(model), warn.call_args and warn.call_args.args[1]


def measure(case, batch):
    """Losses with whole logits and in chunks, the difference of their gradients, and why logits were whole."""
    expected, gradients, _ = result_of(case, batch, WHOLE)
    loss, found, reason = result_of(case, batch, 3)
    return expected, loss, largest_difference(found, gradients), reason


def refusal(batch):
    model = DistributedDataParallel(patched())
    with torch.no_grad():
        hfp.compute_loss(model, batch)
    hfp.compute_loss(model, batch, num_items_in_batch=10 / dist.get_world_size()).backward()
    try:
        hfp.compute_loss(model, batch)
    except hfp.PackingError as error:
        return str(error)


def measure_on_rank(folder):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # with whole logits
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    state = PartialState(cpu=True)
    batch = hfp.PackingCollator()([{"input_ids": ids} for ids in DOCUMENTS[state.process_index]])
    found = {case: measure(case, batch) for case in CASES}
    found["compute_loss"] = refusal(batch)
    if state.is_main_process:
        (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    on_ranks(measure_on_rank, folder, ranks=2)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_whole_logits(found, case):
    expected, loss, difference, reason = found[case]
    rounded = case == "FSDP2 in bfloat16"
    assert loss == pytest.approx(expected, rel=1e-3 if rounded else 1e-6)
    assert difference <= (2e-2 if rounded else 5e-6)
    alone = "the first version of FSDP shards the output layer on its own"
    assert reason == (alone if case == "FSDP1, head alone" else None)


def test_a_batch_is_no_whole_step_on_two_ranks(found):
    message = "num_items_in_batch: expected the number of items of the whole optimizer step divided by the 2"
    assert found["compute_loss"].startswith(message)
