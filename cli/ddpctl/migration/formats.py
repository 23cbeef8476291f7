"""Determines the format of another launcher's file, and reads those that are YAML or a hostfile."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpctl.errors import UsageError
from ddpctl.job.config import read_bytes, read_documents
from ddpctl.job.schema import Kinds
from ddpctl.job.values import Text, read_json
from ddpctl.migration import sbatch
from ddpctl.migration.settings import COMPUTED, Migration, Table, key, meaning_of, ours, skipped, unknown, without

Path_ = tuple[Any, ...]  # the keys and numbers above a value
MAX_BYTES = 100_000
SHM = "/dev/shm"  # noqa: S108 -- a path in the container
OWN_SHM = ours("the container has its own /dev/shm, of the size shm")
RENDEZVOUS = ours("ddpctl chooses the address of node 0 and the rendezvous")
PATCH = skipped("write it as pod")
MANIFEST: Table = {
    "apiVersion": ours("workload chooses it"), "kind": key("target.workload", convert=str.lower),
    "metadata.name": key("job.name"), "metadata.namespace": key("target.namespace"),
    "metadata.labels.kueue.*, spec.*.schedulingPolicy.queue": key("target.queue"),
    "metadata.labels.*, template.metadata.labels.*": key("target.labels"),
    "spec.*suspend": ours("a queue suspends the job"), "spec.runPolicy.cleanPodPolicy": key("target.clean_pods"),
    "spec.*.ttlSecondsAfterFinished": key("target.keep", convert="{}s".format),
    "spec.*.activeDeadlineSeconds": key("job.time_limit", convert="{}s".format),
    "spec.*.backoffLimit": without("failures counts those of each node"),
    "spec.nprocPerNode, spec.elasticPolicy.nProcPerNode, spec.trainer.numProcPerNode": key(
        "job.ranks", "or gpus, if no GPUs are given"),
    "spec.elasticPolicy.maxRestarts": key("job.max_restarts"),
    "spec.elasticPolicy.rdzv*": RENDEZVOUS,
    "spec.elasticPolicy.m*Replicas": without("nodes: MIN:MAX starts with fewer nodes, and none joins later"),
    "spec.elasticPolicy.metrics.*": without("ddpctl does not scale a run by its load"),
    "spec.*.Master.replicas": key("job.nodes", "with the Workers, and master", lambda value: {
        "job.nodes": value, "target.master": True}),
    "spec.*.replicas": key("job.nodes", "Master and Workers together"), "spec.trainer.numNodes": key("job.nodes"),
    "spec.*.restartPolicy": key("target.restart"), "spec.runtimePatches, spec.podTemplateOverrides": PATCH,
    "spec.runtimeRef.*": unknown("the settings of the runtime in the cluster"),
    "container.image": key("job.image"), "container.command, container.args": key("job.command"),
    "container.env.*": key("job.env", "or secrets; what is not a value stays in pod"),
    "container.resources.limits.cpu": key("job.cpus"), "container.resources.limits.memory": key("job.memory"),
    "container.resources.limits.*/gpu": key("job.gpus"),
    "container.resources.requests.cpu, container.resources.requests.memory, container.resources.requests.*/gpu":
        ours("ddpctl requests what it limits"),
    "container.name": ours("the container of the ranks is called main"), SHM: OWN_SHM,
    "template.spec.restartPolicy": ours("ddprun restarts the ranks"),
    "template.spec.containers.*, template.spec.volumes.*, container.volumeMounts.*": key("target.pod"),
    "container.resources.*.*, container.*, template.*": key("target.pod"),
}  # fmt: skip
WHOLE = ("job.command", "job.env", "target.pod", PATCH.text)
HOSTFILE: Table = {"HOST": key("target.hosts"), "slots": key("job.gpus", "of each host")}
ACCELERATE: Table = {
    "num_machines": key("job.nodes", "all of them this machine, unless another target is chosen"),
    "main_process_port": key("job.port"), "machine_rank, main_process_ip, rdzv_backend, same_network": RENDEZVOUS,
    "num_processes": skipped("write its share of each machine as gpus"),
    "use_cpu": skipped("write device: cpu if it is true"),
    "mixed_precision": skipped("write it in env, as ACCELERATE_MIXED_PRECISION"),
    "compute_environment": ours("a target is the environment"), "main_training_function": ours("a script is started"),
    "gpu_ids": without("a run uses the first free GPUs"),
    "*": without("accelerate passes it to the script: set it in the script's Accelerator()"),
}  # fmt: skip
COMPOSE: Table = {
    "services.*.image, services.*.command*, services.*.entrypoint*": skipped("write it as image or command"),
    "services.*.volumes*, services.*.environment*, services.*.env_file*": skipped("write it as mounts, env or secrets"),
    "services.*.shm_size, services.*.mem_limit, services.*.limits.memory, services.*.cpus, services.*.count":
        skipped("write it as shm, memory, cpus or gpus"),
    "services.*.devices*, services.*.runtime": ours("a container has the GPUs of its node"),
    "services.*.ipc": OWN_SHM, "services.*.build*": without("docs/environment.md builds an image"),
    "*": without("ddpctl starts no service"),
}  # fmt: skip
TABLES: Mapping[str, Table] = {
    "sbatch": sbatch.SBATCH, "srun": sbatch.SRUN, "apptainer": sbatch.APPTAINER, "commands of a shell": sbatch.SHELL,
    "PyTorchJob and TrainJob": MANIFEST, "DeepSpeed's hostfile": HOSTFILE,
    "accelerate's configuration": ACCELERATE, "docker-compose": COMPOSE,
}  # fmt: skip
FORMATS = "an sbatch script, a PyTorchJob or TrainJob, a hostfile with slots=N, an accelerate or docker-compose file"


def migrate(path: Path, kinds: Kinds) -> Migration:
    """Return what the settings of a file become. Raises NoInputError or UsageError."""
    text = (data := read_bytes(path)).decode("utf-8-sig", "replace")
    if len(data) > MAX_BYTES or re.search("[\0\ufffd]", text):
        raise UsageError(f"{path}: expected {FORMATS}, as a text of at most {MAX_BYTES} bytes")
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    entries = [(number, fields) for number, fields in lines if fields and not fields[0].startswith("#")]
    if re.match(r"#!.*sh\b", text) or (re.search("^#SBATCH", text, re.MULTILINE) and not text.startswith("#!")):
        migration = Migration(target="slurm", kinds=kinds)
        sbatch.Reader(migration).script(text)
    elif entries and all(len(fields) > 1 and re.match(r"slots=\d", fields[1]) for _, fields in entries):
        migration = Migration(target="ssh", kinds=kinds)
        hosts = [(number, fields[0], int(re.findall(r"\d+", fields[1])[0])) for number, fields in entries]
        _read_hostfile(hosts, migration)
    else:
        migration = _read_yaml(path, data, kinds)
    return migration


def _read_hostfile(hosts: list[tuple[int, str, int]], migration: Migration) -> None:
    entries = [{"address": host, "gpus": slots} for _, host, slots in hosts]
    counts = [slots for _, _, slots in hosts]
    migration.add(hosts[0][0], f"{len(hosts)} hosts", "job.nodes", str(len(hosts)))
    for line, host, slots in hosts:
        migration.add(line, host, "target.hosts", entries)
        migration.add(line, f"slots={slots}", "job.gpus", counts if len({*counts}) > 1 else str(slots))
    migration.add(hosts[0][0], "the Python of the hosts", "target.runtime", "none")


def _read_yaml(path: Path, data: bytes, kinds: Kinds) -> Migration:
    try:
        documents = [document for document in read_documents(data) if isinstance(document[0], dict)]
    except ValueError as error:
        raise UsageError(f"{path}: expected {FORMATS}: as YAML, {error}") from None
    value, places, errors = next((document for document in documents if _table(document[0])), ({}, {}, []))
    if not (table := _table(value)):
        raise UsageError(f"{path}: expected {FORMATS}")
    migration = Migration(target="kubernetes" if table is MANIFEST else "local", kinds=kinds)
    try:
        if table is MANIFEST:
            _Manifest(value, migration, places)
        else:
            for place, part in _leaves(value, table):
                shown = str(part) if table is ACCELERATE and isinstance(part, Text) else ""  # compose's may be secret
                migration.translate(table, places[place][0], _name(place), shown)
    except (AttributeError, TypeError, LookupError, ValueError):
        raise UsageError(f"{path}: expected {FORMATS}, but a part of it has another form") from None
    for line, text in errors:
        migration.note(line, text, skipped("it is ambiguous in YAML"))
    for other, its_places, _ in documents:
        if other is not value:
            migration.note(its_places[()][0], f"kind={other.get('kind')}", without("ddpctl makes a run's objects"))
    return migration


def _table(value: Any) -> Table:
    """Return the table of a document's format. It is empty for a document of another format."""
    if value.get("kind") in ("PyTorchJob", "TrainJob"):
        return MANIFEST
    is_accelerate = {"distributed_type", "compute_environment", "num_processes"} & value.keys()
    return COMPOSE if isinstance(value.get("services"), dict) else ACCELERATE if is_accelerate else {}


class _Manifest:
    """Reads a PyTorchJob or a TrainJob."""

    def __init__(self, value: Any, migration: Migration, places: Mapping[Path_, tuple[int, int]]) -> None:
        self.migration, self.places = migration, places
        self.pod: dict[Any, Any] = {}  # what stays as it is, with numbers for the entries of lists
        replicas = value["spec"].get("pytorchReplicaSpecs", {})
        counts = [int(part["replicas"]) for part in replicas.values() if str(part.get("replicas")).isdecimal()]
        migration.numbers = {"job.nodes": str(sum(counts))} if counts else {}
        templates = {name: part["template"] for name, part in replicas.items() if "template" in part}
        for name in list(templates)[1:]:
            path = ("spec", "pytorchReplicaSpecs", name, "template")
            migration.note(places[path][0], ".".join(path), without("all nodes have the first template"))
            del replicas[name]["template"]
        containers = [template["spec"]["containers"][0] for template in templates.values()]
        self.main = [*containers, value["spec"].get("trainer", {})][0]
        self.shm = [mount["name"] for mount in self.main.get("volumeMounts", []) if mount["mountPath"] == SHM]
        # The number of ranks and the command need the number of GPUs.
        for path, part in sorted(_leaves(value, MANIFEST), key=lambda leaf: "limits" not in leaf[0]):
            self._set(path, part)
        if self.pod:
            migration.values["target.pod"] = _lists(self.pod)

    def _set(self, path: Path_, value: Any) -> None:
        """Record a setting."""
        migration, line, name = self.migration, self.places[path][0], _name(path)
        if ("volumeMounts" in path and value["mountPath"] == SHM) or ("volumes" in path and value["name"] in self.shm):
            name = SHM
        meaning, text = meaning_of(MANIFEST, name), str(value) if isinstance(value, Text) else ""
        if meaning.text == "target.pod" or (meaning.text == "job.env" and "value" not in value):
            self._keep(path, value)
        elif meaning.text == "job.env":
            migration.variable(line, str(value["name"]), str(value["value"]))
        elif name == "container.args" and "command" in self.main:
            migration.note(line, name, meaning)
        elif meaning.text == "job.command":
            parts = value.split() if isinstance(value, str) else value
            parts = [*parts, *self.main.get("args", [])] if name == "container.command" else parts
            quoted = (str(part).replace("\\", "\\\\").replace('"', '\\"') for part in parts)  # "$A" is one word
            sbatch.Reader(migration).commands(" ".join(f'"{part}"' for part in quoted), line)
        elif meaning.text == "target.labels":
            migration.add(line, f"{name}={text}", "target.labels", {path[-1]: text})
        else:
            migration.translate(MANIFEST, line, name, text)

    def _keep(self, path: Path_, value: Any) -> None:
        """Record a part of the template or of the ranks' container that stays as it is, in the patch of the pod."""
        name, meaning, place = _name(path), key("target.pod"), self.pod
        text = str(value["name"]) if isinstance(value, dict) and "name" in value else name
        if COMPUTED.search(str(value)):
            meaning = unknown(meaning.text)
        else:
            parts = ("spec", "containers", 0, *path[2:]) if path[1] == "trainer" else path[4:]
            for part in parts[:-1]:
                place = place.setdefault(str(part).replace("PerNode", "") if isinstance(part, str) else part, {})
            place[parts[-1]] = read_json(value)
            if name.startswith("container."):
                self.pod["spec"]["containers"][0]["name"] = "main"
        self.migration.note(self.places[path][0], text, meaning)


def _lists(value: Any) -> Any:
    """Return a value whose tables with numbers as keys have become lists."""
    if not isinstance(value, dict):
        return value
    return [*map(_lists, value.values())] if 0 in value or 1 in value else {k: _lists(v) for k, v in value.items()}


def _name(path: Path_) -> str:
    """Return the name of a part in a table. The first container and a TrainJob's trainer are the ranks' container."""
    name = re.sub(r"^spec\.pytorchReplicaSpecs\.\w+\.template\b", "template", ".".join(map(str, path)))
    name = re.sub(r"^(template\.spec\.containers\.0|spec\.trainer(?!\.num))\b", "container", name)
    return name.replace("container.resourcesPerNode", "container.resources")


def _leaves(value: Any, table: Table, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield the path and the value of each scalar, and of each part that becomes a key as a whole."""
    name = _name(path)
    is_whole = meaning_of(table, name).text in WHOLE and f", {name}." not in f", {', '.join(table)}"
    if is_whole or not value or not isinstance(value, dict | list):
        yield path, value
        return
    for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inner, table, (*path, part))
