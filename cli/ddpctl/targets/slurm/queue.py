"""The shell scripts that the login node runs to query and control jobs, and the parser of their output.

The scripts are for ``sh -c`` and need no program of ddpctl on the login node. The argument for a job is its number. For
a batch script that ddpctl has started inside an allocation, it is ``@PID:JOB``: the pid of the script and the number of
the allocation. The parser knows the job states of Slurm 22.05 to 25.05.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from ddpctl.runs.run_status import ENDED, NodeReport, RunStatus, State, fold_nodes, node_report
from ddpctl.runs.run_store import Run
from ddpwire import run_files
from ddpwire.exits import Exit
from ddpwire.history import HISTORY
from ddpwire.run_files import KILLED_ON_REQUEST

_WORDS: Mapping[State, str] = {
    "pending": "PENDING EXPEDITING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
    "starting": "CONFIGURING POWER_UP_NODE",
    "running": "RUNNING RESIZING SIGNALING STOPPED SUSPENDED",  # STOPPED: by SIGSTOP; the job keeps its cores
    "stopping": "COMPLETING STAGE_OUT UPDATE_DB",
    "succeeded": "COMPLETED",
    "stopped": "CANCELLED PREEMPTED",
    # REVOKED: another cluster of the federation runs the job
    "failed": "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY RECONFIG_FAIL REVOKED TIMEOUT",
}
STATES = {word: state for state, states in _WORDS.items() for word in states.split()}
HEADER = re.compile(r"^==> (.*) <==$", re.MULTILINE)


# squeue's reason why a job may wait forever → a message. Others usually pass (Priority, Resources).
HOPELESS = {
    "PartitionNodeLimit": "it requests more nodes than its partition allows: use fewer, or another partition",
    "PartitionTimeLimit": "it requests more time than its partition allows: use less, or another partition",
    "PartitionConfig": "its partition cannot run what it requests",
    "BadConstraints": "no node has what it requests",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "DependencyNeverSatisfied": "the run that it waits for did not succeed: stop it with ddpctl stop",
    "JobHeldUser": "it is held: release it with scontrol release",
    "JobHeldAdmin": "it is held by an administrator",
    "AssocGrpGRES": "its account may not use so many GPUs",
    "QOSMaxGRESPerJob": "its quality of service does not allow a job so many GPUs",
    "QOSMaxNodePerJobLimit": "its quality of service does not allow a job so many nodes",
}
_CASES = "".join(f"      {reason}) why={shlex.quote(f': {text}')} ;;\n" for reason, text in HOPELESS.items())


# A word that is unknown here does not go on, else a wait for it might never end.
GOES_ON = "|".join(word for word, state in STATES.items() if state not in ENDED)

# A process in state Z has ended, but its parent has not yet waited for it.
LIVES = """\
lives() { # @PID:JOB
  pid=${1#@}
  pid=${pid%:*}
  case $(ps -o stat= -p "$pid" 2>/dev/null) in '' | Z*) return 1 ;; esac
}
"""
FORMAT = "%F|%K|%T|%r|%S|%N"  # number of the array or job, index in the array, state, reason, start, nodes

# Arguments: the jobs, separated by commas, then files. Prints the state of each job and the text of each file, each
# after a header line. sacct is queried for jobs that squeue no longer lists. Without accounting, sacct fails, and the
# files alone say how the job ended. If Slurm has forgotten all of the jobs, squeue fails with "Invalid job id".
# Of a history (.csv), the header and the last lines are enough for the progress. An empty line follows each file, whose
# last line may have no end. The exit code is 0, as files may be missing: else it would be that of the last command.
ASK = f"""\
{LIVES}jobs=$1
shift
echo '==> squeue <=='
for job in $(echo "$jobs" | tr , '\\n' | grep '^@'); do # scripts inside an allocation: check their processes
  state=COMPLETED
  lives "$job" && state=RUNNING
  echo "$job|N/A|$state|||"
done
jobs=$(echo "$jobs" | tr , '\\n' | grep -v '^@' | paste -s -d , -)
if [ -n "$jobs" ]; then
  answer=$(squeue --noheader --array --states=all --jobs="$jobs" --format='{FORMAT}' 2>&1) || case $answer in
    *'Invalid job id'*) answer= ;;
    *) answer="error: $answer" ;;
  esac
  [ -z "$answer" ] || echo "$answer"
  jobs=$(echo "$jobs" | tr , '\\n' | grep -vxF "$(echo "$answer" | cut -d '|' -f 1)" | paste -s -d , -)
  case $answer in error:*) jobs= ;; esac
  [ -z "$jobs" ] || sacct --noheader --allocations --parsable2 --jobs="$jobs" --format=JobID,State 2>/dev/null |
    sed -nE 's/^([0-9]+)_([0-9]+)[|]([A-Z_]+).*/\\1|\\2|\\3|||/p; s/^([0-9]+)[|]([A-Z_]+).*/\\1|N\\/A|\\2|||/p'
fi
for file in "$@"; do
  [ -f "$file" ] || continue
  echo "==> $file <=="
  case $file in
    *.csv) head -n 1 "$file" && tail -n 20 "$file" ;;
    *) cat "$file" ;;
  esac
  echo
done
exit 0
"""

# Arguments: the uid of a launch, the run's folder, the time of the launch. Prints the number of its job. The uid is the
# argument of the job's script: neither a user nor a submit plugin changes it. Exit 1: there is no job. 69: unknown.
LOCATE = """\
known= uid=$1 folder=$2 age=$(($(date +%s) - $3))
jobs=$(squeue --noheader --user="$(id -un)" --states=all --format='%F|%o' 2>&1) || { echo "$jobs" >&2; exit 69; }
old=$(sacct --noheader --parsable2 --allocations --starttime=now-7days --format=JobID,SubmitLine 2>/dev/null) && known=1
job=$(printf '%s\\n' "$jobs" "$old" | awk -v uid="$uid" '$NF == uid { sub("[_|].*", ""); print; exit }')
for starts in "$folder/starts" "$folder"/task-*/starts; do
  [ -z "$job" ] && [ "$starts" -nt "$folder/job.sh" ] && job=$(awk '$1 == "slurm" { print $2; exit }' "$starts")
done
[ -z "$job" ] || { echo "$job"; exit 0; }
kept=$(scontrol show config | sed -n 's/^MinJobAge *= *\\([0-9]*\\).*/\\1/p')
# After 600 s, any disk shows the file of a job that has started.
[ -z "$known" ] && [ -e "$folder/job.sh" ] && [ "$age" -ge "${kept:-0}" ] && [ "$age" -lt 600 ] || exit 1
echo "Slurm may have forgotten the job: it keeps ended jobs for ${kept:-0} s" >&2
exit 69
"""

# Arguments: the job, the number of last lines, then pairs of PREFIX and FILE. Prints the files. Exit 66: none exists.
# PREFIX takes the place of torch's own prefix "[rankN]: ", which the lines of tracebacks have.
PRINT = """\
tail=$2
shift 2
code=66
while [ $# -gt 1 ]; do
  [ ! -f "$2" ] || { code=0; tail -n "$tail" "$2" | sed -E "s/^([[]rank[0-9]+[]]: ?)?/$1/"; }
  shift 2
done
exit $code
"""

# Has the arguments of PRINT. Prints new lines of the files until the job ends. While the job waits, prints the reason.
# It ends if its parent (ddpctl, or its sshd) has ended, or after 30 queries without an answer. tail -F also waits for
# files that do not exist yet; its errors about them are dropped. It ends with this script (--pid), and looks for new
# lines at least once a second. sed -u passes each line on at once.
FOLLOW = f"""\
{LIVES}job=$1 tail=$2
shift 2
pids=
while [ $# -gt 1 ]; do
  tail -q -n "$tail" -F --pid=$$ "$2" 2>/dev/null | sed -uE "s/^([[]rank[0-9]+[]]: ?)?/$1/" &
  pids="$pids $!"
  shift 2
done
last= misses=0
while kill -0 "$PPID" 2>/dev/null && [ "$misses" -lt 30 ]; do
  case $job in
    @*) lives "$job" || break ;;
    *) if states=$(squeue --noheader --array --states=all --jobs="$job" --format='%T|%r|%S|' 2>&1); then
      misses=0
      echo "$states" | grep -qE '^({GOES_ON})[|]' || break
      waits=$(echo "$states" | sed -n 's/^PENDING|//p' | sort -u | head -n 1)
      waits=${{waits%|}} && waits=${{waits%|N/A}}
      why= reason=${{waits%|*}}
      case ${{reason%%,*}} in
{_CASES}      esac
      [ -z "$why" ] || waits=$reason
      case $waits in
        "$last" | '' | None*) ;;
        *'|'*) echo "slurm: the job is waiting (${{waits%|*}}), expected to start at ${{waits#*|}}" >&2 ;;
        *) echo "slurm: the job is waiting ($waits)$why" >&2 ;;
      esac
      last=$waits
    else
      case $states in *'Invalid job id'*) break ;; esac
      misses=$((misses + 1))
    fi ;;
  esac
  sleep 1
done
sleep 1.5 # tail then prints the nodes' last lines
for pid in $pids; do kill "$pid" 2>/dev/null; done
exit 0
"""

_KILLED = json.dumps(asdict(KILLED_ON_REQUEST))
# Arguments: the job, INT, TERM or KILL, the seconds to wait until the job ends, then the run's folders. Exit 1: the job
# still exists. Exit 69: Slurm does not answer. A killed run cannot write its outcome, so this script writes it.
# TERM is USR2 for the batch script: there, SIGTERM means scancel, after which Slurm itself signals the step. A waiting
# job is cancelled first, so that a job that starts meanwhile gets the signal. An allocation (salloc) is not cancelled.
# Errors of scancel do not matter, because the loop then asks whether the job still exists. A single miss of squeue may
# be a controller that is busy, so the third one in a row counts.
STOP = f"""\
{LIVES}job=$1 given=$1 how=$2 wait=$3
shift 3
tell=USR2
[ "$how" != INT ] || tell=INT
case $job in
  @*)
    lives "$job" && kill -"$tell" "$pid"
    job=${{job#*:}} ;;
  *)
    scancel --quiet --state=PENDING "$job"
    scancel --quiet --batch --signal="$tell" "$job" ;;
esac 2>/dev/null
if [ "$how" = KILL ]; then # the script has got the signal above, so it will not requeue the job
  for folder in "$@"; do
    task=
    case $folder in */task-*) task=_${{folder##*/task-}} ;; esac
    [ ! -s "$folder/step" ] || scancel --quiet --signal=KILL "$job$task.$(cat "$folder/step")" 2>/dev/null
  done
  [ "$given" != "$job" ] || scancel --quiet "$job" 2>/dev/null
fi
job=$given misses=0
while :; do
  case $job in
    @*) lives "$job" || break ;;
    *) if states=$(squeue --noheader --states=all --jobs="$job" --format='%T|' 2>&1); then
      misses=0
      echo "$states" | grep -qE '^({GOES_ON})[|]' || break
    else
      case $states in *'Invalid job id'*) break ;; esac
      misses=$((misses + 1))
      [ "$misses" -lt 3 ] || {{ echo "$states" >&2 && exit 69; }} # whether the job still exists is unknown
    fi ;;
  esac
  wait=$((wait - 1))
  [ "$wait" -ge 0 ] || exit 1
  sleep 1
done
for folder in "$@"; do rm -f "$folder/secrets"; done # a job that never ran or was killed has not deleted it
[ "$how" = KILL ] && for folder in "$@"; do
  set -- "$folder"/node-*/outcome.json
  [ -e "$1" ] || {{ mkdir -p "$folder/node-0" && echo '{_KILLED}' >"$folder/node-0/outcome.json"; }}
done
exit 0
"""

# Arguments: the job, the node's number, the folder, then options of srun, -- and the command. With --overlap, the step
# shares the cores and GPUs of the ranks' step, which has all of them. The start of MPI would take time.
EXECUTE = """\
job=$1 node=$2 folder=$3
shift 3
nodes=$(squeue --noheader --jobs="$job" --states=RUNNING --format=%N) && [ -n "$nodes" ] || exit 69
name=$(scontrol show hostnames "$nodes" | sed -n "$((node + 1))p")
[ -n "$name" ] || exit 66
exec srun --jobid="$job" --overlap --nodes=1 --ntasks=1 --nodelist="$name" --mpi=none --chdir="$folder" "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The state that Slurm reports for a job, or for one task of a job array."""

    id: str
    task: str | None  # its index in the array
    word: str  # Slurm's state, such as ``RUNNING``, ``CANCELLED by 1000`` or ``CANCELLED+``
    reason: str = ""
    start: str = ""

    @property
    def state(self) -> State:
        """The state of the run."""
        # sacct appends who cancelled the job, and + to a word that it has cut off.
        return STATES.get(self.word.split(" ")[0].rstrip("+"), "unknown")

    @property
    def number(self) -> str:
        """The job's number, or JOB_TASK for a task of an array."""
        return self.id if self.task is None else f"{self.id}_{self.task}"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The parsed output of ``ASK``."""

    jobs: tuple[Job, ...]
    files: Mapping[str, str]  # path → text
    error: str = ""  # the error of squeue


def read_answers(text: str) -> Answers:
    """Parse the output of ``ASK``."""
    _, *parts = HEADER.split(text)
    sections = dict(zip(parts[::2], (text.removeprefix("\n") for text in parts[1::2]), strict=True))
    jobs, error = [], ""
    for line in sections.pop("squeue", "").strip().splitlines():
        if line.startswith("error: "):
            error = line.removeprefix("error: ")
            continue
        fields = line.split("|")
        if len(fields) >= 5:  # else it is a message of squeue or of the login shell
            task = fields[1] if fields[1].isdecimal() else None
            jobs.append(Job(id=fields[0], task=task, word=fields[2], reason=fields[3], start=fields[4]))
    return Answers(jobs=tuple(jobs), files=sections, error=error)


def node_files(run_dir: str, nodes: Iterable[int]) -> tuple[str, ...]:
    """Return the paths of the files that show the state of each node of a job."""
    dirs = [PurePath(run_dir) / run_files.node_name(node) for node in nodes]
    return tuple(str(path / name) for path in dirs for name in (run_files.NODE, run_files.OUTCOME, HISTORY))


def starts_file(run_dir: str) -> str:
    """Return the path of the file with one line for each start of a job."""
    return str(PurePath(run_dir) / run_files.STARTS)


def status_of(run: Run, run_dir: str, job: Job | None, answers: Answers, *, young: bool) -> RunStatus:
    """Return the status of one job.

    Slurm reports whether the job runs. The files of its nodes contain its progress and its outcome.
    """
    reports = tuple(_report(node, run_dir, job, answers) for node in range(run.job.max_machines))
    status = partial(RunStatus, run=run.name)
    if answers.error and job is None:
        return status(state="unknown", message=f"Slurm does not answer: {answers.error}")
    if job is not None and job.state == "pending":  # before the outcome, which is that of an earlier start
        again = _requeued(answers.files.get(starts_file(run_dir), ""), reports)
        return status(state="pending", message=again + waits(job))
    folded = fold_nodes(run.name, reports, young=young and job is None)  # Slurm may not list a young job yet
    if job is None:
        message = "Slurm no longer lists the job, and its nodes wrote no outcome: see job.log"
        return replace(folded, message=message) if folded.state == "lost" else folded
    status, message = partial(status, nodes=reports), f"Slurm: job {job.id} is {job.word}"
    if job.state in ("starting", "running", "stopping"):
        # The job's script runs before the first and after the last ddprun.
        state: State = "stopping" if folded.outcome else "starting"
        return folded if folded.alive else status(state=state, message=message)
    if job.state == "unknown":  # a word of a newer Slurm: the job may go on, whatever a first outcome says
        return status(state="unknown", message=message)
    began = any(report.state for report in reports)
    has_logs = began or starts_file(run_dir) in answers.files
    if folded.outcome:  # it says more than Slurm's state, which is FAILED for each exit code but 0
        return replace(folded, has_logs=has_logs)
    if job.state == "succeeded":
        return status(state="succeeded", message="Slurm: COMPLETED", code=0, has_logs=has_logs)
    # A job that was cancelled in the queue has stopped as asked. Otherwise no ddprun lived to write why it ended.
    code = Exit.SAVED_TERM if job.state == "stopped" and not began else Exit.KILLED
    message += "; its nodes wrote no outcome: see job.log" if began else ""
    return status(state=job.state, message=message, code=code, has_logs=has_logs)


def _requeued(starts: str, reports: tuple[NodeReport, ...]) -> str:
    """Return a message that says at which step a waiting job was requeued. Return "" if it was not requeued."""
    if not (lines := run_files.read_starts(starts)):
        return ""
    reached = [report.outcome.step for report in reports if report.outcome]
    reached += [report.progress.step for report in reports if report.progress]
    step = max((step for step in reached if step is not None), default=None)
    number, limit = lines[-1].requeues + 1, lines[-1].limit
    of = f" of {limit}" if number <= limit else ""  # an administrator may requeue the job more often
    return f"requeued{'' if step is None else f' at step {step}'} (requeue {number}{of}); "


def waits(job: Job) -> str:
    """Return a message about why a job waits, and when Slurm expects to start it."""
    explanation = HOPELESS.get(job.reason.partition(",")[0])  # "ReqNodeNotAvail, UnavailableNodes:node-2"
    if explanation:
        return f"job {job.id} is waiting ({job.reason}): {explanation}"
    start = f", expected to start at {job.start}" if job.start not in ("", "N/A") else ""
    return f"job {job.id} is waiting{f' ({job.reason})' if job.reason not in ('', 'None') else ''}{start}"


def _report(node: int, run_dir: str, job: Job | None, answers: Answers) -> NodeReport:
    text_of = {path.name: answers.files.get(str(path), "") for path in map(PurePath, node_files(run_dir, [node]))}
    shown: dict[str, Any] = {"node": None, "outcome": None, "history": text_of[HISTORY]}
    for key, name in (("node", run_files.NODE), ("outcome", run_files.OUTCOME)):
        with suppress(ValueError):  # the file is missing
            shown[key] = json.loads(text_of[name])
    # The login node cannot look at the node's processes: it lives if Slurm runs its job and it has no outcome.
    report = node_report(node, {**shown, "alive": False})
    is_alive = job is not None and job.state in ("running", "stopping") and report.outcome is None
    return replace(report, alive=is_alive)


def together(run: Run, states: tuple[RunStatus, ...], tasks: tuple[str, ...]) -> RunStatus:
    """Return the status of a whole job array.

    While at least one task is active, the array has the state of an active task. Running tasks take precedence over
    waiting tasks. After the end of all tasks, the array has the status of the task with the highest exit code.
    """
    names = [state.state for state in states]
    counts = ", ".join(f"{names.count(word)} {word}" for word in dict.fromkeys(names))
    going = next((state for state in states if not state.ended and state.state != "pending"), None)
    waiting = next((state for state in states if state.state == "pending"), None)
    nodes = tuple(report for state in states for report in state.nodes)
    message = f"array of {len(tasks)}: {counts}"
    status = RunStatus(run=run.name, state="unknown", message=message, nodes=nodes, tasks=states)
    if active := going or waiting:
        return replace(status, state=active.state)
    number, worst = max(enumerate(states), key=lambda pair: pair[1].code or 0)
    if worst.code:
        message += f"; task {tasks[number]}: {worst.message}"
    return replace(status, state=worst.state, message=message, code=worst.code, outcome=worst.outcome)
