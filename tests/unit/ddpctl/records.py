"""The record of a run, with values for all that a test does not name."""

from typing import Any

from ddpctl.job.spec import JobSpec
from ddpctl.runs.run_store import Run


def run_of(name: str = "night", **fields: Any) -> Run:
    folder = fields.get("folder", f"/runs/{name}")
    place = {"cwd": "/p", "folder": folder, "checkpoint_dir": f"{folder}/checkpoints"}
    launch = {"created": 1000.0, "target": "here", "kind": "local", "options": {}, "version": "0.1.0"}
    return Run(name=name, **{"job": JobSpec(), **place, **launch, **fields})
