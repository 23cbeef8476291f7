"""How the machine under a node does, read when somebody asks: cores, memory, network, and GPUs where NVML finds any.

Nodes that share a machine tell the same of it. It knows nothing of ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from ddprun.network import interface
from ddpwire import catalogue

HOST = (catalogue.HOST_CPU, catalogue.HOST_MEMORY, catalogue.HOST_NETWORK)
DEVICES = (
    catalogue.DEVICE_UTILIZATION,
    catalogue.DEVICE_MEMORY_USED,
    catalogue.DEVICE_POWER,
    catalogue.DEVICE_TEMPERATURE,
)
SERIES = (*HOST, *DEVICES)
MAX_DEVICES = 16  # four series each


class HostSeries(Collector):
    """The machine's series."""

    def collect(self) -> Iterator[Family]:
        """Every family as it is now."""
        yield family(catalogue.HOST_CPU, cpu_seconds())
        yield family(catalogue.HOST_MEMORY, memory_bytes())
        yield family(catalogue.HOST_NETWORK, network_bytes())


def family(metric: catalogue.Metric, values: Iterable[tuple[str, float]]) -> Family:
    """The values of a metric with one label, by what that says."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = kind(metric.name, metric.help, labels=tuple(metric.labels))
    for label, value in values:
        made.add_metric([label], value)
    return made


def cpu_seconds() -> list[tuple[str, float]]:
    """By mode; 0 for what the system does not count."""
    times = psutil.cpu_times()
    return [(mode, getattr(times, mode, 0.0)) for mode in catalogue.HOST_CPU.labels["mode"]]


def memory_bytes() -> list[tuple[str, float]]:
    """Of the machine, whatever share of it a container has."""
    memory = psutil.virtual_memory()
    return [("total", memory.total), ("available", memory.available)]


def network_bytes() -> list[tuple[str, float]]:
    """Of all interfaces together."""
    loopback = interface("127.0.0.1")
    counts = [count for name, count in psutil.net_io_counters(pernic=True).items() if name != loopback]
    return [
        ("received", sum(count.bytes_recv for count in counts)),
        ("sent", sum(count.bytes_sent for count in counts)),
    ]


class DeviceSeries(Collector):
    """The series of the machine's GPUs, numbered as NVML does; those that a device does not tell are left out."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        num_devices = min(nvml.nvmlDeviceGetCount(), MAX_DEVICES)
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(num_devices)]

    def collect(self) -> Iterator[Family]:
        """Every family as it is now."""
        nvml = self._nvml
        yield self._of_each(
            catalogue.DEVICE_UTILIZATION, lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
        )
        yield self._of_each(catalogue.DEVICE_MEMORY_USED, lambda device: nvml.nvmlDeviceGetMemoryInfo(device).used)
        yield self._of_each(catalogue.DEVICE_POWER, lambda device: nvml.nvmlDeviceGetPowerUsage(device) / 1000)
        yield self._of_each(
            catalogue.DEVICE_TEMPERATURE,
            lambda device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        )

    def _of_each(self, metric: catalogue.Metric, read: Callable[[Any], float]) -> Family:
        values = []
        for index, device in enumerate(self._devices):
            try:
                values.append((str(index), read(device)))
            except self._nvml.NVMLError:  # not supported here, or the device is lost
                continue
        return family(metric, values)


def collectors() -> list[Collector]:
    """What there is to be told of this machine."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [HostSeries(), DeviceSeries(pynvml)]
    except Exception:  # no driver, or no library: NVML has an error for each
        return [HostSeries()]
