"""Metrics of a node's machine, read at each scrape: CPU, memory, network, and GPUs if NVML finds any.

Nodes on the same machine report the same values. The values do not depend on the ranks.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from ddprun.system.network import interface_of
from ddpwire import metrics

HOST = (metrics.HOST_CPU, metrics.HOST_MEMORY, metrics.HOST_NETWORK)
DEVICES = (metrics.DEVICE_UTILIZATION, metrics.DEVICE_MEMORY_USED, metrics.DEVICE_POWER, metrics.DEVICE_TEMPERATURE)
SERIES = (*HOST, *DEVICES)


def family(metric: metrics.Metric, values: Iterable[tuple[str, float]]) -> Family:
    """Return ``metric``, which has one label, as a metric family. ``values`` are pairs of label value and number."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = kind(metric.name, metric.help, labels=tuple(metric.labels))
    for label, value in values:
        made.add_metric([label], value)
    return made


def cpu_seconds() -> list[tuple[str, float]]:
    """Return the CPU seconds of each mode, which are 0 for a mode that the system does not count."""
    times = psutil.cpu_times()
    return [(mode, getattr(times, mode, 0.0)) for mode in metrics.HOST_CPU.labels["mode"]]


def memory_bytes() -> list[tuple[str, float]]:
    """Return the total and available bytes of the machine's memory, regardless of a container's limit."""
    memory = psutil.virtual_memory()
    return [("total", memory.total), ("available", memory.available)]


def network_bytes() -> list[tuple[str, float]]:
    """Return the bytes that all interfaces except the loopback have received and sent in total."""
    loopback = interface_of("127.0.0.1")
    counts = [count for name, count in psutil.net_io_counters(pernic=True).items() if name != loopback]
    return [
        ("received", sum(count.bytes_recv for count in counts)),
        ("sent", sum(count.bytes_sent for count in counts)),
    ]


class MachineSeries(Collector):
    """The metrics of the machine and of its GPUs, labeled with the NVML index, without those that a GPU lacks."""

    def __init__(self, nvml: Any = None) -> None:
        """``nvml``: the module pynvml, or None without GPUs."""
        self._nvml = nvml
        self._devices = {}
        for index in range(min(nvml.nvmlDeviceGetCount(), 16)) if nvml else ():
            with contextlib.suppress(nvml.NVMLError):  # the GPU is lost or not permitted
                self._devices[index] = nvml.nvmlDeviceGetHandleByIndex(index)

    def collect(self) -> Iterator[Family]:
        """Yield each metric family with its current values."""
        yield family(metrics.HOST_CPU, cpu_seconds())
        yield family(metrics.HOST_MEMORY, memory_bytes())
        yield family(metrics.HOST_NETWORK, network_bytes())
        if (nvml := self._nvml) is None:
            return
        readers: tuple[Callable[[Any], float], ...] = (
            lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        )
        for metric, read in zip(DEVICES, readers, strict=True):
            values = []
            for index, gpu in self._devices.items():
                with contextlib.suppress(nvml.NVMLError):  # not supported, or the GPU is lost
                    values.append((str(index), read(gpu)))
            yield family(metric, values)


def machine_series() -> MachineSeries:
    """Return the metrics of this machine."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return MachineSeries(pynvml)
    except Exception:  # the driver or the library is missing, which raises different errors
        return MachineSeries()
