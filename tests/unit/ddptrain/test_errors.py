"""How a rank ends by the errors that torch raises on a GPU: their texts, without one."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.messages import assert_names

from ddprank.signals import Signals
from ddptrain import main
from ddptrain.config import parse_options
from ddptrain.distributed import RankInfo, check_same_devices, is_lost_peer, nccl_failure, take_device
from ddptrain.errors import TrainError
from ddpwire.metrics import COLLECTIVE_TIMEOUTS, DEVICE_OOMS, UNPRODUCTIVE, Metric
from ddpwire.names import ERROR_FILE

STACK = "Exception raised from run at /pytorch/NCCLUtils.cpp:94 (most recent call first):\nframe #0: timeout\n"


def nccl(failure: str, kind: str, last: str, head: str = "NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3763") -> str:
    """Return the text of torch's error: C10D_NCCL_CHECK in torch/csrc/distributed/c10d/NCCLUtils.hpp."""
    return f"{head}, {failure}, NCCL version 2.30.0\n{kind}\nLast error:\n{last}\n{STACK}"


INVALID = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
CUDA = "ncclUnhandledCudaError: Call to CUDA function failed."
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
INTERNAL = "ncclInternalError: Internal check failed."
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
OWN = {
    "duplicate": nccl("invalid usage", INVALID, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"),
    "memory": nccl("unhandled cuda error", CUDA, "Cuda failure 2 'out of memory'"),
    "shared-memory": nccl(
        "unhandled system error", SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-a"
    ),
    "asynchronous": nccl("unhandled cuda error", CUDA, "Cuda failure 700 'an illegal memory access'", "NCCL error"),
    "no-last-error": "NCCL error in: /pytorch/NCCLUtils.cpp:94, internal error, NCCL version 2.30.0\n" + INTERNAL,
}
LOST = {
    "remote": nccl("remote process exited or there was a network error", REMOTE, "NET/IB : Got completion"),
    "closed": nccl("internal error", INTERNAL, "Net : Connection closed by remote peer box<50260>"),
    "reset": nccl("unhandled system error", SYSTEM, "Call to recv from 10.0.0.2<33> failed : Connection reset by peer"),
    "refused": nccl("unhandled system error", SYSTEM, "connect to 10.0.0.2<33> failed : Connection refused"),
    "watchdog": "NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error, NCCL version 2.30.0\n"
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600 milliseconds",
    "timeout": "NCCL timeout in: /pytorch/NCCLUtils.cpp:94",
    "aborted": "NCCL communicator was aborted on rank 1.",
}


def nccl2(call: str, kind: str, last: str) -> str:
    """Return the text of nccl2's error: NCCLException in torch/csrc/distributed/c10d/nccl2."""
    return f"NCCL {call} failed: {kind} \nNCCL Last Error: {last}"


SYSTEM2 = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
NCCL2_OWN = nccl2("AllReduce", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "out of memory")
NCCL2_LOST = {
    "nccl2-remote": nccl2("AllReduce", "remote process exited or there was a network error", ""),
    "nccl2-reset": nccl2("Broadcast", SYSTEM2, "Call to recv from 10.0.0.2<33> failed : Connection reset by peer"),
}


LOST_PEERS = [*map(dist.DistBackendError, LOST.values()), *map(RuntimeError, NCCL2_LOST.values())]


@pytest.mark.parametrize("error", LOST_PEERS, ids=[*LOST, *NCCL2_LOST])
def test_an_error_of_nccl_for_a_lost_rank_is_no_failure_of_this_one(error: RuntimeError) -> None:
    assert nccl_failure(error) is None
    assert is_lost_peer(error)


def test_other_errors_of_other_ranks() -> None:
    assert is_lost_peer(dist.DistNetworkError("recv failed"))
    assert is_lost_peer(RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_lost_peer(RuntimeError(OWN["duplicate"]))


def ended_by(error: Exception, folder: Path, *counted: Metric, signaled: int = 0) -> tuple[int, str]:
    """Return the exit code of a training that raises this, and the message of its error file. ``counted``: by it."""
    signals, metrics = Signals(), mock.Mock()
    signals.code = signaled
    with mock.patch.object(main, "_train", side_effect=error), mock.patch.object(main, "open_metrics") as opened:
        opened.return_value = metrics
        environ = {ERROR_FILE: str(folder / "error.json"), "DDP_LOST_BEFORE": "restart=2"}
        code = main.run(parse_options([], {}), environ, signals)
    before, *others = metrics.count.mock_calls
    assert before == mock.call(UNPRODUCTIVE, "restart", number=2.0)
    assert others == [*map(mock.call, counted)]
    return code, json.loads((folder / "error.json").read_text())["message"]["message"]


@pytest.mark.parametrize(
    "error", [*map(dist.DistBackendError, OWN.values()), RuntimeError(NCCL2_OWN)], ids=[*OWN, "nccl2"]
)
def test_a_failure_of_nccl_is_told_with_its_own_line(
    error: Exception, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, message = ended_by(error, tmp_path)
    *log, line = capfd.readouterr().err.splitlines()
    assert (code, message) == (70, line)
    assert log[0] == "Traceback (most recent call last):"
    assert_names(line, "rank 0", "NCCL_DEBUG")


@pytest.mark.parametrize(("signaled", "code"), [(0, 142), (143, 143)])
def test_lost_ranks_are_no_error_of_their_own_after_a_signal(signaled: int, code: int, tmp_path: Path) -> None:
    lost = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 300000ms for recv")
    assert ended_by(lost, tmp_path, COLLECTIVE_TIMEOUTS, signaled=signaled)[0] == code
    assert ended_by(TrainError(65, "it is damaged"), tmp_path) == (65, "ddptrain: it is damaged")


def test_too_little_memory_of_a_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.21 GiB is "
        "free. Including non-PyTorch memory, this process has 14.55 GiB memory in use. Of the allocated memory 13.90 "
        "GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
    )
    code, message = ended_by(torch.OutOfMemoryError(text), tmp_path, DEVICE_OOMS)
    *log, line = capfd.readouterr().err.splitlines()
    assert (code, message) == (78, line)
    assert log[0] == "Traceback (most recent call last):"
    assert log[-1].endswith(text)
    assert_names(line, "rank 0", "2.00", "15.77", "1.21", "--batch-size")


def test_a_gpu_that_cannot_be_used() -> None:
    old = RuntimeError(
        "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.\nTraceback"
    )
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "set_device", side_effect=old),
        pytest.raises(TrainError) as error,
    ):
        take_device(RankInfo(rank=3, size=4, local_rank=1, local_world_size=2), "auto")
    assert error.value.code == 78
    assert_names(error.value, "rank 3", "11040", "--device")


def test_ranks_with_and_without_a_gpu() -> None:
    with pytest.raises(TrainError) as error:
        check_same_devices(["cuda", "cuda", "cpu", "cpu"])
    assert (error.value.code, error.value.rank) == (78, 0)
    assert_names(error.value, "rank 2", "rank 0", "--device")
    check_same_devices(["cpu", "cpu"])
    check_same_devices(["cuda"])
