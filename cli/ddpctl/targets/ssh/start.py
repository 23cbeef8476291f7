"""How the nodes of a run are started: a script for each host, from the plan and what the hosts have. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from ddpctl import containers
from ddpctl.command import Command, Host
from ddpctl.plan import Plan, contract, ddprun_args
from ddpctl.spec import JobSpec
from ddpctl.targets.ssh import scripts
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import Facts
from ddpwire import names
from ddpwire.folder import CHECKPOINTS

PORT_S = 60.0
_INSIDE_CHECKPOINTS = "/checkpoints"
_ROOT, _OURS = "0:0", "10001:10001"  # root's containers run as the image's own user
_NODECTL = ("-P", "-m", "ddprun.nodectl")


def user_of(fact: Facts) -> str:
    """Whom a host's container runs as: the one who logs in, and never root."""
    return _OURS if fact.get("id") == _ROOT else fact.get("id")


def folder(options: SshOptions, run: str) -> str:
    """Where the ranks run on a host without containers."""
    if options.project == "sync":
        return scripts.run_path(options.home, run, "project")
    return "~/" if options.project == "none" else options.project


def port_command(options: SshOptions, host: Host, job: JobSpec, fact: Facts, address: str) -> Command:
    """Find a port on the first host that is free at the address where the others will look for it."""
    words = (*_NODECTL, "port", "--host", address, *(("--want", str(job.port)) if job.port else ()))
    if options.runtime == "none":
        text = f"{scripts.path_word(options.python)} {' '.join(words)}\n"
        return Command(argv=("/bin/sh",), stdin=text, host=host, timeout_s=PORT_S, placeholder="<port>")
    inside = (options.runtime, "run", "--rm", f"--network={options.network}", *containers.confined())
    argv = (*inside, "--entrypoint=python3", fact.image_id, *words)
    return Command(argv=argv, host=host, timeout_s=PORT_S, placeholder="<port>")


def checkpoint_folder(options: SshOptions, plan: Plan) -> str:
    """Where the checkpoints are on a host; ``~`` is whoever logs in there."""
    if plan.checkpoint_dir != str(PurePath(plan.run_dir) / CHECKPOINTS):
        return plan.checkpoint_dir.partition(":")[2]  # the run that is resumed has said it: HOST:PATH
    if options.checkpoint_dir:
        return f"{options.checkpoint_dir.rstrip('/')}/{plan.run}"
    return scripts.run_path(options.home, plan.run, CHECKPOINTS)


def checkpoints_shown(options: SshOptions, plan: Plan, first: SshHost) -> str:
    """The same for a person and for a run that resumes this one: ``box1:~/.ddpctl/runs/night/checkpoints``."""
    return f"{first.address}:{checkpoint_folder(options, plan)}"


def nodes(
    options: SshOptions,
    plan: Plan,
    hosts: Sequence[SshHost],
    facts: Sequence[Facts],
    *,
    cuda: bool,
    address: str,
    port: str,
    secrets: Mapping[str, str],
) -> tuple[str, ...]:
    """The script that starts each node. Raises ConfigError."""
    return tuple(
        _node(options, plan, node, fact, gpus=_share(plan.job, host, fact) if cuda else (), cuda=cuda,
              address=address, port=port, secrets=secrets)
        for node, (host, fact) in enumerate(zip(hosts, facts, strict=True))
    )  # fmt: skip


def _share(job: JobSpec, host: SshHost, fact: Facts) -> tuple[str, ...]:
    allowed = fact.gpus if host.gpus is None else fact.gpus[: host.gpus]
    return tuple(gpu for gpu in (*allowed, *fact.gpus) if gpu in fact.free_gpus)[: job.gpus]


def _node(
    options: SshOptions,
    plan: Plan,
    node: int,
    fact: Facts,
    *,
    gpus: tuple[str, ...],
    cuda: bool,
    address: str,
    port: str,
    secrets: Mapping[str, str],
) -> str:
    def there(path: str) -> str:
        return fact.get("home") + path[1:] if path.startswith("~/") else path

    run_dir = there(scripts.run_path(options.home, plan.run))
    checkpoints = there(checkpoint_folder(options, plan))
    own_env = {**plan.job.env, **secrets, names.DEVICE: "cuda" if cuda else "cpu"}
    if options.runtime == "none":
        here = replace(plan, run_dir=run_dir, checkpoint_dir=checkpoints)
        env = {**own_env, **contract(here, node=node, addr=address, port=port), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        argv = (options.python, "-P", "-m", "ddprun", *ddprun_args(plan))
        where = folder(options, plan.run)
        return scripts.start_process(options.home, plan.run, node, argv, env, folder=where, checkpoints=checkpoints)
    own = checkpoints == f"{run_dir}/{CHECKPOINTS}"
    inside = f"{containers.RUNS}/{plan.run}"
    plan = replace(plan, run_dir=inside, checkpoint_dir=f"{inside}/{CHECKPOINTS}" if own else _INSIDE_CHECKPOINTS)
    env = {**containers.DEFAULTS, **own_env, **contract(plan, node=node, addr=address, port=port),
           names.IMAGE: fact.image_id}  # fmt: skip
    container = containers.Node(
        engine=options.runtime,
        node=node,
        image=fact.image_id,
        user=user_of(fact),
        run_dir=run_dir,
        gpus=gpus,
        network=options.network,
        project=None if options.project == "none" else there(folder(options, plan.run)),
        checkpoints=None if own else checkpoints,
    )
    return scripts.start_container(
        options.runtime,
        options.home,
        plan.run,
        node,
        containers.run_args(plan, container, env_file="$env"),
        containers.env_file(env),
        checkpoints=checkpoints,
        owner=_OURS if fact.get("id") == _ROOT else None,
    )
