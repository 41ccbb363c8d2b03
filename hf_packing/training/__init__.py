"""Training with planned batches: `attach` for Trainer and SFTTrainer, and what a loop of your own needs.

| file | what is in it |
|---|---|
| attach.py | `attach`: check, plan, isolate the model, settle its loss; the methods it gives a trainer |
| loop.py | `prepare_dataloader`, `compute_loss` and `evaluation_loss` for a loop of your own |
| planned_batches.py | what an attached trainer holds, and its loaders |
| loader.py | the DataLoader of one rank, and `PackedLoader` |
| losses.py | the loss of a global batch as a sum over weighted tokens; which loss a model computes |
| trainer_loss.py | who computes a trainer's loss; SFTTrainer's fused head |
| checks.py | trainers, arguments and accelerators that cannot be served; labels against loss masks and tokens |
| ranks.py | what ranks agree on, what a checkpoint holds a resumed run to, counts for the logs |
"""
