"""The health of the GPUs that this process sees, from NVML, the kernel log, DCGM (if installed) and a matrix product.

NVML's functions and constants: https://docs.nvidia.com/deploy/nvml-api; Xid: https://docs.nvidia.com/deploy/xid-errors.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddpcheck.finding import Finding, Status
from ddpwire.machine import visible_handles

GPU_CHECKS = ("GPU memory", "PCIe", "NVLink", "MIG", "GPU processes", "GPU clocks", "Xid", "DCGM", "GPU matmul")
BAD_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120, 140})  # ECC, row remapping, NVLink, off the bus, GSP
SCRIPT_XIDS = frozenset({13, 31, 43, 45})  # caused by a faulty program
XID = re.compile(r"^\d+,\d+,(\d+),[^;]*;.*NVRM: Xid \(([^)]*)\): (\d+)", re.MULTILINE)
OLD_XID_S = 86400.0  # a day: an older error may have been repaired since
HARDWARE_REASONS = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
THERMAL_REASON = 0x20  # set by the driver
MATRIX, MATMUL_WINDOWS, MATMULS = 4096, 8, 8
DCGM_S = 120.0  # diag -r 1 takes some seconds
NO_GPU_CODES = frozenset({9, 12})  # of NVML: the driver is not loaded, or the library is not found
Part = tuple[Status, str]  # the result for one GPU


def not_looked_at(reason: str) -> list[Finding]:
    """Return a finding "not looked at" for each GPU check."""
    return [Finding(check, "not looked at", reason) for check in GPU_CHECKS]


def look() -> tuple[list[Finding], dict[str, str]]:
    """Return the findings about this node's GPUs, and the values that must be the same on all nodes.

    Call this before this process uses CUDA.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        code = getattr(error, "value", None)  # only NVML's errors have one
        if code in NO_GPU_CODES:
            return not_looked_at(f"no GPU: {error}"), {"GPUs": "none"}
        reason = f"NVML cannot be used: {error}"
        return [*([] if code is None else [Finding("GPUs", "bad", reason)]), *not_looked_at(reason)], {}
    handles, lost = _handles(pynvml)
    checks = {"GPU memory": _memory, "PCIe": _pcie, "NVLink": _nvlink, "MIG": _mig, "GPU processes": _processes}
    findings = [Finding("GPUs", "bad" if lost else "ok", "; ".join(lost) or f"{len(handles)} GPUs answer")]
    findings += [_of_all(pynvml, check, look_at, handles) for check, look_at in checks.items()]
    findings += [check_kernel_log(), check_dcgm()]
    names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles.values()]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return findings, {"GPUs": kinds, "driver": str(pynvml.nvmlSystemGetDriverVersion())}


def _handles(nvml: Any) -> tuple[dict[str, Any], list[str]]:
    handles, lost = {}, []
    for device, get_handle in visible_handles(nvml).items():
        try:
            handles[device] = get_handle()
        except nvml.NVMLError as error:
            lost.append(f"GPU {device}: {error}")
    return handles, lost


def _of_all(nvml: Any, check: str, look_at: Callable[[Any, Any], Part], handles: dict[str, Any]) -> Finding:
    """Return one finding for all GPUs: the worst status, and the GPUs that have it."""
    parts: dict[str, Part] = {}
    for device, handle in handles.items():
        try:
            parts[device] = look_at(nvml, handle)
        except nvml.NVMLError as error:
            parts[device] = ("not looked at", str(error))
    order: tuple[Status, ...] = ("bad", "warning", "not looked at", "ok")
    worst = min((status for status, _ in parts.values()), key=order.index, default=order[2])
    values = dict.fromkeys(value for status, value in parts.values() if status == worst)
    if worst == "ok" or len({*parts.values()}) == 1:
        return Finding(check, worst, ", ".join(values))
    shown = [f"GPU {device}: {value}" for device, (status, value) in parts.items() if status == worst]
    return Finding(check, worst, "; ".join(shown) or "no GPU is visible")


def _memory(nvml: Any, handle: Any) -> Part:
    """Check for ECC errors since the driver was loaded, and for rows that have to be remapped."""
    faults, known = [], []
    with contextlib.suppress(nvml.NVMLError):
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        known.append("no uncorrected ECC error")
        faults += [f"{errors} uncorrected ECC errors"] if errors else []
    with contextlib.suppress(nvml.NVMLError):
        _, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        known.append(f"{uncorrected} rows remapped after uncorrected errors")
        faults += ["a row could not be remapped"] if failed else []
        faults += ["a row is remapped at the next reset"] if pending else []
    return ("bad" if faults else "ok" if known else "not looked at"), ", ".join(faults or known or ["without ECC"])


def _pcie(nvml: Any, handle: Any) -> Part:
    """Compare the width of the link and of the slot. The generation is ignored, because it is lower on an idle GPU."""
    width, most = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    return ("ok" if width >= most else "warning" if 2 * width >= most else "bad"), f"x{width} of x{most}"


def _nvlink(nvml: Any, handle: Any) -> Part:
    """Check the NVLinks. Bad: only some of the links are up. Warning: a link that is up has recovered from errors."""
    up, down, errors = 0, [], 0
    with contextlib.suppress(nvml.NVMLError):  # the error after the GPU's last link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                down.append(str(link))
                continue
            up += 1
            errors += nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
    if up and down:
        return "bad", f"down: {', '.join(down)}; {up} up"
    return ("warning", f"{errors} recoveries") if errors else ("ok", f"{up} links up" if up else "none")


def _mig(nvml: Any, handle: Any) -> Part:
    current, pending = 0, 0
    with contextlib.suppress(nvml.NVMLError):  # a GPU without MIG
        current, pending = nvml.nvmlDeviceGetMigMode(handle)
    if current != pending:
        return "bad", "the mode changes at the next reset"
    return ("warning", "on") if current else ("ok", "off")


def _processes(nvml: Any, handle: Any) -> Part:
    """Warn about the processes on the GPU. This process is not among them, because it has not used CUDA yet."""
    pids = [str(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return ("warning", f"used by pid {', '.join(pids)}") if pids else ("ok", "none")


def check_clocks() -> Finding:
    """Check why the GPUs' clocks are low now. Call this right after a load, because an idle GPU lowers its clocks."""

    def reasons(nvml: Any, handle: Any) -> Part:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        if slowdowns := [word for bit, word in HARDWARE_REASONS.items() if bits & bit]:
            return "bad", ", ".join(slowdowns)
        return ("warning", "thermal slowdown by the driver") if bits & THERMAL_REASON else ("ok", "not slowed down")

    import pynvml

    return _of_all(pynvml, "GPU clocks", reasons, _handles(pynvml)[0])


def check_kernel_log(path: str = "/dev/kmsg") -> Finding:
    """Check for Xid errors in the kernel log.

    Bad: a hardware error (BAD_XIDS) in the last day. Warning: an older hardware error, or an error of unknown kind.
    Errors caused by a faulty program (SCRIPT_XIDS) are left out.
    """
    records = bytearray()
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.closing(os.fdopen(file, "rb", buffering=0)), contextlib.suppress(BlockingIOError):  # the end
            while record := os.read(file, 8192):  # one record per read: ``priority,number,microseconds,...;text``
                records += record
    except OSError as error:
        return Finding("Xid", "not looked at", f"{path}: {error.strerror} (run dmesg as root)")
    now, errors, bad = time.clock_gettime(time.CLOCK_BOOTTIME), dict[str, None](), False
    for since_boot, device, number in XID.findall(records.decode(errors="replace")):
        age, xid = now - int(since_boot) / 1e6, int(number)
        if xid not in SCRIPT_XIDS:
            errors[f"Xid {xid} of {device}, {age / 3600:.1f} h ago"] = None
            bad |= xid in BAD_XIDS and age < OLD_XID_S
    value = "; ".join([*errors][-4:]) or "none in the kernel log"
    return Finding("Xid", "bad" if bad else "warning" if errors else "ok", value)


def check_dcgm() -> Finding:
    """Run ``dcgmi diag -r 1``. Bad: a test fails. Ok: no test fails, at least one passes, and dcgmi has no error."""
    program = shutil.which("dcgmi")
    if program is None:
        return Finding("DCGM", "not looked at", "dcgmi is not installed")
    try:
        done = subprocess.run([program, "diag", "-r", "1", "--json"], capture_output=True, text=True, timeout=DCGM_S)
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except (subprocess.TimeoutExpired, ValueError) as error:
        return Finding("DCGM", "not looked at", f"dcgmi diag: {error}")
    results = [*find_values(answer, "status")]
    errors = [error for _, error in find_values(answer, "runtime_error")]
    if failed := dict.fromkeys(name for name, status in results if status.lower() == "fail"):
        return Finding("DCGM", "bad", ", ".join(failed))
    if errors or not any(status.lower() == "pass" for _, status in results):
        return Finding("DCGM", "not looked at", f"dcgmi diag: {'; '.join(errors) or 'no test passed or failed'}")
    return Finding("DCGM", "ok", "diag -r 1 passes")


def find_values(answer: Any, key: str, test: str = "") -> Iterator[tuple[str, str]]:
    """Yield each test and its value of ``key``, at any depth of ``answer``. DCGM 3 and 4 nest tests differently."""
    if isinstance(answer, dict):
        test = str(answer.get("name", test))
        if answer.get(key):
            yield test, str(answer[key])
        answer = list(answer.values())
    if isinstance(answer, list):
        for part in answer:
            yield from find_values(part, key, test)


def measure_matmul() -> float:
    """Return the TFLOP/s of bfloat16 matrix products on the slowest visible GPU, in its best time window."""
    speeds: list[float] = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            matrix = torch.rand(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
            times = []
            for _ in range(MATMUL_WINDOWS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                for _ in range(MATMULS):
                    torch.mm(matrix, matrix)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            speeds.append(2 * MATRIX**3 * MATMULS / min(times) / 1e12)
    return min(speeds)
