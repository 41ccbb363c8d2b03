"""A worker of this machine: a process that reads tasks from its standard input, and answers on its standard output."""

import os
import pickle
import sys
from typing import IO, Any

from hf_packing.errors import PackingError
from hf_packing.fleet.tasks import do_task


def send(stream: IO[bytes], value: Any) -> None:
    """Write a value to a stream."""
    pickle.dump(value, stream)
    stream.flush()


def main() -> None:
    """Do tasks until the standard input ends, as it does when the driver has died."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not be among the answers
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            do_task(task)
        except PackingError as error:
            send(answers, error)
        except OSError as error:
            send(answers, OSError(str(error)))  # a plain one, which any process can read
        except Exception as error:
            send(answers, RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            send(answers, None)


if __name__ == "__main__":
    main()
