"""A notebook's kernel as a real process: cells are sent to it as a notebook's page does."""

import asyncio
import gc
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop


def close_loop() -> None:
    """Close the event loops that the client's calls have left open, in this thread or one that has ended."""
    ensure_event_loop()
    for loop in [value for value in gc.get_objects() if issubclass(type(value), asyncio.AbstractEventLoop)]:
        if not loop.is_running():
            loop.close()
    asyncio.set_event_loop(None)


@dataclass
class Answer:
    """The result of a cell."""

    text: str = ""  # what it printed, and its value
    pictures: list[str] = field(default_factory=list)  # the HTML of what it displayed, also where it was drawn again
    error: str = ""  # the exception's name
    value: str = ""  # its text
    traceback: str = ""


class Kernel:
    """One kernel, for as long as the with-block."""

    def __init__(self, cwd: Path) -> None:
        self._manager = KernelManager()
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager.kernel_spec.argv = argv
        self._manager.start_kernel(cwd=str(cwd))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        close_loop()

    def kill(self) -> None:
        """SIGKILL, as a host does when its memory is full."""
        self._manager.provisioner.process.kill()

    def run(self, code: str, *, timeout_s: float = 400, interrupt_at: str = "") -> Answer:
        """Execute a cell. ``interrupt_at``: interrupt it when this has been printed, as the page's button does."""
        number = self._client.execute(code)
        answer, deadline, interrupted = Answer(), time.monotonic() + timeout_s, False
        while time.monotonic() < deadline:
            try:
                message: dict[str, Any] = self._client.get_iopub_msg(timeout=1)
            except Exception as error:
                if type(error).__name__ != "Empty":
                    raise
                continue
            if message["parent_header"].get("msg_id") != number:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    answer.text += content["text"]
                case "execute_result" | "display_data" | "update_display_data":
                    answer.pictures += [content["data"]["text/html"]] if "text/html" in content["data"] else []
                    answer.text += content["data"].get("text/plain", "") + "\n"
                case "error":
                    answer.error, answer.value = content["ename"], content["evalue"]
                    answer.traceback = "\n".join(content["traceback"])
                case "status" if content["execution_state"] == "idle":
                    return answer
            if interrupt_at and not interrupted and interrupt_at in answer.text:
                interrupted = True
                self._manager.interrupt_kernel()
        raise AssertionError(f"the cell has not ended in {timeout_s} s: {answer}")
