"""Makes a Python environment from a lock file, with uv, on hosts and on the login node of a cluster.

A host has one folder of environments. In it, ``KEY/MACHINE-VERSION`` is the virtual environment for a type of machine
and a version of Python. The key is a hash of the lock and of ddpctl itself. ``KEY/python`` starts the Python of the
environment that the machine can run. An environment is complete if it has the file RECORD, which is written last, so an
installation that failed or was interrupted is never used. ``files`` has what the launching machine has sent: ddpctl's
own wheel, uv if the host has none, and the wheels of ``wheelhouse``.

``python -m ddpctl.files.environments`` is a separate program: ``read`` prints a Recipe as JSON, and ``pack`` writes the
files for a host as a tar archive.
"""

import base64
import hashlib
import json
import re
import shlex
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path, PurePath
from tempfile import NamedTemporaryFile
from typing import Any

from ddpctl.command import NOT_FOUND, SHELL, Command, FilePart, Host, Output, Transfer, Verb, path_word
from ddpctl.errors import CannotWriteError, ConfigError
from ddpctl.files.own_wheel import wheel
from ddpctl.text import one_line
from ddpwire.exits import Exit
from ddpwire.machine import GIB
from ddpwire.run_files import PYTHON_RECORD
from ddpwire.version import __version__

LOCKS = ("uv.lock", "pylock.toml", "requirements.txt")
PYTHON = ">=3.11"  # if the lock requires no version
AGENT = ("prometheus-client>=0.21", "psutil>=6", "nvidia-ml-py>=12.560")  # what ddprun needs besides torch
WHEEL = f"ddpctl-{__version__}-py3-none-any.whl"
KEPT, KEPT_DAYS = 3, 30  # environments that no run uses; days that a sent file stays
INSTALL_S = 3600  # for one step of uv, and for the installation of another launch
UNPACKED = 2.5  # an environment and its download, compared to the size of the wheels
TORCH_BYTES = 6 * GIB  # an environment with torch, if the lock has no sizes
ASK_S, FETCH_S, STALL_S = 60.0, 300.0, 120.0
MACHINE = "x86_64"  # assumed in a dry run
_CACHE = ".cache/ddpctl/uv"  # in the home folder of this machine: the wheels of uv, by type of machine
_PROGRAM = (sys.executable, "-P", "-m", "ddpctl.files.environments")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What an environment is made from."""

    lock: str  # the path of the lock on this machine
    texts: dict[str, str]  # the lock and the files that uv reads beside it
    requires: str  # the version of Python, as for uv
    num_bytes: int  # free disk space that an environment needs if uv's cache is empty
    own: str  # a hash of ddpctl's wheel
    sizes: dict[str, int] = field(default_factory=dict)  # the files to send, except uv: name → bytes
    wheelhouse: str = ""  # the folder with all wheels, for a host without a network

    @property
    def key(self) -> str:
        """A hash of everything that the environment depends on, except the type of machine."""
        parts = [self.own, self.requires, *sorted(self.sizes), *(text for pair in self.texts.items() for text in pair)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The name of the lock's file, with a hash of its text."""
        name = PurePath(self.lock).name
        return f"{name} {hashlib.sha256(self.texts[name].encode()).hexdigest()[:12]}"

    def resolve(self, options: Any, folder: str) -> Any:
        """Return a target's options with the environment's Python. ``folder``: the folder of environments."""
        return replace(options, python=f"{folder}/{self.key}/python")


def read_lock(path: Path, wheelhouse: Path | None = None) -> Recipe:
    """Return the recipe of a lock without ddpctl's wheel. Raises ValueError or OSError if it cannot be used."""
    if path.name not in LOCKS:
        raise ValueError(f"expected a file with the name {', '.join(LOCKS[:-1])} or {LOCKS[-1]}")
    beside = {"uv.lock": ("pyproject.toml", ".python-version")}.get(path.name, (".python-version",))
    texts = {path.name: path.read_text()}
    texts |= {name: file.read_text() for name in beside if (file := path.parent / name).is_file()}
    if path.name == "uv.lock" and "pyproject.toml" not in texts:
        raise ValueError("its pyproject.toml is not beside it")
    num_bytes, requires, packages = TORCH_BYTES, "", []
    if path.suffix == ".txt":
        names = _requirements(texts[path.name])
    else:
        lock = tomllib.loads(texts[path.name])
        packages = lock.get("package" if path.suffix == ".lock" else "packages", [])
        names, requires = {package.get("name", "") for package in packages}, lock.get("requires-python", "")
        num_bytes = max(GIB, int(UNPACKED * sum(map(_wheel_bytes, packages))))
    if "torch" not in names:
        raise ValueError("torch is not in it")
    sizes: dict[str, int] = {}
    if wheelhouse is not None:
        if path.name == "pylock.toml":  # its packages have the addresses of an index
            lines = (
                f"{each['name']}=={each['version']} ; {each.get('marker', 'python_version > 3')}" for each in packages
            )
            texts["requirements.txt"] = "\n".join(lines)
        sizes = {f"wheels/{file.name}": file.stat().st_size for file in sorted(wheelhouse.glob("*.whl"))}
        num_bytes = int(UNPACKED * sum(sizes.values()))
        if not sizes:
            raise ValueError(f"the wheelhouse {wheelhouse} has no wheels")
    version = texts.get(".python-version", "").split("#")[0].strip() or requires or PYTHON
    return Recipe(
        lock=str(path), texts=texts, requires=version, num_bytes=num_bytes, own="", sizes=sizes,
        wheelhouse=str(wheelhouse or ""),
    )  # fmt: skip


def _requirements(text: str) -> set[str]:
    """Return the names of the packages in a requirements.txt. Raises ValueError if a version is not exact."""
    names = set[str]()
    for line in re.sub(r"\\\n", " ", text).splitlines():
        requirement = line.partition(" #")[0].strip()
        if re.match(r"-r|-c|-e|--requirement|--constraint|--editable|\.|/", requirement):
            raise ValueError(f"'{requirement}' is another file: write one lock with uv pip compile")
        if name := re.match(r"[A-Za-z0-9][\w.-]*", requirement):
            if not re.search("==|@", requirement):
                raise ValueError(f"'{requirement}' has no exact version: write a lock with uv pip compile")
            names.add(name[0].lower())
    return names


def _wheel_bytes(package: Any) -> int:
    wheels = (item for item in package.get("wheels", ()) if re.search(r"linux|-any\.whl", str(item.get("url"))))
    return max((item.get("size", 0) for item in wheels), default=package.get("sdist", {}).get("size", 0))


def problems(options: Any, *, python: str | None) -> Iterable[tuple[str, str]]:
    """Yield the errors in ``environment`` and ``wheelhouse`` of a target. ``python`` is the default of that option."""
    if not options.environment:
        if options.wheelhouse:
            yield "target.wheelhouse", "needs the key environment, the path of a lock"
        return
    if options.runtime != "none":
        yield (
            "target.environment",
            f"a container of the runtime '{options.runtime}' has the packages of its image: install the lock in the "
            "image (ddpctl image build), or set the runtime to 'none'",
        )
    if options.python != python and not re.search(
        r"/[0-9a-f]{16}/python$", options.python
    ):  # that of an earlier launch
        yield "target.python", "the environment has its own Python: leave out python or environment"
    try:
        read_lock(Path(options.environment), Path(options.wheelhouse) if options.wheelhouse else None)
    except OSError as error:
        yield "target.environment", f"{options.environment}: {error.strerror}"
    except ValueError as error:  # also of TOML and of UTF-8
        yield "target.environment", one_line(f"{options.environment}: {error}")


def read_recipe(options: Any) -> Verb[Recipe]:
    """Read the lock of a target's options. Raises ConfigError."""
    argv = (*_PROGRAM, "read", options.environment, options.wheelhouse or "")
    (output,) = yield (Command(argv=argv, probe=True, timeout_s=ASK_S),)
    output.check(f"environment: {options.environment} cannot be read", ConfigError)
    return Recipe(**json.loads(output.stdout))


def state_text(python: str) -> str:
    """Return shell code that prints the record of the environment ``python``, a word of the shell."""
    code = f'import sys; print(open(sys.prefix + "/{PYTHON_RECORD}").read())'
    return f"say environment \"$({python} -c {shlex.quote(code)} 2>/dev/null | tr -d '\\n')\""


def recorded(text: str) -> dict[str, Any]:
    """Return the environment's record as a part of a run's handle, from the output of ``state_text``."""
    with suppress(ValueError):
        return {"environment": json.loads(text)}
    return {}


def use_text(python: str, run_dir: str) -> str:
    """Return shell code that notes that a run uses an environment. Both are words of the shell."""
    return f"""\
_ddp_d=$(dirname {python})
mkdir -p "$_ddp_d/runs" && ln -sfn {run_dir} "$_ddp_d/runs/$(basename {run_dir})" && touch "$_ddp_d"
"""


def clean_text(folder: str) -> str:
    """Return shell code that removes all environments that no run uses, except the newest, and old files.

    A run uses its environment until it is removed. An environment of the last hour may be that of a launch.
    """
    return f"""\
if cd {path_word(folder)} 2>/dev/null; then (
  _ddp_n=0
  for _ddp_key in $(ls -t); do
    [ -d "$_ddp_key" ] && [ "$_ddp_key" != files ] || continue
    for _ddp_run in "$_ddp_key"/runs/*; do if [ -e "$_ddp_run" ]; then continue 2; fi; done
    _ddp_n=$((_ddp_n + 1))
    if [ $_ddp_n -le {KEPT} ] || [ -n "$(find "$_ddp_key" -maxdepth 0 -mmin -60)" ]; then continue; fi
    (flock -n 9 && rm -rf "$_ddp_key") 9>>"$_ddp_key.lock"
  done
  find files -type f -mtime +{KEPT_DAYS} -delete
) fi
"""


def make(hosts: Sequence[Host | None], folder: str, recipe: Recipe) -> Verb[tuple[Output, ...]]:
    """Make the environment on all hosts in parallel. Return an output for each host. Raises ConfigError.

    ``None`` is this machine.
    """
    say = f"environment: making that of {recipe.name} on {', '.join(str(host or 'this machine') for host in hosts)}"
    files = f"{folder}/files"
    survey = f"mkdir -p {path_word(files)} && cd {path_word(files)} || exit {Exit.CANNOT_WRITE:d}\n{_SURVEY}"
    answers = yield tuple(
        Command(argv=SHELL, stdin=survey, host=host, timeout_s=ASK_S, say=say, placeholder=f"machine {MACHINE}\n")
        for host in hosts
    )
    results = dict(enumerate(answers))
    facts = {place: _facts(answer.stdout) for place, answer in results.items() if not answer.returncode}
    for machine in sorted({fact["machine"][0] for fact in facts.values()}):
        there = [place for place, fact in facts.items() if fact["machine"] == [machine]]
        known = [{*facts[place].get("file", ())} for place in there]
        names = [name for name, size in recipe.sizes.items() if not all(f"{size} {name}" in files for files in known)]
        fetch = not all("uv" in facts[place] for place in there)
        if fetch:
            (done,) = yield (Command(argv=("sh", "-c", _FETCH, sys.executable, machine), timeout_s=FETCH_S),)
            done.check("environment: uv is not on the hosts, and its wheel cannot be fetched here")
        if not names and not fetch:
            continue
        argv = (*_PROGRAM, "pack", recipe.wheelhouse, machine if fetch else "", *names)
        (packed,) = yield (Command(argv=argv, timeout_s=FETCH_S, placeholder='["<archive>", 0]'),)
        packed.check("environment: the files for the hosts cannot be packed", CannotWriteError)
        path, size = json.loads(packed.stdout)
        moved = Transfer(num_bytes=size, num_files=len(names) + fetch, reads=FilePart(path=path, start=0, length=size))
        argv = ("/bin/sh", "-c", f"cd {path_word(files)} && {_RECEIVE}")
        send = (Command(argv=argv, host=hosts[place], transfer=moved, timeout_s=STALL_S, say=say) for place in there)
        results |= zip(there, (yield tuple(send)), strict=True)
        yield (Command(argv=("rm", "-f", path)),)
    places = [place for place in facts if not results[place].returncode]
    made = yield tuple(
        Command(argv=SHELL, stdin=install_text(str(hosts[place] or "here"), folder, recipe), host=hosts[place],
                mode="stream", timeout_s=None, say=say)
        for place in places
    )  # fmt: skip
    if any(output.returncode == Exit.CONFIG for output in made):
        raise ConfigError(f"environment: {recipe.lock} cannot be used: see the lines above")
    return tuple((results | dict(zip(places, made, strict=True)))[place] for place in range(len(hosts)))


def _facts(text: str) -> dict[str, list[str]]:
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, value = line.partition(" ")
        facts.setdefault(word, []).append(value)
    return facts


_FIND_UV = """\
uv=
for _ddp_uv in uv "$HOME/.local/bin/uv" "$_ddp_files/uv-$(uname -m)"; do
  "$_ddp_uv" export --help 2>/dev/null | grep -q pylock.toml || continue # an old uv does not know it
  uv=$_ddp_uv; break
done
"""
# Runs in the folder of the files.
_SURVEY = f"""\
_ddp_files=$PWD
{_FIND_UV}echo "machine $(uname -m)"
[ -z "$uv" ] || echo "uv $uv"
find . -type f -printf 'file %s %P\\n'
"""
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


def install_text(name: str, folder: str, recipe: Recipe) -> str:
    """Return the script that makes the environment on a host, which the messages call ``name``.

    It shows its progress on stderr, and ends with 78 if the lock cannot be used.
    """
    home, is_offline = path_word(folder), bool(recipe.wheelhouse)
    texts = "".join(
        f"echo {base64.b64encode(text.encode()).decode()} | base64 -d >lock/{shlex.quote(name)}\n"
        for name, text in recipe.texts.items()
    )
    form = "requirements.txt" if is_offline or "requirements.txt" in recipe.texts else "pylock.toml"
    export = f'step export "$uv" export --quiet --frozen --no-dev --no-emit-local --project lock --format {form}'
    export = f"{export} --output-file lock/{form} || stop {Exit.CONFIG:d} 'uv cannot read the lock'\n"
    index = f"--no-index --find-links {home}/files/wheels" if is_offline else ""
    own = f"{home}/files/{recipe.own}/{WHEEL}"
    return f"""\
set -u
say() {{ echo {shlex.quote(name)}": environment: $*" >&2; }}
stop() {{ say "$2${{log:+: $(grep -v '^warning' "$log" | tail -n 3 | tr '\\n' ' ')}}"; exit "$1"; }}
trap 'exit {Exit.UNAVAILABLE:d}' HUP INT TERM PIPE
trap 'kill ${{pid:-}} 2>/dev/null' EXIT
# step NAME COMMAND...: run a command, and show its last line every 5 s.
step() {{
  log=$PWD/log name=$1 start=$(date +%s) shown=0; shift
  timeout {INSTALL_S} "$@" >"$log" 2>&1 </dev/null & pid=$!
  while kill -0 $pid 2>/dev/null; do
    sleep 0.2
    s=$(($(date +%s) - start))
    if [ $s -ge $((shown + 5)) ]; then shown=$s; say "$name, $s s: $(tail -n 1 "$log")"; fi
  done
  wait $pid && pid='' # another process may get its number
}}
log='' s=0
mkdir -p {home}/{recipe.key}/lock && cd {home}/{recipe.key} || stop {Exit.CANNOT_WRITE:d} 'its folder cannot be written'
exec 9>>"$PWD.lock"
until flock -w 5 9; do # another launch
  s=$((s + 5))
  [ $s -lt {INSTALL_S} ] || stop {Exit.UNAVAILABLE:d} "another launch has been making it for more than $s s"
  say "another launch is making it, $s s"
done
_ddp_files={home}/files
{_FIND_UV}\
[ "$uv" ] || stop {Exit.UNAVAILABLE:d} 'uv cannot run there'
{texts}\
export UV_SYSTEM_CERTS=1{" UV_PYTHON_DOWNLOADS=never" if is_offline else ""}
requires={shlex.quote(recipe.requires)}
find_python() {{ python=$("$uv" python find --no-project --system "$requires" 2>log); }}
find_python || step "Python $requires" "$uv" python install "$requires"
find_python || stop {Exit.CONFIG:d} "there is no Python $requires, and uv can download none"
env=$PWD/$(uname -m)-$("$python" -c 'import platform; print(platform.python_version())')
if [ -e "$env/{PYTHON_RECORD}" ] && [ -x "$env/bin/python" ]; then exit 0; fi
rm -rf "$env" # from an installation that was interrupted
{export if "uv.lock" in recipe.texts else ""}\
"$uv" venv --quiet --python "$python" "$env" 2>log || stop {Exit.CANNOT_WRITE:d} 'uv cannot make it'
install() {{ name=$1; shift; step "$name" "$uv" pip install --python "$env" --project lock {index} "$@"; }}
install plan --dry-run -r lock/{form} || stop {Exit.UNAVAILABLE:d} 'uv cannot install the lock'
need={recipe.num_bytes >> 10} cache=$("$uv" cache dir) && mkdir -p "$cache"
grep -q 'Would download' log || need=$((need / 10)) # uv's cache has all packages, and gives hard links
free=$(df -Pk . "$cache" | awk 'NR > 1 && (NR == 2 || $4 < free) {{ free = $4 }} END {{ print free }}')
log=
[ "$free" -ge $need ] ||
  stop {Exit.CANNOT_WRITE:d} "$((need >> 10)) MiB needed in $PWD and in uv's cache, $((free >> 10)) MiB free"
install installing -r lock/{form} || stop {Exit.UNAVAILABLE:d} 'uv cannot install the lock'
# ddprun, without a change of a package of the lock
"$uv" pip freeze --python "$env" >lock/constraints 2>log
install ddprun --constraints lock/constraints {shlex.join(AGENT)} {own} ||
  stop {Exit.UNAVAILABLE:d} 'ddprun cannot be installed beside the packages of the lock'
log=
"$env/bin/python" -I - >record <<'END' || stop {Exit.CONFIG:d} "torch is not in {recipe.name}"
import json, platform
from importlib.metadata import distributions, version
names = {{each.metadata["Name"] for each in distributions()}}
print(json.dumps({{"lock": {recipe.name!r}, "python": platform.python_version(), "torch": version("torch"),
                  "packages": len(names)}}))
END
cat >python.new <<'END'
{_START}END
chmod +x python.new && mv -f python.new python && mv -f record "$env/{PYTHON_RECORD}"
say "complete: $(cat "$env/{PYTHON_RECORD}")"
{clean_text(folder)}"""


_START = f"""\
#!/bin/sh
# Starts the Python of the first complete environment here that this machine can run.
for python in "${{0%/*}}/$(uname -m)"-*/bin/python; do
  [ ! -e "${{python%/bin/python}}/{PYTHON_RECORD}" ] || [ ! -x "$python" ] || exec "$python" "$@"
done
echo "there is no complete environment for $(uname -m) in ${{0%/*}}" >&2
exit {NOT_FOUND}
"""


def main(argv: Sequence[str]) -> None:
    """Print what the module's documentation says."""
    if argv[0] == "read":
        try:
            recipe = read_lock(Path(argv[1]), Path(argv[2]) if argv[2] else None)
        except (OSError, ValueError) as error:
            sys.exit(one_line(str(error)))
        data = wheel()
        own = hashlib.sha256(data).hexdigest()[:12]
        recipe = replace(recipe, own=own, sizes={f"{own}/{WHEEL}": len(data), **recipe.sizes})
        print(json.dumps(asdict(recipe)))
        return
    _, wheelhouse, machine, *names = argv
    cache = Path.home() / _CACHE
    cache.mkdir(parents=True, exist_ok=True)
    with (
        NamedTemporaryFile(dir=cache, suffix=".tar", delete=False) as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for name in names:
            if name.startswith("wheels/"):
                tar.add(Path(wheelhouse, PurePath(name).name), name)
            else:
                _add(tar, name, wheel())
        if machine:
            packed = max((cache / machine).glob("*.whl"))
            with zipfile.ZipFile(packed) as archive:
                program = next(item for item in archive.namelist() if item.endswith("/scripts/uv"))
                _add(tar, f"uv-{machine}", archive.read(program))
    print(json.dumps([file.name, Path(file.name).stat().st_size]))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(data), 0o755, int(time.time())
    tar.addfile(entry, BytesIO(data))


if __name__ == "__main__":
    main(sys.argv[1:])
