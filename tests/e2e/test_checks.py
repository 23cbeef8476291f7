"""``ddpctl bench`` and ``ddpctl doctor`` on this machine, which is sound however busy it is."""

import json
from pathlib import Path

import pytest
from tests.e2e.driver import ddpctl

from ddpwire.communication import fit_link, matrices, parse_way, step_seconds


def test_bench_measures_each_collective_of_two_ranks(tmp_path: Path) -> None:
    done = ddpctl("bench", "--gpus", "2", "--sizes", "64K,1001", "--json", "--parameters", "25M")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["check"], result["ranks"], result["backend"], result["code"]) == ("bench", 2, "gloo", 0)
    rows = {(row["collective"], row["bytes"]): row for row in result["collectives"]}
    assert len(rows) == 20
    assert {size for name, size in rows if name != "all_reduce"} == {1000, 64 << 10}
    probes_s = [rows["all_reduce", size]["seconds"] for size in (8, 4 << 20)]  # 4 bytes are rounded up
    factors = {name: row["busbw"] / row["algbw"] for (name, _), row in rows.items()}
    half = dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), 0.5)
    assert factors == pytest.approx({**half, **dict.fromkeys(("all_reduce", "broadcast", "reduce", "send_recv"), 1.0)})
    for (_, size), row in rows.items():
        assert row["algbw"] == pytest.approx(size / row["seconds"] / 1e9)
        assert row["wrong"] == {}
    plain, bf16, *_ = result["advice"]["ways"]
    assert (plain["way"], bf16["way"]) == ("plain", "bf16")
    assert plain["bytes"] == 2 * bf16["bytes"] == pytest.approx(100e6, rel=1e-3)
    advised = fit_link(2, dict(zip((8, 4 << 20), probes_s, strict=True)))
    assert [result["advice"][key] for key in ("latency_s", "bytes_per_s")] == [advised.latency_s, advised.bytes_per_s]
    compute_s, shapes = result["advice"]["compute_s"], matrices(25e6)
    for way in (plain, bf16):
        assert way["seconds"] == step_seconds(parse_way(way["way"]), shapes, advised, compute_s=compute_s) > compute_s
    assert ([link[:2] for link in result["links"]], result["slow"], "last" in result) == ([[0, 1]], [], False)
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == []


def test_doctor_finds_no_defect_of_a_sound_machine_under_load(tmp_path: Path) -> None:
    done = ddpctl("doctor", "--nodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [node["node"] for node in report["nodes"]] == [0, 1]
    assert {result["status"] for result in report["results"]} <= {"ok", "warning", "not looked at"}
    assert {"libraries", "disk", "clock", "CPU", "open files"} <= {result["check"] for result in report["results"]}
    assert all(result["value"] and result["expected"] and result["todo"] for result in report["results"])
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == []
