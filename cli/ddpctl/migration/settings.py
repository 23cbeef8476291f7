"""The settings of another launcher's file, what became of each, and the ddpctl.yaml that they make together."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import yaml

from ddpctl.job.schema import Kinds, required, validate
from ddpctl.job.secrets import looks_secret, options_of, redact_text
from ddpctl.job.spec import OURS, JobSpec
from ddpctl.text import cut, one_line

Status = Literal["became", "ddpctl does it", "no counterpart", "unknown", "not translated"]
WIDTH = 100  # of a setting in a comment and in the table
COMPUTED = re.compile(r"[$`]")  # a shell or another program replaces it


class Meaning(NamedTuple):
    """What a setting of another launcher means: the key that it becomes, or why it becomes none."""

    status: Status
    text: str  # the key as job.KEY or target.KEY, or the reason
    note: str = ""  # what changes on the way

    def __str__(self) -> str:
        text = f"{self.text}, {self.note}" if self.note else self.text
        return text if self.status == "became" else f"{self.status}: {text}"


# The meanings of a setting that becomes a key, that ddpctl makes unnecessary, that ddpctl does not have, and of a line
# that is not understood.
key, ours = partial(Meaning, "became"), partial(Meaning, "ddpctl does it")
without, skipped = partial(Meaning, "no counterpart"), partial(Meaning, "not translated")
unknown = partial(Meaning, "unknown", note="its value is computed elsewhere: write it")
Table = Mapping[str, Meaning]  # by the name of a setting; * stands for any text


class Setting(NamedTuple):
    """A setting of the file, and what became of it."""

    line: int
    text: str  # as in the file
    meaning: Meaning


@dataclass
class Migration:
    """The settings of a file, and the keys that they have become so far."""

    target: str  # the kind of the target
    kinds: Kinds
    settings: list[Setting] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # by job.KEY or target.KEY
    secrets: list[str] = field(default_factory=list)  # values that no output may contain

    def note(self, line: int, text: str, meaning: Meaning) -> None:
        """Record what a setting becomes. A value is hidden if the last part of its name looks like that of a secret."""
        for word in text.split():
            name, _, value = word.partition("=")
            self.secrets += [value] if looks_secret(name.rpartition(".")[2].lstrip("-"), value) else []
        self.settings.append(Setting(line, text, meaning))

    def add(self, line: int, text: str, name: str, value: Any, note: str = "") -> None:
        """Set a key, or record why it cannot have this value. Lists (tuples here) and tables are merged."""
        before = self.values.get(name)
        if isinstance(value, tuple) and name != "job.command":
            value = tuple(dict.fromkeys((*(before or ()), *value)))
        elif isinstance(value, dict):
            value = merge(before or {}, value)
        if name != "job.command" and COMPUTED.search(str(value)):
            return self.note(line, text, unknown(name))
        if problem := next((text for of, text in self._problems({**self.values, name: value}) if of == name), None):
            return self.note(line, text, without(f"{name}: {problem}"))
        if not isinstance(value, dict | tuple | list) and before not in (None, value):
            return self.note(line, text, without(f"{name} is already {before}"))
        self.values[name] = value
        return self.note(line, text, key(name, note))

    def variable(self, line: int, name: str, value: str, *, otherwise: Meaning | None = None) -> None:
        """Record a variable of the ranks, or of the file alone if it has another meaning. No secret is copied."""
        if name in OURS or name.startswith("PET_"):
            self.note(line, f"{name}={value}", ours("ddpctl sets it for each rank"))
        elif redact_text(value) != value or (looks_secret(name, value) and not COMPUTED.fullmatch(value[:1])):
            self.secrets.append(value)
            if otherwise:
                self.note(line, f"{name}=${name}", otherwise)
            else:
                self.add(line, name, "job.secrets", (name,), "its value is not copied: export it before the launch")
        elif otherwise:
            self.note(line, f"{name}={value}", otherwise)
        elif looks_secret(name, value):
            self.add(line, name, "job.secrets", (name,), "export it before the launch")
        elif COMPUTED.search(value):
            self.note(line, f"{name}={value}", unknown("job.env"))
        else:
            self.add(line, f"{name}={value}", "job.env", {name: value})

    def ranks(self, line: int, text: str, ranks: str) -> None:
        """Record the number of ranks per node: one for each GPU, or fewer that share the GPUs of the node."""
        gpus = self.values.get("job.gpus")
        if ranks == gpus:
            return self.note(line, text, ours("one rank for each GPU"))
        return self.add(
            line, text, "job.ranks" if gpus else "job.gpus", ranks, f"each sees {gpus} GPUs" if gpus else ""
        )

    def command(self, line: int, text: str, argv: Iterable[str], note: str = "") -> None:
        """Record the script and its arguments. What is computed or secret remains to be filled in."""
        argv = tuple(argv)
        self.secrets += [value for name, value in options_of(argv) if looks_secret(name, value)]
        shown = tuple(redact_text(argument, self.secrets) for argument in argv)
        self.add(line, text, "job.command", shown, note)
        for argument, copy in zip(argv, shown, strict=True):
            if argument != copy:
                self.note(
                    line, copy, Meaning("unknown", "job.command", "a secret is not copied: pass it as a variable")
                )
            elif COMPUTED.search(argument):
                self.note(
                    line, argument, Meaning("unknown", "job.command", "it is passed on as it is: write its value")
                )

    def translate(
        self, table: Table, line: int, name: str, value: str, convert: Callable[[str], Any] = str, text: str = ""
    ) -> None:
        """Record a setting by the entry of a table."""
        meaning, text = meaning_of(table, name), text or (f"{name}={value}" if value else name)
        if meaning.status != "became" or COMPUTED.search(value):
            return self.note(line, text, meaning if meaning.status != "became" else unknown(meaning.text))
        try:
            return self.add(line, text, meaning.text, convert(value), meaning.note)
        except ValueError as error:
            return self.note(line, text, without(f"{meaning.text}: {error}"))

    def _part(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(part): value for name, value in values.items() if name.startswith(part)}

    def _problems(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the key and an error message for each value that is not allowed, alone or with the others."""
        cls = self.kinds[self.target]()
        job, wrong = validate(JobSpec, self._part("job.", values))
        options, others = validate(cls, self._part("target.", values))
        problems = [(f"job.{problem.place[0]}", problem.text) for problem in wrong]
        problems += [(f"target.{problem.place[0]}", problem.text) for problem in others if problem.place]
        if options.keys() >= set(required(cls)) and hasattr(cls, "problems"):
            problems += cls(**options).problems(JobSpec(**job))
        return [*problems, *JobSpec(**job).problems()]

    def finish(self) -> None:
        """Drop settings that are recorded twice, and the keys that later keys do not allow."""
        self.settings = list(dict.fromkeys(self.settings))
        for name, text in self._problems(self.values):
            dropped = without(f"{name}: {text}")
            self.settings = [
                setting._replace(meaning=dropped) if setting.meaning.text == name else setting
                for setting in self.settings
            ]
            self.values.pop(name, None)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the line, the text and the meaning of each setting, in the order of the file, without secrets."""
        return [
            (str(setting.line), self._shown(setting.text), one_line(redact_text(str(setting.meaning), self.secrets)))
            for setting in sorted(self.settings, key=lambda setting: setting.line)
        ]

    def _shown(self, text: str) -> str:
        return cut(one_line(redact_text(" ".join(text.split()), self.secrets)), WIDTH, plain=True)

    def text(self, source: str) -> str:
        """Return the ddpctl.yaml. Its comments say where each key comes from, and what has not become a key."""
        rest = [setting for setting in self.settings if setting.meaning.status != "became"]
        lines = [f"# Written by ddpctl init from {one_line(source)}. What has not become a key:"]
        for (
            setting
        ) in rest:  # a command that is not translated may hold a secret at any place: only its program is written
            text = setting.text if setting.meaning.status != "not translated" else setting.text.split(maxsplit=1)[0]
            lines.append(f"#   line {setting.line}: {self._shown(f'{text}: {setting.meaning}')}")
        if "job.command" not in self.values:
            lines.append("#   no script is known: without a command, ddpctl launch starts ddptrain")
        lines += [
            "",
            "job:" if self._part("job.", self.values) else "job: {}",
            *self._keys("job.", 2),
            "",
            f"target: {self.target}",
        ]
        lines += ["targets:", f"  {self.target}:", f"    kind: {self.target}", *self._keys("target.", 4)]
        return "\n".join(lines) + "\n"

    def _keys(self, part: str, indent: int) -> list[str]:
        lines = []
        for name, value in self._part(part, self.values).items():
            sources = [setting for setting in self.settings if setting.meaning[:2] == ("became", part + name)]
            lines += [f"# line {setting.line}: {self._shown(setting.text)}" for setting in sources]
            plain = list(value) if isinstance(value, tuple) else value
            plain = int(plain) if isinstance(plain, str) and re.fullmatch("0|[1-9][0-9]{0,8}", plain) else plain
            lines += yaml.safe_dump({name: plain}, sort_keys=False, width=4096, allow_unicode=True).splitlines()
        return [" " * indent + line for line in lines]


def meaning_of(table: Table, name: str) -> Meaning:
    """Return the first entry of a table whose name matches."""
    matches = (table[other] for other in table if re.fullmatch(re.escape(other).replace(r"\*", ".*"), name))
    return next(matches, without("ddpctl has no such setting"))


def merge(before: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the entries of another one. Tables and lists in them are merged as well."""
    merged = dict(before)
    for name, part in value.items():
        old = merged.get(name)
        if isinstance(part, dict) and isinstance(old, dict):
            part = merge(old, part)
        elif isinstance(part, list) and isinstance(old, list):
            part = [*old, *part]
        merged[name] = part
    return merged
