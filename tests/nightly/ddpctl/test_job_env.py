"""A variable of any name reaches the ranks."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.ddpctl.answers import matching, perform
from tests.unit.ddpctl.slurm_standins import SYSTEM, StandIns
from tests.unit.ddpctl.ssh_answers import BARE, HOSTS, OPTIONS, facts

from ddpctl.command import Output
from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget
from ddpctl.targets.local import LocalOptions, LocalTarget
from ddpctl.targets.slurm.batch_script import render_script
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.ssh.preflight import parse_facts
from ddpctl.targets.ssh.target import Start, node_script
from ddpwire import job_env, names

Env = dict[str, str]


OURS = "_ddp_"


BASHS = [  # which a bash that has not been asked for anything does not list
    "BASHOPTS", "BASHPID", "BASH_ARGV0", "BASH_ENV", "CDPATH", "COLUMNS", "DIRSTACK", "ENV", "EPOCHSECONDS",
    "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "HOME", "HOSTNAME", "HOSTTYPE", "IFS", "LANG", "LC_ALL", "LINENO",
    "LINES", "MACHTYPE", "OLDPWD", "OPTARG", "OPTERR", "OPTIND", "OSTYPE", "PATH", "PIPESTATUS",
    "POSIXLY_CORRECT", "PPID", "PS1", "PS4", "PWD", "RANDOM", "REPLY", "SECONDS", "SHELL", "SHELLOPTS",
    "SHLVL", "TMOUT", "TMPDIR", "UID", "USER", "_",
]  # fmt: skip


DUMP = 'env -0 >"$DDP_RUN_DIR/node-$PET_NODE_RANK.new" && mv "$DDP_RUN_DIR/node-$PET_NODE_RANK."{new,env}\n'


def bashs() -> set[str]:
    """The names that bash itself has or reads."""
    listed = subprocess.run(["/bin/bash", "-c", "compgen -v"], env={}, capture_output=True, text=True, timeout=60)
    return {*BASHS, *listed.stdout.split()}


def assigned(script: str) -> set[str]:
    """The names that a script assigns, without those of the contract between our programs."""
    text = re.sub(
        r"^#SBATCH .*|--(env|ulimit) \S+|\s#\s.*|=~ .*|<<'END_OF_FILE'[^']*END_OF_FILE$|[\"] (ArrayJobId|Restarts)=",
        "", script, flags=re.MULTILINE,
    )  # fmt: skip
    matches = re.findall(
        r"(?:^|[\s;&|('])([A-Za-z_]\w*)\+?=(?!=)|\bfor (?:\(\()?([A-Za-z_]\w*) (?:in|=)"
        r"|\b(?:read|mapfile) ((?:-\w+ |'' )*(?:[A-Za-z_]\w* ?)+)", text, re.MULTILINE,
    )  # fmt: skip
    names_ = {word for match in matches for part in match for word in part.split() if word[0] not in "-'"}
    theirs = ("PET_", "DDP_", "SLURM_", "APPTAINERENV_", "SINGULARITYENV_")
    return {name for name in names_ if not name.startswith(theirs)} - {"CUDA_VISIBLE_DEVICES", "IFS", "_"}


def read_env(path: Path) -> Env:
    return dict(pair.split("=", 1) for pair in path.read_text().split("\0")[:-1])


def plan_of(job: JobSpec, folder: Path) -> Plan:
    return Plan(name="r", job=job, cwd=str(folder), folder=f"{folder}/r", checkpoint_dir=f"{folder}/r/checkpoints")


def through_local(job: JobSpec, folder: Path, theirs: Env) -> tuple[str, list[Env]]:
    python = folder / "python"
    python.write_text(f"#!/bin/bash\nif [[ $3 == ddprun.nodectl ]]; then echo 1; exit; fi\n{DUMP}")
    python.chmod(0o755)
    script = LocalTarget(LocalOptions(python=str(python))).render(plan_of(job, folder))
    environ = {"PATH": SYSTEM, "RUN_DIR": f"{folder}/r"} | theirs
    subprocess.run(["/bin/bash", "-c", script], env=environ, timeout=60, check=True)
    return script, [read_env(path) for path in sorted((folder / "r").glob("*.env"))]


def through_ssh(job: JobSpec, folder: Path, theirs: Env, *, bare: bool) -> tuple[str, list[Env]]:
    options = replace(BARE if bare else OPTIONS, hosts=HOSTS[:1], project="none", python="~/python")
    (folder / "python").write_text(f"#!/bin/bash\n{DUMP}")
    (folder / "docker").write_text(
        "#!/bin/bash\n[[ $1 == run ]] || exit 0\nfor word; do\n"
        '  [[ $word != --env-file=* ]] || cp "${word#*=}" "$HOME/given"\ndone\n'
    )
    for name in ("python", "docker"):
        (folder / name).chmod(0o755)
    fact = parse_facts(facts(home=str(folder), ssh="10.0.0.9 4000 10.0.0.1 22"))
    plan = replace(plan_of(job, folder), checkpoint_dir=f"{folder}/r/checkpoints")
    secrets = theirs | ({name: "secret" for name in SECRETS if bare} if theirs else {})
    start = Start(plan=plan, cuda=False, address="a", port="1", secrets=secrets, store_secret="")
    script = node_script(options, start, 0, fact, ())
    environ = {"PATH": f"{folder}:{SYSTEM}", "HOME": str(folder)} | theirs
    subprocess.run(["/bin/sh"], input=script, text=True, env=environ, timeout=60, check=True)
    if not bare:
        lines = (folder / "given").read_text().splitlines()
        return script, [dict(line.split("=", 1) for line in lines)]
    (claim,) = folder.glob(".ddpctl/claims-*/run-*")
    subprocess.run(["/usr/bin/flock", claim, "/bin/true"], timeout=60, check=True)
    return script, [read_env(path) for path in folder.rglob("node-0.env")]


def through_slurm(job: JobSpec, folder: Path, theirs: Env, *, runtime: Any) -> tuple[str, list[Env]]:
    stand_ins = StandIns(folder / "slurm")
    job = replace(job, secrets=tuple(theirs))
    plan, options = stand_ins.plan(job), SlurmOptions(runtime=runtime)
    secrets = folder / "slurm" / "runs" / "train-4711" / "secrets"
    secrets.parent.mkdir(parents=True)
    secrets.write_text("".join(f"export {name}={value}\n" for name, value in theirs.items()))
    secrets.chmod(0o600)
    done = stand_ins.run(job, options, plan, **theirs)
    program = "ddprun" if runtime in ("none", "pyxis") else runtime
    calls = [call for call in done.of(program) if "train.py" in call.argv and "ddprun.batch" not in call.argv]
    if runtime in ("docker", "podman"):
        assert all(names.JOB_ENV in call.passed for call in calls)
    if runtime == "apptainer":
        assert all(call.env[f"APPTAINERENV_{names.JOB_ENV}"] == call.env[names.JOB_ENV] for call in calls)
    assert len(calls) == 2, done.output
    return render_script(plan, options), [call.env for call in calls]


def through_a_launch(job: JobSpec, folder: Path, theirs: Env) -> tuple[str, list[Env]]:
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, sys\nsys.stdout.write('\\0'.join(map('='.join, os.environ.items())))\n"
    )
    python.chmod(0o755)
    script = folder / "train.py"
    script.touch()
    plan = plan_of(replace(job, command=(str(script),)), folder)
    port = Output(returncode=0, stdout='{"port": 61000}\n')
    verb = LocalTarget(LocalOptions(python=str(python))).submit(plan, attached=False)
    commands, _ = perform(verb, {"ddprun.nodectl port": port})
    given = []
    for command in matching(commands, "-m ddprun --grace"):
        done = subprocess.run(
            command.argv, env={"PATH": SYSTEM, **theirs, **command.env}, capture_output=True, text=True, timeout=60
        )
        given.append(dict(pair.split("=", 1) for pair in done.stdout.split("\0")))
    return "", given


def through_kubernetes(job: JobSpec, folder: Path, theirs: Env) -> tuple[str, list[Env]]:
    text = KubernetesTarget(KubernetesOptions(workload="job")).render(plan_of(job, folder))
    (workload,) = [thing for thing in yaml.safe_load_all(text) if thing and thing["kind"] == "Job"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    environ = dict(theirs)
    for variable in container["env"]:  # as the kubelet expands it: a name that is known by then, and $$ is $
        environ[variable["name"]] = re.sub(
            r"\$\$|\$\(([^)]*)\)",
            lambda match: "$" if match[1] is None else environ.get(match[1], match[0]),
            str(variable.get("value", "")),
        )
    return "", [environ]


SECRETS = ("UID", "PS4", "HOME", "IFS")


THROUGH: dict[str, Callable[[JobSpec, Path, Env], tuple[str, list[Env]]]] = {
    "local": through_local,
    "local-launch": through_a_launch,
    "kubernetes": through_kubernetes,
    "ssh": lambda *given: through_ssh(*given, bare=True),
    "ssh-docker": lambda *given: through_ssh(*given, bare=False),
    **{
        f"slurm-{runtime}": lambda *given, runtime=runtime: through_slurm(*given, runtime=runtime)  # type: ignore[misc]
        for runtime in ("none", "pyxis", "apptainer", "podman", "docker")
    },
}


@pytest.mark.parametrize("target", THROUGH)
def test_a_rank_sees_a_variable_of_any_name(target: str, tmp_path: Path) -> None:
    job = JobSpec(name="r", nodes="1" if target.startswith("ssh") else "2", gpus=1, device="cpu", env={"A": ""},
                  command=("-m", "train.py"))  # fmt: skip
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    script, _ = THROUGH[target](job, tmp_path / "before", {})
    ours = assigned(script)
    assert {name for name in ours if not name.startswith(OURS)} == set()
    assert ours or not script
    theirs = {name.removeprefix(OURS): "mine" for name in sorted(ours)}
    env = {name: f'{name}\'s "value"\n$({name})' for name in sorted({*bashs(), *ours})}
    if target == "kubernetes":
        del env["HOSTNAME"]  # refused by name: Kubernetes sets it
    if target == "ssh":  # the job's secrets win over its variables
        env = {name: value for name, value in env.items() if name not in SECRETS}
        expected = env | theirs | dict.fromkeys(SECRETS, "secret")
    else:
        expected = env | theirs
    _, given = THROUGH[target](replace(job, env=env), tmp_path / "after", theirs)
    assert given
    for environ in given:
        unpacked = job_env.unpack(environ)
        assert {name: unpacked.get(name) for name in expected} == expected
        assert names.JOB_ENV not in unpacked
