"""Train on packed batches: `attach` for Trainer and SFTTrainer, and functions for your own training loop.

| file | content |
|---|---|
| attach.py | `attach`, which plans batches and patches the model; `PackedTrainer`, the trainer's class after attach |
| loop.py | `prepare_dataloader`, `compute_loss` and `evaluation_loss` for your own training loop |
| planned_batches.py | the state and the loaders of a trainer after `attach` |
| loader.py | the DataLoader of one rank, and `PackedLoader` |
| losses.py | the loss of an optimizer step as a weighted sum over tokens; a test of how a model computes its own loss |
| trainer_loss.py | decides whether attach or the trainer computes the loss; handles SFTTrainer's fused LM head |
| checks.py | refuses unsupported trainers, arguments and accelerators; checks labels against loss masks and tokens |
| ranks.py | checks that all ranks agree, and that a resumed run matches its checkpoint; counts tokens for the logs |
"""
