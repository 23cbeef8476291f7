"""Connections to stores. TCPStore by itself waits for ever for a stranger that takes a connection and is silent."""

import socket
import threading
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch does not say so

from ddprun import ports

TIMEOUT = timedelta(seconds=10)  # an operation on a store that is there takes a millisecond
ANSWER_S = 4.0
GREET_S = 2.5  # until a stranger has not answered; a store does at once, from a thread of C++ that nothing holds up


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
    connecting.join(GREET_S)
    if not made:
        raise RuntimeError
    return made[0]


def serve(host: str, listener: socket.socket) -> TCPStore:
    """A store on a port that is already ours, so that nothing can take it in between. Raises OSError."""
    listener.listen(ports.BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )
