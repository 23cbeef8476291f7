#!/usr/bin/env bash
# Most people expect torch.utils.flop_counter.FlopCounterMode to count the operations of a model in whatever mode it runs,
# and measure it as one measures inference: model.eval() and torch.no_grad().
# What happens: in exactly this mode a TransformerEncoderLayer and a MultiheadAttention count as 0, because they take a
# fused fast path whose operator has no formula. With gradients, or after train(), they are counted. An LSTM on a CPU counts
# as 0 in every mode, but on the meta device it is counted, and a GRU is counted everywhere. `matrix @ vector` is 0, while
# linear() of the same vector is right. Nothing says that an operator was left out.
# Version: torch 2.15.0, CPU. In torch 2.10.0, scaled_dot_product_attention on a CPU is 0 as well.
# Source: met when a test of ours failed with torch 2.10; flop_registry in torch/utils/flop_counter.py.
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${FINDINGS_VENV:-} ]]; then
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.6
fi
cat >"$folder/count.py" <<'END'
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def count(program: Callable[..., object], *inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        program(*inputs)
    return counter.get_total_flops()


print("torch", torch.__version__.partition("+")[0])
tokens = torch.randn(2, 16, 32)
layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True).eval()
print("encoder layer, eval, with gradients:", count(layer, tokens))
with torch.no_grad():
    print("encoder layer, eval, no_grad:", count(layer, tokens))
    print("encoder layer, train, no_grad:", count(layer.train(), tokens))
print("LSTM on the CPU:", count(nn.LSTM(32, 32), tokens))
print("LSTM on meta:", count(nn.LSTM(32, 32, device="meta"), tokens.to("meta")))
print("GRU on the CPU:", count(nn.GRU(32, 32), tokens))
matrix, vector = torch.randn(64, 64), torch.randn(64)
print("matrix @ vector:", count(torch.matmul, matrix, vector))
print("linear of the vector:", count(nn.functional.linear, vector, matrix, vector))
END
seen=$("${FINDINGS_VENV:-$folder/venv/bin/python}" "$folder/count.py")
echo "$seen"
diff <(echo "$seen") - <<'END'
torch 2.15.0
encoder layer, eval, with gradients: 589824
encoder layer, eval, no_grad: 0
encoder layer, train, no_grad: 589824
LSTM on the CPU: 0
LSTM on meta: 524288
GRU on the CPU: 393216
matrix @ vector: 0
linear of the vector: 8192
END
