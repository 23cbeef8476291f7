"""Makes a Python environment from a lock file, with uv, on hosts or on the login node of a cluster.

A host has one folder of environments. In it, ``KEY/MACHINE-VERSION`` is the virtual environment for a type of machine
and a version of Python. The key is a hash of the lock and of ddpctl itself. ``KEY/python`` starts the Python of the
environment that the machine can run. An environment is complete if it has the file PYTHON_RECORD, which is written
last: an installation that has failed or was interrupted is never used. ``files`` has what the launching machine has
sent: ddpctl's own wheel, uv if the host has none, and the wheels of ``wheelhouse``.
"""

import hashlib
import json
import re
import shlex
import sys
import tarfile
import zipfile
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path, PurePath
from tempfile import NamedTemporaryFile
from typing import Any

from ddpctl.command import NOT_FOUND, SHELL, UNREACHED, Command, FilePart, Host, Transfer, Verb, call, path_word
from ddpctl.errors import CannotWriteError, ConfigError
from ddpctl.files.own_wheel import wheel
from ddpctl.text import one_line
from ddpwire.exits import Exit
from ddpwire.machine import GIB
from ddpwire.run_files import PYTHON_RECORD
from ddpwire.version import __version__

# The names of locks → files beside it
LOCKS = {"uv.lock": ("pyproject.toml", ".python-version"), "pylock.toml": (), "requirements.txt": ()}
PYTHON = ">=3.11"  # if the lock requires no version
AGENT = ("prometheus-client>=0.21", "psutil>=6", "nvidia-ml-py>=12.560")  # what ddprun needs besides torch
WHEEL = f"ddpctl-{__version__}-py3-none-any.whl"
CUDA_BYTES, CPU_BYTES = 8 * GIB, 2 * GIB  # torch with its libraries, and the download
KEPT, KEPT_DAYS = 3, 30  # environments that no run uses; days that a sent file stays
INSTALL_S = 3600  # for one step of uv, and for the installation of another launch
ASK_S, FETCH_S, STALL_S = 60.0, 300.0, 120.0
_CACHE = ".cache/ddpctl/uv"  # in the home folder of this machine: the wheel of uv for each type of machine


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What an environment is made from."""

    lock: str  # the path on this machine
    name: str  # the name of its file, with a hash of its text
    texts: dict[str, str]  # the lock and the files that uv reads beside it
    requires: str  # the version of Python, as for uv
    num_bytes: int  # free disk space that an environment needs if uv's cache is empty
    sizes: dict[str, int]  # the files to send, except uv: name → bytes
    wheelhouse: str  # the folder with all wheels, for a host without a network; or ""

    def resolve(self, options: Any, folder: str) -> Any:
        """Return a target's options with the environment's Python. ``folder``: the folder of environments."""
        parts = [self.requires, *self.sizes, *(text for pair in self.texts.items() for text in pair)]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return replace(options, python=f"{folder}/{key}/python")


def read_lock(path: Path, wheelhouse: Path | None, own: bytes = b"") -> Recipe:
    """Return the recipe of a lock. Raises ValueError or OSError. ``own``: ddpctl's wheel."""
    if path.name not in LOCKS:
        raise ValueError(f"the name of a lock is {', '.join(LOCKS)}")
    text = path.read_text()
    texts = {path.name: text} | {name: (path.parent / name).read_text() for name in LOCKS[path.name][:1]}
    texts |= {name: file.read_text() for name in LOCKS[path.name][1:] if (file := path.parent / name).is_file()}
    if path.name == "requirements.txt" and (open_ := re.search(r"(?m)^(?!.*(===?| @ ))([A-Za-z0-9].*|-r.*)", text)):
        raise ValueError(f"'{open_[0].strip()}' has no exact version: make a lock, such as by uv pip compile")
    if not re.search(r'(?m)^(name = "torch"$|torch *[=@[])', text):
        raise ValueError("torch is not in it")
    if wheelhouse and not wheelhouse.is_dir():
        raise ValueError(f"the wheelhouse {wheelhouse} is not a folder")
    wheels = sorted(wheelhouse.glob("*.whl")) if wheelhouse else []
    if wheelhouse and not wheels:
        raise ValueError(f"{wheelhouse} has no wheels")
    if wheelhouse and path.name == "pylock.toml":
        raise ValueError("it contains the addresses of wheels: with a wheelhouse, use a uv.lock or a requirements.txt")
    sizes = {f"wheels/{file.name}": file.stat().st_size for file in wheels}
    num_bytes = 3 * sum(sizes.values()) or (CUDA_BYTES if "nvidia-" in text else CPU_BYTES)
    requires = re.search(r'(?m)^requires-python = "(.+)"$', text)
    return Recipe(
        lock=str(path), name=f"{path.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}", texts=texts,
        requires=next(iter(texts.get(".python-version", "").split()), "") or (requires[1] if requires else PYTHON),
        num_bytes=num_bytes, sizes={f"{hashlib.sha256(own).hexdigest()[:12]}/{WHEEL}": len(own), **sizes},
        wheelhouse=str(wheelhouse or ""),
    )  # fmt: skip


def problems(options: Any, *, python: str | None) -> Iterable[tuple[str, str]]:
    """Yield the errors in ``environment`` and ``wheelhouse`` of a target. ``python`` is the default of that option."""
    if not options.environment:
        if options.wheelhouse:
            yield "target.wheelhouse", "needs 'environment', the path of a lock"
        return
    if options.runtime != "none":
        text = f"a container of the runtime '{options.runtime}' has the packages of its image"
        to_do = "install the lock in the image (ddpctl image build), or set the runtime to 'none'"
        yield "target.environment", f"{text}: {to_do}"
    if options.python != python and not re.search("/[0-9a-f]{16}/python$", options.python):  # that of an earlier launch
        yield "target.python", "an environment has its own Python: leave out 'python' or 'environment'"
    try:
        read_lock(Path(options.environment), Path(options.wheelhouse) if options.wheelhouse else None)
    except OSError as error:
        yield "target.environment", f"{error.filename}: {error.strerror}"
    except ValueError as error:  # also if it is not UTF-8
        yield "target.environment", one_line(f"{options.environment}: {error}")


def read_recipe(options: Any) -> Verb[Recipe]:
    """Read the lock of a target's options. Raises ConfigError."""
    (output,) = yield (call(_read, options, probe=True),)
    output.check("environment", ConfigError)
    recipe: Recipe = output.value
    return recipe


def _read(options: Any) -> Recipe:
    try:
        return read_lock(Path(options.environment), options.wheelhouse and Path(options.wheelhouse), wheel())
    except (OSError, ValueError) as error:
        raise ConfigError(one_line(f"{options.environment}: {error}")) from None


def record_text(python: str) -> str:
    """Return shell code that prints the record of the environment of ``python``, a word of the shell, on one line."""
    code = f'import sys; print(open(sys.prefix + "/{PYTHON_RECORD}").read().strip())'
    # The time of the folder keeps another launch from removing it (clean_text).
    return f'touch -c "$(dirname {python})" 2>/dev/null; {python} -c {shlex.quote(code)} 2>/dev/null'


def recorded(text: str) -> dict[str, Any]:
    """Return the environment's record as a part of a run's handle. ``text``: the output of ``record_text``, or ""."""
    with suppress(ValueError):
        return {"environment": json.loads(text)}
    return {}


def use_text(python: str, run_dir: str) -> str:
    """Return shell code that notes that a run uses an environment. Both are words of the shell."""
    return f"""\
_ddp_d=$(dirname {python})
mkdir -p "$_ddp_d/runs" && ln -sfn {run_dir} "$_ddp_d/runs/" && touch "$_ddp_d"
"""


def clean_text(folder: str) -> str:
    """Return shell code that removes old files, and all environments that no run uses, except the newest.

    A run uses its environment until it is removed. An environment of the last hour may be that of a launch.
    """
    return f"""\
if cd {path_word(folder)} 2>/dev/null; then (
  _ddp_n=0
  for _ddp_key in $(ls -t); do
    [ -d "$_ddp_key/lock" ] || continue
    for _ddp_run in "$_ddp_key"/runs/*; do if [ -e "$_ddp_run" ]; then continue 2; fi; done
    _ddp_n=$((_ddp_n + 1))
    if [ $_ddp_n -le {KEPT} ] || [ -n "$(find "$_ddp_key" -maxdepth 0 -mmin -60)" ]; then continue; fi
    (flock -n 9 && rm -rf "$_ddp_key") 9>>"$_ddp_key.flock"
  done
  find files -type f -mtime +{KEPT_DAYS} -delete 2>/dev/null || true
) fi
"""


def make(hosts: Sequence[Host | None], python: str, recipe: Recipe) -> Verb[None]:
    """Make the environment of ``python`` on all hosts in parallel. ``None`` is this machine.

    Raises ConfigError if the lock cannot be used. A host on which another error occurs has no complete environment.
    """
    say = f"environment: installing {recipe.name} on {', '.join(str(host or 'this machine') for host in hosts)}"
    files = f"{PurePath(python).parent.parent}/files"
    enter = f"mkdir -p {path_word(files)}; cd {path_word(files)} || exit\n"
    ask = Command(argv=SHELL, stdin=enter + _SURVEY, timeout_s=ASK_S, say=say, placeholder="machine x86_64 none\n")
    answers = dict(zip(hosts, (yield tuple(replace(ask, host=host) for host in hosts)), strict=True))
    kinds = {host: re.search(r"(?m)^machine (\S+) (\S+)$", answer.stdout) for host, answer in answers.items()}
    for machine, uv in sorted({(kind[1], kind[2]) for kind in kinds.values() if kind}):
        at = [host for host, kind in kinds.items() if kind and (kind[1], kind[2]) == (machine, uv)]
        files_of = {host: answers[host].stdout.splitlines() for host in at}
        lacking = {name for name, size in recipe.sizes.items() for host in at if f"{size} {name}" not in files_of[host]}
        if uv == "none":
            (done,) = yield (Command(argv=("sh", "-c", _FETCH, sys.executable, machine), timeout_s=FETCH_S, say=say),)
            done.check("environment: uv is not on the hosts, and its wheel cannot be fetched here")
            lacking.add(f"uv-{machine}")
        if lacking:
            (packed,) = yield (call(pack, recipe, sorted(lacking), say=say),)
            packed.check("environment: the files for the hosts cannot be packed", CannotWriteError)
            path, size = packed.value or ("<archive>", 0)
            moved = Transfer(num_bytes=size, num_files=len(lacking), reads=FilePart(path=path, start=0, length=size))
            argv = ("/bin/sh", "-c", enter + _RECEIVE)
            sent = yield tuple(Command(argv=argv, host=host, transfer=moved, timeout_s=STALL_S, say=say) for host in at)
            for host, output in zip(at, sent, strict=True):
                output.check(f"{host or 'this machine'}: the files of the environment were not sent", CannotWriteError)
            yield (Command(argv=("rm", "-f", path), say=say),)
    made = yield tuple(
        Command(argv=SHELL, stdin=install_text(host, python, recipe), host=host, mode="stream", timeout_s=None, say=say)
        for host, answer in answers.items()
        if answer.returncode != UNREACHED
    )
    if any(output.returncode == Exit.CONFIG for output in made):
        raise ConfigError(f"environment: {recipe.lock} cannot be used: see the lines above")


_FIND_UV = """\
uv=none
for each in uv "$HOME/.local/bin/uv" "$files/uv-$(uname -m)"; do
  if "$each" export --help 2>/dev/null | grep -q pylock.toml; then uv=$each; break; fi # not if it is too old
done
"""
# In the folder of the files: prints the type of machine and whether there is a uv, and then each file.
_SURVEY = f'files=$PWD\n{_FIND_UV}echo "machine $(uname -m) ${{uv##*/}}"\nfind . -type f -printf "%s %P\\n"\n'
# A file that is in use is replaced, not written.
_RECEIVE = """\
new=$(mktemp -d in.XXXXXX) && trap 'rm -rf "$new"' EXIT && tar --extract --verbose --no-same-owner --directory="$new" &&
  cp -alf "$new/." ."""
# Downloads the wheel of uv for a type of machine, with this Python's pip or the pip that uv brings.
_FETCH = f"""\
folder=$HOME/{_CACHE}/$1 manylinux=manylinux2014_$1
[ -z "$(ls "$folder" 2>/dev/null)" ] || exit 0
if "$0" -m pip --version >/dev/null 2>&1; then set -- "$0" -m pip; else set -- uv tool run pip; fi
exec "$@" download --quiet --no-deps --only-binary=:all: --platform "$manylinux" --dest "$folder" uv
"""


def install_text(host: Host | None, python: str, recipe: Recipe) -> str:
    """Return the script that makes an environment. It shows its progress on stderr.

    It ends with 78 if the lock cannot be used.
    """
    folder, offline = path_word(str(PurePath(python).parent)), bool(recipe.wheelhouse)
    texts = "".join(
        f"echo {b64encode(text.encode()).decode()} | base64 -d >lock/{name}\n" for name, text in recipe.texts.items()
    )
    own, form = next(iter(recipe.sizes)), "requirements.txt" if offline else "pylock.toml"
    export = f'step export "$uv" export --quiet --frozen --no-dev --no-emit-local --project lock --format {form}'
    export += f" --output-file lock/{form} || stop {Exit.CONFIG:d} 'uv cannot read the lock'"
    locked = "requirements.txt" if "requirements.txt" in recipe.texts else form
    index = '--no-index --find-links "$files/wheels"' if offline else ""
    return f"""\
set -u
say() {{ echo {shlex.quote(str(host or "environment"))}": $*" >&2; }}
stop() {{ say "$2${{log:+: $(grep -v '^warning' "$log" | tail -n 3 | tr '\\n' ' ')}}"; exit "$1"; }}
trap 'exit {Exit.UNAVAILABLE:d}' HUP INT TERM PIPE
trap 'kill ${{pid:-}} 2>/dev/null' EXIT
step() {{ # NAME COMMAND...: run a command, and show the last line of its output every 5 s
  log=$PWD/log name=$1 start=$(date +%s) shown=0; shift
  timeout {INSTALL_S} "$@" >"$log" 2>&1 </dev/null & pid=$!
  while kill -0 $pid 2>/dev/null; do
    sleep 0.2
    s=$(($(date +%s) - start))
    if [ $s -ge $((shown + 5)) ]; then shown=$s; say "$name, $s s: $(tail -n 1 "$log")"; fi
  done
  wait $pid && pid='' # another process may get its number
}}
install() {{ name=$1; shift; step "$name" "$uv" pip install --python "$env" --project lock {index} "$@"; }}
log='' s=0
mkdir -p {folder}/lock && chmod 700 {folder}/lock && cd {folder} ||
  stop {Exit.CANNOT_WRITE:d} 'the folder of the environment cannot be written'
exec 9>>"$PWD.flock"
flock -n 9 || say 'waiting for the installation of another launch'
until flock -w 5 9; do
  s=$((s + 5))
  [ $s -lt {INSTALL_S} ] || stop {Exit.UNAVAILABLE:d} "another launch has been installing for more than $s s"
  say "waiting for the installation of another launch, $s s"
done
files=$(cd ../files && pwd)
{_FIND_UV}\
{texts}\
export UV_SYSTEM_CERTS=1{" UV_PYTHON_DOWNLOADS=never" if offline else ""}
requires={shlex.quote(recipe.requires)}
find_python() {{ python=$("$uv" python find --no-project --system "$requires" 2>log); }}
find_python || step "Python $requires" "$uv" python install "$requires"
find_python || stop {Exit.CONFIG:d} "there is no Python $requires, and uv cannot download one"
env=$PWD/$(uname -m)-$("$python" -c 'import platform; print(platform.python_version())')
if [ -e "$env/{PYTHON_RECORD}" ] && [ -x "$env/bin/python" ]; then exit 0; fi
rm -rf "$env" # an installation was interrupted
{export if "uv.lock" in recipe.texts else ""}
"$uv" venv --quiet --python "$python" "$env" 2>log || stop {Exit.CANNOT_WRITE:d} 'uv cannot make an environment'
install plan --dry-run -r lock/{locked} || stop {Exit.UNAVAILABLE:d} 'uv cannot install the lock'
need={recipe.num_bytes >> 20} cache=$("$uv" cache dir) && mkdir -p "$cache"
grep -q 'Would download' log || need=$((need / 10)) # uv's cache has all packages, and makes hard links
free=$(df -Pm . "$cache" | awk 'NR > 1 && (NR == 2 || $4 < free) {{ free = $4 }} END {{ print free }}')
log=
[ "$free" -ge $need ] || stop {Exit.CANNOT_WRITE:d} "$need MiB needed in $PWD and in uv's cache, but $free MiB free"
install packages -r lock/{locked} || stop {Exit.UNAVAILABLE:d} 'uv cannot install the lock'
"$uv" pip freeze --python "$env" >lock/frozen 2>log # ddprun changes no package of the lock
install ddprun --constraints lock/frozen {shlex.join(AGENT)} "$files/{own}" ||
  stop {Exit.UNAVAILABLE:d} 'ddprun cannot be installed beside the packages of the lock'
log=
"$env/bin/python" -I - >record <<'END' || stop {Exit.CONFIG:d} {shlex.quote(f"{recipe.name} installs no torch")}
{_RECORD.format(name=recipe.name)}END
cat >python.new <<'END'
{_START}END
chmod +x python.new && mv -f python.new python && mv -f record "$env/{PYTHON_RECORD}"
say "complete: $(cat "$env/{PYTHON_RECORD}")"
{clean_text(str(PurePath(python).parent.parent))}"""


_RECORD = """\
import hashlib, json, platform
from importlib.metadata import distributions, version
names = sorted({{f"{{each.name}}=={{each.version}}".lower() for each in distributions()}})
digest = hashlib.sha256("\\n".join(names).encode()).hexdigest()[:12]
print(json.dumps({{"lock": "{name}", "python": platform.python_version(), "torch": version("torch"),
                  "packages": f"{{len(names)}} ({{digest}})"}}))
"""
_START = f"""\
#!/bin/sh
# Starts the Python of the first complete environment here that this machine can run.
for python in "${{0%/*}}/$(uname -m)"-*/bin/python; do
  [ ! -e "${{python%/bin/python}}/{PYTHON_RECORD}" ] || [ ! -x "$python" ] || exec "$python" "$@"
done
echo "there is no complete environment for $(uname -m) in ${{0%/*}}" >&2
exit {NOT_FOUND}
"""


def pack(recipe: Recipe, names: Sequence[str]) -> tuple[str, int]:
    """Write files for a host to a tar archive. Return its path and its size in bytes."""
    cache = Path.home() / _CACHE
    cache.mkdir(parents=True, exist_ok=True)
    with (
        NamedTemporaryFile(dir=cache, suffix=".tar", delete=False) as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for name in names:
            if name.startswith("wheels/"):
                tar.add(Path(recipe.wheelhouse, PurePath(name).name), name)
                continue
            data, entry = wheel(), tarfile.TarInfo(name)
            if machine := name.removeprefix("uv-") * name.startswith("uv-"):
                with zipfile.ZipFile(max((cache / machine).glob("*.whl"))) as packed:
                    data = packed.read(next(item for item in packed.namelist() if item.endswith("/scripts/uv")))
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, BytesIO(data))
    return file.name, Path(file.name).stat().st_size
