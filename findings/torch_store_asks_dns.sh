#!/usr/bin/env bash
# Most people expect a TCPStore that is given numeric addresses to need no name server, and its server to answer all
# clients whatever one of them does.
# What happens: client and server both look up the name of the other's address, only to be able to log it. The server does
# this in its single thread, so while one client connects, nobody is served. With a name server that takes a second to say
# that there is no such name, each client needs two seconds, and a get of another client, which takes less than a
# millisecond, takes a second. Only an error of the lookup (a time-out after 10 s, by default) ends this, for the whole
# process. RES_OPTIONS="timeout:1 attempts:1" in the environment makes that error come after a second.
# Version: torch 2.15.0; needs unshare, mount and ip. Source: met when two nodes did not meet; formatSockAddr in socket.cpp.
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
if [[ ${1:-} != inside ]]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  if [[ -z ${FINDINGS_VENV:-} ]]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.6
  fi
  # A network and an /etc/resolv.conf of its own, without root.
  unshare --map-root-user --net --mount bash "$0" inside "$folder" "${FINDINGS_VENV:-$folder/venv/bin/python}"
  exit
fi
folder=$2 python=$3
ip link set lo up
ip addr add 10.9.9.1/32 dev lo
echo "nameserver 127.0.0.1" >"$folder/resolv.conf"
mount --bind "$folder/resolv.conf" /etc/resolv.conf
cat >"$folder/store.py" <<'END'
import socket
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore

DELAY_S = 1.0
questions = []


def serve_names() -> None:
    """A name server that says a second after each question that there is no such name."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    while True:
        query, asker = server.recvfrom(512)
        questions.append(query)
        answer = query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12:]
        threading.Timer(DELAY_S, server.sendto, (answer, asker)).start()


def connect() -> TCPStore:
    return TCPStore("10.9.9.1", 29600, is_master=False, timeout=timedelta(seconds=60))


threading.Thread(target=serve_names, daemon=True).start()
served = TCPStore("10.9.9.1", 29600, is_master=True, wait_for_workers=False)
first = connect()
first.set("key", "value")
asked, waits_s, ended = len(questions), [], threading.Event()


def get_often() -> None:
    while not ended.is_set():
        began = time.monotonic()
        first.get("key")
        waits_s.append(time.monotonic() - began)
        time.sleep(0.01)


thread = threading.Thread(target=get_often)
thread.start()
began = time.monotonic()
connect().get("key")
took_s = time.monotonic() - began
ended.set()
thread.join()
print(f"torch {torch.__version__}: connecting to a number took {took_s:.1f} s and {len(questions) - asked} questions")
print(f"get of another client meanwhile: median {sorted(waits_s)[len(waits_s) // 2]:.4f} s, longest {max(waits_s):.2f} s")
assert len(questions) - asked == 2, questions
assert took_s > 2 * DELAY_S, took_s
assert max(waits_s) > 0.9 * DELAY_S, waits_s
END
"$python" "$folder/store.py" 2>/dev/null
