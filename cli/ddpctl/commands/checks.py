"""``ddpctl bench``: checks of a target, which run there as jobs (ddpcheck)."""

import json
import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddpctl.commands.arguments import Json
from ddpctl.commands.launch import File, Flags, request_of_flags
from ddpctl.errors import UsageError

if TYPE_CHECKING:
    from ddpctl.launcher import Request

Target = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", metavar="T", help="Where to run, as for launch: a target of the file, or a kind of target."
    ),
]
Nodes = Annotated[str | None, typer.Option("--nodes", "-n", metavar="N", help="Nodes [default: the file's].")]
Gpus = Annotated[str | None, typer.Option("--gpus", "-g", metavar="G", help="GPUs, or CPU ranks, a node.")]
SIZE = re.compile(r"([1-9][0-9]{0,5})([KMG]?)i?B?", re.IGNORECASE)


def bench(
    target: Target = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    file: File = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", metavar="64K,16M", help="Bytes a collective moves [default: as the backend suits]."),
    ] = None,
    as_json: Json = False,
    show: Annotated[
        bool, typer.Option("--show", help="Draw what each collective does with the data of four ranks; run nothing.")
    ] = False,
) -> None:
    """Measure the collectives and the links of a target.

    Exits with 69 if a result is wrong or a link or node is slow.
    """
    options = ("--sizes", ",".join(map(str, read_sizes(sizes)))) if sizes else ()
    request = request_of_flags(
        Flags(target=target, nodes=nodes, gpus=gpus, file=file, program=["-m", "ddpcheck", "bench", *options])
    )
    result = run(request, as_json=as_json)
    raise typer.Exit(result["code"])


def read_sizes(text: str) -> list[int]:
    """``64K,16M`` in bytes, in ascending order. Raises UsageError."""
    found = []
    for word in text.split(","):
        match = SIZE.fullmatch(word.strip())
        if not match or (size := int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]) > 1 << 36:
            raise UsageError(f"--sizes: {word!r} is no size: whole numbers with K, M or G, up to 64G, such as 64K,16M")
        found.append(size)
    return sorted({*found})


def run(request: "Request", *, as_json: bool) -> dict[str, Any]:
    """Run a check on its target, print what it says or its JSON, and return its result.

    Exits with the run's code where it comes to no result. Keeps the result for the next check.
    """
    from ddpctl import check_job, launcher
    from ddpctl.commands.formatting import closing_lines

    context = launcher.open_context(os.environ)
    before = check_job.last_result(context, request)
    check = check_job.run_check(context, request, show=(lambda _: None) if as_json else print)
    if check.result is None:
        for line in closing_lines(check.run, check.state, can_resume=False, code=check.code):
            context.emit(line)
        raise typer.Exit(check.code or 70)
    check_job.keep_result(context, request, check.result)
    result = check.result | ({"last": before} if before else {})
    if as_json:
        print(json.dumps(result, indent=1))
    return result
