"""A trace of some steps, for https://ui.perfetto.dev or chrome://tracing."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SKIPPED = 3  # steps: the first ones allocate, and DDP builds its buckets anew after them
WARM_UP = 1  # the profiler's own


class Tracer:
    """Traces ``num_steps`` steps of this rank, after the first few. 0: none, and costs nothing."""

    def __init__(self, num_steps: int, path: Path, *, say: Callable[[str], None]) -> None:
        self._left = SKIPPED + WARM_UP + num_steps if num_steps else 0
        self.folder = path.parent
        self._path = path
        self._say = say
        self._profile: profile | None = None
        self._num_steps = num_steps

    def begin(self) -> None:
        """The training begins. Raises OSError when the trace's folder cannot be made."""
        if not self._left:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of a GPU that nobody asked for, and that it starts
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=SKIPPED, warmup=WARM_UP, active=self._num_steps, repeat=1),
            record_shapes=True,
        )
        self._profile.start()

    def step(self) -> None:
        """A step ended."""
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self.end()
            else:
                self._profile.step()

    def end(self) -> None:
        """Write what there is, if it is not written yet."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        if self._left >= self._num_steps:
            self._say(f"no trace: the training ended before step {SKIPPED + WARM_UP + 1} of this start (--profile)")
            return
        try:
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._say(f"no trace: {self._path}: {error}")
            return
        self._say(f"trace of {self._num_steps - self._left} steps in {self._path}: open it in https://ui.perfetto.dev")
