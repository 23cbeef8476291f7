"""``python -m ddpcheck doctor``: checks each node and the network between the nodes, with one rank per node.

The nodes exchange data only through the run's store, without a process group, so that they can report a faulty network.
A message carries at most 500 bytes of a value, and a node waits for the answer before it sends the next message. So
the store works over a path of any MTU.

Keys: ``hello/N`` is the Node of node N, and ``report/N`` its Report. ``tried/N`` is set when node N has tried the
paths, and ``measured/N`` when it has measured its speed. ``over`` ends the check. The values of all keys except
``over`` are stored in parts: ``KEY`` contains the number of parts, and ``KEY/P`` contains part P.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # public, all

from ddpcheck import gpu_checks, network_checks, node_checks
from ddpcheck.finding import ADVICE, Finding, compare_builds, compare_speed
from ddpcheck.network_checks import Node, Paths
from ddpcheck.node_checks import CpuSpeed
from ddpwire import clock, names
from ddpwire.machine import source_address

PART_BYTES = 500
MEET_S = 120.0  # the ranks start together, but the import of torch may take long on some of them
STAGE_S = 90.0  # for the other nodes to try all paths, which takes 10 s if all ports are closed
TURN_S = 20.0  # for a measurement of about a second by another node of this machine
REPORT_S = gpu_checks.DCGM_S + 2 * STAGE_S  # for the reports of all nodes together
ANSWER_S = 1.0  # for a report that the store already has
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a node sends to node 0."""

    findings: tuple[Finding, ...]
    builds: dict[str, dict[str, str]]  # per check, the values that must be the same on all nodes
    speeds: dict[str, float]
    loaded: bool  # whether other programs used the cores during the measurement
    paths: Paths
    clock_s: float  # how far the node's clock is ahead of node 0's


def main(_: object) -> dict[str, Any] | None:
    """Check this node. On node 0, also collect and return the results of all nodes."""
    if int(os.environ.get(names.LOCAL_RANK, "0")):
        return None
    began = time.monotonic()
    number, count = (int(os.environ.get(name, "0")) for name in (names.GROUP_RANK, names.GROUP_WORLD_SIZE))
    made, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_S))))
    store = PrefixStore("doctor", made)
    if number == 0:
        clock.answer_requests(store.clone())
    nodes = _look(store, number, max(count, 1))
    if number:
        _wait(store, "over", REPORT_S)
        return None
    reports: dict[int, Report] = {}
    end = time.monotonic() + REPORT_S
    for node in nodes:
        if text := _get(store, f"report/{node.node}", max(end - time.monotonic(), ANSWER_S)):
            value: dict[str, Any] = json.loads(text)
            paths = {key: {int(to): entry for to, entry in by_node.items()} for key, by_node in value["paths"].items()}
            findings_of_node = tuple(Finding(**finding) for finding in value["findings"])
            reports[node.node] = Report(**{**value, "findings": findings_of_node, "paths": Paths(**paths)})
    store.set("over", "")
    late = sorted({*range(max(count, 1))} - {node.node for node in nodes})
    findings = [
        *judge(nodes, reports),
        *(Finding("answer", "bad", f"no answer within {MEET_S:g} s", node) for node in late),
    ]
    advice = {check: {"expected": expected, "todo": todo} for check, (expected, todo) in ADVICE.items()}
    return {
        "nodes": [
            *({"node": node.node, "host": node.host, "address": node.address} for node in nodes),
            *({"node": node, "host": "unknown", "address": "unknown"} for node in late),
        ],
        "results": [asdict(finding) | advice[finding.check] for finding in findings],
        "seconds": round(time.monotonic() - began, 1),
    }


def _look(store: Store, number: int, count: int) -> list[Node]:
    """Run all checks of one node, and put its report into the store. Return the nodes that answered."""
    address = source_address(str(socket.getaddrinfo(os.environ[names.MASTER_ADDR], None)[0][4][0]))
    tcp, udp = network_checks.open_ports(address)
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node()
    _, mtu = node_checks.interface_of(address)
    ports = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
    me = Node(node=number, host=socket.gethostname(), address=address, mtu=mtu, machine=machine, **ports)
    _put(store, f"hello/{number}", json.dumps(asdict(me)))
    texts = (_get(store, f"hello/{other}", MEET_S) for other in range(count))
    nodes = [Node(**json.loads(text)) for text in texts if text]
    paths = network_checks.try_paths(me, nodes)
    _put(store, f"tried/{number}", "")
    offset = clock.offset_s(store) if number else 0.0
    uses_gpus = os.environ.get(names.DEVICE) != "cpu"
    findings, kinds = gpu_checks.look() if uses_gpus else (gpu_checks.not_looked_at("the job is for CPUs"), {})
    num_gpus = torch.cuda.device_count() if uses_gpus else 0
    if "driver" in kinds and not num_gpus:
        findings.append(Finding("GPU matmul", "warning", "the driver has GPUs, and torch sees none: a build for CPUs?"))
    findings += node_checks.check_limits(num_gpus=num_gpus, num_nodes=count)
    findings += (
        node_checks.check_disk(os.environ),
        node_checks.check_interfaces(address),
        node_checks.check_containers(os.environ, num_gpus=num_gpus),
    )
    libraries = node_checks.mapped_libraries()
    for other in nodes:  # nodes on the same machine measure one after the other
        if other.machine == machine and other.node < number:
            _wait(store, f"measured/{other.node}", TURN_S)
    speed = node_checks.measure_cpu()
    findings.append(node_checks.check_cpu(speed))
    speeds, gpu_findings = _speeds(speed, num_gpus)
    findings += gpu_findings
    _put(store, f"measured/{number}", "")
    report = Report(
        findings=tuple(findings),
        builds={"libraries": libraries, "GPUs and driver": kinds},
        speeds=speeds,
        loaded=speed.others > len(os.sched_getaffinity(0)) / 4,
        paths=paths,
        clock_s=offset,
    )
    _put(store, f"report/{number}", json.dumps(asdict(report)))
    for other in nodes:  # this node's ports stay open until all nodes have tried them
        _wait(store, f"tried/{other.node}", STAGE_S)
    return nodes


def _speeds(speed: CpuSpeed, num_gpus: int) -> tuple[dict[str, float], list[Finding]]:
    speeds = {"CPU matmul": speed.gflops, "CPU memory": speed.copy_bytes / 1e9}
    if not num_gpus:
        return speeds, []
    try:
        return speeds | {"GPU matmul": gpu_checks.measure_matmul()}, [gpu_checks.check_clocks()]
    except RuntimeError as error:  # CUDA's error for a GPU that does not work
        return speeds, [Finding("GPU matmul", "bad", str(error).partition("\n")[0])]


def judge(nodes: Sequence[Node], reports: Mapping[int, Report]) -> list[Finding]:
    """Return the findings of all nodes, sorted by check and then by node."""
    findings = [replace(finding, node=node) for node, report in reports.items() for finding in report.findings]
    absent = [node.node for node in nodes if node.node not in reports]
    findings += [Finding("answer", "bad", "it gave no report", node) for node in absent]
    for check in ("libraries", "GPUs and driver"):
        builds = {node: report.builds[check] for node, report in reports.items() if report.builds.get(check)}
        findings += compare_builds(check, builds)
    findings += network_checks.judge(nodes, {node: report.paths for node, report in reports.items()})
    findings += network_checks.judge_clocks({node: report.clock_s for node, report in reports.items()})
    loaded = {node for node, report in reports.items() if report.loaded}
    shared = {finding.node for finding in findings if (finding.check, finding.status) == ("GPU processes", "warning")}
    for check, unit in (("GPU matmul", "TFLOP/s"), ("CPU matmul", "GFLOP/s"), ("CPU memory", "GB/s")):
        speeds = {node: report.speeds[check] for node, report in reports.items() if check in report.speeds}
        findings += compare_speed(check, speeds, unit, loaded=shared if check == "GPU matmul" else loaded)
    order = {check: place for place, check in enumerate(dict.fromkeys(finding.check for finding in findings))}
    return sorted(findings, key=lambda finding: (order[finding.check], finding.node))


def _put(store: Store, key: str, text: str) -> None:
    parts = [text[at : at + PART_BYTES] for at in range(0, len(text), PART_BYTES)]  # it is JSON in ASCII
    for number, part in enumerate(parts):
        store.compare_set(f"{key}/{number}", "", part)  # unlike set, this waits for the answer
    store.compare_set(key, "", f"{len(parts)}")


def _get(store: Store, key: str, timeout_s: float) -> str:
    """Return the value of ``key``, or an empty string if it does not arrive in time."""
    if not _wait(store, key, timeout_s):
        return ""
    return "".join(store.get(f"{key}/{number}").decode() for number in range(int(store.get(key))))


def _wait(store: Store, key: str, timeout_s: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True
