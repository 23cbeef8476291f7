"""The verbs of the target ssh: look at all hosts, start a node on each, ask, follow, stop. Yields commands only."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpctl import footprint
from ddpctl.command import Command, Host, Output, Verb
from ddpctl.containers import container_name
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError, UsageError
from ddpctl.footprint import Footprint
from ddpctl.look import TIMEOUT_S, Look, Seen, read, script
from ddpctl.plan import Plan, counted, script_of
from ddpctl.run import Run, RunStatus
from ddpctl.secrets import read_secrets
from ddpctl.targets import LogQuery, Submission
from ddpctl.targets.ssh import preflight, scripts, start
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.project import sync
from ddpctl.targets.ssh.rehearsal import assume
from ddpctl.targets.ssh.states import last_line, status_of
from ddpwire.exits import Exit
from ddpwire.outcome import Outcome

STOP_MARGIN_S = 5.0  # what a ddprun may take beyond its ranks' grace
KILL_WAIT_S = 5.0
LOOK_S = 45.0
START_S = 120.0
UNREACHED = 255
_KILLED = Outcome(code=Exit.KILLED, cause="stopped", message="killed on request, without saving", retry=True)


class SshTarget:
    """Nodes on machines that SSH reaches."""

    def __init__(self, options: SshOptions) -> None:
        self.options = options

    def render(self, plan: Plan) -> str:
        """There is none: what is run depends on what the hosts answer. Raises UsageError."""
        raise UsageError(
            f"render: {plan.run} would run on SSH hosts, and what is run there depends on what they have: "
            "ddpctl launch --dry-run asks them and prints it"
        )

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:  # noqa: ARG002 -- it never ends with ddpctl
        """Look at every host, and when all are ready start one node on each."""
        try:
            hosts = self._hosts(plan)
            secrets = yield from read_secrets(plan.job)
            facts = yield from self._look(plan, hosts)
            found = preflight.check(self.options, plan.job, hosts, facts, script_of(plan.job.command))
        except DdpctlError as error:
            error.nothing_started = True
            raise
        return (yield from self._start(plan, hosts, facts, found, secrets))

    def rehearse(self, plan: Plan) -> Verb[Submission]:
        """The same; of hosts that are not ready with ``<words>`` for what is not known, and the refusal at the end."""
        hosts = self._hosts(plan)
        secrets = yield from read_secrets(plan.job)
        facts = yield from self._look(plan, hosts)
        script = script_of(plan.job.command)
        try:
            found = preflight.check(self.options, plan.job, hosts, facts, script)
        except DdpctlError as error:
            assumed = assume(self.options, plan.job, facts)
            cuda = plan.job.device != "cpu" and any(fact.failure or fact.gpus for fact in facts)
            yield from self._start(plan, hosts, assumed, (cuda or plan.job.device == "cuda", (), ()), secrets)
            raise error.__class__(str(error).removeprefix(preflight.NOTHING)) from None
        return (yield from self._start(plan, hosts, facts, found, secrets))

    def _start(
        self,
        plan: Plan,
        hosts: Sequence[SshHost],
        facts: Sequence[preflight.Facts],
        found: preflight.Found,
        secrets: Mapping[str, str],
    ) -> Verb[Submission]:
        """Start one node on each host."""
        options, job = self.options, plan.job
        cuda, rows, warnings = found
        if options.project == "sync":
            yield from sync([host.host for host in hosts], cwd=plan.cwd, home=options.home, run=plan.run)
        address = hosts[0].peer or facts[0].address or hosts[0].address
        (port,) = yield (start.port_command(options, hosts[0].host, job, facts[0], address),)
        if port.returncode:
            raise UnavailableError(f"{hosts[0].address}: {last_line(port, 'no free port')}")
        number = port.stdout.strip() if port.stdout.startswith("<") else str(json.loads(port.stdout)["port"])
        nodes = start.nodes(options, plan, hosts, facts, cuda=cuda, address=address, port=number, secrets=secrets)
        outputs = yield tuple(
            Command(argv=("/bin/sh",), stdin=text, secret=bool(secrets), host=host.host, timeout_s=START_S)
            for host, text in zip(hosts, nodes, strict=True)
        )
        failed = [
            f"{host.address}: {last_line(output, f'exit code {output.returncode}')}"
            for host, output in zip(hosts, outputs, strict=True)
            if output.returncode
        ]
        if failed:
            raise UnavailableError("\n".join(["a node could not be started, and the others were taken back", *failed]))
        notes = [*warnings]
        if not cuda and job.device != "cpu":
            notes.append(f"no GPU there: {counted(plan.world_size, 'CPU rank')} under gloo")
        return Submission(
            handle={"port": number, "address": address, "logs": f"ddpctl logs {plan.run}"},
            note="; ".join(notes),
            table=rows,
            checkpoint_dir=start.checkpoints_shown(options, plan, hosts[0]),
        )

    def _look(self, plan: Plan, hosts: Sequence[SshHost]) -> Verb[tuple[preflight.Facts, ...]]:
        """What the hosts have."""
        script = script_of(plan.job.command)
        text = scripts.look(self.options, image=plan.job.image, script=script)
        local: tuple[Command, ...] = ()
        if script and self.options.project == "sync":
            local = (Command(argv=("test", "-f", script), cwd=plan.cwd, probe=True),)
        outputs = yield (
            *(Command(argv=("/bin/sh",), stdin=text, host=host.host, probe=True, timeout_s=LOOK_S) for host in hosts),
            *local,
        )
        if local and outputs[-1].returncode:
            raise NoInputError(f"{script}: no such script in {plan.cwd}")
        facts = tuple(map(preflight.parse_facts, outputs[: len(hosts)]))
        date = ("date", "+%s.%N")
        here, *there = yield (
            Command(argv=date, probe=True),
            *(
                Command(argv=date, host=host.host, probe=True)
                for host, fact in zip(hosts, facts, strict=True)
                if not fact.failure
            ),
        )
        said = iter(there)
        times = [Output(returncode=1) if fact.failure else next(said) for fact in facts]
        return preflight.clocks(facts, here, times)

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Ask every host of every run."""
        asked = [(run, node, host) for run in runs for node, host in enumerate(self._hosts_of(run))]
        outputs = yield tuple(
            Command(argv=("/bin/sh",), stdin=scripts.show(self.options, run.name, node), host=host.host)
            for run, node, host in asked
        )
        answers: dict[str, list[tuple[SshHost, Output]]] = {run.name: [] for run in runs}
        for (run, _, host), output in zip(asked, outputs, strict=True):
            answers[run.name].append((host, output))
        return tuple(status_of(run, answers[run.name], now) for run in runs)

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the nodes' logs: one node's after another's, or as lines come where they are followed."""
        commands = tuple(
            Command(
                argv=("/bin/sh",),
                stdin=scripts.logs(self.options.home, run.name, node, ranks, tail=query.tail, follow=query.follow),
                host=self._hosts_of(run)[node].host,
                mode="stream",
                timeout_s=None,
            )
            for node, ranks in query.places(run)
        )
        outputs: list[Output] = []
        for batch in [commands] if query.follow else [(command,) for command in commands]:
            outputs += yield batch
        if all(output.returncode == Exit.NO_INPUT for output in outputs):
            last = run.job.max_nodes * run.job.gpus - 1
            raise NoInputError(
                f"{run.name} has no such log: its nodes are 0 to {run.job.max_nodes - 1}, its ranks 0 to {last}"
            )
        lost = sum(output.returncode == UNREACHED for output in outputs)
        if lost and not query.follow:  # who follows is told by the status that comes next
            raise UnavailableError(f"{lost} of {counted(len(outputs), 'host')} did not answer")

    def look(self, run: Run, look: Look) -> Verb[tuple[Seen, ...]]:
        """Ask every host: each fetches its own node's metrics."""
        hosts = self._hosts_of(run)
        folders = [scripts.node_path(self.options.home, run.name, node) for node in range(len(hosts))]
        outputs = yield tuple(
            Command(argv=("/bin/sh",), stdin=script(look, (folder,)), host=host.host, timeout_s=TIMEOUT_S)
            for host, folder in zip(hosts, folders, strict=True)
        )
        return tuple(one for node, output in enumerate(outputs) for one in read(output, (node,)))

    def stop(self, run: Run, *, kill: bool, wait: bool = True) -> Verb[bool]:
        """Signal every node, and wait until nothing of the run is left on any host."""
        wait_s = 0.0 if not wait else KILL_WAIT_S if kill else run.job.grace + STOP_MARGIN_S
        hosts = self._hosts_of(run)
        outputs = yield tuple(
            self._signal(run, node, host.host, kill=kill, wait_s=wait_s) for node, host in enumerate(hosts)
        )
        failed = [
            f"{host.address} (node {node}): {last_line(output, f'exit code {output.returncode}')}"
            for node, (host, output) in enumerate(zip(hosts, outputs, strict=True))
            if output.returncode
        ]
        if failed:
            raise UnavailableError("\n".join([f"{run.name} could not be stopped everywhere", *failed]))
        return not any(json.loads(output.stdout.splitlines()[-1])["alive"] for output in outputs)

    def remove(self, run: Run, *, look: bool) -> Verb[tuple[Footprint, ...]]:
        """The run's folder on each of its hosts; the project's tree and a checkpoint_dir of the target's stay."""
        path, hosts = scripts.run_path(self.options.home, run.name), self._hosts_of(run)
        command = footprint.command(scripts.path_word(path), look=look)
        outputs = yield tuple(replace(command, host=host.host) for host in hosts)
        return tuple(footprint.read(said, path, host.address) for host, said in zip(hosts, outputs, strict=True))

    def _signal(self, run: Run, node: int, host: Host, *, kill: bool, wait_s: float) -> Command:
        home, engine = self.options.home, self.options.runtime
        if engine == "none":
            name = "KILL" if kill else "TERM"
            text = scripts.signal_process(self.options, run.name, node, name, wait_s)
        else:
            word = json.dumps(vars(replace(_KILLED, node=node)))
            text = scripts.signal_container(engine, home, run.name, node, kill=kill, wait_s=wait_s, last_word=word)
        return Command(argv=("/bin/sh",), stdin=text, host=host, timeout_s=wait_s + 30)

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """In the node's container, or in its folder with its variables."""
        engine, host = self.options.runtime, self._hosts_of(run)[node].host
        if engine == "none":
            folder = start.folder(self.options, run.name)
            line = shlex.join(argv) if argv else '"${SHELL:-/bin/sh}"'
            words = " ".join(f"{name}={shlex.quote(value)}" for name, value in run.job.env.items())
            inner = f"cd {scripts.path_word(folder)} && {words}{' ' if words else ''}{line}"
            command = Command(argv=("/bin/sh", "-c", inner), host=host)
        else:
            flags = ("--interactive", "--tty") if tty else ()
            inside = argv or ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash || exec sh")
            command = Command(argv=(engine, "exec", *flags, container_name(run.name, node), *inside), host=host)
        (done,) = yield (replace(command, mode="tty" if tty else "stream", timeout_s=None),)
        if tty and done.returncode == UNREACHED and done.stderr:
            raise UnavailableError(f"{host}: {done.stderr}")
        return done.returncode

    def _hosts(self, plan: Plan) -> tuple[SshHost, ...]:
        """The first hosts, one a node. Raises ConfigError where a run is resumed with more nodes."""
        for _, text in self.options.problems(plan.job):
            raise ConfigError(f"--nodes: {text}")
        return self.options.hosts[: plan.job.max_nodes]

    def _hosts_of(self, run: Run) -> tuple[SshHost, ...]:
        return self.options.hosts[: run.job.max_nodes]
