"""Each verb in each state that a run can be in, on each target: the state that is named, and each verb's exit code."""

from collections.abc import Callable, Collection, Mapping

import pytest
from tests.contract.ddpctl.worlds import World

VERBS = {
    "status": ("status", "night"),
    "ps": ("ps",),
    "logs": ("logs", "night", "--tail", "5"),
    "exec": ("exec", "night", "--", "true"),
    "attach": ("attach", "night"),
    "resume": ("launch", "--resume", "night", "--dry-run"),
    "pull": ("pull", "night"),
    "timeline": ("timeline", "night"),
    "report": ("report", "night"),
    "top": ("top", "night", "--once"),
    "explain": ("explain", "night"),
    "rm": ("rm", "night", "--dry-run"),
    "suspend": ("suspend", "night"),
    "stop": ("stop", "night"),
}
# By the state that is named first, the exit code of each verb, and the state after them, which end with a stop. None:
# the verb would follow the run (tests/cluster/test_ssh.py), continues it (test_kubernetes.py), or needs OpenSSH's
# client (tests/nightly/ssh/test_ssh_pull.py) or two seconds to pack a wheel (test_kaggle.py).
# Everything that reads: daily in the states below, and by night in all of them (tests/nightly/ddpctl).
READING = ("ps", "pull", "timeline", "report", "top", "explain", "suspend")
ALL_VERBS_IN = ("training", "failed", "unknown")
Codes = tuple[int | None, ...]
#              status, ps, logs, exec, attach, resume, pull, timeline, report, top, explain, rm, suspend, stop
GOING: Codes = (0, 0, 0, 0, None, 2, 78, 0, 0, 0, 0, 2, 78, 0)
OVER: Codes = (0, 0, 0, 66, 66, 0, 78, 0, 0, 0, 0, 0, 2, 0)
SSH_GOING: Codes = (0, 0, 0, 0, None, 2, None, 0, 0, 0, 0, 2, 78, 0)
SSH_OVER: Codes = (0, 0, 0, 66, 66, 0, None, 0, 0, 0, 0, 0, 2, 0)
POD_OVER: Codes = (0, 0, 0, 66, 66, 0, 0, 0, 0, 0, 0, 0, 2, 0)
KAGGLE_GOING: Codes = (0, 0, 0, 78, None, 2, 0, 78, 78, 78, 78, 2, 78, 69)
KAGGLE_OVER: Codes = (0, 0, 0, 66, 66, None, 0, 78, 78, 78, 0, 0, 2, 0)
LAUNCHING: Codes = (0, 0, 66, 69, None, 2, 66, 0, 0, 0, 0, 2, 69, 0)  # then its launch takes the run back
INTERRUPTED: Codes = (0, 0, 66, 66, 66, 0, 66, 0, 0, 0, 0, 0, 2, 0)
State = tuple[str, Codes, str]


def on_machines(going: Codes, over: Codes, **others: State) -> Mapping[str, State]:
    """Return the states of a run whose nodes write files that ddpctl reads, and others of its target."""
    runs = {state: (state, going, "stopped") for state in ("starting", "training", "stopping")}
    has_ended = {state: (state, over, state) for state in ("succeeded", "failed", "stopped", "lost")}
    return {**LAUNCH, **runs, **has_ended, **others}


LAUNCH: Mapping[str, State] = {"launching": ("starting", LAUNCHING, ""), "interrupted": ("lost", INTERRUPTED, "lost")}
TABLE: Mapping[str, Mapping[str, State]] = {
    "local": on_machines(
        GOING, OVER,
        launching=("starting", (*LAUNCHING[:6], 78, *LAUNCHING[7:]), ""),
        interrupted=("lost", (*INTERRUPTED[:6], 78, *INTERRUPTED[7:]), "stopped"),
        running=("running", GOING, "stopped"),
    ),
    "ssh": on_machines(
        SSH_GOING, SSH_OVER, unknown=("unknown", (0, 0, 69, 69, 69, 69, None, 0, 0, 0, 0, 69, 78, 69), "unknown")
    ),
    "slurm": on_machines(
        GOING, OVER,
        pending=("pending", (0, 0, 66, 69, None, 2, 78, 0, 0, 0, 0, 2, 78, 0), "stopped"),
        unknown=("unknown", (0, 0, 0, 69, None, 69, 78, 0, 0, 0, 0, 69, 78, 69), "unknown"),
    ),
    "kubernetes": {
        **LAUNCH,
        "pending": ("starting", (0, 0, 66, 0, None, 2, 66, 0, 0, 0, 0, 2, None, 0), "stopped"),
        "training": ("running", (0, 0, 0, 0, None, 2, 0, 0, 0, 0, 0, 2, None, 0), "stopped"),
        "suspended": ("suspended", (0, 0, 66, 66, None, 2, 0, 0, 0, 0, 0, 2, 0, 0), "stopped"),
        "succeeded": ("succeeded", POD_OVER, "succeeded"),
        "failed": ("failed", POD_OVER, "failed"),
        "lost": ("lost", (0, 0, 66, 66, 66, 0, 0, 0, 0, 0, 0, 0, 2, 0), "lost"),
        "unknown": ("unknown", (0, 0, 69, 69, None, 69, 69, 69, 69, 69, 0, 69, 69, 69), "unknown"),
    },
    "kaggle": {
        "pending": ("pending", (0, 0, 0, 78, None, 2, 0, 78, 78, 78, 0, 2, 78, 69), "pending"),
        "running": ("running", KAGGLE_GOING, "running"),
        "stopping": ("stopping", KAGGLE_GOING, "stopping"),
        "succeeded": ("succeeded", KAGGLE_OVER, "succeeded"),
        "failed": ("failed", KAGGLE_OVER, "failed"),
        "stopped": ("stopped", KAGGLE_OVER, "stopped"),
        "lost": ("lost", KAGGLE_OVER, "lost"),
        "unknown": ("unknown", (0, 0, 0, 78, None, 69, 0, 78, 78, 78, 0, 69, 78, 69), "unknown"),
    },
}  # fmt: skip


# By night alone (tests/nightly/ddpctl): states of the nodes' files that are tried daily on another target, and answers
# of Kaggle whose states have tests of their own (tests/unit/ddpctl/test_kaggle_target.py).
NIGHTLY = {
    "local": ("running", "stopping", "succeeded", "stopped"),
    "ssh": ("starting",),
    "slurm": ("starting", "stopping", "succeeded", "stopped"),
    "kaggle": ("stopping", "succeeded", "stopped", "lost"),
}
DAILY = [(kind, state) for kind, states in TABLE.items() for state in states if state not in NIGHTLY.get(kind, ())]


@pytest.mark.parametrize(("kind", "state"), DAILY)
def test_each_verb_in_this_state(kind: str, state: str, world: Callable[[str], World]) -> None:
    try_verbs(world(kind), kind, state, [verb for verb in VERBS if state in ALL_VERBS_IN or verb not in READING])


def try_verbs(site: World, kind: str, state: str, verbs: Collection[str]) -> None:
    """Bring a run into a state, call the verbs one after the other, and compare their codes with the table."""
    named, codes, after = TABLE[kind][state]
    launch = None
    if state in ("launching", "interrupted"):
        launch = site.interrupted_launch(alive=state == "launching")
    else:
        site.enter(state)
    answered = {}
    try:
        assert site.state() == named
        for verb, code in zip(VERBS, codes, strict=True):
            if verb == "stop" and state == "stopping":
                site.go()  # its ranks have saved
            if code is None or verb not in verbs:
                answered[verb] = code
                continue
            done = site.ddpctl(*VERBS[verb])
            answered[verb] = done.returncode
            output = done.stdout + done.stderr
            assert "None" not in output, output
            assert not done.returncode or output.strip(), f"{verb}: exit code {done.returncode} in silence"
            assert done.stderr.count("\n") < 20, "one reason, not a traceback"
        assert answered == dict(zip(VERBS, codes, strict=True))
        if launch is not None:
            assert launch.wait(60) == 0
        assert (site.ddpctl("status", "night").returncode == 66) if not after else (site.state() == after)
        if state == "unknown" and kind != "kaggle":  # nothing has happened to the run, and it can be stopped now
            site.answer_again()
            assert site.state() in ("training", "running")
            assert site.ddpctl("stop", "night").returncode == 0
            assert site.state() == "stopped"
        if (
            after == "stopped"
            and state in ("starting", "running", "training", "stopping", "stopped")
            and kind != "kaggle"
        ):
            assert [site.outcome(node)["code"] for node in (0, 1)] == [143, 143]
        site.wait_for(site.is_over)
    finally:
        if launch is not None:
            launch.kill()
            launch.communicate()
