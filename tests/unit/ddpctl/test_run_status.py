"""The status of a run whose machines are lost and replaced, from what its machines have reported."""

from dataclasses import replace

from ddpctl.runs.run_status import NodeReport, fold_nodes, machine_of, present_nodes
from ddpwire.run_files import NodeState, Outcome

LOST = Outcome(code=142, cause="node_lost", message="node 0 was lost", node=0)
DONE = Outcome(code=0, cause="ok", message="every rank exited with 0", attempt=2)


def machine(number: int, state: str = "training", *, node: int | None = None, attempt: int = 1) -> NodeReport:
    """Return what a living machine reports. ``node``: the number that it has now, if it was a spare."""
    place = {"node": number} if node is None else {"node": node, "spare": number}
    reported = NodeState(run="night", pid=1, state=state, started=0.0, attempt=attempt, **place)  # type: ignore[arg-type]
    return NodeReport(node=number, alive=True, state=reported, outcome=None)


def silent(number: int) -> NodeReport:
    return NodeReport(node=number, alive=False, state=None, outcome=None, note="no answer")


def ended(report: NodeReport, outcome: Outcome) -> NodeReport:
    return replace(report, alive=False, outcome=outcome)


def test_spare_stands_for_the_lost_machine_whose_place_it_has_taken() -> None:
    status = fold_nodes("night", (machine(0), machine(1), machine(2, "spare")), young=False)
    assert (status.state, len(status.nodes)) == ("running", 3)
    assert ("2 of 2 nodes" in status.message, "1 spare" in status.message) == (True, True), "it waits, and is no node"
    nodes = (silent(0), machine(1, attempt=2), machine(2, node=0, attempt=2))
    status = fold_nodes("night", nodes, young=False)
    assert (status.state, "2 of 2 nodes" in status.message, "spare 2 is node 0" in status.message) == (
        "running", True, True,
    )  # fmt: skip
    first, second = machine(3, node=0, attempt=2), machine(4, node=0, attempt=3)
    assert present_nodes((silent(0), first, second)) == (second,), "the last one that took the place"


def test_run_that_a_cut_off_machine_has_left_goes_on_and_succeeds() -> None:
    cut_off = ended(machine(0), LOST)
    rest = (machine(1, attempt=2), machine(2, node=0, attempt=2))
    assert fold_nodes("night", (cut_off, *rest), young=False).state == "running"
    done = tuple(ended(report, DONE) for report in rest)
    assert fold_nodes("night", (cut_off, *done), young=False).code == 0
    spare = ended(machine(3), replace(LOST))
    assert fold_nodes("night", (*rest, spare), young=False).state == "running"


def test_a_node_is_addressed_by_its_number_after_spares_have_taken_its_place() -> None:
    nodes = (silent(0), machine(1, attempt=2), machine(3, node=0, attempt=2), machine(4, "spare"))
    assert [machine_of(nodes, number) for number in (0, 1, 3, 4, 9)] == [3, 1, 3, 4, 9]
    again = (*nodes, machine(5, node=0, attempt=3))
    assert machine_of(again, 0) == 5
