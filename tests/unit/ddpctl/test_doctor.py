"""The doctor's job, its table, and what a launch does with its findings; the sizes and the comparison of a bench."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.messages import assert_names, refused
from tests.unit.ddpctl.kubernetes_judges import faults
from tests.unit.ddpctl.kubernetes_lab import plan_of, run_of

from ddpctl.commands.checks import PARAMETERS, TIMES, advice, advice_lines, compared, read_quantity, read_sizes
from ddpctl.errors import DdpctlError, UnavailableError, UsageError
from ddpctl.job.launch_plan import Request
from ddpctl.job.spec import JobSpec
from ddpctl.operations import checks, launcher
from ddpctl.operations.checks import NoResultError
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpwire.run_files import Outcome

OPTIONS = SshOptions(hosts=tuple(SshHost(address=f"box{number}") for number in range(4)))
DIGITS = JobSpec(name="digits", nodes="2", gpus=4)
REQUEST = Request(job=DIGITS, target="boxes", kind="ssh", options=OPTIONS, name="n")


def finding(node: int, status: str, check: str = "clock", value: str = "x") -> dict[str, Any]:
    return {"node": node, "check": check, "status": status, "value": value, "expected": "-", "todo": "-"}


class Doctor:
    """In the place of a job: it reports that these hosts are bad."""

    def __init__(
        self, bad: Mapping[str, str], *, outcome: Outcome | None = None, refused: Mapping[str, Any] | None = None
    ) -> None:
        self.bad, self.outcome, self.looked_at = bad, outcome, list[tuple[str, ...]]()
        self.refused = dict(refused or {})

    def __call__(self, _: Any, request: Request, **__: Any) -> tuple[Run, dict[str, Any], list[str]]:
        assert (request.name, request.job.local_world_size, request.job.env["DDP_ONE_PORT"]) == (None, 1, "1")
        options = request.options
        numbers = [n for n, host in enumerate(options.hosts) if host.address not in options.exclude][
            : request.job.max_nodes
        ]
        hosts = tuple(options.hosts[number].address for number in numbers)
        self.looked_at.append(hosts)
        if any(self.refused.get(host) for host in hosts):
            raise UnavailableError("not ready", machines=self.refused)
        nodes = [{"node": node, "host": host, "address": host} for node, host in enumerate(hosts)]
        results = [finding(node, self.bad.get(host, "ok")) for node, host in enumerate(hosts)]
        run = replace(run_of("doctor-otter", job=request.job), kind="ssh", options=asdict(options))
        run = replace(run, handle={"hosts": numbers})
        if self.outcome:
            state = RunStatus(run=run.name, state="failed", message="", outcome=self.outcome)
            raise NoResultError(run, state, 78)
        return run, {"nodes": nodes, "results": results}, []


@pytest.fixture
def context(tmp_path: Path) -> launcher.AppContext:
    return replace(launcher.open_context(os.environ), root=tmp_path, emit=lambda _: None)


def test_bad_hosts_are_left_out_while_there_are_others(monkeypatch, context):
    doctor_ = Doctor({"box0": "bad", "box1": "warning", "box2": "bad"})
    monkeypatch.setattr(checks, "run_check", doctor_)
    request = checks.only_sound(context, REQUEST)
    assert doctor_.looked_at == [("box0", "box1"), ("box1", "box2"), ("box1", "box3")]
    assert request == replace(REQUEST, options=replace(OPTIONS, exclude=("box0", "box2")))


def test_too_few_sound_hosts_are_a_refusal(monkeypatch, context):
    monkeypatch.setattr(checks, "run_check", Doctor(dict.fromkeys(("box0", "box1", "box2"), "bad")))
    with pytest.raises(UnavailableError) as error:
        checks.only_sound(context, REQUEST)
    assert error.value.fields == {"nodes": [0]}  # of the last look: box2


@pytest.mark.parametrize("ready", [("box0", "box2", "box3"), ("box3",), ()])
def test_a_host_that_the_target_refuses_is_a_finding_and_the_others_are_examined(monkeypatch, context, ready):
    refused = {f"box{n}": [] if f"box{n}" in ready else [("SSH", "no answer"), ("disk", "full")] for n in range(4)}
    doctor_ = Doctor({"box3": "bad"}, refused=refused)
    monkeypatch.setattr(checks, "run_check", doctor_)
    result, machines = checks.examine(context, replace(REQUEST, job=replace(REQUEST.job, nodes="4")))
    assert machines == ("box0", "box1", "box2", "box3")
    assert doctor_.looked_at[1:] == ([ready] if ready else [])
    statuses = {(machines[row["node"]], row["check"]): row["status"] for row in result["results"]}
    bad = {(f"box{n}", check): "bad" for n in range(4) if f"box{n}" not in ready for check in ("SSH", "disk")}
    assert statuses == bad | {(host, "clock"): "bad" if host == "box3" else "ok" for host in ready}
    assert {(node["node"], node["host"]) for node in result["nodes"]} == {(n, f"box{n}") for n in range(4)}
    assert (result["code"], len(result["findings"])) == (69, len(bad) + bool(ready))
    kept = checks.last_result(context, "boxes", "doctor")
    assert kept
    assert (kept["results"], kept["lines"]) == (result["results"], checks.lines(result))


def test_the_table_has_a_column_for_nodes_that_are_alike():
    results = [finding(n, "bad" if n == 3 else "ok", "disk") for n in range(64)]
    results += [finding(n, "not looked at", "Xid", "no GPU") for n in range(64)]
    lines = checks.lines({"nodes": [{"node": n} for n in range(64)], "results": results})
    assert [line.split() for line in lines[:2]] == [["node", "0-2,4-63", "node", "3"], ["disk", "ok", "BAD"]]
    assert lines[2:] == ["not looked at on node 0-63: Xid (no GPU)", "node 3, disk: bad: x; expected: -; -"]


def test_a_refusal_of_ddprun_is_a_finding_of_its_node(monkeypatch, context):
    outcome = Outcome(code=78, cause="config", message="the nodes do not match", node=1)
    monkeypatch.setattr(checks, "run_check", Doctor({}, outcome=outcome))
    result, _ = checks.examine(context, REQUEST)
    assert (result["code"], [(row["node"], row["status"]) for row in result["results"]]) == (69, [(1, "bad")])
    monkeypatch.setattr(checks, "run_check", Doctor({}, outcome=replace(outcome, node=None)))
    with refused(DdpctlError, code=78):
        checks.examine(context, REQUEST)


def test_the_run_of_a_check_is_bounded_starts_once_and_tells_nobody(monkeypatch, context):
    jobs = []

    def start(_: Any, request: Request, **__: Any) -> Run:
        jobs.append(request.job)
        raise UnavailableError("no")

    monkeypatch.setattr(launcher, "start", start)
    own = {"nodes": "3", "spares": 1, "checkpoint_copies": 2, "notify": ("true",), "time_limit": "9h"}
    with pytest.raises(UnavailableError):
        checks.run_check(context, replace(REQUEST, job=JobSpec(**own)), name="doctor", show=print)
    expected = {"name": "doctor", "command": ("--record",), "max_restarts": 0, "time_limit": checks.TIME_LIMIT}
    assert jobs == [JobSpec(nodes="3", **expected)]


@pytest.mark.parametrize("workload", ["job", "pytorchjob", "trainjob"])
def test_the_job_on_kubernetes_is_one_that_its_schemas_allow(workload):
    job = checks.job_of(replace(REQUEST.job, device="cuda", image="registry.example/train:1"))
    text = KubernetesTarget(KubernetesOptions(workload=workload)).render(plan_of(job))
    things = [thing for thing in yaml.safe_load_all(text) if thing]
    assert [faults(thing) for thing in things] == [[]] * len(things)
    assert "ddpcheck" in text
    assert "nvidia.com/gpu: '4'" in text


def test_sizes_in_order_and_quantities_are_read_with_their_units() -> None:
    sizes = {"4096": [4096], "64K,16M": [64 << 10, 16 << 20], "1g, 64KiB ,64kb": [64 << 10, 1 << 30], "64G": [1 << 36]}
    assert {text: read_sizes(text) for text in sizes} == sizes, "each once"
    for units, texts in ((PARAMETERS, {"11.7M": 11.7e6, "7e9": 7e9}), (TIMES, {"200ms": 0.2, "0.2": 0.2})):
        assert {text: read_quantity("--flag", text, units) for text in texts} == pytest.approx(texts)


def test_a_text_that_is_no_size_or_no_time_is_refused() -> None:
    for text in ("", "0", "-1", "1.5M", "64K,", "64T", "65G", "9999999", "K"):
        with refused(UsageError, "--sizes"):
            read_sizes(text)
    for text in ("", "0", "-1s", "1M", "s", "1 s", "1h", "inf"):
        with refused(UsageError, "--step", "ms"):
            read_quantity("--step", text, TIMES)


def test_the_advice_comes_from_the_latency_and_from_4_megabytes_whatever_else_was_measured() -> None:
    speeds = {8: 0.002, 1000: 0.5, 4 << 20: 0.002 + 0.0005, 1 << 30: 100.0}
    rows = [{"collective": "all_reduce", "bytes": size, "seconds": seconds} for size, seconds in speeds.items()]
    result = advice({"ranks": 2, "backend": "nccl", "collectives": rows}, 7e9, 0.2)
    assert (result["latency_s"], result["bytes_per_s"]) == (0.002, pytest.approx((4 << 20) / 0.0005))
    assert_names("\n".join(advice_lines(result)), "7,000 M", "8,390 MB/s", "2 ms", "28,000 MB")


def bench(*rows: tuple[str, int, float], **more: Any) -> dict[str, Any]:
    names = ("collective", "bytes", "busbw")
    return {
        "collectives": [dict(zip(names, row, strict=True)) for row in rows],
        "nodes": ["a", "b"],
        "ranks": 2,
        **more,
    }


NOW = bench(("all_reduce", 1024, 2.0), ("all_reduce", 4096, 4.0), ("broadcast", 1024, 1.0), ("gather", 64, 1.0))


def test_the_ratio_is_the_median_of_the_collectives_and_a_low_one_is_named() -> None:
    old = bench(("all_reduce", 1024, 2.0), ("all_reduce", 4096, 2.0), ("broadcast", 1024, 4.0), time=time.time() - 60)
    first, second = compared({**NOW, "last": old})
    assert first.startswith("busbw: 0.88 of the last bench's (")  # of 1.5 and 0.25; gather has no former size
    assert second == "less than half of the last bench: broadcast 0.25"
    many = bench(*((f"collective-{number}", 8, 1.0) for number in range(9)))
    fast = bench(*((f"collective-{number}", 8, 4.0) for number in range(9)), time=time.time() - 60)
    lines = compared({**many, "last": fast})
    assert max(map(len, lines)) <= 80
    assert_names(" ".join(lines), *(f"collective-{number} 0.25" for number in range(9)))
    (line,) = compared({**NOW, "last": {**NOW, "nodes": ["c"], "time": time.time()}})
    assert line.startswith("busbw: 1.00 of the last bench's, which was on other nodes (")
    assert compared({**NOW, "ranks": 4, "last": old}) == []
