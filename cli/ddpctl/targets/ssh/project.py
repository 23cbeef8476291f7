"""Copies the project's folder to hosts. Only files whose size, modification time or executable bit differs are sent.

Normally, the changed files are sent as a compressed archive, which is faster than rsync for new files (bench/sync.py).
But rsync sends only the changed parts of files. So ddpctl uses rsync instead if both machines have it, and if more than
1 MB of changed files would replace older versions on the host.

A host keeps one copy of each project. Each run gets hard links to the files of this copy, so that a later sync does not
change the files of the run.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpctl.command import UNREACHED, Command, FilePart, Host, Output, Transfer, Verb, path_word
from ddpctl.errors import CannotWriteError, ConfigError, NoInputError, UnavailableError
from ddpctl.files.images import human_size
from ddpctl.files.project_files import IGNORE, LIST_ARGV, MAX_BYTES, RSYNC, file_state
from ddpctl.targets.ssh.scripts import run_path
from ddpctl.text import counted

_LITTLE = 1_000_000  # bytes; a smaller archive is a text for the existing connection: a new one would take longer
LIST_S, PACK_S = 120.0, 600.0
STALL_S = 120.0
_PACK = f"""\
set -eu -o pipefail
tar --create --format=posix --null --verbatim-files-from --no-recursion --files-from=- | $2 >"$1"
size=$(wc -c <"$1")
echo "$size"
[ "$size" -gt {_LITTLE} ] || base64 "$1"
"""
_RSYNC_ARGV = (
    "rsync", "--links", "--perms", "--times", "--ignore-times", "--compress", "--compress-level=1", "--protect-args",
    "--from0", "--files-from=-", "--info=progress2",
)  # fmt: skip
_PRUNE = "find . -mindepth 1 -type d -empty -delete"  # otherwise a new file could not get the name of an old folder
_CODECS = {"zstd": ("zstd -q -T0 -1", "zstd -dcq"), "gzip": ("gzip -1", "gzip -dc")}


@dataclass(frozen=True, kw_only=True)
class Project:
    """The files of the project, and whether this machine has rsync and zstd."""

    files: Mapping[str, str]  # name → its size, modification time and executable bit (file_state)
    sizes: Mapping[str, int]  # name → bytes
    left_out: Sequence[str]  # files and folders that are not sent, for a message
    rsync: bool
    zstd: bool

    @property
    def num_bytes(self) -> int:
        """The size of all files, in bytes."""
        return sum(self.sizes.values())


@dataclass(frozen=True, kw_only=True)
class Copy:
    """The copy of the project on a host, and how it differs from the project."""

    host: Host
    folder: str  # its full path there
    zstd: bool  # whether the host has zstd
    changed: tuple[str, ...]  # the files that the host lacks or has in another version
    removed: tuple[str, ...]  # the files that the project no longer has
    by_rsync: bool  # whether to send the changed files with rsync


def sync(hosts: Sequence[Host], *, cwd: str, home: str, run: str, run_dir: str) -> Verb[None]:
    """Copy the folder ``cwd`` to the folder ``project`` of the run on every host. Raises DdpctlError.

    ``run_dir``: the run's folder on this machine, for temporary files.
    """
    tree = f"{home.rstrip('/')}/projects/{hashlib.sha256(cwd.encode()).hexdigest()[:16]}"
    here = Command(argv=LIST_ARGV, cwd=cwd, probe=True, timeout_s=LIST_S)
    listed, *answers = yield (here, *(_look_there(host, tree) for host in hosts))
    project = _project(cwd, listed)
    check_all(hosts, answers, "its copy of the project cannot be read")
    copies = [_copy(host, answer, project) for host, answer in zip(hosts, answers, strict=True)]
    changed = [copy for copy in copies if copy.changed]
    say = _summary(project, changed)
    stale = tuple(
        Command(argv=("/bin/sh", "-c", f"cd {path_word(tree)} && xargs -0 rm -f -- && {_PRUNE}"), host=copy.host,
                say=say, stdin="".join(f"{name}\0" for name in copy.removed))
        for copy in copies if copy.removed
    )  # fmt: skip
    if stale:  # before anything is sent, because a new folder may have the name of an old file
        removed = yield stale
        check_all([command.host for command in stale if command.host], removed, "old files cannot be removed there")
        say = ""
    if changed:
        yield from _send(project, changed, cwd=cwd, tree=tree, archive=f"{run_dir}/project.tar", say=say)
        say = ""
    target = path_word(run_path(home, run, "project"))
    link = f"set -eu\ncd {path_word(tree)}\nmkdir -p $(dirname {target})\nrm -rf {target}\ncp -al . {target}\n"
    link += f"cd {target}\nfind . -type f | LC_ALL=C sort >../project.list\n"
    linked = yield tuple(Command(argv=("/bin/sh",), stdin=link, host=host, say=say) for host in hosts)
    check_all(hosts, linked, "the run's copy of the project cannot be made")


def _look_there(host: Host, tree: str) -> Command:
    text = f"""\
mkdir -p {path_word(tree)} && cd {path_word(tree)} || exit
printf '%s\\0' "$PWD" "$(rsync --version 2>/dev/null | head -n 1)" "$(command -v zstd)"
find . \\( -type f -o -type l \\) -print0 | xargs -0 -r stat --printf '%s %.9Y %a %n\\0'
"""
    assumed = f"{tree}\0{RSYNC}\0zstd\0"
    return Command(argv=("/bin/sh",), stdin=text, host=host, timeout_s=LIST_S, placeholder=assumed)


def _project(cwd: str, listed: Output) -> Project:
    listed.check(f"project: sync: {cwd} cannot be read", NoInputError)
    project = Project(**json.loads(listed.stdout))
    if not project.files:
        raise NoInputError(f"project: sync: there is no file to send in {cwd}")
    if project.num_bytes > MAX_BYTES:
        entries: dict[str, int] = {}
        for name, size in project.sizes.items():
            top, slash, _ = name.partition("/")
            entries[top + slash] = entries.get(top + slash, 0) + size
        largest = sorted(entries, key=entries.__getitem__, reverse=True)[:3]
        raise ConfigError(
            f"project: sync: {cwd} has {human_size(project.num_bytes)}, more than the limit of {human_size(MAX_BYTES)} "
            f"(largest: {', '.join(f'{name} {human_size(entries[name])}' for name in largest)})",
            hint=f"add what the ranks do not need to {IGNORE}, set 'project: PATH' to a folder that all hosts have, or "
            "use an image that contains the code",
            num_bytes=project.num_bytes,
        )
    return project


def _copy(host: Host, answer: Output, project: Project) -> Copy:
    folder, rsync, zstd, *entries = answer.stdout.split("\0")[:-1]
    files = {}
    for entry in entries:
        size, modified, mode, name = entry.split(" ", 3)
        files[name.removeprefix("./")] = file_state(int(size), modified, int(mode, 8))
    changed = tuple(name for name, state in project.files.items() if files.get(name) != state)
    # rsync sends only the changed parts of files: of use if much of what changes is there in another version.
    replaced = sum(project.sizes[name] for name in changed if name in files)
    return Copy(
        host=host, folder=folder, zstd=bool(zstd), changed=changed,
        removed=tuple(sorted(files.keys() - project.files.keys())),
        by_rsync=project.rsync and rsync.startswith(RSYNC) and replaced > _LITTLE,
    )  # fmt: skip


def _send(project: Project, copies: Sequence[Copy], *, cwd: str, tree: str, archive: str, say: str) -> Verb[None]:
    """Send the changed files to all hosts in parallel. Hosts that need the same files get the same archive."""
    packed = [copy for copy in copies if not copy.by_rsync]
    codec = "zstd" if project.zstd and all(copy.zstd for copy in packed) else "gzip"
    contents = list(dict.fromkeys(copy.changed for copy in packed))
    archives = [f"{archive}.{number}" for number in range(len(contents))]
    sizes = yield tuple(
        Command(argv=("bash", "-c", _PACK, "bash", path, _CODECS[codec][0]), cwd=cwd, timeout_s=PACK_S,
                stdin="".join(f"{name}\0" for name in names), placeholder="0", say=say)
        for path, names in zip(archives, contents, strict=True)
    )  # fmt: skip
    for done in sizes:
        done.check("the project cannot be packed", NoInputError)
    unpack = f"{_CODECS[codec][1]} | tar --extract --verbose --no-same-owner"
    commands = []
    for copy in copies:
        names = copy.changed
        moved = Transfer(num_bytes=_size(project, names), num_files=len(names), rsync_to=copy.host)
        if copy.by_rsync:
            address = f"[{copy.host}]" if ":" in copy.host.address else str(copy.host)
            argv = (*_RSYNC_ARGV, f"{cwd}/", f"{address}:{copy.folder}/")
            command = Command(argv=argv, stdin="".join(f"{name}\0" for name in names), transfer=moved)
        else:
            number = contents.index(names)
            size, _, text = sizes[number].stdout.partition("\n")
            decode = "base64 -d | " if text else ""
            receive = ("/bin/sh", "-c", f"cd {path_word(tree)} && {decode}{unpack}")
            part = FilePart(path=archives[number], start=0, length=int(size))
            moved = replace(moved, num_bytes=int(size), rsync_to=None, reads=part)
            command = Command(argv=receive, host=copy.host, stdin=text or None, transfer=None if text else moved)
        commands.append(replace(command, say="" if packed else say, timeout_s=STALL_S))
    answers = yield tuple(commands)
    check_all([copy.host for copy in copies], answers, "the project cannot be written there")
    if archives:
        yield (Command(argv=("rm", "-f", *archives)),)


def _summary(project: Project, changed: Sequence[Copy]) -> str:
    """Return a message of two lines: what the project contains, and what is sent to the hosts that lack some of it."""
    text = f"project: {counted(len(project.files), 'file')}, {human_size(project.num_bytes)}"
    if project.left_out:
        text += f"; left out: {', '.join(project.left_out)}"
    if not changed:
        return f"{text}\nevery host has it already"
    num_files = sum(len(copy.changed) for copy in changed)
    size = human_size(sum(_size(project, copy.changed) for copy in changed))
    return f"{text}\nsending {counted(num_files, 'file')}, {size}, to {counted(len(changed), 'host')}"


def _size(project: Project, names: Sequence[str]) -> int:
    return sum(project.sizes[name] for name in names)


def check_all(hosts: Sequence[Host], answers: Sequence[Output], problem: str) -> None:
    """Raise UnavailableError or CannotWriteError for the first host on which a command failed."""
    for host, answer in zip(hosts, answers, strict=True):
        if answer.returncode:
            kind = UnavailableError if answer.returncode == UNREACHED else CannotWriteError
            raise kind(f"{host}: {problem}: {answer.last_line()}")
