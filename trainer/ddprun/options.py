"""ddprun's command line, with torchrun's option names. node_config.py checks the values and knows their sources."""

import argparse
from collections.abc import Mapping, Sequence

from ddpwire.commandline import Parser

DESCRIPTION = """\
Start one node's ranks of a torch.distributed job, watch them, and end every process that they leave.
Use it in place of torchrun: `ddprun --nproc-per-node 2 train.py --epochs 3`. Options that are not given are read
from the variables PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and so on, or from Slurm or Kubernetes; otherwise the
job has one node."""

# torchrun's flags that are accepted and change nothing, each with the reason.
ACCEPTED = {
    "monitor_interval": "the end of a rank is noticed at once",
    "start_method": "ddprun chooses how the ranks are started",
    "event_log_handler": "node.log and outcome.json record what happens",
    "tee": "the output of each rank goes to the console and to its own log",
    "duplicate_stdout_filters": "the log of each rank has all of its lines",
    "duplicate_stderr_filters": "the log of each rank has all of its lines",
    "logs_specs": "ddprun writes its own logs, and loads no plug-in for logs",
    "log_line_prefix_template": "each line begins with its node and rank",
    "signals_to_handle": "all signals that request a stop are forwarded to the ranks",
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
    add("--node-rank", metavar="K", help="number of this node, from 0")
    add("--master-addr", metavar="HOST", help="address of node 0, as the other nodes reach it")
    add("--master-port", metavar="PORT", help="a free port of node 0")
    add("--rdzv-endpoint", metavar="HOST[:PORT]", help="--master-addr and --master-port in one option, as in torchrun")
    add(
        "--rdzv-backend",
        metavar="c10d|static",
        help="static (default): each node needs --node-rank; c10d: without --node-rank, the node with the address "
        "HOST is node 0, the others are numbered in the order in which they join, and the default PORT is "
        "29400",
    )
    add("--rdzv-id", "--run-id", dest="rdzv_id", metavar="ID", help="the run's id, the same on every node")
    add("--rdzv-conf", metavar="KEY=VALUE,...", help="only is_host and join_timeout have an effect")
    add("--standalone", action="store_const", const="1", help="a single node on a free port")
    add(
        "--local-addr",
        metavar="ADDRESS",
        help="this node's address (default: that of the interface that reaches node 0)",
    )
    add(
        "--max-restarts",
        metavar="N",
        help="as in torchrun: restart all ranks at most N times after any failure, including errors of the script "
        "(but never after exit codes 65, 66 and 78)",
    )
    add(
        "--restart-limit",
        metavar="N",
        help="without --max-restarts: restart at most N times, only after a rank was killed or hung, or a node was "
        "lost; PET_MAX_RESTARTS and a job's max_restarts set this limit (default: no limit, but three "
        "attempts in a row without progress end the run; 0: no restart)",
    )
    add(
        "--hang-timeout",
        metavar="S",
        help="seconds without a heartbeat of any rank after which the rank that blocks the others is killed; 0: "
        "never (default 300; 0 for a single rank that reads a terminal and with --debug-rank). Applies after "
        "the script's first heartbeat, or if a rank is stopped",
    )
    add(
        "--debug-rank",
        metavar="K",
        help="connect this rank to ddprun's stdin and show its output unbuffered, for breakpoint() with several "
        "ranks (a single rank needs no flag); hangs are not detected unless --hang-timeout is given",
    )
    add(
        "--local-ranks-filter",
        metavar="K,...",
        help="local ranks whose output the console shows (default: all); the logs contain the output of every rank",
    )
    add(
        "-r",
        "--redirects",
        metavar="SPEC",
        help="3, or 0:3,1:0: local ranks whose output the console does not show, unless --tee names them too; 1 "
        "and 2 (one stream) have no effect",
    )
    add(
        "--no-prefix",
        action="store_true",
        help="do not print the node and rank before each line of a rank on the console",
    )
    add(
        "--run-dir",
        "--log-dir",
        dest="run_dir",
        metavar="DIR",
        help="folder for logs and the outcome (default: a temporary folder)",
    )
    add(
        "--grace",
        "--shutdown-timeout",
        dest="grace",
        metavar="S",
        help="seconds that ranks have to save after SIGTERM (default 30)",
    )
    add(
        "--deadline", metavar="S|TIME", help="seconds from the start, or an ISO time; the ranks save and stop before it"
    )
    add(
        "--checkpoint-copies",
        metavar="N",
        help="number of nodes that keep the checkpoints; all but node 0 copy its DDP_CHECKPOINT_DIR (default 1)",
    )
    add(
        "--join-timeout",
        metavar="S",
        help="seconds to wait for the other nodes (default 30 on one machine, 300 in Slurm, 600 in Kubernetes, "
        "else 60)",
    )
    add(
        "--numa-binding",
        metavar="MODE",
        help="bind each rank to cores near its GPU: node, socket, exclusive or core-complex as in torchrun, or "
        "none (default: node, if there are several NUMA nodes and either one GPU per rank or a single rank)",
    )
    add(
        "--pushgateway",
        metavar="URL",
        help="a Prometheus Pushgateway to which node 0 sends the outcome (default: DDP_PUSHGATEWAY)",
    )
    add(
        "--check-only",
        action="store_true",
        help="only run the preflight checks with all nodes, print the result, and exit",
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
        help="ROLE_NAME of the ranks; ROLE_RANK counts the ranks of a role (default 'default')",
    )
    add(
        "--virtual-local-rank",
        action="store_true",
        help="each rank has LOCAL_RANK=0 and sees only its own GPU (CUDA_VISIBLE_DEVICES)",
    )
    add(
        "--exec",
        action="store_true",
        help="start each rank as a new process, instead of forking it from a process that has imported torch",
    )
    what = top.add_mutually_exclusive_group()
    what.add_argument("-m", "--module", action="store_true", help="the script is a module, as for `python -m`")
    what.add_argument("--no-python", "--no_python", action="store_true", help="the script is an executable program")
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
