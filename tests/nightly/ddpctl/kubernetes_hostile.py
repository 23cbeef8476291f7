"""Configurations that somebody might write, well or ill: for the tests and for bench/kubernetes.py."""

from typing import Any

from hypothesis import strategies as st

from ddpctl.targets.kubernetes.manifests import WORKLOADS

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
TEXT = (
    NASTY
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
    | st.text(max_size=8).filter(
        lambda text: "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)
    )
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


def configurations(wild: bool) -> st.SearchStrategy[tuple[dict[str, Any], dict[str, Any]]]:
    """A job and the options of its target. ``wild``: any value may be anything; else each is right by itself."""

    def maybe(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return right | TEXT if wild else right

    jobs = table(
        name=maybe(NAME),
        nodes=maybe(st.sampled_from(["1", "2", "3:5", "1:9999", "9999"])),
        gpus=st.integers(-1, 65) if wild else st.integers(1, 64),
        device=st.sampled_from(["auto", "cuda", "cpu"]),
        command=st.lists(TEXT, max_size=5).map(tuple),
        env=st.dictionaries(maybe(VARIABLE), TEXT, max_size=4),
        port=st.integers(0, 65536) if wild else st.integers(1024, 9000),
        grace=st.floats(0, 3600),
        cpus=st.integers(64, 1024),
        memory=maybe(st.sampled_from(["64Gi", "1Ti"])),
        shm=SIZE if wild else st.sampled_from(["64Mi", "8Gi"]),
        mounts=st.lists(
            maybe(MOUNT), max_size=3, unique_by=lambda text: text.split(":", 2)[1] if ":" in text else text
        ).map(tuple),
        time_limit=st.sampled_from(["1s", "12h", "3d"]),
        image=maybe(st.sampled_from(["a", "registry.example.com/team/train:1", "x@sha256:" + "0" * 64])),
    )
    options = table(
        namespace=maybe(NAME),
        master=st.booleans() if wild else st.just(False),
        restart=st.sampled_from(["auto", "OnFailure", "ExitCode", "Never"]),
        failures=st.integers(0, 1001) if wild else st.integers(1, 1000),
        keep=st.sampled_from(["7d", "1h", "x"] if wild else ["7d", "90s"]),
        scratch=st.none() | maybe(st.sampled_from(["512Mi", "2Ti"])),
        gpu_resource=maybe(st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb"])),
        tolerations=st.lists(maybe(st.sampled_from(["a", "a=b", "a/b=c:NoSchedule"])), max_size=2).map(tuple),
        queue=NAME,
        gang=st.booleans() if wild else st.just(False),
        profile=st.sampled_from(["restricted", "rdma"]),
        labels=st.dictionaries(maybe(NAME), maybe(NAME), max_size=2),
        network_policy=st.booleans(),
    )
    workload = st.sampled_from(["job", "trainjob", "pytorchjob", "auto"])
    assert set(WORKLOADS) == {"job", "trainjob", "pytorchjob"}
    return st.tuples(jobs, st.builds(lambda rest, word: {**rest, "workload": word}, options, workload))


CONFIGURATIONS = st.booleans().flatmap(configurations)
