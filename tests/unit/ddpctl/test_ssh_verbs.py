"""The commands of the target ssh for the hosts of a run that continues."""

import json
from dataclasses import asdict, replace

import pytest
from tests.unit.ddpctl.answers import OK, only, perform
from tests.unit.ddpctl.ssh_answers import BARE, HOSTS, OPTIONS, RUN, by_host

from ddpctl.command import Output
from ddpctl.errors import NoInputError, UnavailableError
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery
from ddpctl.targets.ssh import scripts
from ddpctl.targets.ssh.target import SshTarget


def shows(alive: bool, state: str | None = None, code: int | None = None, steps: str = "") -> Output:
    node = {"run": "night", "node": 0, "pid": 1, "state": state, "started": 1.0} if state else None
    outcome = (
        {"code": code, "cause": "error" if code else "ok", "message": f"code {code}"} if code is not None else None
    )
    answer = {"alive": alive, "node": node, "outcome": outcome, "history": f"time,ddp_last_step\n{steps}\n"}
    return Output(returncode=0, stdout=json.dumps(answer) + "\n")


def lost(node: int) -> Output:
    """A node that has ended because it lost the connection to node 0, or whose loss node 0 has seen."""
    outcome = {"code": 137, "cause": "node_lost", "message": f"node {node} was lost"}
    return Output(returncode=0, stdout=json.dumps({"alive": False, "node": None, "outcome": outcome}) + "\n")


GONE = Output(returncode=255, stderr="the connection was lost (the host is gone)")


def status(*answers: Output, run: Run = RUN) -> RunStatus:
    """The status of a run whose hosts answer so."""
    asked, (state,) = perform(SshTarget(OPTIONS).status((run,), now=1001.0), {"": by_host(*answers)})
    assert [command.stdin for command in asked] == [scripts.show(OPTIONS, [("night", node)]) for node in (0, 1)]
    return state


LOST_HOST = "does not answer: the connection was lost"


@pytest.mark.parametrize(
    ("first", "second", "state", "code", "facts"),
    [
        pytest.param(shows(True, "training"), shows(True, "rendezvous"), "rendezvous", None, "2 of 2", id="rendezvous"),
        pytest.param(
            shows(False, "succeeded", 0), shows(False, "succeeded", 0), "succeeded", 0, "code 0", id="succeeded"
        ),
        pytest.param(
            shows(True, "training"), GONE, "running", None, f"box2 (node 1) {LOST_HOST}", id="running-and-gone"
        ),
        pytest.param(
            shows(True, "training", steps="1.0,5"),
            GONE,
            "training",
            None,
            f"box2 (node 1) {LOST_HOST}",
            id="training-and-gone",
        ),
        pytest.param(
            shows(True, "training", steps="1.0,5\n2.0,"),
            shows(True, "training"),
            "running",
            None,
            "2 of 2",
            id="restarted",
        ),
        pytest.param(
            shows(False, "failed", 3), GONE, "failed", 3, f"code 3; box2 (node 1) {LOST_HOST}", id="failed-and-gone"
        ),
        pytest.param(GONE, lost(0), "failed", 137, f"node 0 was lost; box1 (node 0) {LOST_HOST}", id="node-0-gone"),
        pytest.param(lost(1), GONE, "failed", 137, f"node 1 was lost; box2 (node 1) {LOST_HOST}", id="node-1-gone"),
        pytest.param(shows(True, "training", steps="1.0,5"), lost(0), "training", None, "1 of 2", id="goes-on-alone"),
        pytest.param(GONE, GONE, "unknown", None, f"box1 (node 0) {LOST_HOST}", id="gone"),
        pytest.param(shows(False), shows(False), "lost", 137, "node.log", id="silent"),
    ],
)
def test_the_status_of_a_run_follows_from_what_its_hosts_show(
    first: Output, second: Output, state: str, code: int | None, facts: str
) -> None:
    run = status(first, second)
    assert (run.state, run.code, facts in run.message) == (state, code, True)


ELASTIC = replace(RUN, job=replace(RUN.job, nodes="1:2"), options=asdict(OPTIONS))


def test_node_0_of_an_elastic_run_may_train_on_where_it_does_not_answer() -> None:
    elastic = status(GONE, lost(0), run=ELASTIC)
    assert (elastic.state, elastic.code, elastic.remains) == ("unknown", None, False)
    assert f"box1 (node 0) {LOST_HOST}" in elastic.message
    assert status(GONE, lost(0)).remains
    assert not status(lost(1), GONE).remains, "what is left of node 0 is unknown"


def test_logs_ask_the_node_of_a_rank() -> None:
    query = LogQuery(follow=True, ranks=(2, 3), tail=5)
    logs = only(perform(SshTarget(OPTIONS).logs(RUN, query), {})[0])
    assert (logs.host, logs.mode, logs.timeout_s) == (HOSTS[1].host, "stream", None)
    assert logs.stdin == scripts.logs("~/.ddpctl", "night", 1, query.files(RUN)[1], query)
    with pytest.raises(NoInputError, match="'night'"):
        perform(SshTarget(OPTIONS).logs(RUN, LogQuery(nodes=(1,))), {"": Output(returncode=66)})


def test_stop_asks_every_host() -> None:
    answers = {"": by_host(*(Output(returncode=0, stdout=f'{{"alive": {alive}}}\n') for alive in ("false", "true")))}
    asked, gone = perform(SshTarget(OPTIONS).stop(RUN, signal="TERM"), answers)
    assert not gone
    assert asked[0].stdin == (
        "ids=$(docker ps --all --quiet --filter label=ddpctl.run=night --filter label=ddpctl.node=0) || exit\n"
        '[ -z "$ids" ] || docker kill --signal TERM $ids >/dev/null 2>&1 || true\n'
        'if [ -n "$ids" ]; then timeout 35 docker wait ddpctl-night-0 >/dev/null 2>&1; fi\n'
        "n=0\n"
        "while ids=$(docker ps --all --quiet --filter label=ddpctl.run=night --filter label=ddpctl.node=0) "
        '&& [ -n "$ids" ] && [ $n -lt 10 ]; do sleep 0.2; n=$((n + 1)); done\n'
        """if [ -z "$ids" ]; then echo '{"alive": false}'; else echo '{"alive": true}'; fi\n"""
    )
    asked, _ = perform(SshTarget(OPTIONS).stop(RUN, signal="INT", wait=False), answers)
    assert "docker kill --signal INT $ids " in str(asked[0].stdin)
    asked, _ = perform(SshTarget(BARE).stop(RUN, signal="INT", wait=False), answers)
    assert " ddprun.nodectl signal --signal INT --wait 0 " in str(asked[0].stdin)


def test_a_host_that_does_not_answer_to_stop_is_named() -> None:
    answers = {"": by_host(Output(returncode=0, stdout='{"alive": false}\n'), GONE)}
    with pytest.raises(UnavailableError) as error:
        perform(SshTarget(BARE).stop(RUN, signal="KILL"), answers)
    assert str(error.value).splitlines()[1:] == [f"box2 (node 1): {GONE.stderr}"]


def test_execute_goes_into_the_container() -> None:
    asked, code = perform(
        SshTarget(OPTIONS).execute(RUN, node=1, argv=("nvidia-smi",), tty=False), {"": Output(returncode=9)}
    )
    command = only(asked)
    assert (command.argv, command.host, command.mode, code) == (
        ("docker", "exec", "--env=A=b c", "ddpctl-night-1", "nvidia-smi"),
        HOSTS[1].host,
        "stream",
        9,
    )
    command = only(perform(SshTarget(BARE).execute(RUN, node=0, argv=("echo", "a b"), tty=True), {"": OK})[0])
    assert (command.argv, command.mode) == (("/bin/sh", "-c", "cd \"$HOME\"/ && A='b c' echo 'a b'"), "tty")
