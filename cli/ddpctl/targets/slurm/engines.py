"""What a node runs with podman or docker: pieces of the batch script. Pure text."""

import shlex

from ddpctl.spec import JobSpec
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.pieces import BREAK, PLAIN, WORKSPACE, Runtime, handed_in, lines, mounts
from ddpwire import names

# What a container of the engine may have: docker's daemon starts it outside of the job's cgroup.
_MEMORY = """\
memory=${SLURM_MEM_PER_NODE:-$((${SLURM_MEM_PER_CPU:-0} * ${SLURM_CPUS_ON_NODE:-0}))}
export memory
"""
_LIMITS = {
    "docker": """\
more=() # docker's containers are not in the job's cgroup: they get what Slurm gave the job as limits
[ "${memory:-0}" = 0 ] || more+=(--memory "${memory}m")
cores=${SLURM_CPUS_PER_TASK:-0}
[ "$cores" = 0 ] || [ "$cores" -gt "$(getconf _NPROCESSORS_ONLN)" ] || more+=(--cpus "$cores")
""",
    "podman": """\
more=() # in the job's own cgroup, with its limits, where the engine's runtime can do that
[ "$(podman info --format '{{.Host.OCIRuntime.Name}}' 2>/dev/null)" != crun ] || more+=(--cgroups=disabled)
""",
}


def engine_of(job: JobSpec, options: SlurmOptions) -> Runtime:
    """Podman and docker: the container is not the task's child, so it is given a pipe that ends when the task does."""
    engine = options.runtime
    who = "--userns=keep-id" if engine == "podman" else '--user "$(id -u):$(id -g)"'
    each = 'gpus+=(--device "nvidia.com/gpu=$id")' if engine == "podman" else 'ids+="$id,"'
    first = "" if engine == "podman" else "  ids=\n"
    hand = "" if engine == "podman" else '  [ -z "$ids" ] || gpus=(--gpus "\\"device=${ids%,}\\"")\n'
    words = (
        "--rm", "--init", "--interactive", "--network=host", '--label "ddpctl.run=$run"',
        f"--shm-size={job.shm_size[:-1].lower()}", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", who, f"--workdir {WORKSPACE}", "--env HOME=/tmp",
        f"--env {names.LIFELINE_FD}=3", *(f"--env {name}" for name in handed_in(job)),
        *(f"--volume {mount}" for mount in mounts(job)), *map(shlex.quote, options.runtime_args),
        "--entrypoint sh", shlex.quote(job.image),
    )  # fmt: skip
    test = {"cuda": "true", "auto": "command -v nvidia-smi >/dev/null", "cpu": "false"}[job.device]
    return Runtime(
        setup=_MEMORY if engine == "docker" else "",
        needs=f'command -v {engine} >/dev/null || lacks 69 "there is no {engine}"\n',
        on_node=f"""\
{PLAIN}name=ddpctl-$SLURM_JOB_ID-$SLURM_NODEID gpus=()
{_LIMITS[engine]}for variable in "${{!NCCL_@}}" "${{!UCX_@}}"; do # what the site sets for its network
  more+=(--env "$variable")
done
if {test}; then # only this job's GPUs
{first}  for id in $(echo "${{SLURM_STEP_GPUS:-${{CUDA_VISIBLE_DEVICES:-}}}}" | tr , ' '); do
    {each}
  done
{hand}  # NCCL locks memory for InfiniBand.
  [ ! -d /dev/infiniband ] || gpus+=(--device /dev/infiniband --ulimit memlock=-1)
  unset CUDA_VISIBLE_DEVICES
fi
# This pipe ends with the task, however that ends: then ddprun in the container saves and stops. What Slurm tells all
# processes of a step must not end it before the container has been told.
exec 9< <(trap '' TERM INT HUP USR1 USR2 && exec sleep infinity)
pipe=$!
trap 'woken=1' TERM INT # Slurm tells the client, too, which hands it on
{engine} rm --force "$name" >/dev/null 2>&1 # of an earlier start
{engine} run --name "$name" "${{more[@]}}" "${{gpus[@]}}" "$@" <&9 9<&- &
client=$!
exec 9<&-
woken=1
while ((woken)); do # a signal ends a wait early
  woken=0 code=0
  wait "$client" || code=$?
done
kill -KILL "$pipe" 2>/dev/null
{engine} rm --force "$name" >/dev/null 2>&1
exit "$code"
""",
        words=BREAK.join((*lines(words), """-c 'exec 3<&0 </dev/null; exec ddprun "$@"' ddprun""")),
    )
