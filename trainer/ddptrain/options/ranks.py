"""How the ranks meet, and how gradients travel between them."""

from dataclasses import dataclass

from ddptrain.options.field import option, real, whole


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The world. ddprun and torchrun say a rank's place in its environment: then nothing of it is needed here."""

    rank: int | None = option("this process's, where no launcher says it", type=whole(0), default=None, metavar="N")
    world_size: int | None = option("ranks, where no launcher says it", type=whole(1), default=None, metavar="N")
    init_method: str = option(
        "where the ranks meet: env:// (MASTER_ADDR and MASTER_PORT), tcp://HOST:PORT, file:///PATH of a new file that "
        "all ranks see",
        default="env://",
        metavar="URL",
    )
    spawn: int = option(
        "start so many ranks on this machine, with torch.multiprocessing", type=whole(1, 1024), default=1, metavar="N"
    )
    timeout_s: int = option(
        "longest wait for the other ranks: to come, to download data, to answer",
        flag="--timeout",
        type=whole(1, 100_000_000),
        default=300,
        metavar="SECONDS",
    )
    strategy: str = option(
        "ddp: DistributedDataParallel; dp: DataParallel, one process for all GPUs, to compare with; single: one device",
        choices=("ddp", "dp", "single"),
        default="ddp",
    )
    backend: str = option(
        "carries the gradients; auto: nccl on GPUs, gloo on CPUs",
        choices=("auto", "nccl", "gloo", "mpi"),
        default="auto",
    )
    sync_bn: bool = option("batch norms over all ranks' images (GPUs only)", shapes=True, default=False)
    compress: str = option("what gradients travel as", choices=("none", "bf16", "fp16"), default="none", shapes=True)
    bucket_mb: float = option("gradients that travel together", type=real(0.01), default=25.0, metavar="MB")
    bucket_view: bool = option("gradients are views of the buckets: a copy less", default=True)
    static_graph: bool = option("promise DDP that every step uses the same parameters in the same order", default=False)
