"""Which files of a project go to other machines: what git knows or would add, less what ``.ddpignore`` names.

``.ddpignore`` has the syntax of .gitignore. Outside of a repository all goes that is not hidden, and no environment or
cache. ``python -m ddpctl.project_files`` reads on stdin what LIST has printed, and prints the fields of a Project.
"""

import json
import os
import stat
import sys
from collections.abc import Sequence
from typing import Any

IGNORE = ".ddpignore"
RSYNC = "rsync  version 3."  # how its --version begins; openrsync has no --info
_NAMED = 4  # of what is left out
_SECTION = "/"
# What there is to send with; the files that go; those that .ddpignore names; what git ignores. NUL ends each name, and
# _SECTION each of these.
LIST = f"""\
end() {{ printf '{_SECTION}\\0'; }}
printf '%s\\0' "$(rsync --version 2>/dev/null | head -n 1)" "$(command -v zstd)"; end
if ! command -v git >/dev/null; then
  if [ -e {IGNORE} ]; then echo "git is not here, which reads {IGNORE}" >&2; exit 69; fi
  find . -name '.?*' -prune -o -name __pycache__ -prune -o -name venv -prune -o -type f -print0; end; end; end; exit
fi
if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  GIT_DIR=$(mktemp -d); GIT_WORK_TREE=$PWD; export GIT_DIR GIT_WORK_TREE
  trap 'rm -rf "$GIT_DIR"' EXIT
  git init --quiet --template= && set -- -x '.?*' -x __pycache__ -x venv || exit
fi
git ls-files -z --cached --recurse-submodules
git ls-files -z --others --exclude-standard "$@"; end
git ls-files -z --cached --others --ignored --exclude-per-directory={IGNORE}; end
git ls-files -z --others --ignored --directory --exclude-standard "$@"; end
"""


def file_state(size: int, modified: str, mode: int) -> str:
    """What of a file tells that it has changed: its size, its time (``%.9Y`` of stat), and whether it can be run."""
    return f"{size} {modified} {bool(mode & stat.S_IXUSR)}"


def look(names: str) -> dict[str, Any]:
    """The fields of Project, from what LIST has printed."""
    sections: list[list[str]] = [[]]
    for name in names.split("\0")[:-1]:
        if name == _SECTION:
            sections.append([])
        else:
            sections[-1].append(name.removeprefix("./"))
    (rsync, zstd), known, unwanted, ignored = sections[:4]
    files, sizes = {}, {}
    odd: list[str] = []
    repositories: list[str] = []
    dropped = set(unwanted)
    for name in dict.fromkeys(known):
        if name in dropped:
            continue
        try:
            found = os.lstat(name)
        except OSError:  # git also lists what is deleted and not committed
            continue
        if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
            modified = f"{found.st_mtime_ns // 10**9}.{found.st_mtime_ns % 10**9:09}"
            files[name], sizes[name] = file_state(found.st_size, modified, found.st_mode), found.st_size
        else:
            (repositories if name.endswith("/") else odd).append(name)
    by_ignore = [name for name in dict.fromkeys(known) if name in dropped]
    left_out = [*_some(ignored, "ignored"), *_some(by_ignore, IGNORE), *_some(odd, "no file")]
    left_out += _some(repositories, "a repository of its own")
    return {"files": files, "sizes": sizes, "left_out": left_out, "rsync": rsync.startswith(RSYNC), "zstd": bool(zstd)}


def _some(names: Sequence[str], why: str) -> list[str]:
    """The first of them, and how many more."""
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{', '.join(names[:_NAMED])}{more} ({why})"]


if __name__ == "__main__":
    print(json.dumps(look(sys.stdin.read())))
