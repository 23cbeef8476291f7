"""The checked-in specs are what ``ddpctl render`` makes of examples/, and the page of the metrics is what the catalogue
says; ``make specs`` writes them again. The tests that a page names exist.
"""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from ddpctl import targets
from ddpctl.execution.executor import Executor
from ddpctl.job import config
from ddpctl.migration.formats import TABLES
from ddpctl.monitoring import prometheus
from ddpctl.monitoring.prometheus import Limits, Scraping
from ddpctl.operations import launcher
from ddprank.series import LoopSeries
from ddpwire.events import KINDS
from ddpwire.metrics import CATALOGUE, Metric

ROOT = Path(__file__).parents[3]
KAGGLE = ("resnet18", "imageclassifier", "mnist")  # profiles of examples/kaggle/ddpctl.yaml


def render(file: str, target: str, workload: str | None = None) -> str:
    flags = {"workload": workload} if workload else {}
    request = config.load(file=ROOT / file, target=target, kinds=targets.kinds(), flags=flags)
    plan = launcher.plan_of(replace(request, cwd="."), request.job.name, Path())
    return targets.make(request.kind, request.options).render(plan)


def kaggle(profile: str, number: int) -> str:
    """One of the files that ``ddpctl render --out`` writes: 0 the notebook, 1 its metadata."""
    file = ROOT / "examples/kaggle/ddpctl.yaml"
    request = replace(config.load(file=file, profile=profile, kinds=targets.kinds()), cwd=".")
    target = targets.make(request.kind, request.options)
    files, _ = Executor({}).perform(target.files(launcher.plan_of(request, request.job.name, Path())))
    return list(files.values())[number]


def head(page: str, begin: str) -> str:
    """What is written by hand: all that stands before the first generated line of a page."""
    text = (ROOT / page).read_text()
    return text[: text.index(begin)]


def metrics_page() -> str:
    """docs/metrics.md: the rows of its two tables. The text before each table is written by hand."""
    scripts = set_by_scripts()
    groups = (
        [metric for metric in CATALOGUE if metric.set_by == "ddprun"],
        [metric for metric in CATALOGUE if metric.set_by == "ddptrain" and not metric.by_rank_0],
        [metric for metric in CATALOGUE if metric.by_rank_0],
    )
    metrics = "".join(row(metric, scripts) for group in groups for metric in group)
    _, title, of_events = head("docs/metrics.md", "| `node_started`").partition("\n## Events\n")
    events = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in KINDS.items())
    return head("docs/metrics.md", "| `ddp_") + metrics + title + of_events + events


def set_by_scripts() -> set[str]:
    """The metrics of a script that calls all that ddpwire.script has."""
    with mock.patch("ddprank.series.series_of") as made:
        loop = LoopSeries()
        loop.step(1, samples=1, total=1, loss=0.0, lr=0.1, epoch=1)
        loop.saved(1, 1)
    return {call.args[0].name for call in made.call_args_list}


def migrating_page() -> str:
    """docs/migrating.md: the settings of a table that have the same meaning are on one line."""
    lines = []
    for file, table in TABLES.items():
        meanings: dict[str, list[str]] = {}
        for names, meaning in table.items():
            if file == "srun" and names in TABLES["sbatch"]:
                continue
            plain = meaning.status == "became" and not meaning.note
            text, settings = "the key" if plain else str(meaning), "`" + names.replace(", ", "`, `") + "`"
            meanings.setdefault(text, []).append(f"{settings} → `{meaning.text}`" if plain else settings)
        lines += [f"| {file} | {', '.join(names)} | {text} |\n" for text, names in meanings.items()]
    return head("docs/migrating.md", "| sbatch |") + "".join(lines)


def row(metric: Metric, scripts: set[str]) -> str:
    labels = [f"{name}: {', '.join(values)}" if values else name for name, values in metric.labels.items()]
    needs = " Needs a GPU." if metric.needs_gpu else ""
    ranks = "rank 0" if metric.by_rank_0 else "each rank"
    set_by = "ddprun" if metric.set_by == "ddprun" else ranks + (", scripts" if metric.name in scripts else "")
    return f"| `{metric.name}` | {metric.kind} | {'; '.join(labels) or '-'} | {set_by} | {metric.help}{needs} |\n"


BOX = prometheus.compose_files(Scraping(targets=prometheus.MOUNTED_TARGETS), Limits())
SPECS = {
    **{f"docker/monitoring/{name}": partial(str, text) for name, text in BOX.items() if not name.endswith(".json")},
    "k8s/monitoring/rules.yaml": partial(prometheus.prometheus_rule, Limits()),
    "k8s/monitoring/dashboards.yaml": prometheus.dashboard_config_maps,
    "docs/metrics.md": metrics_page,
    "docs/migrating.md": migrating_page,
    "examples/digits.local.sh": partial(render, "examples/digits.yaml", "here"),
    "k8s/pytorchjob.yaml": partial(render, "examples/digits.kubernetes.yaml", "cluster", "pytorchjob"),
    "k8s/trainjob.yaml": partial(render, "examples/digits.kubernetes.yaml", "cluster", "trainjob"),
    "k8s/indexed-job.yaml": partial(render, "examples/digits.kubernetes.yaml", "cluster", "job"),
    "k8s/base/pytorchjob.yaml": partial(render, "examples/digits.kubernetes.yaml", "cluster", "pytorchjob"),
    **{f"examples/kaggle/{name}/{name}.ipynb": partial(kaggle, name, 0) for name in KAGGLE},
    **{f"examples/kaggle/{name}/kernel-metadata.json": partial(kaggle, name, 1) for name in KAGGLE},
    "slurm/train.sbatch": partial(render, "examples/slurm.yaml", "here"),
    **{
        f"slurm/train.{runtime}.sbatch": partial(render, "examples/slurm.yaml", runtime)
        for runtime in ("pyxis", "apptainer", "podman", "docker")
    },
}


@pytest.mark.parametrize("spec", SPECS)
def test_the_checked_in_spec_is_the_rendered_one(spec: str) -> None:
    assert (ROOT / spec).read_text() == SPECS[spec](), f"{spec} is old: make specs"


def test_each_test_that_a_page_names_exists() -> None:
    results = (ROOT / "docs" / "results" / f"{name}.md" for name in ("benchmarks", "faults", "secrets", "torchrun"))
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), ROOT / "ansible/README.md", *results]
    named = [
        (page.name, path, test)
        for page in pages
        for path, test in re.findall(r"(tests/[\w./-]*\.py)(?:::(\w+))?", page.read_text())
    ]
    assert ("faults.md", "tests/cluster/test_faults.py", "test_fault_ends_as_the_table_says") in named
    assert [name for name in named if not has_test(ROOT / name[1], name[2])] == []


def has_test(file: Path, test: str) -> bool:
    """Return whether a file exists and, if a test is named, defines it."""
    return file.is_file() and (not test or re.search(rf"^ *(async )?def {test}\(", file.read_text(), re.M) is not None)


if __name__ == "__main__":
    for spec, made in SPECS.items():
        (ROOT / spec).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / spec).write_text(made())
        print(f"wrote {spec}", file=sys.stderr)
