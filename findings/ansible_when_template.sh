#!/usr/bin/env bash
# Most people expect `when: x` and `when: "{{ x }}"` to mean the same, apart from a warning about the braces: with the
# text "false" in x (from --extra-vars x=false, or quoted in YAML), ansible-core 2.19 refuses `when: x`, because its
# result is a text and not a boolean.
# What happens: `when: "{{ x }}"` is not refused. The text that the template gives is evaluated once more as an
# expression: "false" skips the task, "1 > 2" skips it, "1 < 2" runs it. The plain form is an error in all three cases.
# Version: ansible-core 2.19.14.
# Source: found by experiment; the porting guide of ansible-core 2.19 describes the error of the plain form.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ansible-core==2.19.14
cd "$folder"
for variable in "${!ANSIBLE_@}"; do unset "$variable"; done
export HOME=$folder ANSIBLE_NOCOLOR=1 ANSIBLE_LOCALHOST_WARNING=false
cat >play.yml <<'END'
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - {debug: {msg: plain}, when: x, ignore_errors: true, register: plain}
    - {debug: {msg: braces}, when: "{{ x }}", ignore_errors: true, register: braces}
    - debug:
        msg: "plain {{ plain is failed | ternary('failed', plain is skipped | ternary('skipped', 'ran')) }},
          braces {{ braces is failed | ternary('failed', braces is skipped | ternary('skipped', 'ran')) }}"
END
venv/bin/ansible --version | head -n 1
for case in "false:skipped" "1 > 2:skipped" "1 < 2:ran"; do
  result=$(venv/bin/ansible-playbook -i localhost, -e "x='${case%:*}'" play.yml 2>&1 | grep -o '"plain .*"')
  echo "x is the text ${case%:*}: $result"
  [[ $result == "\"plain failed, braces ${case#*:}\"" ]]
done
