#!/usr/bin/env bash
# Most people expect paramiko's SSHConfig to refuse a criterion of Match that it does not know, as OpenSSH does
# ("Unsupported Match attribute"), or to treat the block as not matching.
# What happens: the criterion is passed over and the rest of the line decides. If nothing else is on the line, the block
# applies to every host: `Match tagged gpu`, `Match version`, `Match sessiontype` and `Match localnetwork` of newer
# OpenSSH releases, and a word that no release knows. So Fabric can use another user, port or proxy than ssh does.
# Version: paramiko 5.1.0.
# Source: found by experiment; ssh_config(5) lists the criteria, https://docs.paramiko.org/en/stable/api/config.html
# lists those that paramiko knows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check paramiko==5.1.0
"$folder/venv/bin/python" - <<'END'
import paramiko

print("paramiko", paramiko.__version__)
users = {}
for line in ("tagged gpu", "version OpenSSH_9.*", "sessiontype exec", "localnetwork 10.0.0.0/8", "host other", "host other tagged gpu"):
    config = paramiko.SSHConfig.from_text(f"Match {line}\n  User admin\nHost *\n  User me\n")
    users[line] = config.lookup("node1")["user"]
    print(f"Match {line}: the user at node1 is {users[line]}")
assert [*users.values()] == ["admin"] * 4 + ["me"] * 2, users
END
