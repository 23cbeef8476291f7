"""RPC: rank 0 has the weights. Each other rank computes a gradient, and sends it to rank 0 as soon as it is ready.

ddprun --nproc-per-node 3 examples/rpc.py

This is a parameter server. No rank waits for another's gradient, so the steps are asynchronous. torch's RPC framework
uses TensorPipe, which needs its own ports between the nodes.
"""

import os
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

STEPS, SERVER = 30, "rank-0"
_lock = threading.Lock()
_weights = torch.zeros(20, 1)
_received: list[int] = []  # the worker of each gradient


def read_weights() -> torch.Tensor:
    """Run on the server, called by a worker."""
    with _lock:
        return _weights.clone()


def add_gradient(worker: int, gradient: torch.Tensor) -> None:
    """Run on the server, called by a worker."""
    with _lock:
        _weights.sub_(0.02 * gradient)
        _received.append(worker)


def work(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        weights = rpc.rpc_sync(SERVER, read_weights).requires_grad_()
        inputs = torch.randn(32, 20, generator=generator)
        loss = nn.functional.mse_loss(inputs @ weights, inputs.sum(1, keepdim=True))
        loss.backward()
        rpc.rpc_sync(SERVER, add_gradient, (rank, weights.grad))
    print(f"rank {rank}: {STEPS} gradients sent, loss {loss.item():.4f}", flush=True)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=size)
    if rank:
        work(rank)
    rpc.shutdown()  # waits for all ranks
    if rank == 0:
        error = (_weights - 1).abs().max().item()
        print(f"rank 0: {len(_received)} gradients of {len(set(_received))} ranks, error {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
