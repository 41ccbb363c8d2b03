"""One of the processes of test_tree_training: trains on a row of trees of its own, and writes the gradients.

torchrun --nproc-per-node 2 tree_process.py FOLDER
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from process_group import end_process_group
from torch.nn.parallel import DistributedDataParallel
from tree_documents import DOCUMENTS, LABELS, OTHER
from tree_oracle import exact
from tree_rows import tree_row

import hf_packing as hfp
from hf_packing.training.losses import items_in


def main(folder):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    model = DistributedDataParallel(hfp.patch_model(exact("Llama")))
    batches = [hfp.PackingCollator()([tree_row(*case)[0]]) for case in ((DOCUMENTS, LABELS), OTHER)]
    found = {}
    for loss in ("token", "sequence"):
        items = sum(int(items_in(batch, loss)) for batch in batches)
        hfp.compute_loss(model, batches[rank], loss=loss, num_items_in_batch=items / ranks).backward()
        found[loss] = {name: each.grad.clone() for name, each in model.module.named_parameters()}
        model.zero_grad()
    hfp.document_logps(model, batches[rank]).sum().backward()
    found["logps"] = {name: each.grad.clone() for name, each in model.module.named_parameters()}
    torch.save(found, folder / f"gradients-{rank}.pt")
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
