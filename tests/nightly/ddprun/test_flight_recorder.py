"""The collectives that a rank reports under torch's nccl2."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.unit.ddprun.test_flight_recorder import answer
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d


@pytest.mark.parametrize(
    ("is_hooked", "name", "is_known"),
    [(True, "nccl2", True), (False, "nccl2", False), (True, "ucc", False)],
    ids=["torch 2.15", "torch 2.14 with TORCH_DIST_USE_NCCL2", "no report of the end of a collective"],
)
def test_nccl2_has_a_recorder_of_its_own_since_torch_2_15(
    is_hooked: bool, name: str, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"process_group": ["0", "default_pg"], "is_p2p": False, "collective_seq_id": 7, "input_sizes": [[3]]}
    entry |= {"profiling_name": "nccl2:all_reduce", "input_dtypes": ["Float"], "time_created_ns": 1_000_000_000}
    records = json.dumps({"entries": [entry | {"retired": False, "state": "scheduled"}]}).encode()
    backend = type("ProcessGroupNCCL2", (), {"name": lambda _: name})()
    members = {"_device_types": [torch.device("cuda")], "_get_backend": lambda *_: backend}
    process_group = type("Group", (), members)()
    hooks = {process_group: None} if is_hooked else {}
    world = SimpleNamespace(pg_map={process_group: (name, None)}, pg_flight_recorder_hooks=hooks)
    monkeypatch.setattr(distributed_c10d, "_world", world)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *args: records if args[2:] == (name,) else b"{}")
    record = answer(tmp_path)
    assert ("unknown" not in record) == is_known
    calls = [(call["op"], call["seq"], call["done"]) for call in record["collectives"]]
    assert calls == [("all_reduce", 7, False)] * is_known
