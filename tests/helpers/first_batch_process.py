"""One of the processes of test_first_batch: a training loop with FSDP2, LoRA and activation checkpointing.

    torchrun --nproc-per-node 2 first_batch_process.py FOLDER '["stock", "distance"]'

For every case, the process trains an epoch, and writes its losses, what was proven or refused, and what it printed into
FOLDER/CASE-RANK.json. Ranks get batches with different numbers of documents, and so different numbers of lengths.
"""

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path

import accelerate
import datasets
import torch
from leaky_models import leaky
from peft import LoraConfig, get_peft_model
from tiny_models import build, enable_checkpointing
from torch.distributed.fsdp import fully_shard

import hf_packing as hfp

LENGTHS = [600, 100, 200, 310, 310, 450] + [20] * 60


def documents():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 120, (length,), generator=generator).tolist() for length in LENGTHS]
    return datasets.Dataset.from_dict({"input_ids": rows})


def model_of(case):
    model = build("Llama", max_position_embeddings=1024) if case == "stock" else leaky(case)[0]
    enable_checkpointing(model, use_reentrant=False)
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(case, folder):
    accelerator = accelerate.Accelerator(cpu=True)
    model = model_of(case)
    loader = hfp.prepare_dataloader(accelerator, documents(), hfp.TokenBudget(900), model=model)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    found = {"losses": []}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            for batch in loader:
                loss = hfp.compute_loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found["losses"].append(loss.item())
        except hfp.ModelNotSupportedError as error:
            found["refused"] = str(error)
    found["printed"] = printed.getvalue()
    found["proven"] = str(loader.first_batch_proof)
    found["sharded"] = all(type(each).__name__ == "DTensor" for each in model.parameters())
    (folder / f"{case}-{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in json.loads(sys.argv[2]):
        train(case, Path(sys.argv[1]))
    os._exit(0)  # gloo may wait at the end
