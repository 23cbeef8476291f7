"""Stand-ins for Slurm's programs and for container runtimes, named as such: each writes down its arguments and its
environment byte for byte, and does no more than the batch script needs to continue. The real ones run in tests/cluster.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.targets.slurm.batch_script import render_script
from ddpctl.targets.slurm.options import SlurmOptions

SYSTEM = "/usr/bin:/bin"
TRAINER = Path(__file__).parents[3] / "trainer"
# Records, then says what Slurm would say.
RECORD = """\
#!/bin/bash
shopt -s nullglob
_in_records=("$RECORDS"/*.argv)
shopt -u nullglob
_in_record="$RECORDS/${#_in_records[@]}-${0##*/}"
printf '%s\\0' "$@" >"$_in_record.argv"
env -0 >"$_in_record.env"
"""
SRUN = """
while [[ ${1:-} == --* ]]; do shift; done
_in_code=0
export SLURM_NNODES=$SLURM_JOB_NUM_NODES
for ((_in_node = 0; _in_node < SLURM_NNODES; _in_node++)); do
  SLURM_NODEID=$_in_node SLURM_PROCID=$_in_node SLURM_STEP_ID=1 SLURMD_NODENAME=node-$_in_node "$@" || _in_code=$?
done
exit "$_in_code"
"""
SAYS = {
    "srun": SRUN,
    "scontrol": """
[[ $1 != --oneliner ]] || shift
case $1-$2 in
  show-job)
    echo "JobId=9$3 ArrayJobId=9 Restarts=9 "
    [[ ! -e $RECORDS/restarts ]] || RESTARTS=$(<"$RECORDS/restarts")
    echo "JobId=$3 ${ARRAY-${SLURM_ARRAY_TASK_ID:+ArrayJobId=4700 }}JobName=x" \
      "Restarts=${RESTARTS:-${SLURM_RESTART_COUNT:-0}} ${MEMORY:-MinMemoryNode=0} MinTmpDiskNode=0"
    ;;
  show-hostnames) printf 'node-%d\\n' $(seq 0 $((SLURM_JOB_NUM_NODES - 1))) ;;
  show-node) echo "NodeName=$3 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=$3" ;;
esac
""",
    "getent": 'echo "10.0.0.1        STREAM node-0"\n',
    "squeue": "echo RUNNING\n",
    # ddprun, or what contains it; OUTCOME is what its nodes agree on. ddprun.batch is the real one.
    "ddprun": f"""
[[ " $* " != *" -m ddprun.batch "* ]] || exec {sys.executable} "$@"
""" + """
if [[ $SLURM_NODEID == 0 ]]; then echo "$SLURM_STEP_ID" >"$DDP_RUN_DIR/step"; fi
if [[ -n ${REQUEUED:-} ]]; then echo "$REQUEUED" >"$RECORDS/restarts"; fi # by Slurm itself
if [[ -n ${SAVES:-} ]]; then echo "$SAVES" >"$DDP_CHECKPOINT_DIR/step-$SAVES.pt"; fi
if [[ -n ${OUTCOME:-} ]]; then
  mkdir -p "$DDP_RUN_DIR/node-$SLURM_NODEID"
  echo "$OUTCOME" >"$DDP_RUN_DIR/node-$SLURM_NODEID/outcome.json"
fi
exit "${CODE:-0}"
""",
}  # fmt: skip
for engine in ("docker", "podman", "apptainer"):
    SAYS[engine] = """
for word; do case $word in
  pull) touch "${@:3:1}" ;;
  --env-file=*) cat "${word#*=}" >"$_in_record.names" ;;
esac; done
"""
SAYS["scancel"] = ""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A call of a stand-in."""

    program: str
    argv: tuple[str, ...]
    env: dict[str, str]
    passed: frozenset[str]  # the names of the variables that an engine's container gets


@dataclass(frozen=True, kw_only=True)
class Done:
    """A script that has run."""

    code: int
    output: str
    calls: tuple[Recorded, ...]

    def of(self, program: str) -> tuple[Recorded, ...]:
        return tuple(call for call in self.calls if call.program == program)


class StandIns:
    """A folder in which batch scripts run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin, self._records = folder / "bin", folder / "records"
        for path in (self._bin, self._records, folder / "home"):
            path.mkdir(parents=True)
        for name, text in SAYS.items():
            program = self._bin / name
            program.write_text(RECORD + text)
            program.chmod(0o755)

    @property
    def environ(self) -> dict[str, str]:
        """Of a batch job of two nodes."""
        return {
            "PATH": f"{self._bin}:{SYSTEM}",
            "HOME": str(self.folder / "home"),
            "RECORDS": str(self._records),
            "PYTHON": str(self._bin / "ddprun"),
            "PYTHONPATH": str(TRAINER),
            "ENVIRONMENT": "BATCH",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node-[0-1]",
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_CPUS_PER_TASK": "4",
            "SLURM_GPUS_ON_NODE": "2",
        }

    def plan(self, job: JobSpec) -> Plan:
        """As ddpctl render has it."""
        return Plan(name=job.name, job=job, cwd=".", folder=".", checkpoint_dir="checkpoints")

    def run(self, job: JobSpec, options: SlurmOptions, /, plan: Plan | None = None, **env: str) -> Done:
        """Run the job's script to its end."""
        script = self.folder / "job.sh"
        script.write_bytes(os.fsencode(render_script(plan or self.plan(job), options)))
        return self.bash(script, **env)

    def bash(self, script: Path, /, **env: str) -> Done:
        log = self.folder / "job.log"
        with log.open("wb") as file:
            done = subprocess.run(
                ["/bin/bash", str(script)],
                env=self.environ | env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=60,
                check=False,
            )
        calls = tuple(self._read(path) for path in sorted(self._records.glob("*.argv"), key=_number))
        for path in self._records.iterdir():
            path.unlink()
        return Done(code=done.returncode, output=os.fsdecode(log.read_bytes()), calls=calls)

    def _read(self, path: Path) -> Recorded:
        arguments = os.fsdecode(path.read_bytes()).split("\0")[:-1]
        pairs = os.fsdecode(path.with_suffix(".env").read_bytes()).split("\0")[:-1]
        env = dict(pair.split("=", 1) for pair in pairs)
        names = path.with_suffix(".names")
        passed = frozenset(names.read_text().split() if names.exists() else ())
        return Recorded(program=path.stem.split("-", 1)[1], argv=tuple(arguments), env=env, passed=passed)


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])
