"""ddprun's command line, under torchrun's names. Values are checked in the contract, where their source is known."""

import argparse
from collections.abc import Sequence

DESCRIPTION = """\
Bring up one node's ranks of a torch.distributed job, watch them, and leave nothing behind.
It stands where torchrun stood: `ddprun --nproc-per-node 2 train.py --epochs 3`. What is not given here is read
from PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and so on, and is one node without any of them."""


def parser() -> argparse.ArgumentParser:
    """The parser. Values stay the strings they were given as."""
    top = argparse.ArgumentParser(
        prog="ddprun", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(name: str, *aliases: str, **rest: object) -> None:
        names = [name, *aliases]
        names += [f"--{n[2:].replace('-', '_')}" for n in names if "-" in n[2:]]  # torchrun takes both
        top.add_argument(*names, **rest)  # type: ignore[arg-type]

    add("--nnodes", metavar="N|MIN:MAX", help="nodes of the job (default 1)")
    add("--nproc-per-node", metavar="N|auto|gpu|cpu", help="ranks on this node (default 1)")
    add("--node-rank", metavar="K", help="which node this is, from 0")
    add("--master-addr", metavar="HOST", help="address of node 0, as the other nodes reach it")
    add("--master-port", metavar="PORT", help="a free port of node 0")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="torchrun's other way to give both")
    add("--rdzv-backend", choices=("static", "c10d"), help="accepted for torchrun's sake; ddprun has one way to meet")
    add("--rdzv-id", "--run-id", dest="run_id", metavar="ID", help="the run's id, the same on every node")
    add("--standalone", action="store_true", help="one node, on a port of its own")
    add(
        "--max-restarts",
        metavar="N",
        help="starts of all ranks after one was killed or a node lost (default: while there is progress; 0: never)",
    )
    add(
        "--hang-timeout",
        metavar="S",
        help="seconds without a heartbeat of any rank after which the one that holds the others up is killed "
        "(default 300; only once the script has beaten, or a rank is stopped; 0: never)",
    )
    add("--run-dir", metavar="DIR", help="folder for logs and outcome (default: a temporary one)")
    add("--grace", metavar="S", help="seconds that ranks get to save after SIGTERM (default 30)")
    add("--join-timeout", metavar="S", help="seconds to wait for the other nodes (default 30 on one machine, else 300)")
    what = top.add_mutually_exclusive_group()
    what.add_argument("-m", "--module", action="store_true", help="the script is a module, as for `python -m`")
    what.add_argument("--no-python", "--no_python", action="store_true", help="the script is a program of its own")
    top.add_argument("script", help="the training script")
    top.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options in ``argv``. Ends with usage and exit code 2 as argparse does."""
    return parser().parse_args(argv)
