#!/usr/bin/env bash
# Most people expect Lightning Fabric's CSVLogger, whose flush_logs_every_n_steps is 100 by default, to write
# metrics.csv at least every 100 steps, and the rest when the program ends.
# What happens: it writes only in a call whose step + 1 is a multiple of that number. A training that logs at the steps
# 0, 10, 20 and so on, the usual `if step % 10 == 0`, never makes such a call: all rows stay in memory. Nothing is
# written at the end either, unless the program calls logger.finalize() itself; Fabric does not. So a run that logged
# 105 rows and exited with 0 leaves no file. With a row at each step, the rows behind the last multiple are missing.
# Version: lightning-fabric 2.6.6, torch 2.15.0, CPU.
# Source: found by experiment; log_metrics in lightning_fabric/loggers/csv_logs.py.
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${FINDINGS_VENV:-python3}" -m venv "$folder/venv"
if [[ -n ${FINDINGS_VENV:-} ]]; then
  where='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$FINDINGS_VENV" -c "$where" >"$("$folder/venv/bin/python" -c "$where")/torch.pth"
fi
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  lightning-fabric==2.6.6 torch==2.15.0 numpy==2.4.6
cd "$folder"
cat >train.py <<'END'
import sys

from lightning_fabric import Fabric, __version__
from lightning_fabric.loggers import CSVLogger

every, finalize = int(sys.argv[1]), len(sys.argv) > 2
logger = CSVLogger(".", name=f"every{every}{'finalized' if finalize else ''}")
fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
fabric.launch()
rows = 0
for step in range(1050):
    if step % every == 0:
        fabric.log("loss", 1.0, step=step)
        rows += 1
if finalize:
    logger.finalize("success")
end = ", finalize()" if finalize else ""
print(f"lightning-fabric {__version__}: every {every} steps, {rows} rows logged{end}")
END
{
  for arguments in 1 10 100 "10 finalize"; do
    # shellcheck disable=SC2086 # the second word is an argument of its own
    venv/bin/python -W ignore train.py $arguments 2>errors || { cat errors >&2 && exit 1; }
    file=every${arguments/ finalize/finalized}/version_0/metrics.csv
    if [[ -e $file ]]; then echo "  rows in the file: $(($(wc -l <"$file") - 1))"; else echo "  no file"; fi
  done
} | tee seen
diff seen - <<'END'
lightning-fabric 2.6.6: every 1 steps, 1050 rows logged
  rows in the file: 1000
lightning-fabric 2.6.6: every 10 steps, 105 rows logged
  no file
lightning-fabric 2.6.6: every 100 steps, 11 rows logged
  no file
lightning-fabric 2.6.6: every 10 steps, 105 rows logged, finalize()
  rows in the file: 105
END
