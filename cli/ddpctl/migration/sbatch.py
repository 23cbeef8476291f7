"""Reads an sbatch script: its #SBATCH options, and the shell commands that prepare and start the training."""

import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from itertools import dropwhile
from math import ceil
from pathlib import PurePath

from ddpctl.errors import UsageError
from ddpctl.job.other_launchers import LAUNCHERS, translate
from ddpctl.job.values import bases_of
from ddpctl.migration.settings import (
    COMPUTED,
    Meaning,
    Migration,
    Table,
    key,
    meaning_of,
    ours,
    skipped,
    unknown,
    without,
)  # fmt: skip
from ddpctl.migration.shell import Statement, Variables, statements

TASKS = ours("ddprun is the only task of a node, and starts its ranks")
FILES = ours("each run has its own folder: ddpctl logs")
SHIFTER = without("shifter is no runtime of ddpctl")
NODE = "of each node"
PYXIS = {"container-image": key("job.image", "with runtime pyxis"), "container-mounts": key("job.mounts")}
SBATCH: Table = {
    "job-name": key("job.name", "in lower case, with - in place of other characters"), "nodes": key("job.nodes"),
    "gpus-per-node": key("job.gpus"), "gpus": key("job.gpus", NODE), "gpus-per-task": key("job.gpus", NODE),
    "gres": key("job.gpus", "requested by gres"), "cpus-per-task": key("job.cpus", NODE), "ntasks*": TASKS,
    "cpus-per-gpu": key("job.cpus", NODE), "mem": key("job.memory"), "mem-per-*": skipped("write memory, of each node"),
    "time": key("job.time_limit"), "partition": key("target.partition"),
    "account": key("target.account"), "qos": key("target.qos"), "reservation": key("target.reservation"),
    "constraint": key("target.constraint"), "exclusive": key("target.exclusive"), "array": key("target.array"),
    "chdir": key("target.workdir"), "no-requeue": key("target.requeues", "0"), "requeue": ours("requeues is 20"),
    "output": FILES, "error": FILES, "open-mode": FILES, "export": key("job.env", "of each NAME=VALUE"),
    "get-user-env": ours("sbatch passes your environment on"), "mail-*": without("ddpctl sends no mail"),
    "signal": key("job.stop_signal", "and grace, the seconds"), "image": SHIFTER, "module": SHIFTER,
    "dependency": without("after takes the name of a run, not the number of a job"), **PYXIS, "*": key("target.extra"),
}  # fmt: skip
SIGNAL = re.compile(r"(?:[BR]+:)?(?:SIG)?(?P<name>TERM|USR1|USR2)(?:@(?P<seconds>[0-9]+))?")
SHORT = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time", "p": "partition",
    "A": "account", "q": "qos", "C": "constraint", "a": "array", "D": "chdir", "o": "output", "e": "error",
    "L": "licenses", "d": "dependency", "w": "nodelist", "x": "exclude", "m": "distribution", "k": "no-kill",
    "s": "oversubscribe", "H": "hold", "O": "overcommit", "l": "label", "u": "unbuffered", "K": "kill-on-bad-exit",
    "W": "wait", "Q": "quiet", "v": "verbose", "i": "input", "E": "preserve-env",
}  # fmt: skip
SRUN: Table = {
    **PYXIS, "container-workdir": ours("the project is mounted at /workspace, the folder of the ranks"),
    "no-container-mount-home": ours("the container does not mount the home folder"),
    "no-container-entrypoint": ours("the container starts without its entrypoint"),
    "container-env": ours("variables of the job replace those of the image"),
    "*container-*": key("target.runtime_args"), "export": SBATCH["export"],
    "*": ours("ddpctl starts one srun with the job's numbers"),
}  # fmt: skip
FLAGS = re.compile(  # options that have no value, or one after =
    "no-.*|exclusive|requeue|hold|overcommit|contiguous|spread-job|use-min-nodes|quiet|verbose|oversubscribe|label"
    "|overlap|unbuffered|kill-on-bad-exit|get-user-env|preserve-env|exact|pty|multi-prog|reboot|parsable"
    "|container-(mount-home|writable|readonly|remap-root|entrypoint|save-env)"
)
PRINTS = ours("it only prints: status, logs and top show a run")
END = ours("all nodes agree on one exit code")
SHELL: Table = {
    "module load": key("target.modules"), "module *": skipped("modules are only loaded: run it before the launch"),
    "cd": key("target.workdir"), "conda activate": key("target.python", "if it names a folder"),
    "set": ours("the batch script has its own options"),
    **dict.fromkeys(("echo", "printf", "date", "hostname", "nvidia-smi", "rocm-smi", "pwd", "ls", "env", "which", "tee",
                     "whoami", "lscpu", "free", "df"), PRINTS),
    **dict.fromkeys(("wait", "exit", "true", "sleep"), END),
    "source": key("target.python", "if it is .../bin/activate"),
    **dict.fromkeys(("mkdir", "cp", "rsync", "tar", "unzip", "touch", "chmod"), key("job.node_setup", "on each node")),
    "*": skipped("run it before the launch, or in the script"),
}  # fmt: skip
NUMBERS = ("job.nodes", "job.gpus", "job.cpus", "job.memory")
VARIABLE = ours("a variable of the script, replaced where its text is known")
MAYBE = skipped("it may run or not")
DEFAULT = Meaning("unknown", "its default is taken: your environment may have another value")
CURRENT = ours("the current folder is the default")
PROJECT = re.compile(r"\.|\$\{?(PWD|SLURM_SUBMIT_DIR)\}?|\$\(pwd\)")


def read(script: str, migration: Migration) -> None:
    """Record what each line of an sbatch script becomes."""
    Reader(migration).read(script)


class Reader:
    """Reads the commands of one script, with what is known about the job."""

    def __init__(self, migration: Migration) -> None:
        self.migration, self.variables = migration, Variables()
        self.nodes, self.tasks, self.gpus, self.cpus = 1, 1, 0, 0  # all but nodes of each node; 0: unknown
        self.given: dict[str, str] = {}  # the options of sbatch
        self.launches: list[tuple[int, Statement, list[str]]] = []

    def read(self, script: str) -> None:
        """Record what each line becomes: the options of sbatch, then the commands."""
        self._options(script, next((one.line for one in statements(script)), len(script)))
        self.commands(script)

    def commands(self, script: str, line: int = 0, *, is_srun: bool = False) -> None:
        """Record the commands of a script, which may be an argument in ``line`` of another file."""
        launches = self.launches = []
        for statement in statements(script):
            statement = statement._replace(line=line or statement.line)
            argv = [part for word in statement.words if "=(\0" not in word for part in self.variables.expand(word)]
            inner = [self.variables.expand(text) for place in range(len(argv)) if (text := _script(argv[place:]))]
            if (rank := max(map(_rank, [argv, *inner]))) and statement.after != "|":
                launches.append((rank - 4 * statement.inside, statement, argv))
            else:
                self._command(statement, argv)
            for name in self.variables.defaults:
                self.migration.note(statement.line, f"${name}", DEFAULT)
            self.variables.defaults.clear()
        best = max(launches, key=lambda launch: launch[0], default=None)
        for launch in launches:
            _, statement, argv = launch
            try:
                if launch is not best:
                    raise UsageError("ddpctl starts the ranks of one program")
                self._launch(statement, argv, is_srun=is_srun)
            except UsageError as error:
                self.migration.note(statement.line, _first_line(statement), skipped(error.message))

    # The options of sbatch

    def _options(self, script: str, first: int) -> None:
        options: dict[str, tuple[str, int]] = {}
        for line, text in enumerate(script.splitlines(), 1):
            if not text.startswith("#SBATCH"):
                continue
            try:
                pairs, rest = _pairs(shlex.split(text[7:], comments=True))
            except ValueError as error:
                pairs, rest = [], [str(error)]
            if line > first or rest:
                why = f"Slurm ignores it: it stands below the first command, in line {first}"
                self.migration.note(line, text, skipped(why if line > first else " ".join(rest)))
                continue
            for name, value in pairs:
                if name in options:
                    self.migration.note(
                        options[name][1], _option(name, options[name][0]), skipped(f"line {line} gives it again")
                    )
                options[name] = (value, line)
        self._count({name: value for name, (value, _) in options.items()})
        for name, (value, line) in options.items():
            self._sbatch_option(line, name, value)

    def _count(self, given: dict[str, str]) -> None:
        """Determine the numbers of a node, and the variables that Slurm sets."""
        self.given = given
        numbers = {name: int(value) for name, value in given.items() if value.isdecimal()}
        self.nodes = nodes = numbers.get("nodes", 1) or 1
        self.tasks = numbers.get("ntasks-per-node") or ceil(numbers.get("ntasks", 1) / nodes) or 1
        for name, share in (("gpus-per-node", 1), ("gres", 1), ("gpus-per-task", self.tasks), ("gpus", 1 / nodes)):
            if match := _gpu(name, given.get(name, "")):
                self.gpus = ceil(int(match["count"] or 1) * share)
        cpus = numbers.get("cpus-per-task", 0)
        self.cpus = cpus * self.tasks or numbers.get("cpus-per-gpu", 0) * self.gpus
        known = {"NNODES": numbers.get("nodes"), "JOB_NUM_NODES": numbers.get("nodes"), "CPUS_PER_TASK": cpus,
                 "NTASKS_PER_NODE": numbers.get("ntasks-per-node"), "NTASKS": numbers.get("ntasks"),
                 "GPUS_ON_NODE": self.gpus}  # fmt: skip
        self.variables.known |= {f"SLURM_{name}": str(value) for name, value in known.items() if value}

    def _sbatch_option(self, line: int, name: str, value: str) -> None:
        text, add, meaning = _option(name, value), self.migration.add, meaning_of(SBATCH, name)
        convert = partial(CONVERSIONS[name], self) if name in CONVERSIONS else str
        if meaning.text == "job.gpus" and (match := _gpu(name, value)):
            add(line, text, "job.gpus", str(self.gpus), meaning.note)
            if match["type"]:
                add(line, text, "target.gpu_type", match["type"])
            if name == "gres":
                add(line, text, "target.gpu_request", "gres")
                if others := [part for part in value.split(",") if not re.match("(gres/)?gpu", part)]:
                    add(line, text, "target.extra", (f"--gres={','.join(others)}",))
        elif name == "ntasks" and value != "1" and "nodes" not in self.given:
            self.migration.note(line, text, Meaning("unknown", "job.nodes", "Slurm chooses it: write it"))
        elif name in (*PYXIS, "export"):
            self._srun_option(line, name, value)
        elif name == "signal":
            self._signal(line, text, value)
        elif name == "chdir" and PROJECT.fullmatch(value):
            self.migration.note(line, text, CURRENT)
        elif meaning.text == "target.extra" or name == "gres" or (name, value) == ("mem", "0"):
            add(line, text, "target.extra", (text,))
        else:
            self.migration.translate(SBATCH, line, name, value, convert, text)

    def _signal(self, line: int, text: str, value: str) -> None:
        """Record which signal asks the ranks to save, and how long before the time limit."""
        if not (match := SIGNAL.fullmatch(value)):
            return self.migration.note(line, text, without("stop_signal is TERM, USR1 or USR2"))
        self.migration.add(line, text, "job.stop_signal", match["name"])
        if match["seconds"]:
            self.migration.add(line, text, "job.grace", match["seconds"])
        return None

    def _srun_option(self, line: int, name: str, value: str) -> None:
        meaning, text = meaning_of(SRUN, name), _option(name, value)
        if meaning.text == "job.image":
            image = value.removeprefix("docker://").replace("#", "/")
            self.migration.translate(SRUN, line, name, image, text=text)
            self.migration.add(line, text, "target.runtime", "pyxis")
        elif meaning.text == "job.mounts":
            self._mounts(line, text, value)
        elif meaning.text == "target.runtime_args":
            self.migration.add(line, text, meaning.text, (text,))
        elif name == "export" and "=" in value:
            for part in value.split(","):
                if "=" in part:
                    self.migration.variable(line, *part.split("=", 1))
        else:
            self.migration.note(line, text, SBATCH["get-user-env"] if name == "export" else meaning)

    def _mounts(self, line: int, text: str, mounts: str) -> None:
        for mount in mounts.split(","):
            source, _, path = mount.removesuffix(":rw").partition(":")
            if PROJECT.fullmatch(source):
                self.migration.note(line, text, ours("the project is mounted at /workspace"))
            else:
                self.migration.add(line, text, "job.mounts", (f"{source}:{path or source}",))

    # The commands

    def _command(self, statement: Statement, argv: list[str]) -> None:
        """Record a command that does not start the training."""
        raw = list(statement.words)
        builtin = raw[0] if raw and raw[0] in ("export", "declare", "typeset", "readonly", "local") else ""
        if builtin or (raw and all(re.match(r"\w+\+?=", word) for word in raw)):
            is_exported = builtin == "export" or "-x" in raw
            for word in raw[1:] if builtin else raw:
                if not word.startswith("-"):
                    self._assign(statement, word, is_exported=is_exported)
            return
        if raw[:1] in (["for"], ["read"]) and raw[1:]:
            self.variables.set(raw[1], "", sure=False)
        if argv:
            self._tool(statement, argv)

    def _tool(self, statement: Statement, argv: list[str]) -> None:
        """Record a command of a shell, by its name."""
        line, text = statement.line, _first_line(statement)
        name, *rest = argv
        name = {"ml": "module", ".": "source", "mamba": "conda", "micromamba": "conda"}.get(name, PurePath(name).name)
        if name == "module" and argv[0] == "ml" and rest[:1] != ["purge"]:
            rest = ["load", *rest]
        table_name = " ".join((name, *rest[:1])) if name in ("module", "conda") else name
        meaning, value = meaning_of(SHELL, table_name), rest[-1] if rest else ""
        if statement.inside or (statement.redirects and meaning is not PRINTS):
            self.migration.note(line, text, MAYBE if statement.inside else SHELL["*"])
        elif meaning.text == "job.node_setup":
            command = " ".join(argv) if re.fullmatch("[\\w./=:@%+, -]+", " ".join(argv)) else statement.text
            is_sure = not (self.launches or statement.after or COMPUTED.search(command))
            self.migration.translate(
                {name: meaning if is_sure else SHELL["*"]}, line, name, command, lambda _: (command,), text
            )
        elif meaning.text == "target.modules":
            modules = tuple(word for word in rest if word not in ("load", "add") and not word.startswith("-"))
            self.migration.add(line, text, meaning.text, modules)
        elif meaning.text == "target.python":
            is_folder = value.endswith("/bin/activate") if name == "source" else "/" in value
            python = f"{value.removesuffix('/bin/activate')}/bin/python"
            is_conda = name == "conda" or value.endswith(("conda.sh", "activate"))
            why = without("python takes the path of the environment's bin/python") if is_conda else SHELL["*"]
            self.migration.translate({name: meaning if is_folder else why}, line, name, python, text=text)
        elif meaning.text == "target.workdir" and PROJECT.fullmatch(value):
            self.migration.note(line, text, CURRENT)
        else:
            self.migration.translate({name: meaning}, line, name, value, text=text)

    def _assign(self, statement: Statement, word: str, *, is_exported: bool) -> None:
        name, equals, raw = word.partition("=")
        before = self.variables.known.get(name := name.removesuffix("+"), "" if equals else f"${name}")
        value: str | list[str] = self.variables.text(raw) if equals else before
        if raw.startswith("(\0"):
            value = [part for word in raw.split("\0")[1:] for part in self.variables.expand(word)]
        if word.startswith(f"{name}+=") and type(before) is type(value):
            value = before + value  # type: ignore[operator]
        if equals:
            self.variables.set(name, value, sure=not statement.inside)
        shown = value if isinstance(value, str) else " ".join(value)
        meaning = MAYBE if statement.inside else None if is_exported else VARIABLE
        self.migration.variable(statement.line, name, shown, otherwise=meaning)

    def _launch(self, statement: Statement, argv: list[str], *, is_srun: bool) -> None:
        """Record the command that starts the training, and the commands around it: srun, a container, a shell."""
        line, migration = statement.line, self.migration
        while argv:
            name = PurePath(argv[0]).name
            if re.match(r"\w+=", argv[0]):
                migration.variable(line, *argv.pop(0).split("=", 1))
            elif name in ("exec", "time", "nohup", "env", "command"):
                argv = argv[1:]
            elif name == "srun":
                is_srun, argv = True, self._srun(line, argv[1:])
            elif script := _script(argv):
                return self.commands(script, line, is_srun=is_srun)
            elif _is_program(argv):
                return self._program(line, _first_line(statement), argv, is_srun=is_srun)
            else:
                places = (n for n in range(1, len(argv)) if _is_program(argv[n:]) or _script(argv[n:]))
                place = next(places, len(argv))
                migration.note(line, " ".join(argv[:place]), WRAPPER)
                argv = argv[place:]
        return None

    def _srun(self, line: int, argv: list[str]) -> list[str]:
        """Record the options of srun. Return its command."""
        while len(argv) > 1 and re.match(r"[$`]|--?[A-Za-z]", argv[0]):
            pairs, rest = _pairs(argv)
            if COMPUTED.match(argv[0]):
                self.migration.note(line, argv[0], unknown("options of srun"))
                pairs, rest = [], argv[1:]
            self._count(dict(pairs) | self.given)
            for name, value in pairs:
                is_number = meaning_of(SBATCH, name).text in NUMBERS
                (self._sbatch_option if is_number else self._srun_option)(line, name, value)
            argv = rest
        return argv

    def _interpreter(self, line: int, argv: list[str], program: PurePath, *, is_python: bool) -> list[str]:
        """Record the Python of a command. Return the command without its path and without the arguments of sbatch."""
        migration = self.migration
        if "/" in argv[0] and "python" in bases_of(migration.kinds[migration.target]()):
            migration.add(line, argv[0], "target.python", str(program if is_python else program.parent / "python"))
        argv = ["python" if is_python else program.name, *argv[1:]]
        while is_python and argv[1:2] == ["-u"]:
            migration.note(line, f"python {argv.pop(1)}", ours("ranks write without a buffer"))
        for word in [word for word in argv if re.fullmatch(r"\$([@*]|\{[@*].*\})", word)]:
            argv.remove(word)
            migration.note(line, word, Meaning("unknown", "job.command", "add the arguments that sbatch got"))
        return argv

    def _program(self, line: int, text: str, argv: list[str], *, is_srun: bool) -> None:
        """Record the launcher or the Python, its options, and the script."""
        migration, program = self.migration, PurePath(argv[0])
        is_python = program.name.startswith("python")
        argv = self._interpreter(line, argv, program, is_python=is_python)
        refused: list[str] = []
        translation = translate(argv, refused=refused)
        for option in refused:
            migration.note(line, option, unknown("job") if COMPUTED.search(option) else LAUNCHER)
        program_words = argv[1:] if is_python else argv
        if translation:
            program_words = list(translation.program)
            for option in translation.implied:
                migration.note(line, option, ours("ddpctl decides it for every run"))
            for name, value in translation.env.items():
                migration.variable(line, name, value)
        if program_words[:1] == ["-c"]:
            raise UsageError("ddpctl starts a script or a module, no text: write it into a file")
        if not is_srun and self.nodes > 1:
            migration.note(line, "no srun", Meaning("unknown", "job.nodes", "the script uses one, ddpctl all of them"))
        flags = translation.flags if translation else {"--gpus": str(self.tasks if is_srun else 1)}
        for flag, value in flags.items():
            option = f"{translation.launcher if translation else 'srun' if is_srun else 'python'}: {flag} {value}"
            if flag == "--gpus":
                migration.ranks(line, option, value)
            else:
                migration.add(line, option, f"job.{flag[2:].replace('-', '_')}", value)
        migration.command(line, text, program_words)


WRAPPER = skipped("no wrapper that ddpctl knows; for apptainer, write runtime: apptainer, and sif or image")
LAUNCHER = without("the launcher has this option, ddpctl has not")


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"


def _first_line(statement: Statement) -> str:
    """Return the beginning of a command, without the secret after ``login``."""
    argv = [word for word in statement.text.split("\n")[0].split() if word != "\\"]
    return " ".join(argv[: 1 + next((n for n, word in enumerate(argv) if "login" in word), len(argv))])


def _script(argv: Sequence[str]) -> str:
    """Return the script of ``bash -c SCRIPT``, or nothing."""
    if not argv or PurePath(argv[0]).name not in ("bash", "sh"):
        return ""
    place = next((n for n, word in enumerate(argv[1:], 2) if re.fullmatch("-[a-z]*c", word)), len(argv))
    return "".join(argv[place : place + 1])


def _is_program(argv: Sequence[str]) -> bool:
    """Say whether a command begins with srun, a launcher or Python, not with a wrapper such as a container."""
    names = (PurePath(argv[0]).name, *argv[1:])
    return re.fullmatch(r"srun|python[0-9.]*", names[0]) is not None or any(names[: len(s)] == s for s in LAUNCHERS)


def _rank(argv: Sequence[str]) -> int:
    """Return how likely a command starts the training: 4 a launcher, 3 srun, 2 Python, 0 none of them."""
    argv = list(dropwhile(re.compile(r"\w+=").match, argv))
    names, line = [PurePath(word).name for word in argv], f"{' '.join(argv)} "
    if not argv or names[0] in ("echo", "printf", "pip", "which", "export", "declare"):
        return 0
    if any(re.search(rf"(?:^|[\s/]){re.escape(' '.join(start))}\s", line) for start in LAUNCHERS):
        return 4
    if names[0] == "srun" and re.search(r"\bpython[0-9.]*\s|\.py\s", line):
        return 3
    return 2 if re.fullmatch(r"python[0-9.]*", names[0]) and len(names) > 1 else 0


def _pairs(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options at the beginning of a command, by their long names, and the rest of the command."""
    rest, pairs = list(argv), []
    while rest and re.match(r"--?[A-Za-z]", rest[0]):
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            name, value, equals = SHORT.get(name[1], name[1]), name[2:] + equals + value, name[2:]
        name = name.lstrip("-").replace("_", "-")
        if not equals and not FLAGS.fullmatch(name) and rest:
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs, rest


def _gpu(name: str, value: str) -> re.Match[str] | None:
    prefix = r"(?:.*,)?(?:gres/)?gpu:?" if name == "gres" else "(?=.)"
    return re.fullmatch(rf"{prefix}(?P<type>[A-Za-z][\w.-]*)?:?(?P<count>[0-9]+)?(\(S:.*\))?(,.*)?", value)


CONVERSIONS: dict[str, Callable[[Reader, str], str | bool]] = {
    "job-name": lambda _, value: re.sub("[^a-z0-9]+", "-", value.lower()).strip("-")[:40].rstrip("-"),
    "nodes": lambda _, value: value.replace("-", ":"),
    "cpus-per-task": lambda reader, _: str(reader.cpus),
    "cpus-per-gpu": lambda reader, _: str(reader.cpus),
    "mem": lambda _, value: f"{value}M" if value.isdecimal() else value,
    "time": lambda _, value: f"{value}m" if value.isdecimal() else re.sub(r"^(\d+:\d+)$", r"00:\1", value),
    "exclusive": lambda _, value: value or True,
    "no-requeue": lambda _, __: "0",
}
