"""What the hosts' answers make of a run's state. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from ddpctl.command import Output
from ddpctl.run import NodeReport, Run, RunStatus, fold, report_of
from ddpctl.targets.ssh.options import SshHost
from ddpctl.targets.ssh.preflight import report

YOUNG_S = 600.0  # how long a launch may take from its record to its last container (a project is sent)


def status_of(run: Run, answers: Sequence[tuple[SshHost, Output]], now: float) -> RunStatus:
    """One run's status; a host that does not answer counts as a node of which nothing is known."""
    shown = [report(output) for _, output in answers]
    silent = [
        f"{host.address} (node {node}) does not answer: {last_line(output, f'exit code {output.returncode}')}"
        for node, ((host, output), said) in enumerate(zip(answers, shown, strict=True))
        if said is None
    ]
    nodes = tuple(
        report_of(node, said) if said else NodeReport(node=node, alive=False, state=None, outcome=None)
        for node, said in enumerate(shown)
    )
    state = fold(run.name, nodes, young=not run.handle and now - run.created < YOUNG_S)
    if not silent:
        return state
    if len(silent) == len(answers) or not (state.alive or state.outcome):
        return RunStatus(run=run.name, state="unknown", message="; ".join(silent), nodes=nodes)
    return replace(state, message="; ".join([state.message, *silent]))


def last_line(output: Output, otherwise: str) -> str:
    """What a command said last on stderr."""
    lines = output.stderr.strip().splitlines()
    return lines[-1] if lines else otherwise
