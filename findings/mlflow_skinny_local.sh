#!/usr/bin/env bash
# Most people expect `pip install mlflow-skinny`, the client without a server, to write its runs into ./mlruns, as MLflow
# has done since its first version: import mlflow; mlflow.log_metric("loss", 1).
# What happens: the default place is now sqlite:///mlflow.db, for which the skinny package has no driver: an error that
# names the model registry, which nobody asked for. A file: address is refused as well, unless
# MLFLOW_ALLOW_FILE_STORE=true is set. So a training node with the skinny client and no server cannot log at all by
# default, and the error appears in the training, not at installation.
# Version: mlflow-skinny 3.17.2.
# Source: found by experiment; mlflow/store/tracking/file_store.py and https://mlflow.org/docs/latest/self-hosting/
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mlflow-skinny==3.17.2
for variable in "${!MLFLOW_@}"; do unset "$variable"; done
export HOME=$folder
mkdir "$folder/work"
cd "$folder/work"
log() { env "$@" "$folder/venv/bin/python" -W ignore -c 'import mlflow; mlflow.log_metric("loss", 1)' 2>&1 | tail -n 1 || true; }
"$folder/venv/bin/mlflow" --version
default=$(log A=1) file=$(log "MLFLOW_TRACKING_URI=file:$PWD/mlruns")
echo "default: ${default:0:150}"
echo "file: ${file:0:150}"
[[ $default == *UnsupportedModelRegistryStoreURIException*sqlite:///* ]]
[[ $file == *MlflowException*maintenance\ mode* && ! -e mlruns ]]
log "MLFLOW_TRACKING_URI=file:$PWD/mlruns" MLFLOW_ALLOW_FILE_STORE=true
found=$(find mlruns -path '*/metrics/loss')
echo "with MLFLOW_ALLOW_FILE_STORE=true: ${found##*/metrics/} is written"
[[ -n $found ]]
