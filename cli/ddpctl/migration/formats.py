"""Determines the format of another launcher's file, and reads those that are YAML or a hostfile."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpctl.errors import UsageError
from ddpctl.job.config import read_bytes, read_documents
from ddpctl.job.schema import Kinds
from ddpctl.job.values import Text, read_json
from ddpctl.migration import sbatch
from ddpctl.migration.settings import (
    COMPUTED,
    Migration,
    Table,
    key,
    meaning_of,
    merge,
    ours,
    skipped,
    unknown,
    without,
)

Path_ = tuple[Any, ...]  # the keys and numbers above a value
MAX_BYTES = 100_000
SHM = "/dev/shm"  # noqa: S108 -- a path in the container
RENDEZVOUS = ours("ddpctl chooses the address of node 0 and the rendezvous")
RANKS = key("job.gpus", "or ranks, if GPUs are given too")
ELASTIC = without("nodes: MIN:MAX starts with fewer nodes, and none joins later")
MANIFEST: Table = {
    "apiVersion": ours("workload chooses it"), "kind": key("target.workload"), "metadata.name": key("job.name"),
    "metadata.namespace": key("target.namespace"), "metadata.labels.kueue.*": key("target.queue"),
    "metadata.labels.*": key("target.labels"), "spec.*suspend": ours("a queue suspends the job"),
    "spec.runPolicy.cleanPodPolicy": key("target.clean_pods"), "spec.*.ttlSecondsAfterFinished": key("target.keep"),
    "spec.*.activeDeadlineSeconds": key("job.time_limit"), "spec.*.schedulingPolicy.queue": key("target.queue"),
    "spec.*.backoffLimit": without("failures counts those of each node"), "spec.nprocPerNode": RANKS,
    "spec.elasticPolicy.nProcPerNode": RANKS, "spec.elasticPolicy.maxRestarts": key("job.max_restarts"),
    "spec.elasticPolicy.rdzv*": RENDEZVOUS, "spec.elasticPolicy.m*Replicas": ELASTIC,
    "spec.elasticPolicy.metrics.*": without("ddpctl does not scale a run by its load"),
    "spec.*.replicas": key("job.nodes", "Master and Workers together"), "spec.*.restartPolicy": key("target.restart"),
    "spec.trainer.numNodes": key("job.nodes"), "spec.trainer.numProcPerNode": RANKS,
    "spec.runtimeRef.*": unknown("the settings of the runtime in the cluster"),
    "spec.runtimePatches": skipped("write it as pod"), "spec.podTemplateOverrides": skipped("write it as pod"),
}  # fmt: skip
REQUESTS = ours("ddpctl requests what it limits")
POD: Table = {
    "image": key("job.image"), "command": key("job.command"), "args": key("job.command"),
    "env": key("job.env", "or secrets; what is not a value stays in pod"), "limits.cpu": key("job.cpus"),
    "limits.memory": key("job.memory"), "limits.*/gpu": key("job.gpus"), "requests.cpu": REQUESTS,
    "requests.memory": REQUESTS, "requests.*/gpu": REQUESTS, "name": ours("the container of the ranks is called main"),
    SHM: ours("the container has its own /dev/shm, of the size shm"), "labels": key("target.labels"),
    "restartPolicy": ours("ddprun restarts the ranks"), "*": key("target.pod"),
}  # fmt: skip
HOSTFILE: Table = {"HOST": key("target.hosts"), "slots": key("job.gpus", "the smallest number of all hosts")}
ACCELERATE: Table = {
    "num_machines": key("job.nodes"), "main_process_port": key("job.port"), "machine_rank": RENDEZVOUS,
    "num_processes": skipped("write its share of each machine as gpus"), "main_process_ip": RENDEZVOUS,
    "rdzv_backend": RENDEZVOUS, "same_network": RENDEZVOUS, "use_cpu": skipped("write device: cpu if it is true"),
    "mixed_precision": skipped("write it in env, as ACCELERATE_MIXED_PRECISION"),
    "compute_environment": ours("a target is the environment"), "main_training_function": ours("a script is started"),
    "gpu_ids": without("a run uses the first free GPUs"),
    "*": without("accelerate passes it to the script: set it in the script's Accelerator()"),
}  # fmt: skip
SIZES = skipped("write it as shm, memory, cpus or gpus")
GPUS = ours("a container has the GPUs of its node")
COMPOSE: Table = {
    "services.*.image": skipped("write it as image"), "services.*.command*": skipped("write it as command"),
    "services.*.entrypoint*": skipped("write it as command"), "services.*.volumes*": skipped("write it as mounts"),
    "services.*.environment*": skipped("write it as env or secrets"), "services.*.shm_size": SIZES,
    "services.*.mem_limit": SIZES, "services.*.limits.memory": SIZES, "services.*.cpus": SIZES,
    "services.*.count": SIZES,
    "services.*.devices*": GPUS, "services.*.runtime": GPUS, "services.*.ipc": POD[SHM],
    "services.*.build*": without("docs/image.md builds an image"),
    "services.*.env_file*": without("write its variables as env or secrets"), "*": without("ddpctl starts no service"),
}  # fmt: skip
TABLES: Mapping[str, Table] = {
    "sbatch": sbatch.SBATCH, "srun": sbatch.SRUN, "commands of a shell": sbatch.SHELL,
    "PyTorchJob and TrainJob": MANIFEST, "the pod template and its container": POD, "DeepSpeed's hostfile": HOSTFILE,
    "accelerate's configuration": ACCELERATE, "docker-compose": COMPOSE,
}  # fmt: skip
FORMATS = "an sbatch script, a PyTorchJob or TrainJob, a hostfile with slots=N, an accelerate or docker-compose file"
UNITS: Mapping[str, Callable[[str], Any]] = {  # how a value is written in a key
    "target.workload": str.lower, "target.keep": "{}s".format, "job.time_limit": "{}s".format,
}  # fmt: skip


def migrate(path: Path, kinds: Kinds) -> Migration:
    """Return what the settings of a file become. Raises NoInputError or UsageError."""
    text = (data := read_bytes(path)).decode("utf-8-sig", "replace")
    if len(data) > MAX_BYTES or re.search("[\0\ufffd]", text):
        raise UsageError(f"{path}: expected {FORMATS}, as a text of at most {MAX_BYTES} bytes")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if re.match(r"#!.*sh\b", text) or (re.search("^#SBATCH", text, re.MULTILINE) and not text.startswith("#!")):
        migration = Migration(target="slurm", kinds=kinds)
        sbatch.read(text, migration)
    elif lines and all(re.fullmatch(r"\s*\S+\s+slots=\d+.*", line) for line in lines):
        migration = Migration(target="ssh", kinds=kinds)
        _read_hostfile(text, migration)
    else:
        migration = _read_yaml(path, data, kinds)
    migration.finish()
    return migration


def _read_hostfile(text: str, migration: Migration) -> None:
    lines = [(n, line.split()) for n, line in enumerate(text.splitlines(), 1) if re.match(r"\s*[^\s#]", line)]
    hosts = [(number, fields[0], int(re.sub(r"\D.*", "", fields[1][6:]))) for number, fields in lines]
    least = min(slots for _, _, slots in hosts)
    entries = [{"address": host, "gpus": slots} for _, host, slots in hosts]
    for number, host, slots in hosts:
        migration.add(number, host, "target.hosts", entries)
        if slots == least:
            migration.translate(HOSTFILE, number, "slots", str(slots))
        else:
            migration.note(number, f"slots={slots}", without(f"all nodes have the same number of ranks: {least}"))
    migration.add(hosts[0][0], f"{len(hosts)} hosts", "job.nodes", str(len(hosts)))
    migration.add(hosts[0][0], "the Python of the hosts", "target.runtime", "none")


def _read_yaml(path: Path, data: bytes, kinds: Kinds) -> Migration:
    try:
        documents = [document for document in read_documents(data) if isinstance(document[0], dict)]
    except ValueError as error:
        raise UsageError(f"{path}: expected {FORMATS}: as YAML, {error}") from None
    for value, places, errors in documents:
        is_manifest, is_compose = (
            value.get("kind") in ("PyTorchJob", "TrainJob"),
            isinstance(value.get("services"), dict),
        )
        if not (
            is_manifest or is_compose or {"distributed_type", "compute_environment", "num_processes"} & value.keys()
        ):
            continue
        document = _Document(value, Migration(target="kubernetes" if is_manifest else "local", kinds=kinds), places)
        try:
            (document.manifest if is_manifest else document.compose if is_compose else document.accelerate)()
        except (AttributeError, TypeError, KeyError, ValueError):
            raise UsageError(f"{path}: expected {FORMATS}, but a part of it has another form") from None
        for line, text in errors:
            document.migration.note(line, text, skipped("it is ambiguous in YAML"))
        for other, its_places, _ in documents:
            if other is not value:
                kind, line = f"kind={other.get('kind')}", its_places[()][0]
                document.migration.note(line, kind, without("ddpctl makes the objects of a run"))
        return document.migration
    raise UsageError(f"{path}: expected {FORMATS}")


class _Document:
    """A document of a YAML file."""

    def __init__(self, value: Any, migration: Migration, places: Mapping[Path_, tuple[int, int]]) -> None:
        self.value, self.migration, self.places = value, migration, places
        self.container: dict[str, Any] = {}  # what stays as it is in a patch of the ranks' container

    def setting(self, table: Table, path: Path_, name: str, value: Any) -> None:
        """Record a setting by the entry of a table. A name is the part of the path that the table knows."""
        meaning, line = meaning_of(table, name), self.places[path][0]
        key_name = meaning.text
        if key_name == "job.env" and isinstance(value, list):
            self.environment(path, name, value)
        elif meaning is RANKS:
            self.migration.ranks(line, f"{name}={value}", str(value))
        elif key_name == "job.command":
            arguments = [*value, *self.arguments(path)] if isinstance(value, list) else str(value).split()
            quoted = (str(word).replace("\\", "\\\\").replace('"', '\\"') for word in arguments)  # "$NAME" stays a word
            sbatch.Reader(self.migration).commands(" ".join(f'"{word}"' for word in quoted), line)
        elif key_name == "target.pod":
            self.keep(line, name, name, value)
        else:
            labels: Callable[[str], Any] = lambda text: {path[-1]: text}  # noqa: E731
            convert = labels if key_name == "target.labels" else UNITS.get(key_name, str)
            self.migration.translate(table, line, name, str(value) if isinstance(value, Text) else "", convert)

    def environment(self, path: Path_, name: str, value: Any) -> None:
        """Record the variables of a container. References stay in the pod."""
        for number, item in enumerate(value):
            line, variable = self.places[*path, number][0], str(item["name"])
            if "value" in item:
                self.migration.variable(line, variable, str(item["value"]))
            else:
                self.keep(line, variable, name, [item])

    def arguments(self, path: Path_) -> list[Any]:
        """Return the arguments beside a container's command."""
        container = self.value
        for part in path[:-1]:
            container = container[part]
        return container.get("args", []) if path[-1] == "command" else []

    def keep(self, line: int, text: str, name: str, value: Any) -> None:
        """Record a setting of the ranks' container that stays as it is, in the patch of the pod."""
        if COMPUTED.search(str(value)):
            return self.migration.note(line, text, unknown("target.pod"))
        self.container = merge(self.container, {name: read_json(value)})
        return self.migration.note(line, text, key("target.pod"))

    def manifest(self) -> None:
        """Record a PyTorchJob or a TrainJob."""
        first, nodes, stop = None, 0, ("template", "trainer", "runtimePatches", "podTemplateOverrides")
        leaves = sorted(
            _leaves(self.value, stop=stop), key=lambda leaf: "rocPerNode" in str(leaf[0][-1:])
        )  # needs GPUs
        for path, value in leaves:
            name, line = ".".join(map(str, path)), self.places[path][0]
            if path[-1] == "template" and first in (None, value):
                self.template(path, value) if first is None else self.migration.note(line, name, ours("it is the same"))
                first = value
            elif path[-1] == "template":
                self.migration.note(line, name, without("all nodes have one template, that of the first replicas"))
            elif path[-1] == "trainer":
                self.pod(path, value)
            elif path[-1] == "replicas" and str(value).isdecimal():
                nodes += int(value)
                self.migration.values.pop("job.nodes", None)
                self.migration.add(line, f"{name}={value}", "job.nodes", str(nodes))
                if path[2] == "Master":
                    self.migration.add(line, f"{name}={value}", "target.master", True)
            else:
                self.setting(MANIFEST, path, name, value)
        if self.container:
            patch = {"spec": {"containers": [{"name": "main", **self.container}]}}
            self.migration.values["target.pod"] = merge(self.migration.values.get("target.pod", {}), patch)

    def template(self, path: Path_, template: Any) -> None:
        """Record a pod template. What is not of the ranks' container stays as it is."""
        for name, value in template.get("metadata", {}).items():
            for label, text in value.items() if name == "labels" else ():
                self.setting(MANIFEST, (*path, "metadata", name, label), f"metadata.labels.{label}", text)
            if name != "labels":
                line = self.places[*path, "metadata", name][0]
                self.migration.add(line, name, "target.pod", {"metadata": {name: read_json(value)}})
        main, *others = template["spec"]["containers"]
        self.pod((*path, "spec", "containers", 0), main)
        shm = [mount["name"] for mount in main.get("volumeMounts", []) if mount["mountPath"] == SHM]
        volumes = [volume for volume in template["spec"].get("volumes", []) if volume["name"] not in shm]
        for name, value in {**template["spec"], "containers": others, "volumes": volumes}.items():
            if name == "restartPolicy":
                self.setting(POD, (*path, "spec", name), name, value)
            elif value:
                line = self.places[*path, "spec", name][0]
                self.migration.add(line, name, "target.pod", {"spec": {name: read_json(value)}})

    def pod(self, path: Path_, container: Any) -> None:
        """Record the container of the ranks."""
        for name in sorted(container, key=lambda name: not name.startswith("resources")):  # a command needs the GPUs
            value, place = container[name], (*path, name)
            if name.startswith("resources"):
                for kind, amounts in value.items():
                    for resource, amount in amounts.items():
                        if meaning_of(POD, f"{kind}.{resource}").text == "target.pod":
                            self.keep(
                                self.places[*place, kind, resource][0],
                                resource,
                                "resources",
                                {kind: {resource: amount}},
                            )
                        else:
                            self.setting(POD, (*place, kind, resource), f"{kind}.{resource}", amount)
            elif name == "volumeMounts":
                for number, mount in enumerate(value):
                    line, at = self.places[*place, number][0], str(mount["mountPath"])
                    self.migration.note(line, at, POD[SHM]) if at == SHM else self.keep(line, at, name, [mount])
            elif name.startswith("num"):
                self.setting(MANIFEST, place, f"spec.trainer.{name}", value)
            elif name != "args" or "command" not in container:
                self.setting(POD, place, name, value)

    def accelerate(self) -> None:
        """Record a configuration of accelerate, which names no script."""
        for path, value in _leaves(self.value):
            self.setting(ACCELERATE, path, ".".join(map(str, path)), value)

    def compose(self) -> None:
        """Record what the services of docker-compose set. None is translated, and no value is shown."""
        for path, _ in _leaves(self.value):
            name = ".".join(map(str, path))
            self.migration.note(self.places[path][0], name, meaning_of(COMPOSE, name))


def _leaves(value: Any, path: Path_ = (), stop: tuple[str, ...] = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield the path and the value of each scalar, and of each part whose key is in ``stop``."""
    if not value or not isinstance(value, dict | list) or (path and path[-1] in stop):
        yield path, value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(part, (*path, name), stop)
