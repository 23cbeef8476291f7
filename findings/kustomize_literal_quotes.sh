#!/usr/bin/env bash
# Most people expect a ConfigMap to be the same whether `kubectl create configmap --from-literal=NAME=VALUE` or the
# literals of Kustomize's configMapGenerator make it.
# What happens: Kustomize removes a quote at the beginning and the same quote at the end of each literal. "x" becomes x,
# the JSON text "train" becomes one that no longer parses, and a command '"my program" "my file"' loses its outer
# quotes: my program" "my file. kubectl create keeps all of them. A line of an env file without "=" takes its value from
# the environment of `kubectl create`, so the ConfigMap depends on who creates it.
# Version: kubectl 1.20.2 (Debian 12). The same quotes are lost in kubectl 1.32.4 (Kustomize 5.5.0).
# Source: found by experiment; https://kubectl.docs.kubernetes.io/references/kustomize/kustomization/configmapgenerator/
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root kubernetes-client=1.20.5+really1.20.2-1.1+deb12u1
dpkg -x kubernetes-client_*.deb .
unset KUBECONFIG
export HOME=$folder
kubectl() { usr/bin/kubectl "$@"; }
kubectl version --client --short
cat >kustomization.yaml <<'END_YAML'
configMapGenerator:
- name: job
  literals: ['NAME="x"', 'COMMAND="my program" "my file"', 'LIST=["a", 1]']
END_YAML
data() { sed -n '/^data:/,/^kind:/s/^  //p'; }
generated=$(kubectl kustomize . | data)
created=$(kubectl create configmap job --dry-run=client --output=yaml \
  --from-literal='NAME="x"' --from-literal='COMMAND="my program" "my file"' --from-literal='LIST=["a", 1]' | data)
printf 'kustomize:\n%s\nkubectl create:\n%s\n' "$generated" "$created"
[[ $generated == $'COMMAND: my program" "my file\nLIST: \'["a", 1]\'\nNAME: x' ]]
[[ $created == $'COMMAND: \'"my program" "my file"\'\nLIST: \'["a", 1]\'\nNAME: \'"x"\'' ]]
echo TOKEN >job.env
read_from_environment=$(TOKEN=mine kubectl create configmap job --dry-run=client --output=yaml --from-env-file=job.env | data)
echo "an env file with the line TOKEN: $read_from_environment"
[[ $read_from_environment == "TOKEN: mine" ]]
