"""What a node tells of its machine, and that it tells all that the catalogue says."""

from types import SimpleNamespace

import psutil
from prometheus_client import CollectorRegistry, generate_latest

from ddprun.metrics import host_metrics


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


def test_each_gpu_exports_its_series() -> None:
    registry = CollectorRegistry()
    registry.register(host_metrics.MachineSeries(NVML))
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if line.startswith("ddp_device")] == [
        'ddp_device_utilization_ratio{device="0"} 0.25',
        'ddp_device_utilization_ratio{device="1"} 0.75',
        'ddp_device_memory_used_bytes{device="0"} 1024.0',
        'ddp_device_memory_used_bytes{device="1"} 2048.0',
        'ddp_device_power_watts{device="0"} 251.5',
        'ddp_device_temperature_celsius{device="0"} 40.0',
        'ddp_device_temperature_celsius{device="1"} 41.0',
    ]


def test_cpu_and_memory_of_the_machine_are_exported() -> None:
    before = psutil.cpu_times().user
    modes = dict(host_metrics.cpu_seconds())
    assert before <= modes["user"] < before + 10
    assert dict(host_metrics.memory_bytes())["total"] == psutil.virtual_memory().total
