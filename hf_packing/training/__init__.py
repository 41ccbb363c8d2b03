"""Training with planned batches: `attach` for Trainer and SFTTrainer, and what a loop of your own needs.

| file | what is in it |
|---|---|
| attach.py | `attach`: check, plan, isolate the model, settle its loss, install |
| loop.py | `prepare_dataloader`, `compute_loss` and `evaluation_loss` for a loop of your own |
| trainer.py | the methods that attach puts before a trainer's own |
| planned_batches.py | what an attached trainer holds, and its loaders |
| loader.py | the DataLoader of one rank, and `PackedLoader` |
| losses.py | the loss of a global batch as a sum over weighted tokens |
| model_loss.py | which loss a model computes, found out by asking it |
| trainer_loss.py | who computes a trainer's loss; SFTTrainer's fused head |
| checks.py | trainers, arguments and accelerators that cannot be served |
| labels.py | labels of a dataset, checked against loss masks and tokens |
| ranks.py | data ranks; all of them plan from the same data and settings |
| isolate.py | patch a model in the precision it will run in |
| model_cost.py | how much of a model's work grows with tokens, and how much with pairs of tokens |
| checkpoint.py | what a checkpoint says about the batches it was saved after |
| summary.py | `EpochSummary`, and figures for the trainer's logs |
"""
