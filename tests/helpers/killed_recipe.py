"""Run a recipe that trains with a Trainer, and kill its first process after so many optimizer steps.

python killed_recipe.py STEPS RECIPE FLAGS...
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import transformers


class Kills(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **known):  # noqa: ARG002
        if state.global_step == int(sys.argv[1]) and args.process_index == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledTrainer(transformers.Trainer):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, callbacks=[Kills()], **settings)


if __name__ == "__main__":
    recipe, flags = Path(sys.argv[2]), sys.argv[3:]
    sys.path.insert(0, str(recipe.parent))
    transformers.Trainer = KilledTrainer
    runpy.run_path(str(recipe))["main"](flags)
