"""What a node tells of its machine, and that it tells all that the catalogue says."""

import re
import socket
import sys
import urllib.parse
import urllib.request
from types import SimpleNamespace
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, generate_latest

from ddprun import host_metrics, node_config, node_facts, options
from ddprun.machine import count_gpus
from ddpwire.metrics import CATALOGUE


class NotSupportedError(Exception):
    """What NVML raises for a sensor that a device does not have."""


def power(device: int) -> int:
    if device == 1:
        raise NotSupportedError
    return 251_500


NVML = SimpleNamespace(
    NVMLError=NotSupportedError,
    NVML_TEMPERATURE_GPU=0,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=50 * device + 25, memory=1),
    nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=1024 * (device + 1), total=4096),
    nvmlDeviceGetPowerUsage=power,
    nvmlDeviceGetTemperature=lambda device, sensor: 40 + device + sensor,
)


def test_every_gpu_tells_what_it_has() -> None:
    registry = CollectorRegistry()
    registry.register(host_metrics.DeviceSeries(NVML))
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'ddp_device_utilization_ratio{device="0"} 0.25',
        'ddp_device_utilization_ratio{device="1"} 0.75',
        'ddp_device_memory_used_bytes{device="0"} 1024.0',
        'ddp_device_memory_used_bytes{device="1"} 2048.0',
        'ddp_device_power_watts{device="0"} 251.5',
        'ddp_device_temperature_celsius{device="0"} 40.0',
        'ddp_device_temperature_celsius{device="1"} 41.0',
    ]


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
    _, devices = host_metrics.collectors()
    values = {family.name: [one.labels["device"] for one in family.samples] for family in devices.collect()}
    assert values["ddp_device_utilization_ratio"] == ["0", "2"]
    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    inventory = node_facts.inventory(config, {"DDP_DEVICE": "cpu"})
    assert (inventory["GPUs"], inventory["driver"]) == ("2 x NVIDIA H200 (140 GiB), 1 x unreadable", "570.86.15")


def test_the_machine_tells_its_own() -> None:
    before = psutil.cpu_times().user
    modes = dict(host_metrics.cpu_seconds())
    assert before <= modes["user"] < before + 10
    assert dict(host_metrics.memory_bytes())["total"] == psutil.virtual_memory().total


def test_one_rank_exports_all_of_the_catalogue_that_is_the_nodes(runs: Any) -> None:
    """Also where its port is taken, and beside a scraper that hangs: no training fails for its metrics."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {"DDP_METRICS_HOST": "127.0.0.1", "DDP_METRICS_PORT": str(port)}
        node = runs.start("act.py", "all=save", env=environ)
        runs.wait_until_ready(node)
        place = urllib.parse.urlparse(node.state().metrics)
        assert place.port not in (None, port)
        with socket.create_connection((place.hostname, place.port)) as hanging:
            hanging.send(b"GET /metrics HTTP/1.1\r\n")  # and no more
            with urllib.request.urlopen(node.state().metrics, timeout=30) as answer:  # noqa: S310
                text = answer.read().decode()
            node.process.terminate()
            assert node.end() == 143
    told = {metric.name: metric for metric in CATALOGUE if metric.set_by == "ddprun"}
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    with_gpu = count_gpus() > 0
    assert types == {name: metric.kind for name, metric in told.items() if with_gpu or not metric.needs_gpu}
    series = [line for line in text.splitlines() if not line.startswith("#")]
    names = {re.split(r"[{ ]", line)[0] for line in series}
    assert {name for name, metric in told.items() if metric.at_first and name in types} <= names
    assert len(series) <= 120
