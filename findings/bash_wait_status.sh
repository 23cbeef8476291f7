#!/usr/bin/env bash
# Most people expect to get the exit code of a background process by waiting again, after a trapped signal has interrupted
# `wait`. The manual says that wait then returns a status greater than 128 at once, and that a later wait for the same
# process returns its status, even if it has ended meanwhile.
# What happens: if the process ends while the signal arrives, its status may be lost. The second wait returns 255, and says
# nothing. On two busy cores this happened in about one of 30 tries. A batch script that asks its program to stop, and then
# takes 255 for the code of the program, is no rare thing. `wait -f` does the same. What helps is not to wait before the
# process has ended: `while kill -0 "$pid" 2>/dev/null; do sleep 0.5; done; wait "$pid"`.
# Version: bash 5.2.15 (Debian 12).
# Source: met in a Slurm batch script; found by experiment.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root bash=5.2.15-2+b13
dpkg -x bash_*.deb .
bash=$folder/bin/bash
"$bash" --version | head -n 1
cat >again.sh <<'END'
trap : TERM
(trap '' TERM; while [[ ! -e $1 ]]; do sleep 0.01; done; exit 7) &
echo
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
END
sed 's/do wait \$!; done/do sleep 0.1; done/' again.sh >once.sh
cat >count.py <<'END'
import collections, pathlib, subprocess, sys
from concurrent.futures import ThreadPoolExecutor

def exit_code(number):
    file = pathlib.Path(f"{sys.argv[2]}.{number}")
    process = subprocess.Popen([*sys.argv[1:], file], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.readline()
    process.terminate()
    file.touch()
    return process.wait(60)

with ThreadPoolExecutor(8) as pool:
    codes = collections.Counter(pool.map(exit_code, range(400)))
print(", ".join(f"{code} ({number} times)" for code, number in sorted(codes.items())))
END
again=$(python3 count.py "$bash" again.sh) once=$(python3 count.py "$bash" once.sh)
printf 'expected: 7 (400 times)\nwait again: %s\nwait once: %s\n' "$again" "$once"
[[ $again == *"255 ("* && $once == "7 (400 times)" ]]
