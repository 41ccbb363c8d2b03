"""One of the processes of test_sharded: models on the meta device, patched, sharded by FSDP2, filled, and called.

    python fsdp_process.py RANK PROCESSES FOLDER

The weights of tiny models are in FOLDER/ARCHITECTURE.pt. Writes the loss of each of CASES and whether the model is
isolated, or why it is refused, into FOLDER/found-RANK.json. Each process has other documents, and another number.
"""

import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import hf_packing as hfp
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.batch.collate import PackingCollator

DOCUMENTS = ([[11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34]], [[41, 42, 43], [51, 52, 53, 54, 55, 56, 57, 58]])


CASES = [("llama", "outside"), ("jamba", "outside"), ("jamba", "inside")]


def sharded_model(architecture: str, folder: Path, where: str) -> torch.nn.Module:
    warnings.simplefilter("ignore")
    known = torch.load(folder / f"{architecture}.pt")
    ordinary = tiny_model(architecture, "causal")
    with torch.device("meta"):
        model = type(ordinary)(ordinary.config).eval()
    hfp.patch_model(model, prove="small")
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


def measure(rank: int, folder: Path, architecture: str, where: str) -> dict:
    try:
        model = sharded_model(architecture, folder, where)
        batch = PackingCollator()([{"input_ids": tokens} for tokens in DOCUMENTS[rank]])
        loss = model(**batch).loss
        loss.backward()
        found = {"rank": rank, "loss": loss.item(), "isolated": hfp.check_isolation(model).isolated}
    except hfp.PackingError as error:
        found = {"refused": str(error)}
    dist.barrier()
    return found


def main(rank: int, processes: int, folder: Path) -> None:
    """Models are gone before their process group: torch aborts at times where a sharded model outlives it."""
    store = dist.FileStore(str(folder / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        found = [(case, measure(rank, folder, *case)) for case in CASES]
        (folder / f"found-{rank}.json").write_text(json.dumps(found))
    finally:
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
