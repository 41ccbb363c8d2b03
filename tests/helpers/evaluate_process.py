"""One of the processes of test_evaluate: answers a share of the requests, and writes the answers.

torchrun --nproc-per-node 2 evaluate_process.py FOLDER REQUESTS_OF_EACH
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(1, str(Path(__file__).parents[2] / "recipes"))
from evaluate_packed import PackedHFLM


def main(folder, shares):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = PackedHFLM(str(folder / "Llama"), device="cpu", dtype="float32", max_tokens=16)
    model._rank, model._world_size = accelerator.process_index, accelerator.num_processes
    answers = model._loglikelihood_tokens(shares[model.rank], disable_tqdm=True)
    (folder / f"answers-{model.rank}.json").write_text(json.dumps(answers))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
