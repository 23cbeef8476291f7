"""What a node tells of its machine, and that it tells all that the catalogue says."""

import sys
from types import SimpleNamespace
from typing import Any

from tests.unit.ddprun.test_rank_metrics import NVML, NotSupportedError

from ddprun.metrics import host_metrics
from ddprun.settings import node_config, node_facts, options


def test_a_gpu_that_cannot_be_read_takes_no_other_with_it(monkeypatch: Any) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise NotSupportedError
        return index

    nvml = SimpleNamespace(
        **vars(NVML)
        | {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "570.86.15",
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlDeviceGetHandleByIndex": handle,
            "nvmlDeviceGetName": lambda _: "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=0, total=140 << 30),
        }
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    families = {family.name: family for family in host_metrics.machine_series().collect()}
    assert [sample.labels["device"] for sample in families["ddp_device_utilization_ratio"].samples] == ["0", "2"]
    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    inventory = node_facts.inventory(config, {"DDP_DEVICE": "cpu"})
    assert (inventory["GPUs"], inventory["driver"]) == ("2 x NVIDIA H200 (140 GiB), 1 x unreadable", "570.86.15")
