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
WIDTH = 100  # of a setting
COMPUTED = re.compile(r"[$`]")  # a shell or another program replaces it


class Meaning(NamedTuple):
    """What a setting of another launcher means: the key that it becomes, or why it becomes none."""

    status: Status
    text: str  # the key as job.KEY or target.KEY, or the reason
    note: str = ""  # what changes on the way
    convert: Callable[[str], Any] = str  # returns the key's value, or a dict if the setting becomes several keys

    def __str__(self) -> str:
        text = f"{self.text}, {self.note}" if self.note else self.text
        return text if self.status == "became" else f"{self.status}: {text}"


# The meanings of a setting that becomes a key, that ddpctl makes unnecessary, that ddpctl does not have, and of a line
# that is not understood.
key, ours = partial(Meaning, "became"), partial(Meaning, "ddpctl does it")
without, skipped = partial(Meaning, "no counterpart"), partial(Meaning, "not translated")
unknown = partial(Meaning, "unknown", note="its value is computed elsewhere: write it")
Table = Mapping[str, Meaning]  # by the name of a setting, or several with commas; * stands for any text


@dataclass
class Migration:
    """The settings of a file, and the keys that they have become so far."""

    target: str  # the kind of the target
    kinds: Kinds
    settings: list[tuple[int, str, Meaning]] = field(default_factory=list)  # its line, its text, what it became
    values: dict[str, Any] = field(default_factory=dict)  # by job.KEY or target.KEY
    numbers: Mapping[str, str] = field(default_factory=dict)  # of each node, where a setting counts others
    secrets: list[str] = field(default_factory=list)  # values that no output may contain

    def note(self, line: int, text: str, meaning: Meaning) -> None:
        """Record what a setting becomes. A value is hidden if the last part of its name looks like that of a secret."""
        for word in text.split():
            name, _, value = word.partition("=")
            self.secrets += [value] if looks_secret(name.rpartition(".")[2].lstrip("-"), value) else []
        self.settings.append((line, text, meaning))

    def add(self, line: int, text: str, name: str, value: Any, note: str = "") -> None:
        """Set a key, or record why it cannot have this value. Lists (tuples here) and tables are merged.

        The key ``job.ranks`` is ``job.gpus`` if no GPUs are given, and is not needed if there is one rank for each.
        """
        gpus = self.values.get("job.gpus")
        name = "job.gpus" if name == "job.ranks" and not gpus else name
        before, meaning = self.values.get(name), key(name, note)
        if isinstance(value, tuple) and name != "job.command":
            value = tuple(dict.fromkeys((*(before or ()), *value)))
        elif isinstance(value, dict):
            value = {**(before or {}), **value}
        if name != "job.command" and COMPUTED.search(str(value)):
            meaning = unknown(name)
        elif name == "job.ranks" and value == gpus:
            meaning = ours("one rank for each GPU")
        elif problem := next(iter(self._problems({**self.values, name: value})), ""):
            meaning = without(problem)
        elif isinstance(value, str | bool) and before not in (None, value):
            meaning = without(f"{name} is already {before}")
        else:
            self.values[name] = value
        self.note(line, text, meaning)

    def translate(self, table: Table, line: int, name: str, value: str, text: str = "") -> None:
        """Record a setting by the entry of a table."""
        meaning, text = meaning_of(table, name), text or (f"{name}={value}" if value else name)
        if meaning.status != "became" or COMPUTED.search(value):
            return self.note(line, text, unknown(meaning.text) if meaning.status == "became" else meaning)
        keys = meaning.convert(value)
        for key_name, part in keys.items() if isinstance(keys, dict) else [(meaning.text, keys)]:
            note = meaning.note if key_name == meaning.text else ""
            self.add(line, text, key_name, self.numbers.get(key_name, part), note)
        return None

    def variable(self, line: int, name: str, value: str, *, otherwise: Meaning | None = None) -> None:
        """Record a variable of the ranks, or of the file alone if it has another meaning. No secret is copied."""
        text, is_secret = f"{name}={value}", looks_secret(name, value)
        if name in OURS or name.startswith("PET_"):
            otherwise = ours("ddpctl sets it for each rank")
        elif redact_text(value) != value or (is_secret and not COMPUTED.match(value)):
            self.secrets.append(value)
            text = f"{name}=${name}"
        if otherwise:
            self.note(line, text, otherwise)
        elif is_secret or value in self.secrets:
            self.add(line, name, "job.secrets", (name,), "its value is not copied: export it before the launch")
        elif COMPUTED.search(value):
            self.note(line, text, unknown("job.env"))
        else:
            self.add(line, text, "job.env", {name: value})

    def command(self, line: int, text: str, argv: Iterable[str]) -> None:
        """Record the script and its arguments. What is computed or secret remains to be filled in."""
        argv = tuple(argv)
        self.secrets += [value for name, value in options_of(argv) if looks_secret(name, value)]
        shown = tuple(redact_text(argument, self.secrets) for argument in argv)
        self.add(line, text, "job.command", shown)
        for argument, copy in zip(argv, shown, strict=True):
            note = "it is passed on as it is: write its value"
            if argument != copy:
                note = "a secret is not copied: pass it as a variable"
            if argument != copy or COMPUTED.search(argument):
                self.note(line, copy, unknown("job.command", note=note))

    def _part(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(part): value for name, value in values.items() if name.startswith(part)}

    def _problems(self, values: Mapping[str, Any]) -> list[str]:
        """Return an error message for each value that is not allowed, alone or with the others."""
        cls = self.kinds[self.target]()
        job, wrong = validate(JobSpec, self._part("job.", values))
        options, others = validate(cls, self._part("target.", values))
        problems = [(f"{problem.place[0]}", problem.text) for problem in (*wrong, *others) if problem.place]
        if options.keys() >= set(required(cls)) and hasattr(cls, "problems"):
            problems += cls(**options).problems(JobSpec(**job))
        return [f"{name}: {text}" for name, text in (*problems, *JobSpec(**job).problems())]

    def count_unknown(self) -> int:
        """Return the number of values that the user must write."""
        return sum(meaning.status == "unknown" for _, _, meaning in dict.fromkeys(self.settings))

    def rows(self, *, is_file: bool = False) -> list[tuple[str, str, str]]:
        """Return the line, the text and the meaning of each setting, in the order of the file, without secrets.

        A command that is not translated may hold a secret at any place: in a file, only its program is shown.
        """
        rows = []
        for line, text, meaning in sorted(dict.fromkeys(self.settings), key=lambda setting: setting[0]):
            shown = text.split()[:1] if is_file and meaning.status == "not translated" else text.split()
            texts = [one_line(redact_text(part, self.secrets)) for part in (" ".join(shown), str(meaning))]
            rows.append((str(line), cut(texts[0], WIDTH, plain=True), texts[1]))
        return rows

    def text(self, source: str) -> str:
        """Return the ddpctl.yaml. Its comments say what each setting has become."""
        lines = [f"# Written by ddpctl init from {one_line(source)}. What its settings have become:"]
        lines += [f"#   line {line}: {text}: {meaning}" for line, text, meaning in self.rows(is_file=True)]
        if "job.command" not in self.values:
            lines.append("#   no script is known: without a command, ddpctl launch starts ddptrain")
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in self.values.items()}
        for name, value in values.items():
            if isinstance(value, str) and re.fullmatch("0|[1-9][0-9]{0,8}", value):
                values[name] = int(value)
        target = {self.target: {"kind": self.target, **self._part("target.", values)}}
        document = {"job": self._part("job.", values), "target": self.target, "targets": target}
        return "\n".join((*lines, "", yaml.safe_dump(document, sort_keys=False, width=4096, allow_unicode=True)))


def meaning_of(table: Table, name: str) -> Meaning:
    """Return the first entry of a table whose name matches."""
    for names, meaning in table.items():
        if re.fullmatch(re.escape(names).replace(r"\*", ".*").replace(r",\ ", "|"), name):
            return meaning
    return without("ddpctl has no such setting")
