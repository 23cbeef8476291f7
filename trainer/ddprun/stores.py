"""Connections to stores. TCPStore by itself waits for ever for a stranger that takes a connection and is silent."""

import threading
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch does not say so

TIMEOUT = timedelta(seconds=10)  # an operation on a store that is there takes a millisecond
ANSWER_S = 4.0


def connect(address: str, port: int) -> TCPStore:
    """The store on ``address``, where somebody listens. Raises RuntimeError when it is none."""
    made: list[TCPStore] = []

    def run() -> None:
        try:
            made.append(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT))
        except RuntimeError:
            return

    connecting = threading.Thread(target=run, name="connect", daemon=True)
    connecting.start()
    connecting.join(ANSWER_S)
    if not made:
        raise RuntimeError
    return made[0]
