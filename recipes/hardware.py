"""The machine that a figure was measured on."""

import platform


def processor() -> str:
    """Return the processor's name, as the machine reports it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
