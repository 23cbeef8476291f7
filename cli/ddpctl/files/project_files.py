"""Selects the project files to send: all files except those that git or ``.ddpignore`` ignores.

``.ddpignore`` has the syntax of .gitignore. Outside a repository, all files are sent except hidden files, Python
environments and caches. ``python -m ddpctl.files.project_files`` reads the output of the script LIST from stdin, and
prints the fields of a Project as JSON.
"""

import json
import os
import stat
import sys
from typing import Any

from ddpctl.text import some

IGNORE = ".ddpignore"
MAX_BYTES = 200_000_000  # of a project that is copied
RSYNC = "rsync  version 3."  # how the output of rsync --version begins, but not that of openrsync, which has no --info
_NAMED = 4  # how many of the omitted files are named
_SECTION = "/"
# Prints four sections: the tools for sending, the files that git does not ignore, the files that .ddpignore ignores,
# and the files that git ignores. NUL ends each name, and _SECTION ends each section.
LIST = f"""\
end() {{ printf '{_SECTION}\\0'; }}
printf '%s\\0' "$(rsync --version 2>/dev/null | head -n 1)" "$(command -v zstd)"; end
if ! command -v git >/dev/null; then
  if [ -e {IGNORE} ]; then echo "{IGNORE} needs git, which is not installed here" >&2; exit 69; fi
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
# Prints the fields of the Project in the current folder.
LIST_ARGV = (
    "bash", "-o", "pipefail", "-c", f'{{\n{LIST}}} | "$0" -P -m ddpctl.files.project_files', sys.executable
)  # fmt: skip


def file_state(size: int, modified: str, mode: int) -> str:
    """Return a file's size, modification time (``%.9Y`` of stat) and executable bit as text, to detect changes."""
    return f"{size} {modified} {bool(mode & stat.S_IXUSR)}"


def look(names: str) -> dict[str, Any]:
    """Return the fields of a Project. ``names`` is the output of the script LIST."""
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
            status = os.lstat(name)
        except OSError:  # git also lists deleted files if the deletion is not committed
            continue
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            modified = f"{status.st_mtime_ns // 10**9}.{status.st_mtime_ns % 10**9:09}"
            files[name], sizes[name] = file_state(status.st_size, modified, status.st_mode), status.st_size
        else:
            (repositories if name.endswith("/") else odd).append(name)
    by_ignore = [name for name in dict.fromkeys(known) if name in dropped]
    reasons = {"ignored": ignored, IGNORE: by_ignore, "no file": odd, "a repository of its own": repositories}
    left_out = [f"{some(skipped, _NAMED)} ({reason})" for reason, skipped in reasons.items() if skipped]
    return {"files": files, "sizes": sizes, "left_out": left_out, "rsync": rsync.startswith(RSYNC), "zstd": bool(zstd)}


if __name__ == "__main__":
    print(json.dumps(look(sys.stdin.read())))
