"""Whether the Hugging Face hub answers: its own libraries retry for most of a minute before they say that it does not.

Takes: the environment's settings of hub and proxy. Gives: yes or no. Does not know about: models, data sets.
"""

import os
import socket
from urllib.parse import urlsplit

_SECONDS = 3.0  # waited for a connection, at most


def hub_answers() -> bool:
    """False too where HF_HUB_OFFLINE is set. What is in the local cache can be read either way."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxy = urlsplit(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or "")
    host, port = (proxy.hostname, proxy.port) if proxy.hostname else (url.hostname, url.port)
    try:
        socket.create_connection((host, port or 443), timeout=_SECONDS).close()
    except OSError:
        return False
    return True
