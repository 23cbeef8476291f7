"""kubectl's command lines: the person's own kubectl, with its contexts and whatever signs them in. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from ddpctl.command import Command, Output

TIMEOUT_S = 60.0
REQUEST_TIMEOUT = "--request-timeout=30s"


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """kubectl, for one namespace of one cluster; None: as kubectl has it."""

    context: str | None = None
    namespace: str | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The beginning of every command line."""
        context = ("--context", self.context) if self.context else ()
        return ("kubectl", *context, *(("--namespace", self.namespace) if self.namespace else ()))

    def run(self, *arguments: str, timeout_s: float | None = TIMEOUT_S, **rest: Any) -> Command:
        """A command that asks the cluster."""
        return Command(argv=(*self.argv, REQUEST_TIMEOUT, *arguments), timeout_s=timeout_s, **rest)

    def view(self) -> Command:
        """What kubectl's configuration says of this context; asks nobody."""
        context = ("--context", self.context) if self.context else ()
        return Command(argv=("kubectl", *context, "config", "view", "--minify", "-o", "json"), probe=True)

    def raw(self, path: str) -> Command:
        """Whether the cluster serves an API."""
        return self.run("get", "--raw", path, probe=True)

    def create(self, text: str, *, dry_run: bool = False, secret: bool = False, output: str = "name") -> Command:
        """Make the objects of a text; ``dry_run``: only let the cluster judge them, strictly."""
        judged = ("--dry-run=server",) if dry_run else ()
        return self.run(
            "create",
            *judged,
            "--validate=strict",
            "-o",
            output,
            "-f",
            "-",
            stdin=text,
            secret=secret,
            placeholder="<uid>",
        )

    def get(self, what: str, *rest: str) -> Command:
        """Objects as JSON; what is not there is an empty answer."""
        return self.run("get", what, *rest, "--ignore-not-found", "-o", "json")

    def chosen(self, output: Output) -> "Kubectl":
        """The same, with the context and the namespace written out, so that later verbs ask the same cluster."""
        try:
            config = json.loads(output.stdout) if output.returncode == 0 else {}
            context = config["contexts"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            return Kubectl(context=self.context, namespace=self.namespace)  # inside of a pod there is no configuration
        namespace = self.namespace or context["context"].get("namespace", "default")
        return Kubectl(context=self.context or config.get("current-context") or context["name"], namespace=namespace)


def items(output: Output) -> list[dict[str, Any]]:
    """The objects of an answer: of a list, of one, of none."""
    if not output.stdout.strip():
        return []
    answer = json.loads(output.stdout)
    found: list[dict[str, Any]] = answer.get("items", []) if answer["kind"].endswith("List") else [answer]
    return found
