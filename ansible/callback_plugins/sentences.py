"""Ansible's output: a line for each change, each note, and each failure of a machine.

The end has one line per machine. If $DDPCTL_RECAP names a file, the same is written to it as JSON.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: sentences
type: stdout
short_description: a line for each change, note and failure
description: Prints each change and note, and one sentence for every machine that failed.
"""

# The text of a failure, and its meaning. The first match counts.
CAUSES = (
    (r"No space left on device|No usable temporary directory|ENOSPC", "its disk is full: make room there"),
    (
        r"IDENTIFICATION HAS CHANGED|Host key for \S+ has changed",
        "its host key has CHANGED: if the machine was reinstalled, run ssh-keygen -R; if not, somebody may be "
        "intercepting the connection",
    ),
    (
        r"Host key verification failed|host key is known",
        "its host key is not in known_hosts: ssh to it once, and compare the fingerprint before you answer yes",
    ),
    (
        r"(\S+): Permission denied \(",
        r"it accepts no key for \1: use ssh-copy-id, or give another user (--login) or another key",
    ),
    (
        r"sudo: a password is required|Missing sudo password|not in the sudoers|sudo: not found|may not run sudo",
        "the user may not become root there: log in as root (--login root), allow sudo without a password, or enter "
        "it (ddpctl provision -- --ask-become-pass)",
    ),
    (
        r"(?:No package matching '|no available installation candidate for )([\w.+-]+)",
        r"its package sources lack \1: check them with apt-get update",
    ),
    (r"Could not resolve hostname (\S+): ([^\n\r]+)", r"its name '\1' does not resolve (\2): give its address"),
    (r"connect to host \S+ port \d+: ([^\n\r]+)", r"it does not answer: \1"),
)


def failure_of(task: str) -> str:
    """Return the first words about a failed task. ``task``: its name, such as ``firewall : Write the rules``."""
    role, _, step = task.rpartition(" : ")
    return f"{role}: the step '{step}' failed" if role else f"the step '{step}' failed"


def sentence(result: dict[str, Any], failure: str) -> str:
    """Return in one sentence why a task failed. ``failure``: the first words, if the cause is not a known one."""
    parts = [str(result.get(key) or "") for key in ("msg", "stderr", "module_stderr", "stdout")]
    parts += [str(item.get("msg") or "") for item in result.get("results", ()) if item.get("failed")]
    text = "\n".join(parts)
    for pattern, words in CAUSES:
        if found := re.search(pattern, text):
            return found.expand(words)
    if result.get("assertion"):
        return parts[0]
    lines = [line.strip() for line in text.splitlines() if line.strip(" \t^~")]
    return f"{failure}: {lines[-1] if lines else 'no message'}"


class CallbackModule(CallbackBase):
    """Prints the lines."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "sentences"

    def __init__(self) -> None:
        super().__init__()
        self._failed: dict[str, str] = {}

    def _line(self, result: Any, word: str, text: str, color: str | None = None) -> None:
        self._display.display(f"{result._host.get_name():<12} {word:<8} {text}", color=color)

    def _fail(self, result: Any, failure: str) -> None:
        self._failed[result._host.get_name()] = why = sentence(result._result, failure)
        self._line(result, "failed", why, color="red")

    def v2_runner_on_ok(self, result: Any) -> None:
        """Print what a task has changed, or its note."""
        said = result._result
        if said.get("changed"):
            word = "would" if context.CLIARGS.get("check") else "changed"
            self._line(result, word, result._task.get_name().replace(" : ", ": "), color="yellow")
        elif result._task.action in ("debug", "ansible.builtin.debug"):
            self._line(result, "note", str(said.get("msg", "")))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Print why a task failed. The machine has then failed."""
        if not ignore_errors:
            self._fail(result, failure_of(result._task.get_name()))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Print why a machine cannot be reached."""
        self._fail(result, "it cannot be reached")

    def v2_playbook_on_no_hosts_matched(self) -> None:
        """Print nothing if a play has no machines."""

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print one line per machine, and write the recap."""
        recap = {}
        for host in sorted(stats.processed):
            numbers = stats.summarize(host)
            broken = numbers["failures"] or numbers["unreachable"]
            why = self._failed.get(host, "it failed") if broken else ""
            recap[host] = {"changed": numbers["changed"], "failed": why}
            fine = f"changed={numbers['changed']} ok={numbers['ok']}"
            self._display.display(f"{host:<12} {'failed' if why else 'done':<8} {why or fine}")
        if path := os.environ.get("DDPCTL_RECAP"):
            Path(path).write_text(json.dumps(recap))
