"""Reads an sbatch script: its #SBATCH options, and the shell commands that prepare and start the training."""

import re
import shlex
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import PurePath
from typing import Any

from ddpctl.errors import UsageError
from ddpctl.job.other_launchers import LAUNCHERS, Translation, translate
from ddpctl.job.values import bases_of
from ddpctl.migration.settings import COMPUTED, Migration, Table, key, meaning_of, ours, skipped, unknown, without
from ddpctl.migration.shell import Statement, Variables, statements

EXPORT = key("job.env", "of each NAME=VALUE")
WORKSPACE = ours("the project is mounted at /workspace, the folder of the ranks")
CURRENT = ours("the current folder is the default")
PROJECT = (".", "$PWD", "${PWD}", "$(pwd)", "$SLURM_SUBMIT_DIR", "${SLURM_SUBMIT_DIR}")
GPU = re.compile(r"^([A-Za-z][\w.-]*|):?([^(]*)(\(S:.*\))?$")  # its type and number


def _gpus(value: str) -> dict[str, Any]:
    gpu_type, count = GPU.sub(r"\1", value), GPU.sub(r"\2", value)
    return {"job.gpus": count or "1", **({"target.gpu_type": gpu_type} if gpu_type else {})}


def _gres(value: str) -> dict[str, Any]:
    """Return the keys of generic resources. Those that are no GPUs stay in an option of sbatch."""
    gpus = [part for part in value.split(",") if re.match("(gres/)?gpu", part)]
    keys = {**_gpus(re.sub("(gres/)?gpu:?", "", gpus[0])), "target.gpu_request": "gres"} if gpus else {}
    others = ",".join(part for part in value.split(",") if part not in gpus)
    return {**keys, "target.extra": (f"--gres={others}",)} if others else keys


def _stop_signal(value: str) -> dict[str, str]:
    signal, _, seconds = value.partition("@")
    return {"job.stop_signal": re.sub("^([BR]+:)?(SIG)?", "", signal), **({"job.grace": seconds} if seconds else {})}


BOTH: Table = {  # options of sbatch and of srun
    "container-image": key("job.image", "with runtime pyxis", lambda value: value.removeprefix(
        "docker://").replace("#", "/")),
    "container-mounts": key("job.mounts"), "export": EXPORT,
    "nodes": key("job.nodes", convert=lambda value: value.replace("-", ":")),
    "gpus-per-node": key("job.gpus", "", _gpus), "gpus, gpus-per-task": key("job.gpus", "of each node", _gpus),
    "gres": key("job.gpus", "requested by gres", _gres),
    "cpus-per-task, cpus-per-gpu": key("job.cpus", "of each node"),
    "mem": key("job.memory", "", lambda value: {"target.extra": ("--mem=0",)} if value == "0" else
               f"{value}M" if value.isdecimal() else value.removesuffix("B")),
}  # fmt: skip
SBATCH: Table = {
    "job-name": key("job.name", "in lower case, with - in place of other characters", lambda value: re.sub(
        "[^a-z0-9]+", "-", value.lower()).strip("-")[:40].rstrip("-")),
    **BOTH, "ntasks*": ours("ddprun is the only task of a node, and starts its ranks"),
    "mem-per-*": skipped("write memory, of each node"),
    "time": key("job.time_limit", "", lambda value: f"{value}m" if value.isdecimal()
                else re.sub(r"^(\d+:\d+)$", r"00:\1", value)),
    **{name: key(f"target.{name}") for name in ("partition", "account", "qos", "reservation", "constraint", "array")},
    "exclusive": key("target.exclusive", convert=lambda value: value or True), "chdir": key("target.workdir"),
    "no-requeue": key("target.requeues", "0", lambda _: "0"), "requeue": ours("requeues is 20"),
    "output, error, open-mode": ours("each run has its own folder: ddpctl logs"),
    "get-user-env": ours("sbatch passes your environment on"), "mail-*": without("ddpctl sends no mail"),
    "signal": key("job.stop_signal", "its seconds become job.grace", _stop_signal),
    "image, module": without("shifter is no runtime of ddpctl"),
    "dependency": without("after takes the name of a run, not the number of a job"),
    "*": key("target.extra", convert=lambda value: (value,)),
}  # fmt: skip
SHORT = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time", "p": "partition",
    "A": "account", "q": "qos", "C": "constraint", "a": "array", "D": "chdir", "o": "output", "e": "error",
    "L": "licenses", "d": "dependency", "w": "nodelist", "x": "exclude", "m": "distribution", "k": "no-kill",
    "s": "oversubscribe", "H": "hold", "O": "overcommit", "l": "label", "u": "unbuffered", "K": "kill-on-bad-exit",
    "W": "wait", "Q": "quiet", "v": "verbose", "i": "input", "E": "preserve-env",
}  # fmt: skip
SRUN: Table = {
    **BOTH, "container-workdir": WORKSPACE,
    "no-container-mount-home": ours("the container does not mount the home folder"),
    "no-container-entrypoint": ours("the container starts without its entrypoint"),
    "container-env": ours("variables of the job replace those of the image"),
    "*container-*": key("target.runtime_args", convert=lambda value: (value,)),
    "*": ours("ddpctl starts one srun with the job's numbers"),
}  # fmt: skip
APPTAINER: Table = {
    "IMAGE": key("target.sif", "with runtime apptainer; docker://NAME is image", lambda value: {
        "job.image": value.removeprefix("docker://")} if value.startswith("docker://") else value),
    "bind": key("job.mounts"),
    "env": EXPORT, "pwd": key("target.workdir", "on the nodes; its path in the container is /workspace"),
    "nv": ours("ranks have the GPUs of their node"), "cleanenv, no-home": ours("it is always used"),
    "quiet, silent, debug, verbose": without("apptainer prints its usual lines"),
    "*": key("target.runtime_args", convert=lambda value: (value,)),
}  # fmt: skip
SHORT_APPTAINER = {
    "B": "bind", "e": "cleanenv", "c": "contain", "C": "containall", "H": "home", "W": "workdir", "S": "scratch",
    "w": "writable", "f": "fakeroot", "i": "ipc", "p": "pid", "u": "userns", "q": "quiet", "s": "silent",
}  # fmt: skip
FLAGS = re.compile(  # options that have no value, or one after =
    "no-.*|exclusive|requeue|hold|overcommit|contiguous|spread-job|use-min-nodes|quiet|verbose|oversubscribe|label"
    "|overlap|unbuffered|kill-on-bad-exit|get-user-env|preserve-env|exact|pty|multi-prog|reboot|parsable"
    "|container-(mount-home|writable|readonly|remap-root|entrypoint|save-env)"
    "|nv|nvccli|rocm|cleanenv|contain(all)?|compat|writable(-tmpfs)?|fakeroot|ipc|pid|userns|uts|silent|debug"
)
PRINTS = ours("it only prints: status, logs and top show a run")
SHELL: Table = {
    "module load *": key("target.modules", convert=lambda value: tuple(
        word for word in value.split() if word not in ("load", "add") and not word.startswith("-"))),
    "module *": skipped("modules are only loaded: run it before the launch"),
    ", ".join(f"cd {folder}" for folder in PROJECT): CURRENT, "cd *": key("target.workdir"),
    "source */bin/activate, conda activate */*": key(
        "target.python", convert=lambda value: f"{value.split()[-1].removesuffix('/bin/activate')}/bin/python"),
    "source *activate, source *conda.sh, conda *": without("python takes the path of the environment's bin/python"),
    "set": ours("the batch script has its own options"),
    "echo, printf, date, hostname, nvidia-smi, rocm-smi, pwd, ls, env, which, tee, whoami, lscpu, free, df": PRINTS,
    "wait, exit, true, sleep": ours("all nodes agree on one exit code"),
    "mkdir, cp, rsync, tar, unzip, touch, chmod": key("job.node_setup", "on each node", lambda value: (value,)),
    "*": skipped("run it before the launch, or in the script"),
}  # fmt: skip
ALIASES = {"ml": "module", ".": "source", "mamba": "conda", "micromamba": "conda"}
MAYBE = skipped("it may run or not")
PYTHON = re.compile(r"python[0-9.]*")
LAUNCHER_NAMES = "|".join(re.escape(" ".join(start)) for start in LAUNCHERS)
RANKS: Mapping[str, int] = {  # how likely a command starts the training, by what it is: the first that matches
    r"(echo|printf|pip|which)\b": 0,
    rf"(.*[\s/])?({LAUNCHER_NAMES})\s": 4,
    r"(\S*/)?srun\b.*(\bpython[0-9.]*|\.py)\s": 3,
    r"(\S*/)?((apptainer|singularity|(ba)?sh -\w*c)\b.*(\bpython[0-9.]*|\.py)|python[0-9.]*\s+\S+)\s": 2,
}


class Reader:
    """Reads the commands of one script, with what is known about the job."""

    def __init__(self, migration: Migration) -> None:
        self.migration, self.variables = migration, Variables()
        self.nodes, self.tasks, self.gpus = 1, 1, 0  # tasks and GPUs of each node; 0: unknown
        self.given: dict[str, str] = {}  # the options of sbatch
        self.launches: list[tuple[int, Statement, list[str]]] = []
        self.folders: dict[str, str] = {}  # by the path in the container: what is mounted there

    def script(self, script: str) -> None:
        """Record what each line of an sbatch script becomes: the options of sbatch, then the commands."""
        first = next((statement.line for statement in statements(script)), len(script))
        options: list[tuple[int, str, str]] = []
        for line, text in enumerate(script.splitlines(), 1):
            if not text.startswith("#SBATCH"):
                continue
            try:
                pairs, rest = _pairs(shlex.split(text[7:], comments=True), SHORT)
            except ValueError as error:
                pairs, rest = [], [str(error)]
            if line > first:
                rest = [f"Slurm ignores it: it stands below the first command, in line {first}"]
            if rest:
                self.migration.note(line, text, skipped(" ".join(rest)))
            else:
                options += [(line, name, value) for name, value in pairs]
        self.given = {name: value for _, name, value in options}
        self._count(self.given)
        is_clear = "nodes" in self.given or self.given.get("ntasks", "1") == "1"
        table = SBATCH if is_clear else {"ntasks": unknown("job.nodes", note="Slurm chooses it: write it"), **SBATCH}
        for place, (line, name, value) in enumerate(options, 1):
            if name in [later for _, later, _ in options[place:]]:
                self.migration.note(line, _option(name, value), skipped("a later line gives it again"))
            else:
                self._set(table, line, name, value)
        self.commands(script)

    def commands(self, script: str, line: int = 0, *, is_srun: bool = False) -> None:
        """Record the commands of a script, which may be an argument in ``line`` of another file."""
        launches = self.launches = []
        for statement in statements(script):
            statement = statement._replace(line=line or statement.line)
            argv = [part for word in statement.arguments for part in self.variables.expand(word)]
            texts = [part for word in argv for part in self.variables.expand(word)]  # once more, for bash -c '$COMMAND'
            command = re.sub(r"^(\w+=\S* )+", "", " ".join((*texts, "")))
            rank = next((RANKS[pattern] for pattern in RANKS if re.match(pattern, command, re.DOTALL)), 0)
            if self._assignments(statement) or not argv:
                pass
            elif rank and statement.after != "|":
                launches.append((rank - 4 * statement.inside, statement, argv))
            else:
                self._tool(statement, argv)
            for name in self.variables.defaults:
                meaning = key("its default", "your environment may have another value")
                self.migration.note(statement.line, f"${name}", meaning)
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

    # The options of sbatch, srun and apptainer

    def _count(self, given: dict[str, str]) -> None:
        """Determine the numbers of a node, and the variables that Slurm sets."""
        numbers = {name: int(value) for name, value in given.items() if value.isdecimal()}
        self.nodes = nodes = numbers.get("nodes", 1) or 1
        self.tasks = numbers.get("ntasks-per-node") or ceil(numbers.get("ntasks", 1) / nodes) or 1
        for name, share in (("gpus-per-node", 1), ("gres", 1), ("gpus-per-task", self.tasks), ("gpus", 1 / nodes)):
            count = meaning_of(BOTH, name).convert(given.get(name, "0")).get("job.gpus", "0")
            self.gpus = ceil(int(count) * share) if count.isdecimal() and count != "0" else self.gpus
        cpus = numbers.get("cpus-per-task", 0)
        cpus_of_node = cpus * self.tasks or numbers.get("cpus-per-gpu", 0) * self.gpus
        self.migration.numbers = {"job.gpus": str(self.gpus), "job.cpus": str(cpus_of_node)}
        known = {**given, "nnodes": str(nodes), "job-num-nodes": str(nodes), "gpus-on-node": str(self.gpus)}
        known = {f"SLURM_{name.replace('-', '_').upper()}": value for name, value in known.items()}
        self.variables.known |= {name: value for name, value in known.items() if re.fullmatch("[1-9][0-9]*", value)}

    def _set(self, table: Table, line: int, name: str, value: str) -> None:
        """Record an option of sbatch, srun or apptainer."""
        migration, meaning = self.migration, meaning_of(table, name)
        text = value if name == "IMAGE" else _option(name, value)
        if name == "container-image":
            migration.add(line, text, "target.runtime", "pyxis")
        if meaning.text == "job.mounts":
            for mount in [value] if "$(" in value else value.split(","):
                source, _, path = mount.removesuffix(":rw").partition(":")
                self.folders[(path or source).removesuffix(":ro")] = source
                if source in PROJECT:
                    migration.note(line, text, WORKSPACE)
                elif not source.startswith(("/", "$")):
                    migration.note(line, text, unknown("job.mounts", note=f"write the absolute path of {source}"))
                else:
                    migration.add(line, text, "job.mounts", (f"{source}:{path or source}",))
        elif meaning.text == "job.env":
            for name, equals, part in (variable.partition("=") for variable in value.split(",")):
                if equals:
                    migration.variable(line, name, part)
                else:
                    migration.note(line, text, SBATCH["get-user-env"])
        elif meaning.text == "target.workdir" and self.folders.get(value, value) in PROJECT:
            migration.note(line, text, CURRENT)
        else:
            value = text if meaning.text in ("target.extra", "target.runtime_args") else self.folders.get(value, value)
            migration.translate(table, line, name, value, text)

    def _options(self, table: Table, short: Mapping[str, str], line: int, argv: list[str]) -> list[str]:
        """Record the options at the beginning of a command, and what a shell computes there. Return the rest."""
        while len(argv) > 1 and re.match(r"[$`]|--?[A-Za-z]", argv[0]):
            pairs, argv = _pairs(argv, short)
            if not pairs:
                self.migration.note(line, argv[0], unknown("options"))
                argv = argv[1:]
            self._count(dict(pairs) | self.given)
            for name, value in sorted(pairs, key=lambda pair: pair[0] == "pwd"):  # a path in a mount
                self._set(table, line, name, value)
        return argv

    # The commands

    def _assignments(self, statement: Statement) -> bool:
        """Record the variables that a command sets. Return whether it does nothing else."""
        first, *rest = statement.arguments or [""]
        if first in ("for", "read") and rest:
            self.variables.assign(f"{rest[0]}=", sure=False)
        if first not in ("export", "declare", "typeset", "readonly", "local"):
            rest = list(statement.arguments)
            if not rest or not all(re.match(r"\w+\+?=", word) for word in rest):
                return False
        is_exported = first == "export" or "-x" in rest
        meaning = None if is_exported else ours("a variable of the script, replaced where its text is known")
        meaning = MAYBE if statement.inside else meaning
        for word in rest:
            if not word.startswith("-"):
                name, text = self.variables.assign(word, sure=not statement.inside)
                self.migration.variable(statement.line, name, text, otherwise=meaning)
        return True

    def _tool(self, statement: Statement, argv: list[str]) -> None:
        """Record a command that does not start the training, by its name."""
        line, (name, *rest) = statement.line, argv
        if name == "ml" and rest[:1] != ["purge"]:
            rest = ["load", *rest]
        name, value = ALIASES.get(name, PurePath(name).name), " ".join(rest)
        meaning = meaning_of(SHELL, f"{name} {value}" if name in ("module", "conda", "source", "cd") else name)
        if statement.inside or (statement.redirects and meaning is not PRINTS):
            meaning = MAYBE if statement.inside else SHELL["*"]
        elif meaning.text == "job.node_setup":
            value = " ".join(argv) if re.fullmatch("[\\w./=:@%+, -]+", " ".join(argv)) else statement.text
            meaning = SHELL["*"] if self.launches or statement.after or COMPUTED.search(value) else meaning
        self.migration.translate({name: meaning}, line, name, value, _first_line(statement))

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
                is_srun, argv = True, self._options(SRUN, SHORT, line, argv[1:])
            elif script := _script(argv):
                return self.commands(script, line, is_srun=is_srun)
            elif _is_program(argv):
                return self._program(line, _first_line(statement), argv, is_srun=is_srun)
            else:
                starts = (n for n in range(1, len(argv)) if _is_program(argv[n:]) or _script(argv[n:]))
                wrapper, argv = argv[: (start := next(starts, len(argv)))], argv[start:]
                if name in ("apptainer", "singularity"):
                    migration.add(line, name, "target.runtime", "apptainer")
                    rest = self._options(APPTAINER, SHORT_APPTAINER, line, wrapper[1:])[1:]  # without the verb
                    for image in self._options(APPTAINER, SHORT_APPTAINER, line, rest):
                        self._set(APPTAINER, line, "IMAGE", image)
                else:
                    migration.note(line, " ".join(wrapper), skipped("no wrapper that ddpctl knows"))
        return None

    def _interpreter(self, line: int, argv: list[str]) -> list[str]:
        """Record the Python of a command. Return the command without its path and without the arguments of sbatch."""
        migration, path = self.migration, PurePath(argv[0])
        is_python, is_own = PYTHON.fullmatch(path.name) is not None, "target.runtime" not in migration.values
        if "/" in argv[0] and is_own and "python" in bases_of(migration.kinds[migration.target]()):
            migration.add(line, argv[0], "target.python", str(path if is_python else path.parent / "python"))
        elif "/" in argv[0]:
            migration.note(line, argv[0], ours("ranks use the Python of the image"))
        argv = ["python" if is_python else path.name, *argv[1:]]
        while is_python and argv[1:2] == ["-u"]:
            migration.note(line, f"python {argv.pop(1)}", ours("ranks write without a buffer"))
        for word in [word for word in argv if re.fullmatch(r"\$([@*]|\{[@*].*\})", word)]:
            argv.remove(word)
            migration.note(line, word, unknown("job.command", note="add the arguments that sbatch got"))
        return argv

    def _program(self, line: int, text: str, argv: list[str], *, is_srun: bool) -> None:
        """Record the launcher or the Python, its options, and the script."""
        migration, argv = self.migration, self._interpreter(line, argv)
        refused: list[str] = []
        flags = {"--gpus": str(self.tasks if is_srun else 1)}
        program = argv[1:] if argv[0] == "python" else argv
        translation = translate(argv, refused=refused) or Translation(
            launcher="srun" if is_srun else "python", flags=flags, program=tuple(program)
        )
        for option in refused:
            meaning = without("the launcher has this option, ddpctl has not")
            migration.note(line, option, unknown("job") if COMPUTED.search(option) else meaning)
        for option in translation.implied:
            migration.note(line, option, ours("ddpctl decides it for every run"))
        for name, value in translation.env.items():
            migration.variable(line, name, value)
        if translation.program[:1] == ("-c",):
            raise UsageError("ddpctl starts a script or a module, no text: write it into a file")
        if not is_srun and self.nodes > 1:
            migration.note(line, "no srun", unknown("job.nodes", note="the script uses one, ddpctl all of them"))
        for flag, value in translation.flags.items():
            name = "job.ranks" if flag == "--gpus" else f"job.{flag[2:].replace('-', '_')}"
            migration.add(line, f"{translation.launcher}: {flag} {value}", name, value)
        migration.command(line, text, translation.program)


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"


def _first_line(statement: Statement) -> str:
    """Return the beginning of a command, without the secret after ``login``."""
    return re.sub(r"(login\S*)\s.*", r"\1", statement.text.split("\n")[0]).rstrip(" \\")


def _script(argv: Sequence[str]) -> str:
    """Return the script of ``bash -c SCRIPT``, or nothing."""
    if not argv or PurePath(argv[0]).name not in ("bash", "sh"):
        return ""
    place = next((n for n, word in enumerate(argv[1:], 2) if re.fullmatch("-[a-z]*c", word)), len(argv))
    return "".join(argv[place : place + 1])


def _is_program(argv: Sequence[str]) -> bool:
    """Say whether a command begins with srun, a launcher or Python, not with a wrapper such as a container."""
    return re.match(rf"(\S*/)?(srun|python[0-9.]*|{LAUNCHER_NAMES})\s", " ".join((*argv, ""))) is not None


def _pairs(argv: Sequence[str], short: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options at the beginning of a command, by their long names, and the rest of the command."""
    rest, pairs = list(argv), []
    while rest and re.match(r"--?[A-Za-z]", rest[0]):
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            name, value, equals = short.get(name[1], name[1]), name[2:] + equals + value, name[2:]
        name = name.lstrip("-").replace("_", "-")
        if not equals and not FLAGS.fullmatch(name) and rest:
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs, rest
