#!/usr/bin/env bash
# Most people expect single quotes in a .env file to protect a value, as in the shell, and $NAME and ${NAME} to mean the
# same.
# What happens: python-dotenv replaces ${NAME} also inside of single quotes, and $NAME nowhere. A password
# 'a${b}c' becomes "ac" without a warning; in a shell that sources the file it stays as it is. A command
# 'echo ${RANK}' in single quotes, meant for later, loses its variable. interpolate=False is the only protection: neither
# a backslash nor $$ helps.
# Version: python-dotenv 1.2.4.
# Source: https://saurabh-kumar.com/python-dotenv/ describes quotes and ${NAME}, each without the other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check python-dotenv==1.2.4
cd "$folder"
unset RANK
export HOST=n1
cat >job.env <<'END_ENV'
PASSWORD='a${b}c'
COMMAND='echo ${RANK} $HOST'
DOUBLED='a$${b}c'
ESCAPED='a\${b}c'
BARE=$HOST
END_ENV
echo "python-dotenv $(venv/bin/python -c 'from importlib.metadata import version; print(version("python-dotenv"))')"
venv/bin/python - <<'END'
from dotenv import dotenv_values

values = dict(dotenv_values("job.env"))
literal = dict(dotenv_values("job.env", interpolate=False))
print("python-dotenv:", values)
print("without interpolation:", literal)
assert values == {"PASSWORD": "ac", "COMMAND": "echo  $HOST", "DOUBLED": "a$c", "ESCAPED": "a\\c", "BARE": "$HOST"}
assert literal["PASSWORD"] == "a${b}c"
END
# shellcheck disable=SC1091
shell=$(. ./job.env && printf '%s' "$PASSWORD, $COMMAND, $BARE")
echo "a shell: $shell"
# shellcheck disable=SC2016
[[ $shell == 'a${b}c, echo ${RANK} $HOST, n1' ]]
