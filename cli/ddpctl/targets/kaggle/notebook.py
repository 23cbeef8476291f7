"""Renders a plan as a Kaggle notebook, with the metadata that Kaggle's client needs to push the notebook.

The notebook contains the job's script unchanged. It contains no credentials. It also runs on other Jupyter servers.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ddpctl.job.launch_plan import TRAINER, Plan, program, title
from ddpctl.job.spec import JobSpec
from ddpctl.targets.kaggle.options import INSIDE, NONE, KaggleOptions
from ddpctl.text import either
from ddpwire import kaggle
from ddpwire.version import __version__

METADATA = "kernel-metadata.json"  # the name that the client expects
PREFIX = "ddpctl-"  # before the run's name, in the notebook's title and in Kaggle's URLs
MAX_KB = 1000  # the limit for a notebook
_WIDTH = 100
_EXPORT = """\
if run.code == 0:
    export = [sys.executable, '-m', 'ddptrain', 'export', '--best', str(run.checkpoint_dir), 'weights.pt']
    subprocess.run(export, check=True)"""


def former_kernel(plan: Plan) -> str | None:
    """Return the notebook (OWNER/NAME) that has the checkpoints of a resumed run. Return None for a new run."""
    kernel, colon, _ = plan.checkpoint_dir.partition(":")
    return kernel if colon and not kernel.startswith("/") else None


def metadata(plan: Plan, options: KaggleOptions, owner: str) -> str:
    """Return the text of kernel-metadata.json, which Kaggle's client reads."""
    gpu = plan.job.device != "cpu"
    datasets = [*options.datasets, *([] if options.wheel in (INSIDE, NONE) else [options.wheel])]
    former = former_kernel(plan)
    values = {
        "id": f"{owner}/{PREFIX}{plan.name}",
        "title": f"{PREFIX}{plan.name}",
        "code_file": f"{plan.name}.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": gpu,
        "enable_tpu": False,
        "enable_internet": options.internet,
        "machine_shape": options.accelerator if gpu else "",
        "dataset_sources": datasets,
        "competition_sources": list(options.competitions),
        "kernel_sources": [*options.notebooks, *([former] if former else [])],
        "model_sources": [],
    }
    return json.dumps(values, indent=1) + "\n"


def summary(plan: Plan, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return two lines for a dry run: one about the notebook and one about its metadata."""
    file, about = f"{plan.name}.ipynb", json.loads(texts[METADATA])
    sources = [cell["source"] for cell in json.loads(texts[file])["cells"]]
    wheel = ["ddpctl's wheel"] if any(source.startswith("WHEEL") for source in sources) else []
    files = [source.split("\n")[0].removeprefix("%%writefile ") for source in sources if source.startswith("%%write")]
    contains = f"; contains {either((*wheel, *files), 'and')}" if wheel or files else ""
    size = f"{len(texts[file]) / 1000:,.0f} kB (at most {MAX_KB:,} kB are allowed)"
    kinds = {"data sets": "dataset_sources", "competitions": "competition_sources", "notebooks": "kernel_sources"}
    inputs = "".join(f"; {name}: {', '.join(about[key])}" for name, key in kinds.items() if about[key])
    internet = "internet" if about["enable_internet"] else "no internet"
    return (
        f"  {file}: runs {title(plan.job)}{contains}; {size}",
        f"  {METADATA}: {about['id']}, private, {about['machine_shape'] or 'no GPU'}, {internet}{inputs}",
    )


def notebook(plan: Plan, files: Mapping[str, str] = MappingProxyType({}), wheel: str = "") -> str:
    """Return the text of the .ipynb file.

    ``files``: name → text of each file that it contains. ``wheel``: ddpctl's wheel, compressed with LZMA, in base85;
    empty if the notebook does not contain it.
    """
    cells = [_text(_about(plan))]
    if wheel:
        folded = "\n".join(f"    '{wheel[start : start + _WIDTH]}'" for start in range(0, len(wheel), _WIDTH))
        cells += [_text("The wheel of ddpctl, for a session without a network."), _code(f"WHEEL = (\n{folded}\n)")]
    cells.append(_code(_install(has_wheel=bool(wheel))))
    cells += [_code(f"%%writefile {name}\n{text.rstrip()}") for name, text in files.items()]
    argv = program(plan.job.command)
    args = json.dumps(argv[2:] if argv[0] == "-m" else argv[1:], ensure_ascii=False)
    cells += [
        _text("The parameters. A program such as papermill can insert a cell with other values after this one."),
        _code(f"gpus = {plan.job.max_gpus}\nargs = {args}", "parameters"),
        _code(_launch(plan)),
    ]
    if argv[:2] == TRAINER:
        cells += [_text("Export only the weights, without the state of the training."), _code(_EXPORT)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    language = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": language}
    whole = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _about(plan: Plan) -> str:
    text = title(plan.job).removeprefix("1 node x ")
    return (
        f"# {plan.name}\n\n{text[0].upper()}{text[1:]}, by [ddpctl](https://github.com/ddpctl/ddpctl): each rank is a "
        "separate process, and this notebook's kernel uses no GPU. Rendered by ddpctl render. The notebook runs "
        "unchanged on Kaggle, in Colab and in Jupyter, with or without GPUs."
    )


def _install(*, has_wheel: bool) -> str:
    inside = f"""\
    import base64
    import lzma
    wheel = Path('/tmp') / 'ddpctl-{__version__}-py3-none-any.whl'
    wheel.write_bytes(lzma.decompress(base64.b85decode(WHEEL)))
    wanted = ['--no-index', '--no-deps', str(wheel)]  # without a network: the image has torch and all other packages"""
    outside = f"""\
    inputs = Path({kaggle.INPUT_FOLDER!r})
    wheels = [file for deep in range(1, 5) for file in inputs.glob('*/' * deep + 'ddpctl-*.whl')]
    wanted = ['--no-index', '--no-deps', str(wheels[0])] if wheels else ['ddpctl[notebook]']"""
    return f"""\
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec('ddpctl') is None:
{inside if has_wheel else outside}
    subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', *wanted], check=True)"""


def _launch(plan: Plan) -> str:
    job = plan.job
    argv = program(job.command)
    script = "ddptrain" if argv[:2] == TRAINER else argv[0]
    given = {key: getattr(job, key) for key in ("ranks", "device", "env", "max_restarts", "hang_timeout", "grace")}
    given = {key: value for key, value in given.items() if value != getattr(JobSpec(), key)}
    given = {"name": plan.name} | given | ({"resume": True} if former_kernel(plan) else {})
    lines = ["from ddpctl.notebook import launch", ""]
    if job.time_limit_s is not None:
        limit = f"os.environ[{kaggle.SESSION_S!r}] = '{job.time_limit_s}'  # the session's time limit"
        lines = ["import os", "", *lines, limit]
    pairs = "".join(f", {key}={value!r}" for key, value in given.items())
    return "\n".join([*lines, f"run = launch({script!r}, gpus=gpus, args=args{pairs})", "run"])


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _code(source: str, *tags: str) -> dict[str, Any]:
    about = {"tags": list(tags)} if tags else {}
    return {"cell_type": "code", "execution_count": None, "metadata": about, "outputs": [], "source": source}
