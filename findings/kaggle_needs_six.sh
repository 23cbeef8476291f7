#!/usr/bin/env bash
# Most people expect `pip install kaggle` to install a client that starts, since `pip check` finds nothing missing.
# What happens: the client imports six, which it does not require. Until python-dateutil 2.9, that package brought six
# along; 4.0 no longer does. Every command, even `kaggle --version`, ends with a traceback, and so does
# `import kaggle`. `pip install six` is enough. After it, `import kaggle` without credentials prints a page of help
# and succeeds; it does not end the interpreter.
# Version: kaggle 2.2.5, python-dateutil 4.0.0.
# Source: found in a fresh virtual environment; kaggle/models/upload_file.py imports six.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet kaggle==2.2.5 python-dateutil==4.0.0
"${pip[@]}" check
unset KAGGLE_USERNAME KAGGLE_KEY KAGGLE_API_TOKEN KAGGLE_CONFIG_DIR XDG_CONFIG_HOME
export HOME=$folder/home
mkdir "$HOME"
if output=$("$folder/venv/bin/kaggle" --version 2>&1); then
  echo "changed: $output"
  exit 1
fi
echo "kaggle --version: $(tail -n 1 <<<"$output")"
[[ $output == *"No module named 'six'"* ]]
"${pip[@]}" install --quiet six==1.17.0
"$folder/venv/bin/kaggle" --version
output=$("$folder/venv/bin/python" -c 'import kaggle; print("the import has returned")')
sed -n '1p;$p' <<<"$output"
[[ $output == "Authentication required"*"the import has returned" ]]
