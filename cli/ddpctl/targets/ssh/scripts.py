"""Renders the scripts that a host's /bin/sh runs, and the command line of a node's container.

A host needs only sh, flock, coreutils and its container runtime. Every script is passed on stdin, so that a process
list shows only ``/bin/sh``. A node is alive while its ddprun holds a lock on a file in the run's folder
(ddpwire.run_files). The kernel releases the lock when ddprun ends.
"""

import shlex
from collections.abc import Mapping, Sequence

from ddpctl.command import NO_GPU, path_word
from ddpctl.errors import ConfigError
from ddpctl.files import environments
from ddpctl.files.images import inspect_line
from ddpctl.job.launch_plan import CHECK_PYTHON, Plan, ddprun_args
from ddpctl.job.spec import size_bytes
from ddpctl.targets import LogQuery, StopSignal
from ddpctl.targets.ssh import claims
from ddpctl.targets.ssh.options import SshOptions
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.history import HISTORY
from ddpwire.run_files import COPY, COPY_PART, LOCK, NODE, NODE_LOG, OUTCOME, STORE_SECRET, node_name

SHOWN = "==== next node ===="
_END = "END_OF_FILE"
_MACHINE = "cat /proc/sys/kernel/random/boot_id && readlink /proc/self/ns/net /proc/self/ns/mnt"
_BEGINNING = "s/^([[]rank[0-9]+[]]: ?)?/"  # the prefix of ddpctl replaces the prefix of torch
ENV_FILE = "--env-file=$_ddp_env"  # a temporary file with the environment of a container
INFINIBAND = "$_ddp_infiniband"  # the option that gives the host's InfiniBand devices to a container, if there are any
RUN_LABEL, NODE_LABEL = "ddpctl.run", "ddpctl.node"
WORKSPACE = "/workspace"  # the working folder of the image, where the project's folder is mounted
RUNS = "/runs"

# Libraries need both variables. They are not set for a user who is not in the image's /etc/passwd.
DEFAULTS = {"HOME": "/tmp", "USER": "ddp"}  # noqa: S108 -- the container's own, a tmpfs

# A container's log is deleted with the container, so a node's output is written to a file in the run's folder.
_INTO_LOG = f'exec ddprun "$@" >>"${names.RUN_DIR}/{node_name(0)[:-1]}${names.NODE_RANK}/{NODE_LOG}" 2>&1'


def run_path(home: str, run: str, *parts: str) -> str:
    """Return the path of a run's folder on a host, or a path in it."""
    return "/".join((home.rstrip("/"), "runs", run, *parts))


def node_path(home: str, run: str, node: int) -> str:
    """Return the path of a node's folder on its host, quoted for the shell."""
    return path_word(run_path(home, run, node_name(node)))


def claims_folder(home: str) -> str:
    """Return the path of the host's folder of claims (see claims.py), quoted for the shell."""
    # Hosts may share a home folder, so the name of the folder contains the name of the host.
    return f'{path_word(home.rstrip("/") + "/claims-")}"$(uname -n)"'


def gpus_text(options: SshOptions, *, load: bool = False) -> str:
    """Return shell code that prints a host's GPUs, claims and tickets.

    ``load``: also print the load of its CPUs and GPUs.
    """
    smi = "timeout 10 nvidia-smi"
    lines = [
        'say() { printf "%s %s\\n" "$1" "$2"; }',
        'say name "$(uname -n) $(cat /etc/machine-id 2>/dev/null)"',
        f"if own=$({_MACHINE} 2>/dev/null); then say machine \"$(uname -n) $HOME $own\" | tr '\\n' ' '; echo; fi",
        'say now "$(date +%s)"',
        f"code=0; out=$({smi} --query-gpu=uuid --format=csv,noheader 2>/dev/null) || code=$?",
        "case $code in",
        '  0) printf "%s\\n" "$out" | while read -r gpu; do case $gpu in GPU-*|MIG-*) say gpu "$gpu" ;; esac; done ;;',
        f"  {'|'.join(map(str, NO_GPU))}) ;;",
        '  *) say gpu_error "exit code $code: $(printf "%s" "$out" | tail -n 1)" ;;',
        "esac",
        f"{smi} --query-compute-apps=gpu_uuid --format=csv,noheader 2>/dev/null | "
        'while read -r gpu; do say busy "$gpu"; done',
        claims.list_claims(claims_folder(options.home)).rstrip(),
    ]
    if load:
        query = "uuid,utilization.gpu,memory.used,memory.total"
        lines += [
            # OMP_NUM_THREADS and OMP_THREAD_LIMIT, which many profiles set, change what nproc prints.
            'say load "$(cut -d " " -f 1 /proc/loadavg) $(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"',
            f"{smi} --query-gpu={query} --format=csv,noheader,nounits 2>/dev/null | "
            'while read -r line; do say use "$line"; done',
        ]
    return "\n".join(lines)


def facts_script(options: SshOptions, *, image: str, script: str | None, checkpoints: str | None = None) -> str:
    """Return a script that prints the properties of a host, one key and value per line. It changes nothing."""
    home = path_word(options.home)
    engine = options.runtime
    lines = [
        gpus_text(options),
        'last() { printf "%s" "$1" | tail -n 1; }',
        'say id "$(id -u):$(id -g)"',
        'say home "$HOME"',
        'say ssh "${SSH_CONNECTION:-}"',
        f'd={home}; while [ ! -d "$d" ]; do d=$(dirname "$d"); done',
        'if [ -w "$d" ]; then say writable yes; fi',
        'say disk "$(df -Pk "$d" | awk \'NR == 2 { print $4 }\')"',
        "if command -v flock >/dev/null; then say flock yes; fi",
    ]
    if engine == "none":
        python = path_word(options.python)
        lines += [
            f'if out=$({python} -c {shlex.quote(CHECK_PYTHON)} 2>&1); then say engine "$({python} -V)"; '
            f'else say engine_error "$(last "$out")"; fi',
        ]
        lines += [f'say environment "$({environments.record_text(python)})"'] if options.environment else []
    else:
        version = "{{.Server.Version}}" if engine == "docker" else "{{.Client.Version}}"
        lines += [
            f"if out=$(timeout 10 {engine} version --format {shlex.quote(version)} 2>&1); "
            'then say engine "$out"; else say engine_error "$(last "$out")"; fi',
            f"say runtimes \"$(timeout 10 {engine} info --format '{{{{json .Runtimes}}}}' 2>/dev/null)\"",
            f"say asked {shlex.quote(image)}",
            f"if out=$(timeout 10 {shlex.join(inspect_line(engine, image))} 2>/dev/null); then "
            "say image \"$(printf '%s' \"$out\" | tr -d '\\n')\"; fi",
        ]
    folder = "~/" if engine == options.project == "none" else options.project
    if script and folder.startswith(("/", "~")):
        lines.append(f"if cd {path_word(folder)} && [ -f {shlex.quote(script)} ]; then say script yes; fi")
    if checkpoints:
        lines += [
            f"if cd {path_word(checkpoints)} 2>/dev/null; then name=$(ls | sort | tail -n 1)",
            f'if [ -n "$name" ] && {{ [ -e {COPY} ] || [ ! -e {COPY_PART} ]; }}; then say checkpoint "$name"; fi',
            f"say copy \"$(cat {COPY} 2>/dev/null | tr -d '\\n')\"",
            f"say announced \"$(cat {COPY_PART} 2>/dev/null | tr -d '\\n')\"; fi",
        ]
    return "\n".join([*lines, "say end yes"]) + "\n"


def start_node(
    options: SshOptions, run: str, node: int, launch: str, *, gpus: Sequence[str], checkpoints: str, secret: str,
    owner: str | None = None, uid: str = "",
) -> str:  # fmt: skip
    """Return a script that starts a node, or fails if another run has one of its GPUs.

    ``launch``: the result of ``launch_container`` or ``launch_process``. ``owner``: the new owner of the run's folders,
    or None.
    """
    home, folder = options.home, path_word(run_path(options.home, run))
    # Each node writes a separate file and renames it, because nodes may share the folder.
    file, new = (f"{path_word(run_path(home, run, STORE_SECRET))}{end}" for end in ("", f".{node}"))
    give = f"chown -R {shlex.quote(owner)} {folder} && chown {owner} {path_word(checkpoints)}\n" if owner else ""
    return f"""\
set -eu
mkdir -p {node_path(home, run, node)} {path_word(checkpoints)} || exit {Exit.CANNOT_WRITE:d}
(umask 077 && printf %s {shlex.quote(secret)} >{new} && mv -f {new} {file})
{give}{claims.take(claims_folder(home), run, node, gpus, engine=options.runtime, uid=uid)}{launch}"""


def launch_container(options: SshOptions, run: str, argv: Sequence[str], env_file: str) -> str:
    """Return the lines that start a node's container.

    ``argv``: the result of ``run_args``. ``env_file``: the text of the container's environment file.
    """
    # Only the name of the environment file and the host's InfiniBand devices must be expanded by the shell.
    expanded = {ENV_FILE: f'"{ENV_FILE}"', INFINIBAND: INFINIBAND}
    command_line = " ".join(expanded.get(word) or shlex.quote(word) for word in argv)
    return f"""\
_ddp_env=$(umask 077 && mktemp {path_word(run_path(options.home, run))}/env.XXXXXX)
trap 'rm -f "$_ddp_env"' EXIT
cat >"$_ddp_env" <<'{_END}'
{env_file}{_END}
_ddp_infiniband=
[ ! -d /dev/infiniband ] || _ddp_infiniband=--device=/dev/infiniband
{command_line} >/dev/null 8>&-
"""


def launch_process(
    options: SshOptions, run: str, node: int, argv: Sequence[str], env: Mapping[str, str], *, folder: str
) -> str:
    """Return the lines that start a node's ddprun as a process. It holds the lock on the node's claim until it ends.

    ``argv``, ``env`` and ``folder``: the command line, the environment and the working folder of ddprun.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    log = path_word(run_path(options.home, run, node_name(node), NODE_LOG))
    python, *rest = argv
    run_dir = path_word(run_path(options.home, run))
    uses = environments.use_text(path_word(python), run_dir) if options.environment else ""
    return f"""\
{uses}cd {path_word(folder)}
{exports}setsid {path_word(python)} {shlex.join(rest)} </dev/null >>{log} 2>&1 8>&- &
"""


def show(options: SshOptions, nodes: Sequence[tuple[str, int]]) -> str:
    """Return a script that prints a JSON object for each run and node. The line ``SHOWN`` separates the objects.

    Each object has the keys of ``nodectl show``: alive, remains, node (from node.json), outcome (from outcome.json) and
    history.
    """
    # The script starts as few programs as possible, because it may query hundreds of runs. Processes or containers are
    # listed at most once, and only if a node has ended without an outcome.
    home = options.home
    if options.runtime == "none":
        exists = '[ -e "$3" ] && ! flock -n -s "$3" true'
        listing = f"grep -ahsz '^{names.RUN_DIR}=' /proc/[0-9]*/environ | tr '\\0' '\\n'"
        markers = [f"{names.RUN_DIR}={path_word(run_path(home, run))}" for run, _ in nodes]
    else:
        exists = '_ddp_remains "$2"'
        listing = f"{options.runtime} ps --all --filter label={RUN_LABEL} --format '{{{{.Names}}}}'"
        markers = [shlex.quote(container_name(run, node)) for run, node in nodes]
    folder = '"$_ddp_claims"'
    calls = f"echo '{SHOWN}'\n".join(
        f"_ddp_show {node_path(home, run, node)} {marker} {claims.claim_word(folder, run, node)}\n"
        for (run, node), marker in zip(nodes, markers, strict=True)
    )
    return f"""\
_ddp_claims={claims_folder(home)}
unset _ddp_left
_ddp_remains() {{
  [ "${{_ddp_left+known}}" ] || _ddp_left=$({listing})
  case "
$_ddp_left
" in *"
$1
"*) return 0 ;; esac
  return 1
}}
_ddp_show() {{
  cd "$1" 2>/dev/null || {{ echo '{{"alive": false, "node": null, "outcome": null}}'; return 0; }}
  alive=false remains=false
  if [ -e {LOCK} ] && ! flock -n -s 9 9<{LOCK}; then alive=true
  elif [ ! -e {NODE} ] && [ ! -e {OUTCOME} ] && {exists}; then alive=true; fi
  if [ $alive = false ] && [ ! -e {OUTCOME} ] && _ddp_remains "$2"; then remains=true; fi
  echo "{{\\"alive\\": $alive, \\"remains\\": $remains, \\"node\\": "
  if [ -e {NODE} ]; then cat {NODE}; else echo null; fi
  echo ', "outcome": '
  if [ -e {OUTCOME} ]; then cat {OUTCOME}; else echo null; fi
  if [ -e {HISTORY} ]; then printf ', "history": "%s"' "$({{ head -n 1 {HISTORY}; tail -n 20 {HISTORY}; }} 2>/dev/null |
    tr -dc '[:alnum:]_:.,+\\n-' | awk '{{ printf "%s\\\\n", $0 }}')"; fi
  echo '}}'
}}
{calls}"""


def logs(home: str, run: str, node: int, files: Mapping[str, str], query: LogQuery) -> str:
    """Return a script that prints log files of a node. ``files`` maps each name to the prefix of its lines.

    With ``query.follow``, the script prints new lines until the node ends. It exits with 66 if there are no files.
    """
    folder = path_word(run_path(home, run, node_name(node)))
    begin = "+1" if query.tail is None else str(query.tail)
    if not query.follow:
        lines = [f"cd {folder} 2>/dev/null || exit 66", "found=66"]
        for name, prefix in files.items():
            mark = f" | sed -E '{_BEGINNING}{prefix}/'" if prefix else ""
            lines.append(f"if [ -f {name} ]; then found=0; tail -n {begin} {name}{mark}; fi")
        return "\n".join([*lines, "exit $found"]) + "\n"
    lines = [
        "n=0",
        f"while [ ! -e {folder}/{LOCK} ] && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done",
        "if [ $n -gt 0 ]; then sleep 0.2; fi",  # the lock's file exists a moment before it is locked
        f"cd {folder} 2>/dev/null || exit 66",
        f"( [ ! -e {LOCK} ] || exec flock -s {LOCK} true ) & ends=$!",
        "trap 'kill \"$ends\" 2>/dev/null' EXIT",
    ]
    for name, prefix in files.items():
        mark = f" | sed -uE '{_BEGINNING}{prefix}/'" if prefix else ""
        lines.append(f'tail --pid="$ends" -s 0.1 -n {begin} -F {name} 2>/dev/null{mark} & tails="${{tails:-}} $!"')
    return "\n".join([*lines, "wait $tails"]) + "\n"


def signal_container(
    engine: str, home: str, run: str, node: int, signal: StopSignal, *, wait_s: float, last_word: str
) -> str:
    """Return a script that signals a node's container and waits for its end.

    The script then prints, in the format of nodectl, whether the container still exists.
    ``last_word``: an outcome as JSON text. If the node is killed before it has written its outcome, the script writes
    this text.
    """
    folder = path_word(run_path(home, run, node_name(node)))
    ours = f"{engine} ps --all --quiet --filter label={RUN_LABEL}={run} --filter label={NODE_LABEL}={node}"
    name = container_name(run, node)
    if signal == "KILL":
        outcome = f"printf '%s\\n' {shlex.quote(last_word)} >{folder}/{OUTCOME}"
        act = f'if [ -n "$ids" ]; then {engine} rm --force $ids >/dev/null; [ -e {folder}/{OUTCOME} ] || {outcome}; fi'
    else:
        act = f'[ -z "$ids" ] || {engine} kill --signal {signal} $ids >/dev/null 2>&1 || true'
    return f"""\
ids=$({ours}) || exit
{act}
if [ -n "$ids" ]; then timeout {wait_s:g} {engine} wait {name} >/dev/null 2>&1; fi
n=0
while ids=$({ours}) && [ -n "$ids" ] && [ $n -lt {10 if wait_s else 0} ]; do sleep 0.2; n=$((n + 1)); done
if [ -z "$ids" ]; then echo '{{"alive": false}}'; else echo '{{"alive": true}}'; fi
"""


def signal_process(options: SshOptions, run: str, node: int, signal: StopSignal, wait_s: float) -> str:
    """Return a script that signals the processes of a node with nodectl.

    The program nodectl waits for the end of the processes, and prints whether the node is still alive.
    """
    folder = path_word(run_path(options.home, run, node_name(node)))
    return (
        f"if [ ! -d {folder} ]; then echo '{{\"alive\": false}}'; exit 0; fi\n"
        f"{path_word(options.python)} -P -m ddprun.nodectl signal --signal {signal} --wait {wait_s:g} {folder}\n"
    )


# The node's container, for docker or podman. It has no capabilities and a read-only root file system. The node writes
# to the run's folder on the host, which belongs to ``user``.


# The options that limit the rights of all containers that ddpctl starts.
CONFINED = (
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--read-only",
    "--tmpfs=/tmp:rw,exec,nosuid,nodev",  # exec: torch.compile loads its compiled code from /tmp
)


def container_name(run: str, node: int) -> str:
    """Return the name of a node's container, such as ``ddpctl-night-0``."""
    return f"ddpctl-{run}-{node}"


def run_args(
    options: SshOptions, plan: Plan, node: int, *, image: str, user: str, run_dir: str, gpus: Sequence[str] = (),
    project: str | None = None, checkpoints: str | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Return the command line that starts a node's container in the background. It is removed when its ddprun ends.

    ``user``: uid:gid of the owner of ``run_dir``, the run's folder on the host. ``project`` and ``checkpoints`` are
    folders of the host, or None for the project in the image and for checkpoints in the run's folder.
    """
    job, engine = plan.job, options.runtime
    argv = [
        "--detach",
        "--rm",
        "--init",
        f"--name={container_name(plan.name, node)}",
        f"--label={RUN_LABEL}={plan.name}",
        f"--label={NODE_LABEL}={node}",
        f"--network={options.network}",
        f"--user={user}",
        ENV_FILE,
        f"--shm-size={size_bytes(job.shm_size)}",
        *CONFINED,
        f"--volume={run_dir}:{plan.folder}",
    ]
    if checkpoints:
        argv.append(f"--volume={checkpoints}:{plan.checkpoint_dir}")
    if project:
        argv += [f"--volume={project}:{WORKSPACE}", f"--workdir={WORKSPACE}"]
    argv += [f"--volume={mount}" for mount in job.mounts]
    argv += options.runtime_args
    if gpus and engine == "podman":
        argv += [f"--device=nvidia.com/gpu={gpu}" for gpu in gpus]
    elif gpus:
        argv.append(f'--gpus="device={",".join(gpus)}"')
    if gpus:  # NCCL needs locked memory. A rootless engine cannot remove the limit.
        argv += ["--ulimit=memlock=-1:-1", INFINIBAND]
    if job.cpus is not None:
        argv.append(f"--cpus={job.cpus}")
    if job.memory is not None:
        argv.append(f"--memory={size_bytes(job.memory)}")
    if engine == "podman":
        argv.append("--userns=keep-id")  # otherwise the folder's owner does not exist in the container
    start = ("--entrypoint=/bin/sh", image, "-c", _INTO_LOG, "ddprun", *ddprun_args(plan))
    return (engine, "run", *argv, *start)


def env_file(env: Mapping[str, str]) -> str:
    """Return the text of an environment file for docker or podman. Raises ConfigError if a value has a line break."""
    for name, value in env.items():
        if "\n" in value or "\r" in value:
            raise ConfigError(f"env: {name} has a line break, which environment files do not allow: encode it")
    return "".join(f"{name}={value}\n" for name, value in env.items())
