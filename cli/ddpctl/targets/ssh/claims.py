"""Shell scripts that reserve the GPUs of a host for runs and queue the launches that wait for GPUs.

Each host has a folder of claims with these files:

``run-NAME.NODE`` (a claim) lists the GPUs of one node. Its second line is the uid of the launch. The claim is valid
while the node's ddprun holds a lock on it (with an inherited file descriptor), or while the node's container runs.
``ticket-N`` (a ticket) represents a waiting launch. The launch with the lowest N is first in the queue. The waiting
ddpctl runs the script of ``take_ticket`` over SSH. The ticket is valid while this script holds a lock on it.
``mutex`` is locked by every script that lists or creates claims and tickets.

The next launch removes claims and tickets that are not valid. ``ddpctl rm`` removes claims that are not valid.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

BUSY = 75  # exit code of a script that finds a GPU taken
MUTEX_S = 60  # how long to wait while another launch starts its container
TICKET_S = 60  # a ticket expires if its launch does not renew it for this long; find(1) counts in minutes


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The GPUs that one node of a run has reserved on a host."""

    run: str
    node: int
    since: int  # by the host's clock, in seconds since the epoch
    gpus: tuple[str, ...]  # UUIDs; empty for CPU ranks


def parse_claims(lines: Sequence[str]) -> tuple[Claim, ...]:
    """Parse claims that the script of ``list_claims`` has printed. Other lines are skipped."""
    return tuple(
        Claim(run=run, node=int(node), since=int(since), gpus=tuple(gpus))
        for run, node, since, _, *gpus in (fields for fields in map(str.split, lines) if len(fields) > 3)
        if node.isdecimal() and since.isdecimal()
    )


def _functions(folder: str) -> str:
    """Return shell code that sets ``$_ddp_c`` to the folder of claims and defines the function ``_ddp_held FILE``.

    The function tests whether a claim or ticket is valid. A claim also counts as valid if its container engine does
    not answer.
    """
    return f"""\
_ddp_c={folder}
_ddp_held() {{
  flock -n -s "$1" true || return 0
  read -r _ddp_run _ddp_node _ _ddp_engine _ <"$1" || return 1
  case $_ddp_engine in docker|podman) ;; *) return 1 ;; esac
  _ddp_ids=$(timeout 10 "$_ddp_engine" ps --quiet \\
    --filter "label=ddpctl.run=$_ddp_run" --filter "label=ddpctl.node=$_ddp_node") || return 0
  [ -n "$_ddp_ids" ]
}}
"""


_LOCK = f"""\
mkdir -p "$_ddp_c"
exec 8>>"$_ddp_c/mutex"
flock -w {MUTEX_S} 8 || {{ echo "another launch is starting a run there" >&2; exit {BUSY}; }}
"""


def list_claims(folder: str) -> str:
    """Return shell code that prints valid claims and tickets with the function ``say`` of ``scripts.gpus_text``."""
    return f"""\
{_functions(folder)}if [ -e "$_ddp_c/mutex" ]; then (
  exec 8>>"$_ddp_c/mutex"
  flock -w 20 8 || {{ say claims_error "another launch is starting a run there"; exit 0; }}
  for _ddp_f in "$_ddp_c"/run-* "$_ddp_c"/ticket-*; do
    if ! [ -e "$_ddp_f" ] || ! _ddp_held "$_ddp_f"; then continue; fi
    _ddp_words=$(head -n 1 "$_ddp_f" 2>/dev/null) || continue # a ticket is removed without the lock
    case ${{_ddp_f##*/}} in
      run-*) say claim "$_ddp_words" ;;
      *) say ticket "${{_ddp_f##*/ticket-}} $_ddp_words" ;;
    esac
  done
) || say claims_error "$_ddp_c cannot be read"; fi
"""


def remove_invalid(folder: str) -> str:
    """Return shell code that removes the claims that are not valid."""
    return f"""\
{_functions(folder)}if [ -e "$_ddp_c/mutex" ]; then (
  exec 8>>"$_ddp_c/mutex"
  flock -w {MUTEX_S} 8 || exit 0
  for _ddp_f in "$_ddp_c"/run-*; do
    if [ -e "$_ddp_f" ] && ! _ddp_held "$_ddp_f"; then rm -f "$_ddp_f"; fi
  done
) fi
"""


def claim_word(folder: str, run: str, node: int) -> str:
    """Return the path of a node's claim, quoted for the shell."""
    return f"{folder}/{shlex.quote(f'run-{run}.{node}')}"


def find_nodes(folder: str, run: str, uid: str) -> str:
    """Return a script that waits for a start under way, and prints each node that a launch has started here."""
    return f"""\
_ddp_c={folder}
[ -e "$_ddp_c/mutex" ] || exit 0
{_LOCK}\
for _ddp_f in "$_ddp_c"/{shlex.quote(f"run-{run}")}.*; do
  if grep -qsxF {shlex.quote(uid)} "$_ddp_f"; then echo "${{_ddp_f##*.}}"; fi
done
"""


def take(folder: str, run: str, node: int, gpus: Sequence[str], *, engine: str, uid: str = "") -> str:
    """Return shell code that writes a node's claim, or fails if another run has one of the GPUs.

    The code locks ``mutex``, and leaves it locked when it ends. If the engine is ``none``, the code also locks the
    claim, with file descriptor 9.
    """
    check = ""
    if gpus:
        check = f"""
  read -r _ddp_run _ _ _ _ddp_gpus <"$_ddp_f"
  for _ddp_gpu in {shlex.join(gpus)}; do
    case " $_ddp_gpus " in *" $_ddp_gpu "*) echo "the run $_ddp_run has $_ddp_gpu" >&2; exit {BUSY} ;; esac
  done"""
    name = claim_word(folder, run, node)
    hold = f'exec 9>>{name}\nflock -w 10 9 || {{ echo "{run} is there already" >&2; exit {BUSY}; }}\n'
    place, use = shlex.join([run, str(node)]), shlex.join([engine, *gpus])
    return f"""\
{_functions(folder)}{_LOCK}\
for _ddp_f in "$_ddp_c"/run-*; do
  [ -e "$_ddp_f" ] || continue
  _ddp_held "$_ddp_f" || {{ rm -f "$_ddp_f"; continue; }}{check}
done
{hold if engine == "none" else ""}{{ echo {place} "$(date +%s)" {use} && echo {shlex.quote(uid)}; }} >{name}
"""


def take_ticket(folder: str, run: str, uid: str) -> str:
    """Return a script that creates a ticket at the end of the queue and prints the ticket's number.

    The script removes the ticket when stdin ends, or when the ticket has not been renewed for ``TICKET_S``.
    """
    return f"""\
{_functions(folder)}{_LOCK}\
last=0
for _ddp_f in "$_ddp_c"/ticket-*; do
  [ -e "$_ddp_f" ] || continue
  if _ddp_held "$_ddp_f"; then last=${{_ddp_f##*/ticket-}}; else rm -f "$_ddp_f"; fi
done
t=$_ddp_c/ticket-$(echo "$last" | awk '{{ printf "%09d", $1 + 1 }}')
exec 9>"$t"
flock -n 9
echo {shlex.join([run, uid])} >&9
exec 8>&- 3<&0
echo "${{t##*/ticket-}}"
cat <&3 >/dev/null 2>&1 9>&- & reader=$!
while kill -0 "$reader" 2>/dev/null && [ -n "$(find "$t" -mmin -{TICKET_S // 60} 9>&-)" ]; do sleep 0.5 9>&-; done
rm -f "$t"
kill "$reader" 2>/dev/null
exit 0
"""


def renew(folder: str, number: int) -> str:
    """Return shell code that renews a ticket."""
    return f't={folder}/ticket-{number:09d}\n[ ! -e "$t" ] || touch "$t"\n'
