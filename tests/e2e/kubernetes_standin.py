"""A kubectl that keeps the objects of a cluster in a folder: what is created is there until it is deleted.

A job has a running pod a node for as long as it is there; ``disk`` is what all of them have at /runs, and ``logs
--follow`` of one continues until it is gone. The file ``kill`` has whoever makes a call sent a signal, at the call's
beginning or its end; with the file ``away`` the cluster does not answer after so many calls.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.unit.ddpctl.kubernetes_lab import DATA

KUBECTL = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == *=* ]] || shift; shift; done
call=1; until mkdir "$CLUSTER/call-$call" 2>/dev/null; do call=$((call + 1)); done
read -r moment edge signal 2>/dev/null <"$CLUSTER/kill"
interrupt() { [[ $call == "$moment" && $1 == "$edge" ]] && kill -s "$signal" "$PPID"; }
file_of() { local kind=${1%%.*}; kind=${kind%s}; echo "$CLUSTER/objects/${kind/policie/policy}.$2"; }
uid_of() { sed -n "/^metadata:/,$ s/^    ddpctl.uid: '*\\([^']*\\)'*$/\\1/p" "$1" 2>/dev/null; }
interrupt begin
if [[ -e $CLUSTER/away && $call -gt $(<"$CLUSTER/away") ]]; then
  echo "The connection to the server lab:6443 was refused" >&2; exit 1
fi
case $1 in
  config) cat "$CLUSTER/view" ;;
  create)
    text=$(cat)
    kind=$(sed -n 's/^kind: //p' <<<"$text"); name=$(sed -n '/^metadata:/,$ s/^  name: //p' <<<"$text" | head -n 1)
    file=$(file_of "${kind,,}" "$name")
    if [[ $* != *--dry-run* ]]; then
      if [[ -e $file ]]; then echo "Error from server (AlreadyExists): \\"$name\\" already exists" >&2; exit 1; fi
      printf '%s\\n' "$text" >"$CLUSTER/part-$call" && mv "$CLUSTER/part-$call" "$file"
    fi
    echo uid-1 ;;
  delete)
    if [[ $2 == pods ]]; then rm -f "$CLUSTER"/objects/pod.*; fi
    for kind in ${2//,/ }; do
      file=$(file_of "$kind" "$3")
      if [[ -e $file ]]; then rm -f "$file"; echo "${file##*/} deleted"; fi
    done ;;
  get)
    if [[ $* == *jsonpath=*uid}* ]]; then uid_of "$(file_of "$2" "$3")"; interrupt end; exit 0; fi
    what=${2%%/*}; name=$(echo "$CLUSTER"/objects/pytorchjob.*); name=${name##*.}
    if [[ $3 == --selector && $4 == *,ddpctl.uid=* ]]; then
      [[ $(uid_of "$CLUSTER/objects/pytorchjob.$name") == "${4##*=}" ]] || exit 0
    fi
    if [[ $name != '*' && -e $CLUSTER/$what ]]; then sed "s/RUN/$name/g" "$CLUSTER/$what"; fi ;;
  exec)
    [[ $2 == --stdin ]] && shift
    disk=$CLUSTER/disk; [[ -e $CLUSTER/disk-of.$2 ]] && disk=$CLUSTER/disk-of.$2
    name=${2%-worker-*}; name=${name%-pull*}
    DDP_RUN_DIR=$disk/$name DDP_CHECKPOINT_DIR=$disk/$name/checkpoints exec sh ;;
  logs)
    cat "$CLUSTER/log.$2" 2>/dev/null && exit
    printf '[node%s rank0] epoch 1/9\\n' "${2##*-}"
    if [[ $* == *--follow* ]]; then
      while compgen -G "$CLUSTER/objects/pytorchjob.*" >/dev/null; do sleep 0.1; done
    fi ;;
esac
interrupt end
exit 0
"""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """The cluster, in a folder."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """What a ddpctl needs to use it."""
        return {"PATH": f"{self.folder}:/usr/bin:/bin", "CLUSTER": str(self.folder)}

    def kill_at(self, call: int, edge: str, signal: str) -> None:
        """Send whoever makes this call a signal; ``edge``: begin or end."""
        (self.folder / "kill").write_text(f"{call} {edge} {signal}\n")

    def end(self, logs: Mapping[int, Sequence[str]]) -> None:
        """The job succeeds; nothing is left of its pods but their logs: the lines of each node's ddprun."""
        self.hold("succeeded", "succ")
        run = next((self.folder / "objects").glob("pytorchjob.*")).suffix[1:]
        for node, lines in logs.items():
            (self.folder / f"log.{run}-worker-{node}").write_text("".join(f"[node{node}] {line}\n" for line in lines))
        shutil.rmtree(self.folder / "disk")

    def hold(self, state: str, name: str) -> None:
        """Answer with a recorded job and its pods; ``name``: theirs in the record."""
        for what, path in (("pytorchjobs.kubeflow.org", f"jobs/{state}"), ("pods", f"pods/{state}")):
            text = (DATA / f"{path}.json").read_text()
            answer = json.loads(text.replace(f'"{name}-worker', '"RUN-worker').replace(f': "{name}"', ': "RUN"'))
            for thing in answer.get("items", [answer]):
                thing["metadata"].setdefault("labels", {})["ddpctl.run"] = "RUN"
            (self.folder / what).write_text(json.dumps(answer))

    def calls(self) -> int:
        """How often kubectl was called."""
        return len(list(self.folder.glob("call-*")))

    def objects(self) -> list[str]:
        """What there is, as KIND.NAME."""
        return sorted(path.name for path in (self.folder / "objects").iterdir())

    def processes(self) -> dict[int, str]:
        """pid → command line of all that uses it."""
        found = {}
        mine = f"CLUSTER={self.folder}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                zombie = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                if not zombie and mine in (folder / "environ").read_bytes().split(b"\0"):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = line.decode(errors="replace")
        found.pop(os.getpid(), None)
        return found


def make_standin(folder: Path) -> StandIn:
    """An empty cluster that serves PyTorchJobs."""
    (folder / "objects").mkdir(parents=True)
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    context = {"name": "lab", "context": {"namespace": "ml"}}
    (folder / "view").write_text(json.dumps({"current-context": "lab", "contexts": [context]}))
    found = StandIn(folder=folder)
    found.hold("running", "running")
    return found
