"""A driver of a fleet in a process of its own.

python driver_process.py FILES OUTPUT [SETTINGS AS JSON]

FILES is a pattern, or a list as JSON. Prints the manifest's key, or the error.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import hf_packing as hfp
from hf_packing.errors import PackingError


def main(files, output, settings="{}"):
    known = json.loads(settings)
    files = json.loads(files) if files.startswith("[") else files
    engine = known.pop("ray", None)
    executor = hfp.fleet.local(known.pop("workers", 2)) if engine is None else hfp.fleet.ray(engine or None)
    warnings.simplefilter("ignore", UserWarning)  # of documents that are cut
    strategy = hfp.BestFit(known.pop("capacity", 128))
    if ready := known.pop("ready", None):  # drivers that are to start together
        Path(ready, f"ready-{time.time_ns()}").touch()
        while not Path(ready, "start").exists():
            time.sleep(0.001)
    try:
        packed = hfp.fleet.pack(files, strategy, output, executor=executor, **known)
    except (PackingError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(packed.key)


if __name__ == "__main__":
    main(*sys.argv[1:])
