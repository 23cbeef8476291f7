"""The operations (verbs) of the target ssh, which run commands on its hosts."""

import itertools
import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import PurePath

from ddpctl.command import TIMED_OUT, UNREACHED, Command, Host, Output, Verb, path_word, sh
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, UnavailableError, UsageError
from ddpctl.execution.node_probe import TIMEOUT_S, Probe, ProbeResult, probe_script, read_probe
from ddpctl.files import environments
from ddpctl.files.pull import MADE, Place, pull_places
from ddpctl.job.launch_plan import Plan, check_script, contract, ddprun_args, look_for_script, script_of
from ddpctl.job.secrets import make_store_secret, read_secrets
from ddpctl.job.spec import JobSpec
from ddpctl.runs.run_status import NodeReport, RunStatus, fold_nodes, node_report
from ddpctl.runs.run_store import Run
from ddpctl.targets import Capability, HostReport, LogQuery, Lookup, Moved, StopSignal, Submission, Target, no_such_log
from ddpctl.targets.ssh import claims, scripts
from ddpctl.targets.ssh.host_choice import Choice, choose, is_resumed
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import Facts, clock_of, host_report, judge, parse_facts, report, split_shown
from ddpctl.targets.ssh.project import sync
from ddpctl.targets.ssh.scripts import container_name, run_path
from ddpctl.text import counted, one_line
from ddpwire import job_env, names, run_files
from ddpwire.exits import Exit
from ddpwire.run_files import CHECKPOINTS

STOP_MARGIN_S = 5.0  # how long a ddprun may take beyond the grace period of its ranks
KILL_WAIT_S = 5.0
SHOW_S = 30.0  # plus one second per node
LOST_S = 10.0
FACTS_S = 45.0
START_S = 120.0
ENGINE_ERROR = re.compile("(?m)^engine_error .*")
PORT_S = 60.0
_INSIDE_CHECKPOINTS = "/checkpoints"
_ROOT, _OURS = "0:", "10001:10001"  # if the login user is root, containers run as the image's user
_NODECTL = ("-P", "-m", "ddprun.nodectl")


@dataclass(frozen=True, kw_only=True)
class Start:
    """The values that all nodes of a launch share."""

    plan: Plan
    cuda: bool  # whether the ranks use GPUs
    address: str  # of node 0
    port: str
    secrets: Mapping[str, str]  # of the job
    store_secret: str  # with which the nodes sign values in the run's store


class SshTarget(Target):
    """The target ssh, whose nodes run on hosts that ddpctl reaches over SSH."""

    kind = "ssh"
    capabilities = frozenset[Capability](
        {"copies", "discovery", "hosts", "interrupt", "pull", "spares", "stop", "uneven", "wait"}
    )

    options: SshOptions

    def render(self, plan: Plan) -> str:
        """Raise UsageError, because the commands depend on the state of the hosts."""
        raise UsageError(
            f"render: {plan.name} would run on SSH hosts, and the commands for them depend on their state: use "
            "ddpctl launch --dry-run, which queries the hosts and prints the commands"
        )

    def machines(self, run: Run) -> tuple[str, ...]:
        """Return the address of each node's host, as written in the options."""
        return tuple(host.address for host in self._hosts_of(run))

    def without(self, machines: Collection[str], job: JobSpec) -> SshOptions | None:
        """Return the options with these hosts excluded, or None if too few hosts remain for the job."""
        options = replace(self.options, exclude=(*self.options.exclude, *machines))
        return None if any(options.problems(job)) else options

    @property
    def _environments(self) -> str:
        return f"{self.options.home.rstrip('/')}/environments"

    def resolve(self) -> Verb[SshOptions]:
        """Return the options with the environment's Python."""
        if self.options.environment:
            recipe = yield from environments.read_recipe(self.options)
            self.options = recipe.resolve(self.options, self._environments)
        return self.options

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:  # noqa: ARG002 -- the run outlives ddpctl
        """Check the hosts. If enough of them are ready, start one node on each host."""
        secrets = read_secrets(plan.job, self.environ)
        choice = yield from choose(self.options, plan, lambda hosts: self._probe(plan, hosts))
        return (yield from self._start(plan, choice, secrets))

    def dry_run(self, plan: Plan) -> Verb[Submission]:
        """Yield the commands that ``submit`` would run.

        If too few hosts are ready, the commands have placeholders such as ``<image>``, and the error is raised after
        the last command.
        """
        plan = replace(plan, wait_s=None)
        seen: list[tuple[SshHost, Facts]] = []

        def look(hosts: Sequence[SshHost]) -> Verb[tuple[Facts, ...]]:
            facts = yield from self._probe(plan, hosts)
            seen.extend(zip(hosts, facts, strict=True))
            return facts

        secrets = read_secrets(plan.job, self.environ)
        yield from self.resolve()
        try:
            choice = yield from choose(self.options, plan, look, dry_run=True)
        except DdpctlError:
            if not seen:
                raise
            hosts, facts = zip(*seen[: plan.job.max_machines], strict=True)
            cuda = plan.job.device != "cpu" and any(fact.failure or fact.gpus for fact in facts)
            assumed = assume_facts(self.options, plan.job, facts)
            choice = Choice(numbers=(), hosts=hosts, facts=assumed, cuda=cuda or plan.job.device == "cuda")
            yield from self._start(plan, choice, secrets)
            raise
        return (yield from self._start(plan, choice, secrets))

    def _start(self, plan: Plan, choice: Choice, secrets: Mapping[str, str]) -> Verb[Submission]:
        options, hosts, facts, requested = self.options, choice.hosts, choice.facts, plan.job.nodes
        plan = replace(plan, job=replace(plan.job, nodes=choice.nodes(plan.job)))
        job = plan.job
        if options.project == "sync":
            places = [host.host for host in hosts]
            yield from sync(places, cwd=plan.cwd, home=options.home, run=plan.name, run_dir=plan.folder)
        first, address = hosts[0].host, hosts[0].peer or facts[0].address or hosts[0].address
        get_port = port_command(options, first, job, facts[0], address)
        port, secret = yield (get_port, self._secret_command(plan.name, first))
        for output in (port, secret):
            output.check(hosts[0].address)
        number = port.stdout.strip() if port.stdout.startswith("<") else str(json.loads(port.stdout)["port"])
        start = Start(
            plan=plan, cuda=choice.cuda, address=address, port=number, secrets=secrets, store_secret=secret.stdout
        )
        failed = yield from self._start_nodes(start, range(len(hosts)), hosts, facts)
        notes = [*choice.notes]
        if job.spares and job.checkpoint_copies == 1 and not options.checkpoint_dir:
            cost = "if that host is lost, the training starts at step 0"
            notes.append(
                f"checkpoints are on the host of node 0 alone: {cost} (set checkpoint_copies or checkpoint_dir)"
            )
        if not choice.cuda and job.device != "cpu":
            notes.append(f"no GPU there: {counted(job.world_size, 'CPU rank')} with gloo")
        submission = Submission(
            handle={
                "port": number,
                "address": address,
                "logs": f"ddpctl logs {plan.name}",
                "hosts": choice.numbers,
                "nodes": requested,
                "device": "cuda" if choice.cuda else "cpu",
                **environments.recorded(facts[0].get("environment")),
                **({"machines": choice.machines} if choice.machines else {}),
            },
            note="\n".join(notes),
            table=choice.rows,
            nodes=job.nodes,
            checkpoint_dir=f"{hosts[0].address}:{checkpoint_folder(options, plan)}",
        )
        if failed:
            some = len(failed) < len(hosts)
            text = "a node could not be started, and the others were stopped" if some else "no node could be started"
            codes = {*failed.values()}
            wrong = CannotWriteError if codes == {Exit.CANNOT_WRITE} else UnavailableError
            lost = codes & {UNREACHED, TIMED_OUT}  # these nodes may have been started
            failure = wrong("\n".join([text, *failed]))
            failure.fields |= {"submission": submission if codes == lost else None} if lost else {}
            raise failure
        return submission

    def locate(self, run: Run) -> Verb[Lookup]:
        """Find the nodes of a launch by its uid in the claims of all hosts."""
        hosts, job = self.options.hosts, run.job
        text = claims.find_nodes(scripts.claims_folder(self.options.home), run.name, run.uid)
        outputs = yield tuple(sh(host.host, text, timeout_s=claims.MUTEX_S + 15) for host in hosts)
        answers = zip(hosts, outputs, strict=True)
        silent = [f"{host.address}: {output.last_line()}" for host, output in answers if output.returncode]
        places = {int(node): number for number, output in enumerate(outputs) for node in output.stdout.split()}
        is_whole = places.keys() >= set(range(job.max_machines if silent else job.min_nodes + job.spares))
        if silent and not is_whole:
            return Lookup(state="unknown", message=one_line("; ".join(silent)))
        others = iter({*range(len(hosts))} - {*places.values()})
        numbers = [places[node] if node in places else next(others, 0) for node in range(job.max_machines)]
        handle = {"hosts": numbers, "nodes": job.nodes, "logs": f"ddpctl logs {run.name}"}
        return Lookup(state="exists", handle=handle, is_whole=is_whole) if places else Lookup(state="absent")

    def _start_nodes(
        self, start: Start, nodes: Sequence[int], hosts: Sequence[SshHost], facts: Sequence[Facts]
    ) -> Verb[dict[str, int]]:
        """Start these nodes. Map the message of each failure to its exit code. Raises ConfigError."""
        commands = []
        for node, host, fact in zip(nodes, hosts, facts, strict=True):
            ordered = dict.fromkeys((*fact.gpus[: host.gpus], *fact.gpus))  # those that a run may have come first
            free = [gpu for gpu in ordered if gpu in fact.free_gpus] if start.cuda else []
            gpus = tuple(free[: start.plan.job.gpus_of(node)])
            text = node_script(self.options, start, node, fact, gpus)
            commands.append(sh(host.host, text, timeout_s=START_S, secret=bool(start.secrets), starts=True))
        outputs = yield tuple(commands)
        pairs = zip(hosts, outputs, strict=True)
        return {
            f"{host.address}: {output.last_line()}": output.returncode for host, output in pairs if output.returncode
        }

    def _secret_command(self, run: str, host: Host) -> Command:
        folder = path_word(run_path(self.options.home, run))
        text = f"{make_store_secret(folder)} && cat {folder}/{run_files.STORE_SECRET}\n"
        return Command(argv=("/bin/sh",), stdin=text, host=host, placeholder="<secret>")

    def _probe(self, plan: Plan, hosts: Sequence[SshHost]) -> Verb[tuple[Facts, ...]]:
        script = script_of(plan.job.command)
        checkpoints = checkpoint_folder(self.options, plan) if is_resumed(plan) else None
        text = scripts.facts_script(self.options, image=plan.job.image, script=script, checkpoints=checkpoints)
        local = look_for_script(plan) if self.options.project == "sync" else ()
        ask = partial(Command, argv=("/bin/sh",), stdin=text, timeout_s=FACTS_S)
        outputs = [*(yield (*(ask(host=host.host, probe=True) for host in hosts), *local))]
        check_script(plan, *outputs[len(hosts) :])
        lacking = [place for place in range(len(hosts)) if "\nengine_error " in outputs[place].stdout]
        if self.options.environment and lacking:
            yield from self._make_environment([hosts[place].host for place in lacking])
            assumed = (ENGINE_ERROR.sub("engine Python <version>", outputs[place].stdout) for place in lacking)
            again = (ask(host=hosts[place].host, placeholder=next(assumed)) for place in lacking)
            for place, output in zip(lacking, (yield tuple(again)), strict=True):
                outputs[place] = output
        facts = tuple(map(parse_facts, outputs[: len(hosts)]))
        ready = [place for place, fact in enumerate(facts) if not fact.failure]
        dates = yield tuple(Command(argv=("date", "+%s.%N"), host=hosts[place].host, probe=True) for place in ready)
        clocks = dict(zip(ready, map(clock_of, dates), strict=True))
        return tuple(replace(fact, clock_s=clocks.get(place)) for place, fact in enumerate(facts))

    def _make_environment(self, hosts: Sequence[Host]) -> Verb[None]:
        recipe = yield from environments.read_recipe(self.options)
        if recipe.resolve(self.options, self._environments) != self.options:
            raise ConfigError(f"environment: {recipe.lock} or ddpctl has changed since the launch: launch it again")
        yield from environments.make(hosts, self.options.python, recipe)

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:  # noqa: ARG002
        """Return the status of each run. Each host is queried only once, for all nodes that it runs."""
        nodes_of: dict[SshHost, list[tuple[str, int]]] = {}
        for run in runs:
            for node, host in enumerate(self._hosts_of(run)):
                nodes_of.setdefault(host, []).append((run.name, node))
        outputs = yield tuple(
            sh(host.host, scripts.show(self.options, nodes), timeout_s=SHOW_S + len(nodes))
            for host, nodes in nodes_of.items()
        )
        answers: dict[tuple[str, int], Output] = {}
        for nodes, output in zip(nodes_of.values(), outputs, strict=True):
            answers |= zip(nodes, split_shown(output, len(nodes)), strict=True)
        return tuple(
            status_of(run, [(host, answers[run.name, node]) for node, host in enumerate(self._hosts_of(run))])
            for run in runs
        )

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the logs of the nodes, one node after the other.

        ``query.follow``: print the lines of all nodes as they appear.
        """
        hosts, ask = self._hosts_of(run), partial(sh, mode="stream", timeout_s=None)
        commands = tuple(
            ask(hosts[node].host, scripts.logs(self.options.home, run.name, node, files, query))
            for node, files in query.files(run).items()
        )
        outputs: list[Output] = []
        if not query.follow and len(commands) > 1:  # open all connections in parallel; the commands use them in turn
            yield tuple(Command(argv=("true",), host=command.host) for command in commands)
        for batch in [commands] if query.follow else [(command,) for command in commands]:
            outputs += yield batch
        if all(output.returncode == Exit.NO_INPUT for output in outputs):
            raise no_such_log(run)
        lost = sum(output.returncode == UNREACHED for output in outputs)
        if lost and not query.follow:  # with follow, the status that is printed afterwards shows it
            raise UnavailableError(f"{lost} of {counted(len(outputs), 'host')} did not answer")

    def has_spares(self, run: Run) -> bool:
        """Return whether the target has a spare host for the run. Return False if the record lists no hosts.

        A spare host has no node of the run, and is neither excluded nor lost. A run whose own spares wait needs none.
        """
        return not run.job.spares and {"hosts", "address"} <= run.handle.keys() and bool(self._spares(run))

    def _spares(self, run: Run) -> tuple[int, ...]:
        used = {*run.handle.get("hosts", range(run.job.max_nodes)), *run.handle.get("lost_hosts", ())}
        hosts = enumerate(self.options.hosts)
        return tuple(n for n, host in hosts if n not in used and host.address not in self.options.exclude)

    def replace_lost(self, run: Run) -> Verb[Moved]:
        """If the host of a node does not answer, restart the node on a spare host.

        Nodes are restarted only if node 0 is alive and in rendezvous, which means that it waits for other nodes. Node 0
        itself cannot be replaced, because it has the run's store.
        """
        hosts, numbers, nothing = self._hosts_of(run), list(run.handle["hosts"]), Moved(handle=run.handle)
        answers = yield tuple(
            sh(host.host, scripts.show(self.options, [(run.name, n)]), timeout_s=LOST_S) for n, host in enumerate(hosts)
        )
        first = report(answers[0])
        lost = [node for node, answer in enumerate(answers) if answer.returncode in (UNREACHED, TIMED_OUT)]
        if not lost or not first or not first["alive"] or (first["node"] or {}).get("state") != "rendezvous":
            return nothing
        spares = self._spares(run)
        at = [self.options.hosts[number] for number in spares]
        facts = (yield from self._probe(run, at)) if at else ()
        device = run.handle.get("device", run.job.device)
        plan, need = replace(run, job=replace(run.job, device=device)), max(map(run.job.gpus_of, lost))
        choice = judge(self.options, plan, at, facts, gpus_of=lambda _: need)
        ready = [place for place in range(len(at)) if not choice.kinds(place)][: len(lost)]
        if len(ready) < len(lost):
            gone = ", ".join(f"{hosts[node].address} (node {node})" for node in lost)
            verb = "is" if len(lost) == 1 else "are"
            reasons = (
                "; ".join(f"{host.address}: {choice.why(place)}" for place, host in enumerate(at)) or "there is none"
            )
            return replace(nothing, note=one_line(f"{gone} {verb} lost, and too few spare hosts are ready ({reasons})"))
        taken = [at[place] for place in ready]
        secrets = read_secrets(run.job, self.environ)
        if self.options.project == "sync":
            at_hosts = [host.host for host in taken]
            yield from sync(at_hosts, cwd=run.cwd, home=self.options.home, run=run.name, run_dir=run.folder)
        (secret,) = yield (self._secret_command(run.name, hosts[0].host),)
        if secret.returncode:
            return replace(nothing, note=one_line(f"{hosts[0].address}: {secret.last_line('no secret')}"))
        handle = run.handle
        start = Start(plan=run, cuda=choice.cuda, address=handle["address"], port=handle["port"], secrets=secrets,
                      store_secret=secret.stdout)  # fmt: skip
        if failed := (yield from self._start_nodes(start, lost, taken, [facts[place] for place in ready])):
            raise UnavailableError("\n".join(["a lost node could not be started on a spare host", *failed]))
        lost_hosts = [*handle.get("lost_hosts", ()), *(numbers[node] for node in lost)]
        for node, place in zip(lost, ready, strict=True):
            numbers[node] = spares[place]
        moves = ", ".join(
            f"node {node} is restarted on {host.address}, because its host {hosts[node].address} is lost"
            for node, host in zip(lost, taken, strict=True)
        )
        handle = {**handle, "hosts": numbers, "lost_hosts": lost_hosts}
        return Moved(handle=handle, nodes=tuple(lost), note=one_line(moves))

    def hosts(self) -> Verb[tuple[HostReport, ...]]:
        """Return a report about each host of the target, including excluded hosts."""
        text = f"{scripts.gpus_text(self.options, load=True)}\nsay end yes\n"
        outputs = yield tuple(sh(host.host, text, timeout_s=FACTS_S) for host in self.options.hosts)
        return tuple(map(host_report, self.options.hosts, outputs))

    def probe(self, run: Run, probe: Probe) -> Verb[tuple[ProbeResult, ...]]:
        """Return the metrics and files of each node. The node's host reads them."""
        hosts = self._hosts_of(run)
        folders = [scripts.node_path(self.options.home, run.name, node) for node in range(len(hosts))]
        outputs = yield tuple(
            sh(host.host, probe_script(probe, (folder,)), timeout_s=TIMEOUT_S)
            for host, folder in zip(hosts, folders, strict=True)
        )
        return tuple(result for node, output in enumerate(outputs) for result in read_probe(output, (node,)))

    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:
        """Signal every node, and wait until the run has ended on all hosts."""
        wait_s = 0.0 if not wait else KILL_WAIT_S if signal == "KILL" else run.job.stop_s + STOP_MARGIN_S
        home, engine = self.options.home, self.options.runtime

        def script(node: int) -> str:
            if engine == "none":
                return scripts.signal_process(self.options, run.name, node, signal, wait_s)
            outcome = json.dumps(asdict(replace(run_files.KILLED_ON_REQUEST, node=node)))
            return scripts.signal_container(engine, home, run.name, node, signal, wait_s=wait_s, last_word=outcome)

        places = self._places(run)
        outputs = yield tuple(sh(host.host, script(node), timeout_s=wait_s + 30) for node, host in places)
        failed = [
            f"{host.address} (node {node}): {output.last_line()}"
            for (node, host), output in zip(places, outputs, strict=True)
            if output.returncode
        ]
        if failed:
            raise UnavailableError("\n".join([f"run '{run.name}' could not be stopped on all hosts", *failed]))
        return not any(json.loads(output.stdout.splitlines()[-1])["alive"] for output in outputs)

    def made(self, run: Run) -> Verb[tuple[str, ...]]:
        """Return a text for each host on which the script has made files in its copy of the project."""
        hosts = [host.host for host in self._hosts_of(run)] if self.options.project == "sync" else []
        text = f"{MADE}cd {path_word(run_path(self.options.home, run.name))} && made_summary\n"
        outputs = yield tuple(sh(host, text, timeout_s=SHOW_S) for host in hosts)
        pairs = zip(hosts, outputs, strict=True)
        return tuple(f"{host}: {output.stdout.strip()}" for host, output in pairs if output.stdout.strip())

    def roots(self, run: Run) -> tuple[tuple[Host, str], ...]:
        """Return each host that has or had a node of the run, with the folder of all runs on that host."""
        lost = (self.options.hosts[number] for number in run.handle.get("lost_hosts", ()))
        root = f"{self.options.home.rstrip('/')}/runs"
        return tuple((host.host, root) for host in (*self._hosts_of(run), *lost))

    def remove_outside(self) -> str:
        """Return shell code that removes the claims of ended runs on a host."""
        clean = environments.clean_text(self._environments) if self.options.environment else ""
        return claims.remove_invalid(scripts.claims_folder(self.options.home)) + clean

    def pull(self, run: Run, into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
        """Copy the run's folder from each host of the run. If the checkpoints are elsewhere, copy their folder, too."""
        own, checkpoints = run_path(self.options.home, run.name), run.checkpoint_dir.partition(":")[2]
        folders = {"": path_word(own)}
        if checkpoints and not PurePath(checkpoints).is_relative_to(own):
            folders[CHECKPOINTS] = path_word(checkpoints)
        places = [
            Place(name=host.address, shell=Command(argv=("/bin/sh",), host=host.host), folders=folders)
            for host in self._hosts_of(run)
        ]
        return (yield from pull_places(run.name, places, into, best=best))

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command in the node's container. Without a container, run it in the ranks' working folder.

        The command gets the environment variables of the job.
        """
        engine, host = self.options.runtime, self._hosts_of(run)[node].host
        if engine == "none":
            folder = work_dir(self.options, run.name)
            line = shlex.join(argv) if argv else '"${SHELL:-/bin/sh}"'
            env = "".join(f"{name}={shlex.quote(value)} " for name, value in run.job.env.items())
            command = Command(argv=("/bin/sh", "-c", f"cd {path_word(folder)} && {env}{line}"), host=host)
        else:
            flags: tuple[str, ...] = ("--interactive", "--tty") if tty else ()
            flags += tuple(f"--env={name}={value}" for name, value in run.job.env.items())
            inside = argv or ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash || exec sh")
            command = Command(argv=(engine, "exec", *flags, container_name(run.name, node), *inside), host=host)
        (done,) = yield (replace(command, mode="tty" if tty else "stream", timeout_s=None),)
        if done.returncode == UNREACHED and done.stderr:
            raise UnavailableError(f"{host}: {done.stderr}" if tty else "")  # the output already shows it
        return done.returncode

    def _hosts_of(self, run: Run) -> tuple[SshHost, ...]:
        """Return the host of each node from the run's record.

        If the record lists no hosts, return the first hosts of the target.
        """
        hosts, numbers = self.options.hosts, run.handle.get("hosts")
        known = isinstance(numbers, list | tuple) and all(number in range(len(hosts)) for number in numbers)
        return tuple(hosts[number] for number in numbers) if known and numbers else hosts[: run.job.max_machines]

    def _places(self, run: Run) -> tuple[tuple[int, SshHost], ...]:
        """Return each node and its host. If the hosts are unknown, return every pair of a node and a host."""
        if run.handle or run.job.max_machines == len(self.options.hosts):
            return tuple(enumerate(self._hosts_of(run)))
        return tuple((node, host) for node in range(run.job.max_machines) for host in self.options.hosts)


def assume_facts(options: SshOptions, job: JobSpec, facts: Sequence[Facts]) -> tuple[Facts, ...]:
    """Return the facts for a dry run, with placeholders such as ``<image>`` for what a host lacks."""
    image = {"Id": "sha256:<image>", "RootFS": {"Layers": []}, "Size": 0, "Created": "", "Os": "", "Architecture": ""}
    images = {} if options.runtime == "none" else {"image": (json.dumps([image]),)}
    guesses = {"id": ("<uid>:<gid>",), "home": ("<home>",), "ssh": ("- - <address>",), "asked": (job.image,)}
    assumed = []
    for need, fact in zip(map(job.gpus_of, itertools.count()), facts, strict=False):
        gpus = {"gpu": tuple(f"<GPU {number}>" for number in range(need)), "busy": ()}
        known = guesses | fact.values | ({} if fact.image else images)
        assumed.append(replace(fact, values=known | ({} if len(fact.free_gpus) >= need else gpus)))
    return tuple(assumed)


def work_dir(options: SshOptions, run: str) -> str:
    """Return the working folder of the ranks as a path on the host. In a container, they have another folder."""
    if options.project == "sync":
        return scripts.run_path(options.home, run, "project")
    return "~/" if options.project == "none" else options.project


def port_command(options: SshOptions, host: Host, job: JobSpec, fact: Facts, address: str) -> Command:
    """Return the command that finds a free port on the host of node 0.

    ``address``: the address at which the other hosts reach this host.
    """
    arguments = (*_NODECTL, "port", "--host", address, *(("--want", str(job.port)) if job.port else ()))
    command = partial(Command, host=host, timeout_s=PORT_S, placeholder="<port>")
    if options.runtime == "none":
        return command(argv=("/bin/sh",), stdin=f"{path_word(options.python)} {' '.join(arguments)}\n")
    inside = (options.runtime, "run", "--rm", f"--network={options.network}", *scripts.CONFINED)
    return command(argv=(*inside, "--entrypoint=python3", fact.image_id, *arguments))


def checkpoint_folder(options: SshOptions, plan: Plan) -> str:
    """Return the folder of the checkpoints on a host. It may begin with ``~/``."""
    if is_resumed(plan):
        return plan.checkpoint_dir.partition(":")[2]  # HOST:PATH
    if options.checkpoint_dir:
        return f"{options.checkpoint_dir.rstrip('/')}/{plan.name}"
    return scripts.run_path(options.home, plan.name, CHECKPOINTS)


def node_script(options: SshOptions, start: Start, node: int, fact: Facts, gpus: tuple[str, ...]) -> str:
    """Return the script that starts a node. Raises ConfigError."""

    def on_host(path: str) -> str:
        return fact.get("home") + path[1:] if path.startswith("~/") else path

    plan, environment = start.plan, partial(contract, node=node, addr=start.address, port=start.port)
    run_dir, checkpoints = on_host(run_path(options.home, plan.name)), on_host(checkpoint_folder(options, plan))
    device, folder, owner = {names.DEVICE: "cuda" if start.cuda else "cpu"}, work_dir(options, plan.name), None
    if options.runtime == "none":
        here = replace(plan, folder=run_dir, checkpoint_dir=checkpoints)
        env = {**device, **environment(here), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        every = {**plan.job.env, **start.secrets}
        env |= job_env.pack({name: value for name, value in every.items() if name not in env})
        argv = (options.python, "-P", "-m", "ddprun", *ddprun_args(plan))
        launch = scripts.launch_process(options, plan.name, node, argv, env, folder=folder)
    else:
        own, inside = checkpoints == f"{run_dir}/{CHECKPOINTS}", f"{scripts.RUNS}/{plan.name}"
        plan = replace(plan, folder=inside, checkpoint_dir=f"{inside}/{CHECKPOINTS}" if own else _INSIDE_CHECKPOINTS)
        env = {**scripts.DEFAULTS, **start.secrets, **device, **environment(plan), names.IMAGE: fact.image_id}
        env |= job_env.pack(plan.job.env)
        owner = _OURS if fact.get("id").startswith(_ROOT) else None
        argv = scripts.run_args(
            options, plan, node, image=fact.image_id, user=owner or fact.get("id"), run_dir=run_dir, gpus=gpus,
            project=None if options.project == "none" else on_host(folder), checkpoints=None if own else checkpoints,
        )  # fmt: skip
        launch = scripts.launch_container(options, plan.name, argv, scripts.env_file(env))
    return scripts.start_node(
        options, plan.name, node, launch, gpus=gpus, checkpoints=checkpoints, secret=start.store_secret, owner=owner,
        uid=plan.uid,
    )  # fmt: skip


def status_of(run: Run, answers: Sequence[tuple[SshHost, Output]]) -> RunStatus:
    """Return a run's status. ``answers``: for each node, its host and the output of ``scripts.show``."""
    shown = [report(output) for _, output in answers]
    silent = [
        f"{host.address} (node {node}) does not answer: {output.last_line()}"
        for node, ((host, output), record) in enumerate(zip(answers, shown, strict=True))
        if record is None
    ]
    no_answer = NodeReport(node=0, alive=False, state=None, outcome=None, note="no answer")
    nodes = tuple(
        node_report(node, record) if record else replace(no_answer, node=node) for node, record in enumerate(shown)
    )
    state = fold_nodes(run.name, nodes, young=False)
    if not silent:
        return state
    message = "; ".join([state.message, *silent])
    # Node 0 decides how a run ends. If it does not answer, it may only be known that others have lost it.
    is_lost = state.outcome is not None and state.outcome.cause == "node_lost"
    undecided = state.ended and is_lost and shown[0] is None
    if len(silent) == len(answers) or not (state.alive or state.outcome):
        return RunStatus(run=run.name, state="unknown", message="; ".join(silent), nodes=nodes)
    if undecided and len(silent) >= run.job.min_nodes:  # these nodes may train on without the others
        return RunStatus(run=run.name, state="unknown", message=message, nodes=nodes)
    return replace(state, message=message, remains=state.remains or undecided)
