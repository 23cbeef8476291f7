"""What is asked and told on the login node: POSIX shell that needs nothing of ours there, as arguments of ``sh -c``.

A job is its number, or ``@PID:JOB`` for a script that runs inside of an allocation.
"""

from ddpctl.run import ENDED
from ddpctl.targets.slurm.states import STATES

KILLED = '{"code": 137, "cause": "stopped", "message": "killed on request, without saving", "retry": true}'
GOES_ON = "|".join(word for word, state in STATES.items() if state not in ENDED)
# A process that has ended may still be somebody's to wait for.
LIVES = """\
lives() { # @PID:JOB
  pid=${1#@}
  pid=${pid%:*}
  case $(ps -o stat= -p "$pid" 2>/dev/null) in '' | Z*) return 1 ;; esac
}
"""
FORMAT = "%F|%K|%T|%r|%S|%N"  # array's or job's number, index in the array, state, reason, start, nodes

# When a job started, in seconds since the epoch; nothing of one that is a script inside of an allocation.
PLACED = """\
case {job} in
  @*) ;;
  *)
    SLURM_TIME_FORMAT=%s squeue --noheader --states=all --jobs={job} --format=%S 2>/dev/null | head -n 1 |
      grep '^[0-9]' ||
      SLURM_TIME_FORMAT=%s sacct --noheader --allocations --jobs={job} --format=Start 2>/dev/null | head -n 1 ;;
esac"""

# $1: the jobs, with commas; then files. Every answer after a line of its own. sacct knows what squeue has forgotten.
ASK = f"""\
{LIVES}jobs=$1
shift
echo '==> squeue <=='
for job in $(echo "$jobs" | tr , ' '); do
  case $job in
    @*) # a script inside of an allocation: its process
      state=COMPLETED
      lives "$job" && state=RUNNING
      echo "$job|N/A|$state|||"
      continue ;;
  esac
  said=$(squeue --noheader --array --states=all --jobs="$job" --format='{FORMAT}' 2>&1) || case $said in
    *'Invalid job id'*) said= ;;
    *) said="error: $said" ;;
  esac
  [ -z "$said" ] || echo "$said"
  [ -n "$said" ] || sacct --noheader --allocations --parsable2 --jobs="$job" --format=JobID,State 2>/dev/null |
    sed -nE 's/^([0-9]+)_([0-9]+)[|]([A-Z_]+).*/\\1|\\2|\\3|||/p; s/^([0-9]+)[|]([A-Z_]+).*/\\1|N\\/A|\\2|||/p'
done
for file in "$@"; do
  [ ! -f "$file" ] || {{ echo "==> $file <=="; cat "$file"; echo; }}
done
exit 0
"""

# $1: the job, $2: lines of the past, then PREFIX FILE pairs: what is in the files. 66: none is there.
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
# The same files as they grow, and while the job waits, why and until when; until Slurm has seen the last of it.
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
      case $waits in
        "$last" | '' | None*) ;;
        *'|'*) echo "slurm: the job waits (${{waits%|*}}), to start about ${{waits#*|}}" >&2 ;;
        *) echo "slurm: the job waits ($waits)" >&2 ;;
      esac
      last=$waits
    else
      case $states in *'Invalid job id'*) break ;; esac
      misses=$((misses + 1))
    fi ;;
  esac
  sleep 1
done
sleep 1.5 # for what the nodes said last
for pid in $pids; do kill "$pid" 2>/dev/null; done
exit 0
"""
# $1: the job, $2: save or kill, $3: seconds to wait for its end, then folders of runs. 1: it is still there.
# A run that is killed is left no time for a last word: it is written here.
STOP = f"""\
{LIVES}job=$1 given=$1 how=$2 wait=$3
shift 3
case $how$job in
  *@*)
    lives "$job" && kill -USR2 "$pid"
    job=${{job#*:}} ;;
  *)
    scancel --quiet --state=PENDING "$job"
    scancel --quiet --batch --signal=USR2 "$job" ;;
esac 2>/dev/null
if [ "$how" = kill ]; then # the script knows by now, and does not take the job's place in the queue again
  for folder in "$@"; do
    task=
    case $folder in */task-*) task=_${{folder##*/task-}} ;; esac
    [ ! -s "$folder/step" ] || scancel --quiet --signal=KILL "$job$task.$(cat "$folder/step")" 2>/dev/null
  done
  [ "$given" != "$job" ] || scancel --quiet "$job" 2>/dev/null
fi
job=$given
while :; do
  case $job in
    @*) lives "$job" || break ;;
    *) squeue --noheader --states=all --jobs="$job" --format='%T|' 2>&1 | grep -qE '^({GOES_ON})[|]' || break ;;
  esac
  wait=$((wait - 1))
  [ "$wait" -ge 0 ] || exit 1
  sleep 1
done
for folder in "$@"; do rm -f "$folder/secrets"; done # of a job that never ran, or was killed
[ "$how" = kill ] && for folder in "$@"; do
  set -- "$folder"/node-*/outcome.json
  [ -e "$1" ] || {{ mkdir -p "$folder/node-0" && echo '{KILLED}' >"$folder/node-0/outcome.json"; }}
done
exit 0
"""
# $1: the job, $2: the node's number, $3: the folder; then options of srun, -- and the command.
EXECUTE = """\
job=$1 node=$2 folder=$3
shift 3
nodes=$(squeue --noheader --jobs="$job" --states=RUNNING --format=%N) && [ -n "$nodes" ] || exit 69
name=$(scontrol show hostnames "$nodes" | sed -n "$((node + 1))p")
[ -n "$name" ] || exit 66
exec srun --jobid="$job" --overlap --nodes=1 --ntasks=1 --nodelist="$name" --mpi=none --chdir="$folder" "$@"
"""
