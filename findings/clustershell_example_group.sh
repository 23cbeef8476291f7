#!/usr/bin/env bash
# Most people expect a freshly installed ClusterShell to know no host, so that `@all` and `clush -a` fail or are empty
# until somebody writes a configuration of groups.
# What happens: the package from PyPI brings an active file of groups, etc/clustershell/groups.d/local.cfg in the virtual
# environment, with example hosts. `nodeset -c @all` counts 131 of them, and `clush -a` would try to reach example4 to
# example159. An own CLUSTERSHELL_CFGDIR does not avoid it: an empty folder there leaves the 131 hosts.
# Version: ClusterShell 1.10.1.
# Source: found by experiment; https://clustershell.readthedocs.io/en/latest/config.html describes the files.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ClusterShell==1.10.1
unset CLUSTERSHELL_CFGDIR XDG_CONFIG_HOME XDG_CONFIG_DIRS
export HOME=$folder/home
mkdir "$HOME"
cd "$folder/venv"
bin/nodeset --version
find . -path '*clustershell*' -name '*.cfg'
echo "@all: $(bin/nodeset -f @all), $(bin/nodeset -c @all) hosts; groups: $(bin/nodeset -l | tr '\n' ' ')"
mkdir "$folder/empty"
[[ $(CLUSTERSHELL_CFGDIR=$folder/empty bin/nodeset -c @all) == 131 ]]
[[ $(bin/nodeset -c @all) == 131 && $(bin/nodeset -f @all) == "example[4-6,32-159]" ]]
