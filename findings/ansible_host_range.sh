#!/usr/bin/env bash
# Most people expect a range of hosts such as n[08:10] to mean three hosts wherever Ansible takes names of hosts.
# What happens: a range is a part of inventory files, INI and YAML alike. In the list behind -i ('n[08:10],') it is one
# host with that name, which Ansible then tries to reach. As a pattern of hosts (`hosts:`, --limit), the same text means
# elements 8 to 10 of what "n" matches: nothing matches, which is exit code 0 and a warning for `ansible`, and 1 for --limit.
# Version: ansible-core 2.19.14.
# Source: found by experiment; https://docs.ansible.com/ansible/latest/inventory_guide/intro_inventory.html
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ansible-core==2.19.14
cd "$folder"
for variable in "${!ANSIBLE_@}"; do unset "$variable"; done
export HOME=$folder ANSIBLE_NOCOLOR=1
venv/bin/ansible --version | head -n 1
echo 'n[08:10]' >hosts.ini
printf 'all:\n  hosts:\n    n[08:10]:\n' >hosts.yml
list() { # prints the exit code, and the names of the hosts
  local code=0
  venv/bin/ansible "$@" --list-hosts >output 2>/dev/null || code=$?
  echo "$code:$(sed '/hosts (/d' output | xargs)"
}
results=("$(list -i hosts.ini all)" "$(list -i hosts.yml all)" "$(list -i 'n[08:10],' all)"
  "$(list -i hosts.ini 'n[08:10]')" "$(list -i hosts.ini all --limit 'n[08:10]')")
printf '%s\n' "hosts.ini  ${results[0]}" "hosts.yml  ${results[1]}" "-i list    ${results[2]}" \
  "pattern    ${results[3]}" "--limit    ${results[4]}"
[[ "${results[*]}" == "0:n08 n09 n10 0:n08 n09 n10 0:n[08:10] 0: 1:" ]]
