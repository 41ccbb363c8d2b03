"""Training with planned batches: `attach` for Trainer and SFTTrainer, and functions for a loop of your own.

| file | content |
|---|---|
| attach.py | `attach`: check, plan, isolate the model, settle its loss; the methods it adds to a trainer |
| loop.py | `prepare_dataloader`, `compute_loss` and `evaluation_loss` for a loop of your own |
| planned_batches.py | the state of an attached trainer, and its loaders |
| loader.py | the DataLoader of one rank, and `PackedLoader` |
| losses.py | the loss of a global batch as a sum over weighted tokens; which loss a model computes |
| trainer_loss.py | whether attach or the trainer computes the loss; SFTTrainer's fused head |
| checks.py | refuses trainers, arguments and accelerators; compares labels with loss masks and tokens |
| ranks.py | checks that ranks agree, and that a resumed run matches its checkpoint; counts for the logs |
"""
