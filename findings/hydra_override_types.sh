#!/usr/bin/env bash
# Most people expect `name=VALUE` on Hydra's command line to have the type that OmegaConf, the library below it, gives to
# the same text in a YAML file or in from_dotlist.
# What happens: each has a grammar of its own. run=007 is the text "007" for Hydra and the number 7 for OmegaConf; 0x10
# is a text and 16, 12:30 a text and 750, `on` a text and True, nan a number and a text, an empty value "" and None. So a
# run name, a job id or a time limit changes when it moves between the command line and the file. PyYAML is a third: it
# reads 1e-3 as a text, which both others read as a number.
# Version: hydra-core 1.3.8, omegaconf 2.3.1, PyYAML 6.0.3.
# Source: https://hydra.cc/docs/advanced/override_grammar/basic/ has the grammar, and no list of differences.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check hydra-core==1.3.8 omegaconf==2.3.1 pyyaml==6.0.3
cd "$folder"
printf 'x: null\n' >config.yaml
venv/bin/python - <<'END'
import math
from importlib.metadata import version
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

print(*(f"{name} {version(name)}" for name in ("hydra-core", "omegaconf", "pyyaml")))
cases = {
    "007": ("007", 7, 7),
    "0x10": ("0x10", 16, 16),
    "12:30": ("12:30", 750, 750),
    "on": ("on", True, True),
    "nan": (math.nan, "nan", "nan"),
    "": ("", None, None),
    "1e-3": (0.001, 0.001, "1e-3"),
}
print("text, then the value for Hydra, OmegaConf, PyYAML")
with initialize_config_dir(str(Path.cwd()), version_base=None):
    for text, expected in cases.items():
        hydra = compose("config", overrides=[f"x={text}"]).x
        values = (hydra, OmegaConf.from_dotlist([f"x={text}"]).x, yaml.safe_load(f"x: {text}")["x"])
        print(repr(text), *map(repr, values))
        assert repr(values) == repr(expected), expected
END
