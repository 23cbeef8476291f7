"""Configurations that somebody might write, well or ill: for the tests and for bench/kubernetes.py."""

from typing import Any

from hypothesis import strategies as st

from ddpctl.targets.kubernetes.workloads import WORKLOADS

CANARY = "ddpctl-canary"
NASTY = st.sampled_from(
    [
        "$(HOSTNAME)",
        "$$(HOSTNAME)",
        "$$",
        "a$b",
        f"$(touch {CANARY})",
        f"`touch {CANARY}`",
        f"'; touch {CANARY}; '",
        f'"\nargs: [touch, {CANARY}]\n"',
        "---\nkind: Pod",
        "{{ .Values.x }}",
        "*anchor",
        "&anchor",
        "!!python/object/apply:os.system [id]",
        "yes",
        "on",
        "1e3",
        "0x1F",
        "1:30",
        "null",
        "~",
        "- a",
        "key: value",
        "# comment",
        "\t tab",
        " trailing ",
        "é\u2028\x85",
        "😀",
        "%TAG",
        "",
    ]
)
TEXT = NASTY | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20) | st.text(max_size=8).filter(
    lambda text: "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
)
NAME = st.from_regex(r"[a-z]([-a-z0-9]{0,18}[a-z0-9])?", fullmatch=True)
VARIABLE = st.from_regex(r"[A-Z][A-Z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: not name.startswith(("PET_", "DDP_")) and name not in ("RANK", "HOSTNAME", "HOME")
)
SIZE = st.builds(lambda number, unit: f"{number}{unit}", st.integers(1, 4096), st.sampled_from(["Mi", "Gi", "Ti"]))
PATH = st.from_regex(r"/[a-z]{1,8}(/[a-z]{1,8})?", fullmatch=True)
MOUNT = st.builds(
    lambda kind, name, path, end: f"{kind}{name}:{path}{end}",
    st.sampled_from(["pvc=", "secret=", "configmap=", "/", ""]),
    NAME,
    PATH,
    st.sampled_from(["", ":ro"]),
)


def table(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=strategies)


JOBS = table(
    name=NAME | TEXT,
    nodes=st.sampled_from(["1", "2", "3:5", "1:9999", "9999", "0", "two"]),
    gpus=st.integers(-1, 65),
    device=st.sampled_from(["auto", "cuda", "cpu"]),
    command=st.lists(TEXT, max_size=5).map(tuple),
    env=st.dictionaries(VARIABLE | TEXT, TEXT, max_size=4),
    port=st.integers(0, 65536),
    grace=st.floats(0, 3600),
    cpus=st.integers(1, 1024),
    memory=SIZE | TEXT,
    shm=SIZE,
    mounts=st.lists(MOUNT | TEXT, max_size=3).map(tuple),
    time_limit=st.sampled_from(["1s", "12h", "3d"]),
    image=st.sampled_from(["a", "registry.example.com/team/train:1", "x@sha256:" + "0" * 64]) | TEXT,
)
OPTIONS = table(
    workload=st.sampled_from(["auto", *WORKLOADS]),
    namespace=NAME | TEXT,
    master=st.booleans(),
    restart=st.sampled_from(["auto", "OnFailure", "ExitCode", "Never"]),
    failures=st.integers(0, 1001),
    keep=st.sampled_from(["7d", "1h", "x"]),
    gpu_resource=st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb"]) | TEXT,
    request_cpus=st.integers(1, 1024),
    request_memory=SIZE,
    image_pull_secrets=st.lists(NAME | TEXT, max_size=2).map(tuple),
    env_secrets=st.dictionaries(VARIABLE, st.builds("{}/{}".format, NAME, NAME) | TEXT, max_size=2),
    node_selector=st.dictionaries(NAME | TEXT, NAME | TEXT, max_size=2),
    tolerations=st.lists(st.sampled_from(["a", "a=b", "a/b=c:NoSchedule"]) | TEXT, max_size=2).map(tuple),
    spread=st.sampled_from(["prefer", "require", "none"]),
    together=st.sampled_from(["topology.kubernetes.io/zone"]) | TEXT,
    priority_class=NAME | TEXT,
    queue=NAME,
    gang=st.booleans(),
    profile=st.sampled_from(["restricted", "rdma"]),
    labels=st.dictionaries(NAME | TEXT, NAME | TEXT, max_size=2),
    network_policy=st.booleans(),
)
CONFIGURATIONS = st.tuples(JOBS, OPTIONS)
