"""What a figure was taken on."""

import platform


def processor() -> str:
    """Its name, as the machine tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
