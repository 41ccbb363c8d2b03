"""Whether the hub can be reached: where it cannot, its libraries try for a minute, and say so at every try."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

OFFLINE, ENDPOINT = "HF_HUB_OFFLINE", "HF_ENDPOINT"
"""Variables of huggingface_hub, which reads them when it is loaded."""
HUB = "https://huggingface.co"
PATIENCE = 5
"""Seconds."""


def look_for_hub(*names: str | None) -> None:
    """Where one of the names is no file and no folder, and the hub is out of reach, have what is cached do.

    To be called before transformers or datasets are loaded; a variable that is set already stays as it is.
    """
    remote = any(name is not None and not Path(name).exists() for name in names)
    if remote and OFFLINE not in os.environ and not is_reachable(os.environ.get(ENDPOINT) or HUB):
        os.environ[OFFLINE] = "1"


def is_reachable(endpoint: str) -> bool:
    """Whether something answers there; what lies behind a proxy is not asked."""
    if getproxies():
        return True
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), PATIENCE).close()
    except OSError:
        return False
    return True
