"""Determines the format of another launcher's file, and reads those that are YAML or a hostfile."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpctl.errors import UsageError
from ddpctl.job.config import MAX_BYTES, read_bytes, read_documents
from ddpctl.job.schema import Kinds
from ddpctl.job.values import Text, read_json
from ddpctl.migration import sbatch
from ddpctl.migration.settings import COMPUTED, Migration, Table, key, meaning_of, ours, skipped, unknown, without

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
    "/dev/shm": ours("the container has its own /dev/shm, of the size shm"), "labels": key("target.labels"),
    "restartPolicy": ours("ddprun restarts the ranks"), "*": key("target.pod"),
}  # fmt: skip
HOSTFILE: Table = {"HOST": key("target.hosts"), "slots": key("job.gpus", "the smallest number of all hosts")}
DEFAULT = ours("it is the default")
ACCELERATE: Table = {
    "num_machines": key("job.nodes"), "num_processes": key("job.gpus", "of each node"), "use_cpu": key("job.device"),
    "main_process_port": key("job.port"), "mixed_precision": key("job.env", "as ACCELERATE_MIXED_PRECISION"),
    "machine_rank": RENDEZVOUS, "main_process_ip": RENDEZVOUS, "rdzv_backend": RENDEZVOUS, "same_network": RENDEZVOUS,
    "compute_environment": ours("a target is the environment"), "main_training_function": ours("a script is started"),
    "gpu_ids": without("a run uses the first free GPUs"),
    "*": without("accelerate passes it to the script: set it in the script's Accelerator()"),
}  # fmt: skip
GPUS = ours("a container has the GPUs of its node")
SERVICE: Table = {
    "image": key("job.image"), "command": key("job.command"), "entrypoint": key("job.command"),
    "environment": key("job.env", "or secrets"), "volumes": key("job.mounts"), "shm_size": key("job.shm"),
    "mem_limit": key("job.memory"), "deploy.resources.limits.memory": key("job.memory"), "cpus": key("job.cpus"),
    "deploy.resources.limits.cpus": key("job.cpus"), "deploy.resources.*.count": key("job.gpus"),
    "deploy.resources.*.devices.*": GPUS, "runtime": GPUS, "ipc": POD["/dev/shm"],
    "build*": without("docs/image.md builds an image"), "env_file*": without("write its variables as env or secrets"),
    "*": without("ddpctl starts no services"),
}  # fmt: skip
TABLES: Mapping[str, Table] = {
    "sbatch": sbatch.SBATCH, "srun": sbatch.SRUN, "commands of a shell": sbatch.SHELL,
    "PyTorchJob and TrainJob": MANIFEST, "the pod template and its container": POD, "DeepSpeed's hostfile": HOSTFILE,
    "accelerate's configuration": ACCELERATE, "a service of docker-compose": SERVICE,
}  # fmt: skip
FORMATS = "an sbatch script, a PyTorchJob or TrainJob, a hostfile with slots=N, an accelerate or docker-compose file"
UNITS: Mapping[str, Callable[[str], str]] = {
    "target.workload": str.lower, "target.keep": "{}s".format, "job.time_limit": "{}s".format, "job.shm": sbatch.size,
    "job.memory": lambda text: text if text.endswith("i") else sbatch.size(text),
}  # fmt: skip


def migrate(path: Path, kinds: Kinds) -> Migration:
    """Return what the settings of a file become. Raises NoInputError or UsageError."""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if len(data) > MAX_BYTES or "\0" in text:
        why = f"it is larger than {MAX_BYTES} bytes" if len(data) > MAX_BYTES else "it is no text"
        raise UsageError(f"{path}: expected {FORMATS}: {why}")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if re.match(r"#!.*sh\b", text) or re.search("^#SBATCH", text, re.MULTILINE):
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
    hosts = [(n, words[0], int(re.sub(r"\D.*", "", words[1][6:]))) for n, words in lines]
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
        if value.get("kind") in ("PyTorchJob", "TrainJob"):
            migration, read = Migration(target="kubernetes", kinds=kinds), _Document.read_manifest
        elif isinstance(value.get("services"), dict):
            migration, read = Migration(target="local", kinds=kinds), _Document.read_compose
        elif {"distributed_type", "compute_environment", "num_processes"} & value.keys():
            migration, read = Migration(target="local", kinds=kinds), _Document.read_accelerate
        else:
            continue
        try:
            read(_Document(value, migration, places))
        except (AttributeError, TypeError, KeyError, ValueError, IndexError):
            raise UsageError(f"{path}: a part of it is not as in {FORMATS}") from None
        for line, text in errors:
            migration.note(line, text, skipped("it is ambiguous in YAML"))
        for other, its_places, _ in documents:
            if other is not value:
                migration.note(
                    its_places[()][0], f"kind={other.get('kind')}", without("ddpctl makes the objects of a run")
                )
        return migration
    raise UsageError(f"{path}: expected {FORMATS}")


class _Document:
    """A document of a YAML file."""

    def __init__(self, value: Any, migration: Migration, places: Mapping[tuple[Any, ...], tuple[int, int]]) -> None:
        self.value, self.migration, self.places = value, migration, places

    def translate(self, table: Table, path: tuple[Any, ...], name: str, value: Any) -> None:
        text, meaning = str(value), meaning_of(table, name).text
        convert: Callable[[str], Any] = UNITS.get(meaning, str)
        if meaning == "target.labels":
            convert = lambda text: {path[-1]: text}  # noqa: E731
        self.migration.translate(table, self.places[path][0], name, text, convert)

    def read_manifest(self) -> None:
        nodes = 0
        for path, value in _leaves(self.value, stop=("template", "trainer", "runtimePatches", "podTemplateOverrides")):
            name = ".".join(map(str, path))
            if path[-1] == "template":
                self.read_template(path, value, is_first=path[2] == next(iter(self.value["spec"][path[1]])))
            elif path[-1] == "trainer":
                self.read_container(path, value, "resourcesPerNode")
            elif path[-1] == "replicas" and str(value).isdecimal():
                nodes += int(value)
                self.migration.values.pop("job.nodes", None)
                self.migration.add(self.places[path][0], f"{name}={value}", "job.nodes", str(nodes))
                if path[2] == "Master":
                    self.migration.add(self.places[path][0], f"{name}={value}", "target.master", True)
            else:
                self.translate(MANIFEST, path, name, value if isinstance(value, Text) else "")

    def read_template(self, path: tuple[Any, ...], template: Any, *, is_first: bool) -> None:
        if not is_first:
            same = ours("all nodes have the template of the first replicas")
            return self.migration.note(self.places[path][0], ".".join(map(str, path)), same)
        for name, value in template.get("metadata", {}).items():
            line = self.places[*path, "metadata", name][0]
            labels, patch = {key: str(text) for key, text in value.items()}, {"metadata": {name: read_json(value)}}
            is_labels = name == "labels"
            self.migration.add(line, name, *(("target.labels", labels) if is_labels else ("target.pod", patch)))
        spec, place = template.get("spec", {}), (*path, "spec")
        main, *others = spec.get("containers", [{}])
        shm = self.read_container((*place, "containers", 0), main, "resources")
        for name, value in {**spec, "containers": others}.items():
            if name == "restartPolicy":
                self.translate(POD, (*place, name), name, value)
            elif name == "volumes":
                self.patch(self.places[*place, name][0], name, {name: [one for one in value if one["name"] not in shm]})
            elif value:
                self.patch(self.places[*place, name][0], name, {name: value})
        return None

    def patch(self, line: int, text: str, spec: Any) -> None:
        self.migration.add(line, text, "target.pod", {"spec": read_json(spec)})

    def read_container(self, path: tuple[Any, ...], container: Any, resources: str) -> set[str]:
        """Record the settings of the ranks' container. Return the names of its volumes for /dev/shm."""
        shm: set[str] = set()
        gpus = [
            str(value)
            for name, value in container.get(resources, {}).get("limits", {}).items()
            if name.endswith("/gpu")
        ]
        for name, value in container.items():
            place = (*path, name)
            line = self.places[place][0]
            if name == resources:
                for kind, table in value.items():
                    for resource, amount in table.items():
                        self.read_resource((*place, kind, resource), kind, resource, amount)
            elif name in ("numNodes", "numProcPerNode"):
                self.translate(MANIFEST, place, f"spec.trainer.{name}", value)
            elif name in ("command", "args"):
                if name == "command" or "command" not in container:
                    self.command(line, [*container.get("command", []), *container.get("args", [])], *gpus[:1])
            elif name == "env":
                for n, variable in enumerate(value):
                    if "value" in variable:
                        self.migration.variable(
                            self.places[*place, n][0], str(variable["name"]), str(variable["value"])
                        )
                    else:
                        self.main(self.places[*place, n][0], str(variable["name"]), {"env": [variable]})
            elif name == "volumeMounts":
                for n, mount in enumerate(value):
                    is_shm, at = str(mount["mountPath"]) == "/dev/shm", self.places[*place, n][0]  # noqa: S108
                    shm |= {mount["name"]} if is_shm else set()
                    if is_shm:
                        self.migration.note(at, "/dev/shm", POD["/dev/shm"])
                    else:
                        self.main(at, str(mount["mountPath"]), {name: [mount]})
            elif name in POD:
                self.translate(POD, place, name, value)
            else:
                self.main(line, name, {name: value})
        return shm

    def read_resource(self, path: tuple[Any, ...], kind: str, name: str, amount: Any) -> None:
        if meaning_of(POD, f"{kind}.{name}").text == "target.pod":
            return self.main(self.places[path][0], f"{name}={amount}", {"resources": {kind: {name: amount}}})
        if kind == "limits" and name.endswith("/gpu") and name != "nvidia.com/gpu":
            self.migration.add(self.places[path][0], name, "target.gpu_resource", name)
        return self.translate(POD, path, f"{kind}.{name}", amount)

    def main(self, line: int, text: str, part: Any) -> None:
        """Record a setting of the ranks' container that stays as it is, in the patch of the pod."""
        before = self.migration.values.get("target.pod", {}).get("spec", {}).get("containers", [])
        aside = Migration(target="kubernetes", kinds=self.migration.kinds)
        for one in [*[one for one in before if one["name"] == "main"], {"name": "main", **read_json(part)}]:
            aside.add(line, text, "target.pod", one)
        if "target.pod" not in aside.values or COMPUTED.search(str(part)):
            return self.migration.note(line, text, unknown("target.pod"))
        if before:
            self.migration.values["target.pod"]["spec"]["containers"] = []
        return self.patch(line, text, {"containers": [aside.values["target.pod"]]})

    def command(self, line: int, words: list[Any], gpus: str = "") -> None:
        """Record the command of a container, which may be a script of a shell."""
        reader = sbatch.Reader(self.migration, int(gpus) if gpus.isdecimal() else 0)
        quoted = (str(word).replace("\\", "\\\\").replace('"', '\\"') for word in words)  # "$NAME" stays a word
        reader.commands(" ".join(f'"{word}"' for word in quoted), line)

    def read_accelerate(self) -> None:
        machines = str(self.value.get("num_machines", "1"))
        for path, value in _leaves(self.value):
            name, text, line = ".".join(map(str, path)), str(value), self.places[path][0]
            if (name, text) in (("mixed_precision", "no"), ("use_cpu", "false"), ("debug", "false")):
                self.migration.note(line, f"{name}={text}", DEFAULT)
            elif name == "mixed_precision":
                self.migration.add(line, f"{name}={text}", "job.env", {"ACCELERATE_MIXED_PRECISION": text})
            elif name == "num_processes" and machines.isdecimal() and text.isdecimal():
                self.migration.translate(ACCELERATE, line, name, text, lambda text: str(int(text) // int(machines)))
            else:
                self.migration.translate(ACCELERATE, line, name, text, lambda text: "cpu" if text == "true" else text)

    def read_compose(self) -> None:
        services = self.value["services"]
        chosen = max(services, key=lambda name: len(re.findall("nvidia|gpu|train", str(services[name]))), default="")
        for path, value in _leaves(self.value, stop=("environment", "command", "entrypoint", "volumes")):
            name, line, words = (
                ".".join(map(str, path[2:])),
                self.places[path][0],
                value if isinstance(value, list) else [value],
            )
            if path[:2] != ("services", chosen):
                self.migration.note(line, ".".join(map(str, path)), SERVICE["*"])
            elif name == "environment":
                pairs = value.items() if isinstance(value, dict) else (str(one).partition("=")[::2] for one in words)
                for variable, content in pairs:
                    self.migration.variable(line, str(variable), str(content))
            elif name == "volumes":
                for mount in words:
                    self.migration.add(line, str(mount), "job.mounts", (str(mount),))
            elif name in ("command", "entrypoint"):
                self.command(line, words if isinstance(value, list) else str(value).split())
            else:
                self.translate(SERVICE, path, name, value if isinstance(value, Text) else "")


def _leaves(
    value: Any, path: tuple[Any, ...] = (), stop: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the value of each scalar, and of each part whose key is in ``stop``."""
    if not value or not isinstance(value, dict | list) or (path and path[-1] in stop):
        yield path, value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(part, (*path, name), stop)
