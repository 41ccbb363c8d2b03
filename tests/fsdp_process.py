"""One of the processes of test_sharded: a model on the meta device, patched, sharded by FSDP2, filled, and called.

python fsdp_process.py RANK PROCESSES FILE ARCHITECTURE {outside,inside}: the weights of a tiny model are in FILE.
Prints rank, loss and whether the model is isolated; each process has other documents, and another number of them.
"""

import gc
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import hf_packing as hfp
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.collate import PackingCollator

DOCUMENTS = ([[11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34]], [[41, 42, 43], [51, 52, 53, 54, 55, 56, 57, 58]])


def sharded_model(architecture: str, file: str, where: str) -> torch.nn.Module:
    warnings.simplefilter("ignore")
    known = torch.load(file)
    ordinary = tiny_model(architecture, "causal")
    with torch.device("meta"):
        model = type(ordinary)(ordinary.config).eval()
    hfp.patch_model(model, prove=False)
    for layer in model.model.layers:
        if where == "inside" and hasattr(layer, "mamba"):
            fully_shard(layer.mamba.conv1d)
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    set_model_state_dict(model, known["weights"], options=StateDictOptions(full_state_dict=True))
    for name, buffer in model.named_buffers():
        buffer.copy_(known["buffers"][name])
    return model


def measure(rank: int, file: str, architecture: str, where: str) -> None:
    model = sharded_model(architecture, file, where)
    batch = PackingCollator()([{"input_ids": tokens} for tokens in DOCUMENTS[rank]])
    loss = model(**batch).loss
    loss.backward()
    print(rank, loss.item(), hfp.check_isolation(model).isolated)
    dist.barrier()


def main(rank: int, processes: int, file: str, architecture: str, where: str) -> None:
    """The model is gone before its process group: torch aborts at times where a sharded model outlives it."""
    store = dist.FileStore(str(Path(file).with_suffix(f".{where}")), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        measure(rank, file, architecture, where)
    finally:
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
