"""Check that no notice of ``notify`` is sent twice, is false, or is lost without a trace.

    python bench/notices.py [--rounds 30] [--seed 0] [--mail ADDRESS] [--json FILE]

Each round runs a script without torch on 2 nodes x 2 ranks of this machine, detached, with a notice to a local web
server, and kills a process at a random moment: a rank, the ddprun of node 0 or 1, or none. The ranks end after 8 s. A
round is right if

- no event of an attempt arrived twice
- what arrived is true: the run's outcome has the same end, and a restart was followed by a further attempt
- the end of the run arrived, or node.json of the node that tells it says "failed" or "sending" (unknown), or no node
  was left to tell it

``--mail mailto://...``: an address that gets each notice as well, such as that of a local mail server. The exit code is
1 if a round is not right.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import measuring

SCRIPT = "import os, time\nprint('ready', flush=True)\ntime.sleep(8)\n"
VICTIMS = ("rank", "rank", "node 0", "node 1", "none")
ENDED = ("succeeded", "failed", "stopped", "lost")
LIMIT_S = 120.0


class Hook(BaseHTTPRequestHandler):
    """Keeps the titles of the messages that are posted to it."""

    titles: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.titles.append(json.loads(body)["title"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def ddpctl(*args: str, env: dict[str, str]) -> str:
    """Return the output of a ddpctl command."""
    argv = [sys.executable, "-m", "ddpctl", *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S).stdout


def status(run: str, env: dict[str, str]) -> dict[str, Any]:
    """Return the status of a run."""
    return dict(json.loads(ddpctl("status", run, "--json", env=env)))


def kill(victim: str, nodes: list[dict[str, Any]], choice: random.Random) -> None:
    """Kill a process of the run with SIGKILL, if it still exists."""
    states = [node["state"] for node in nodes if node["state"]]
    pids = [rank["pid"] for state in states for rank in state["ranks"]]
    if victim.startswith("node"):
        pids = [state["pid"] for state in states if state["node"] == int(victim[-1])]
    if pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(choice.choice(pids), signal.SIGKILL)


def run_round(number: int, seed: int, env: dict[str, str]) -> dict[str, Any]:
    """Run one training. Return what was done, what arrived, and what is wrong with it."""
    choice, run = random.Random(seed), f"notice-{os.getpid()}-{number}"  # noqa: S311 (not for secrets)
    victim, delay_s = choice.choice(VICTIMS), choice.uniform(0.0, 8.5)
    before = len(Hook.titles)
    ddpctl("launch", "--detach", "--nodes", "2", "--name", run, "--", "act.py", env=env)
    deadline = time.monotonic() + LIMIT_S
    while not (report := status(run, env))["node_reports"] or not all(
        node["state"] and node["state"]["ranks"] for node in report["node_reports"]
    ):
        if report["state"] in ENDED or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    time.sleep(delay_s)
    if victim != "none":
        kill(victim, report["node_reports"], choice)
    while (report := status(run, env))["state"] not in ENDED and time.monotonic() < deadline:
        time.sleep(0.3)
    arrived = [title.partition(": ")[2] for title in Hook.titles[before:] if title.startswith(f"{run}:")]
    notices = [notice for node in report["node_reports"] if node["state"] for notice in node["state"]["notices"]]
    hook = [notice for notice in notices if notice["to"] == "$HOOK"]
    return {
        "seed": seed,
        "victim": victim,
        "delay_s": round(delay_s, 1),
        "state": report["state"],
        "arrived": arrived,
    } | {
        "recorded": [f"{notice['event']} {notice['state']}" for notice in hook],
        "wrong": [*judge(report, arrived, hook)],
    }


def judge(report: dict[str, Any], arrived: list[str], hook: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the notices of a run."""
    wrong = []
    recorded = Counter(notice["event"] for notice in hook)
    wrong += [f"{event} arrived {count} times" for event, count in Counter(arrived).items() if count > recorded[event]]
    outcome = report["outcome"]
    end = None if outcome is None else "succeeded" if outcome["code"] == 0 else "failed"
    wrong += [f"{event} is false" for event in arrived if event in ("succeeded", "failed") and event != end]
    wrong += [f"{event} was not followed by an attempt" for event in arrived if event == "restarted" and not outcome]
    tellers = [node for node in report["node_reports"] if node["outcome"]]
    if end and tellers and end not in arrived and not any(notice["event"] == end for notice in hook):
        wrong.append(f"{end} did not arrive, and no node says so")
    wrong += ["sent, but it did not arrive" for n in hook if n["state"] == "sent" and n["event"] not in arrived]
    return wrong


def main() -> None:
    """Run all rounds, and print a line for each."""
    parser = measuring.options(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mail")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="ddpctl-bench-") as folder,
        ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.chdir(folder)
        Path("act.py").write_text(SCRIPT)
        secrets, notify = ["HOOK"], ["$HOOK"]
        if options.mail:
            secrets, notify = [*secrets, "MAIL"], [*notify, "$MAIL"]
        job = {"gpus": 2, "device": "cpu", "secrets": secrets, "notify": notify}
        Path("ddpctl.yaml").write_text(json.dumps({"job": job}))
        env = os.environ | {"HOOK": f"json://127.0.0.1:{server.server_port}/", "MAIL": options.mail or ""}
        env |= {"XDG_STATE_HOME": f"{folder}/state"}
        for number in range(options.rounds):
            results.append(run_round(number, options.seed + number, env))
            print(json.dumps(results[-1]), flush=True)
        server.shutdown()
    measuring.write_json(options.json, results)
    right = sum(not result["wrong"] for result in results)
    lost = sum("sending" in text for result in results for text in result["recorded"])
    print(f"{right} of {len(results)} rounds are right; {lost} notices are unknown")
    sys.exit(right < len(results))


if __name__ == "__main__":
    main()
