"""ddprun's command line, with torchrun's option names. node_config.py checks the values."""

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

# Each option: its names, the placeholder of its value (a switch has none), and its help.
OPTIONS = {
    "--nnodes N|MIN:MAX": "nodes of the job (default 1)",
    "--nproc-per-node N|auto|gpu|cpu": "ranks on this node (default 1)",
    "--node-rank K": "number of this node, from 0",
    "--spares N": "additional machines that wait to take the place of a lost node; their numbers follow those of the "
    "nodes (default 0)",
    "--master-addr HOST": "address of node 0, as the other nodes reach it",
    "--master-port PORT": "a free port of node 0",
    "--rdzv-endpoint HOST[:PORT]": "--master-addr and --master-port in one option, as in torchrun",
    "--rdzv-backend c10d|static": "static (default): each node needs --node-rank; c10d: without --node-rank, the node "
    "with the address HOST is node 0, the others are numbered in the order in which they join, and the default PORT is "
    "29400",
    "--rdzv-id --run-id ID": "the run's id, the same on every node",
    "--rdzv-conf KEY=VALUE,...": "only is_host and join_timeout have an effect",
    "--standalone": "a single node on a free port",
    "--local-addr ADDRESS": "this node's address (default: that of the interface that reaches node 0)",
    "--max-restarts N": "as in torchrun: restart all ranks at most N times after any failure, including errors of the "
    "script (but never after exit codes 65, 66 and 78)",
    "--restart-limit N": "without --max-restarts: restart at most N times, only after a rank was killed or hung, or a "
    "node was lost; PET_MAX_RESTARTS and a job's max_restarts set this limit (default: no limit, but three attempts in "
    "a row without progress end the run; 0: no restart)",
    "--hang-timeout S": "seconds without a heartbeat of any rank after which the rank that blocks the others is "
    "killed; 0: never (default 300; 0 for a single rank that reads a terminal and with --debug-rank). Applies after "
    "the script's first heartbeat, or if a rank is stopped",
    "--debug-rank K": "connect this rank to ddprun's stdin and show its output unbuffered, for breakpoint() with "
    "several ranks (a single rank needs no flag); hangs are not detected unless --hang-timeout is given",
    "--local-ranks-filter K,...": "local ranks whose output the console shows (default: all); the logs contain the "
    "output of every rank",
    "-r --redirects SPEC": "3, or 0:3,1:0: local ranks whose output the console does not show, unless --tee names them "
    "too; 1 and 2 (one stream) have no effect",
    "--no-prefix": "do not print the node and rank before each line of a rank on the console",
    "--run-dir --log-dir DIR": "folder for logs and the outcome (default: a temporary folder)",
    "--grace --shutdown-timeout S": "seconds that ranks have to save after SIGTERM (default 30)",
    "--stop-signal TERM|USR1|USR2": "the signal that asks ranks to save and end, before a deadline and after a SIGTERM "
    "to ddprun (default TERM)",
    "--node-setup COMMAND": "a shell command to run on this node before its ranks start, once and not at a restart; "
    "may be repeated",
    "--node-teardown COMMAND": "a shell command to run on this node after its ranks have ended, whether they failed or "
    "not; may be repeated",
    "--notify COMMAND": "a shell command, or $NAME: the variable NAME holds an address for the library apprise; node 0 "
    "runs it, or sends a notice to it, when the run ends or its ranks start again; may be repeated",
    "--notify-on EVENT,...": "the events to tell: succeeded, failed, restarted, hang, preempted, lost_node (default: "
    "all)",
    "--setup-timeout S": "seconds for all of --node-setup (default 1800)",
    "--teardown-timeout S": "seconds for all of --node-teardown (default 60)",
    "--deadline S|TIME": "seconds from the start, or an ISO time; the ranks save and stop before it",
    "--checkpoint-copies N": "number of nodes that keep the checkpoints; all but node 0 copy its DDP_CHECKPOINT_DIR "
    "(default 1)",
    "--resumes RUN": "the run whose checkpoints are in DDP_CHECKPOINT_DIR: node 0 logs a line if there are none",
    "--join-timeout S": "seconds to wait for the other nodes (default 30 on one machine, 300 in Slurm, 600 in "
    "Kubernetes, 1200 in one of its Jobs, else 60)",
    "--numa-binding MODE": "bind each rank to cores near its GPU: node, socket, exclusive or core-complex as in "
    "torchrun, or none (default: node, if there are several NUMA nodes and either one GPU per rank or a single rank)",
    "--pushgateway URL": "a Prometheus Pushgateway to which node 0 sends the outcome (default: DDP_PUSHGATEWAY)",
    "--check-only": "only run the preflight checks with all nodes, print the result, and exit",
    "--role NAME": "ROLE_NAME of the ranks; ROLE_RANK counts the ranks of a role (default 'default')",
    "--virtual-local-rank": "each rank has LOCAL_RANK=0 and sees only its own GPU (CUDA_VISIBLE_DEVICES)",
    "--exec": "start each rank as a new process, instead of forking it from a process that has imported torch",
    "--run-path": "run the script with runpy.run_path, as torchrun does",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. It leaves all values as strings."""
    formatter = argparse.RawDescriptionHelpFormatter
    top = Parser(prog="ddprun", description=DESCRIPTION, formatter_class=formatter, allow_abbrev=False)
    compatible = {
        f"{'-t ' * (name == 'tee')}--{name.replace('_', '-')} X": f"accepted for compatibility with torchrun: {reason}"
        for name, reason in ACCEPTED.items()
    }
    for usage, text in (OPTIONS | compatible).items():
        parts = usage.split()
        names = [word for word in parts if word.startswith("-")]
        value = {"metavar": parts[-1]} if parts[-1] not in names else {"action": "store_true"}
        value |= {"action": "append"} if parts[-1] == "COMMAND" else {}
        names += [f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:]]  # torchrun takes both
        top.add_argument(*names, help=text, **value)  # type: ignore[arg-type]
    kind = top.add_mutually_exclusive_group()
    kind.add_argument("-m", "--module", action="store_true", help="the script is a module, as for `python -m`")
    kind.add_argument("--no-python", "--no_python", action="store_true", help="the script is an executable program")
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
    """Return a line for each given flag or variable of torchrun that has no effect in ddprun."""
    flags = [name for name in ACCEPTED if getattr(options, name) is not None]
    lines = {f"--{name.replace('_', '-')}": ACCEPTED[name] for name in flags}
    if options.rdzv_backend not in (None, "static", "c10d"):
        lines["this value of --rdzv-backend"] = "the nodes meet at node 0, as with --rdzv-backend=static"
    if any(streams[-1:] in ("1", "2") for streams in (options.redirects or "").split(",")):
        lines["the value 1 or 2 of --redirects"] = "only 3 (both streams) is supported"
    lines |= {name: reason for name, reason in ACCEPTED_VARIABLES.items() if environ.get(name)}
    return tuple(f"{name} has no effect: {reason}" for name, reason in lines.items())
