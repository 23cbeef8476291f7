"""The flags of launch and render: their names, variables and help."""

from pathlib import Path
from typing import Annotated

import typer

Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        "-n",
        envvar="DDPCTL_NODES",
        metavar="N|MIN:MAX",
        help="Nodes; MIN:MAX starts with fewer if not all come.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        "-g",
        envvar="DDPCTL_GPUS",
        metavar="G",
        help="Ranks a node, one GPU each; CPU processes without GPUs.",
    ),
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        envvar="DDPCTL_TARGET",
        metavar="T",
        help="Where to run: a target of the file, or a kind: local, ssh, slurm, kubernetes, kaggle.",
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file", "-f", envvar="DDPCTL_FILE", help="The configuration [default: ./ddpctl.yaml if it is there]."
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", "-p", envvar="DDPCTL_PROFILE", metavar="P", help="A profile of the file, laid over its job."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        envvar="DDPCTL_DEVICE",
        metavar="auto|cuda|cpu",
        help="cuda insists on GPUs; auto takes CPUs without.",
    ),
]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="A variable for every rank; may be repeated.")
]
Name = Annotated[
    str | None, typer.Option("--name", metavar="RUN", help="The run's name [default: the job's name and a word].")
]
Port = Annotated[
    str | None,
    typer.Option(
        "--port", envvar="DDPCTL_PORT", metavar="P", help="The rendezvous port on node 0 [default: a free one]."
    ),
]
Image = Annotated[
    str | None,
    typer.Option("--image", envvar="DDPCTL_IMAGE", metavar="REF", help="The container image of every node."),
]
Workload = Annotated[
    str | None,
    typer.Option(
        "--kind",
        envvar="DDPCTL_KIND",
        metavar="auto|pytorchjob|trainjob|job",
        help="What runs it on Kubernetes; auto: what the cluster serves.",
    ),
]
Array = Annotated[
    str | None,
    typer.Option(
        "--array", envvar="DDPCTL_ARRAY", metavar="0-3%2", help="On Slurm: the same job several times, as an array."
    ),
]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="RUN", help="Launch that run's job again, from its last checkpoint."),
]
Program = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- SCRIPT ARGS...]",
        help="Your script (or -m module) and its arguments, as for torchrun. Without a script our own trainer runs, "
        "ddptrain, and gets what stands here: ddpctl launch -- --epochs 3; ddptrain --help lists its options.",
        show_default=False,
    ),
]
