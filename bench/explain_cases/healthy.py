"""Healthy scripts in which steps are slow or ranks differ. ``ddpctl explain`` must report none of their ranks."""

import os
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from explain_cases.cases import AT_FAULT, FOR_EVER_S, RANK, Items, go_on, join, reduce, train, train_ddp
from torch import nn
from torch.utils.data import DataLoader


def healthy_fast() -> None:
    go_on(lambda _: 0.005)


def healthy_slow_steps() -> None:
    go_on(lambda _: 3.0)


def healthy_random() -> None:
    import random

    go_on(lambda _: random.uniform(0.01, 0.2))  # noqa: S311


def healthy_by_turns() -> None:
    go_on(lambda step: 0.2 if step % 4 == RANK else 0.02)


def healthy_slightly_uneven() -> None:
    go_on(lambda _: 0.11 if RANK == AT_FAULT else 0.1)


def healthy_evaluation() -> None:
    go_on(lambda step: 8.0 if RANK == 0 and step > 10 else 0.05)


def healthy_long_evaluation() -> None:
    """Rank 0 alone evaluates for 105 s, while the others wait in a collective."""
    join()
    model = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    while True:
        end = time.monotonic() + 105
        while RANK == 0 and time.monotonic() < end:
            for batch in DataLoader(Items(lambda _: time.sleep(0.001)), batch_size=32):
                with torch.no_grad():
                    classes = model(batch.sum().expand(32, 200)).argmax(1)
                if (classes == 3).sum() < 0 or time.monotonic() > end:
                    break
        reduce(times=20)


def healthy_checkpoint() -> None:
    join()
    for _ in range(100_000):
        if RANK == 0:
            for _ in range(50):
                torch.save(torch.ones(1_000_000), f"{tempfile.gettempdir()}/explain-{os.getpid()}.pt")
        reduce(times=3)


def healthy_ddp() -> None:
    train_ddp(lambda _: True, lambda: time.sleep(0.02))


def healthy_slow_start() -> None:
    dist.init_process_group("gloo")
    if RANK == 0:
        time.sleep(12)
    go_on_without_join()


def healthy_late_join() -> None:
    if RANK == 0:
        time.sleep(25)
    join()
    reduce(times=100_000)


def go_on_without_join() -> None:
    reduce(times=100_000)


def healthy_two_groups() -> None:
    join()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(100_000):
        dist.all_reduce(torch.ones(3), group=pairs[RANK // 2])
        reduce()


def healthy_broadcasts() -> None:
    join()
    for _ in range(100_000):
        time.sleep(0.02)
        dist.broadcast_object_list([{"step": 1}] if RANK == 0 else [None], 0)
        dist.all_gather_object([None] * 4, "x" * (1 + 100 * RANK))


def healthy_loader() -> None:
    train(lambda _: time.sleep(0.01), workers=2)


def healthy_without_a_group() -> None:
    time.sleep(FOR_EVER_S)


def healthy_spins() -> None:
    join()
    for _ in range(100_000):
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        reduce()


def healthy_async() -> None:
    join()
    for _ in range(100_000):
        works = [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(5)]
        time.sleep(0.05)
        for work in works:
            work.wait()


def healthy_logging_rank() -> None:
    go_on(lambda step: 1.5 if RANK == 0 and step % 50 == 0 else 0.02)


def healthy_first_step() -> None:
    go_on(lambda step: 10.0 if RANK == 0 and step == 0 else 0.02)


def healthy_ends() -> None:
    join()


def healthy_threads() -> None:
    for _ in range(10):
        threading.Thread(target=time.sleep, args=(FOR_EVER_S,), daemon=True).start()
    go_on(lambda _: 0.05)


def healthy_gather() -> None:
    join()
    for _ in range(100_000):
        time.sleep(0.02)
        dist.gather(torch.ones(3), [torch.ones(3) for _ in range(4)] if RANK == 0 else None)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
