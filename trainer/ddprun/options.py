"""ddprun's command line, with torchrun's option names. node_config.py checks the values and knows their sources."""

import argparse
from collections.abc import Mapping, Sequence

from ddpwire.commandline import Parser

DESCRIPTION = """\
Bring up one node's ranks of a torch.distributed job, watch them, and leave nothing behind.
It stands where torchrun stood: `ddprun --nproc-per-node 2 train.py --epochs 3`. What is not given here is read
from PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and so on, from Slurm or Kubernetes, and is one node without them."""

# torchrun's flags that are accepted and change nothing, each with the reason.
ACCEPTED = {
    "monitor_interval": "the end of a rank is noticed at once",
    "start_method": "ddprun chooses how the ranks are started",
    "event_log_handler": "what happens stands in node.log and outcome.json",
    "tee": "the output of each rank goes to the console and to its own log",
    "duplicate_stdout_filters": "the log of each rank has all of its lines",
    "duplicate_stderr_filters": "the log of each rank has all of its lines",
    "logs_specs": "ddprun writes its own logs, and loads no plug-in for logs",
    "log_line_prefix_template": "a line begins with its node and rank",
    "signals_to_handle": "all signals that ask for a stop are handed on to the ranks",
}

# The variables of torchrun's agent that ddprun does not use.
ACCEPTED_VARIABLES = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": "a hanging rank is found by its heartbeat (see --hang-timeout)",
    "TORCHELASTIC_HEALTH_CHECK_PORT": "python -m ddprun.healthcheck is this node's health check",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ACCEPTED["log_line_prefix_template"],
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. It leaves all values as strings."""
    top = Parser(
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
    add("--rdzv-endpoint", metavar="HOST[:PORT]", help="torchrun's other way to give both")
    add(
        "--rdzv-backend",
        metavar="c10d|static",
        help="c10d: without --node-rank the node whose address is HOST is node 0 and the others are numbered as they "
        "come, PORT is 29400 by default; static (default): each node is given its --node-rank",
    )
    add("--rdzv-id", "--run-id", dest="rdzv_id", metavar="ID", help="the run's id, the same on every node")
    add("--rdzv-conf", metavar="KEY=VALUE,...", help="of torchrun's, is_host and join_timeout are used")
    add("--standalone", action="store_const", const="1", help="one node, on a port of its own")
    add(
        "--local-addr",
        metavar="ADDRESS",
        help="this node's own address (default: the one from which node 0 is reached)",
    )
    add(
        "--max-restarts",
        metavar="N",
        help="as torchrun's: at most N restarts of all ranks after any failure, also an error of the script "
        "(never after its exit codes 65, 66 and 78)",
    )
    add(
        "--restart-limit",
        metavar="N",
        help="without --max-restarts: at most N restarts, only after a rank was killed or hung, or a node was lost; "
        "PET_MAX_RESTARTS and a job's max_restarts are this limit (default: none, but three attempts in a row "
        "without progress end the run; 0: no restart)",
    )
    add(
        "--hang-timeout",
        metavar="S",
        help="seconds without a heartbeat of any rank after which the one that holds the others up is killed "
        "(default 300; 0, never, for a single rank that reads a terminal, and with --debug-rank; only once the script "
        "has beaten, or a rank is stopped)",
    )
    add(
        "--debug-rank",
        metavar="K",
        help="the rank that gets ddprun's stdin and whose output is shown as it comes: for breakpoint() with several "
        "ranks, where a single one needs no flag; without --hang-timeout no rank is taken for hung",
    )
    add(
        "--local-ranks-filter",
        metavar="K,...",
        help="local ranks whose output the console shows (default: all); the logs have every rank's",
    )
    add(
        "-r",
        "--redirects",
        metavar="SPEC",
        help="3, or 0:3,1:0: local ranks of which the console shows nothing, unless --tee names them too; 1 and 2, one "
        "stream alone, change nothing",
    )
    add("--no-prefix", action="store_true", help="lines of ranks on the console do not begin with their node and rank")
    add(
        "--run-dir",
        "--log-dir",
        dest="run_dir",
        metavar="DIR",
        help="folder for logs and outcome (default: a temporary one)",
    )
    add(
        "--grace",
        "--shutdown-timeout",
        dest="grace",
        metavar="S",
        help="seconds that ranks get to save after SIGTERM (default 30)",
    )
    add(
        "--checkpoint-copies",
        metavar="N",
        help="how many nodes have the checkpoints: node 0, and others that copy its DDP_CHECKPOINT_DIR (default 1)",
    )
    add("--deadline", metavar="S|TIME", help="seconds from the start, or an ISO time: the ranks save in time before it")
    add(
        "--join-timeout",
        metavar="S",
        help="seconds to wait for the others (default 30 on one machine, 300 in Slurm, 600 in Kubernetes, else 60)",
    )
    add(
        "--numa-binding",
        metavar="MODE",
        help="bind each rank to cores near its GPU: node, socket, exclusive or core-complex as in torchrun, or none "
        "(default: node, where there are several NUMA nodes, and a GPU for each rank or a single rank)",
    )
    add(
        "--pushgateway",
        metavar="URL",
        help="a Prometheus Pushgateway that node 0 tells how the run ended (default: DDP_PUSHGATEWAY)",
    )
    add(
        "--check-only", action="store_true", help="meet the other nodes, say what is wrong or that nothing is, and stop"
    )
    for name, why in ACCEPTED.items():
        add(
            *(["-t"] if name == "tee" else []),
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar="X",
            help=f"accepted for compatibility with torchrun: {why}",
        )
    add(
        "--role",
        metavar="NAME",
        help="the ranks' ROLE_NAME; ROLE_RANK counts those of the same role (default 'default')",
    )
    add(
        "--virtual-local-rank",
        action="store_true",
        help="each rank has LOCAL_RANK=0, and sees its own GPU alone (CUDA_VISIBLE_DEVICES)",
    )
    add("--exec", action="store_true", help="execute each rank, instead of forking it from a process that has torch")
    what = top.add_mutually_exclusive_group()
    what.add_argument("-m", "--module", action="store_true", help="the script is a module, as for `python -m`")
    what.add_argument("--no-python", "--no_python", action="store_true", help="the script is a program of its own")
    add("--run-path", action="store_true", help="run the script with runpy.run_path, as torchrun does")
    top.add_argument("script", help="the training script")
    rest = top.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    rest.required = False  # otherwise an error message lists it as missing
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse ``argv``. On an error, print a line and exit with code 2."""
    if "--check-only" not in argv and "--check_only" not in argv:
        options = parser().parse_args(argv)
        if not options.script:
            parser().error("the script's name is empty")
        return options
    options = parser().parse_args([*argv, ""])  # the script may be omitted: then it is empty
    if options.script_args:
        options.script_args.pop()
    return options


def accepted(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each given flag or variable that torch elastic's agent uses but that has no effect here."""
    given = {name: why for name, why in ACCEPTED.items() if getattr(options, name) is not None}
    if options.rdzv_backend not in (None, "static", "c10d"):
        given["rdzv_backend"] = "the nodes meet at node 0, as with static"
    if any(one[-1:] in ("1", "2") for one in (options.redirects or "").split(",")):
        given["redirects"] = "only the value 3 (both streams) keeps a rank's output off the console"
    lines = {f"--{name.replace('_', '-')}": why for name, why in given.items()}
    lines |= {name: why for name, why in ACCEPTED_VARIABLES.items() if environ.get(name)}
    return tuple(f"{name} has no effect: {why}" for name, why in lines.items())
