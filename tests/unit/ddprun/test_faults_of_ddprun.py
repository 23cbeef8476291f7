"""What ends ddprun itself: values in the store that no ddprun writes, a supervisor that dies, a thread that ends."""

import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from tests.contract.ddprun import test_processes
from tests.messages import refused
from torch.distributed import HashStore

from ddprun.agent import GIVE_UP_S, NodeAgent
from ddprun.main import CRASH_LOG, end_on_thread_error, end_without_disk
from ddprun.settings import node_config, options
from ddprun.system import stores
from ddprun.system.errors import NodeError, config_error, node_error
from ddprun.system.restart_policy import Failure
from ddpwire.exits import Exit


@pytest.mark.parametrize("value", [b"garbage", b"[1]", b"{}", b'{"token": ', b"\xff"])
def test_a_value_that_no_ddprun_writes_is_refused(value):
    with pytest.raises(NodeError) as error:
        stores.decode("claim/1", value, lambda claim: str(claim["token"]))
    assert (error.value.code, error.value.outcome.cause) == (Exit.UNAVAILABLE, "unavailable")
    assert "claim/1" in str(error.value)
    assert stores.decode("claim/1", b'{"token": "a"}', lambda claim: str(claim["token"])) == "a"


SECRET = test_processes.SECRET
secret = test_processes.secret  # the fixture


def test_a_value_that_no_node_of_the_run_has_signed_is_refused():
    wrapped = HashStore()
    ours = stores.SignedStore(wrapped, SECRET.encode(), "night")
    ours.set("a", "1")
    assert (ours.get("a"), ours.compare_set("b", "", "2"), ours.compare_set("a", "", "3")) == (b"1", b"2", b"1")
    assert wrapped.get("a").startswith(stores.SIGNED)
    forged = {
        "none": "1",
        "wrong": f"{stores.SIGNED.decode()}{64 * '0'} 1",
        "of another key": wrapped.get("b").decode(),
        "of another run": signature_of("1", SECRET, "day"),
        "with another secret": signature_of("1", SECRET[::-1], "night"),
    }
    for value in forged.values():
        wrapped.set("a", value)
        for read in (lambda: ours.get("a"), lambda: ours.compare_set("a", "", "1")):
            with pytest.raises(NodeError) as error:
                read()
            assert (error.value.code, error.value.outcome.cause) == (Exit.UNAVAILABLE, "unavailable")
        assert "'a'" in str(error.value)
    with refused(NodeError, code=Exit.CONFIG):
        stores.SignedStore(wrapped, b"", "night").get("b")


def signature_of(value, secret, run_id):
    store = HashStore()
    stores.SignedStore(store, secret.encode(), run_id).set("a", value)
    return store.get("a").decode()


@pytest.mark.parametrize("case", ["missing", "readable", "short", "fifo"])
def test_a_secret_that_cannot_be_one_is_refused(case, secret):
    match case:
        case "missing":
            secret.unlink()
        case "readable":
            secret.chmod(0o644)
        case "short":
            secret.write_text("short\n")
        case "fifo":
            secret.unlink()
            os.mkfifo(secret, 0o600)
    with refused(NodeError, f"DDP_SECRET_FILE is {secret}", code=Exit.CONFIG):
        node_config.read_secret({"DDP_SECRET_FILE": str(secret)})


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [
        ("consensus", ValueError("bad"), Exit.SOFTWARE),
        ("consensus", config_error("bad"), Exit.CONFIG),
        ("history", ValueError("bad"), None),
    ],
    ids=["fault", "refusal", "measuring"],
)
def test_a_thread_that_ends_with_an_exception_ends_the_node_unless_it_only_measures(name, error, code, tmp_path):
    outcomes, lines = [], []

    class End:
        folder = SimpleNamespace(path=tmp_path)
        console = SimpleNamespace(log=lines.append)

        def __call__(self, outcome):
            outcomes.append(outcome)

    args = SimpleNamespace(
        exc_type=type(error), exc_value=error, exc_traceback=None, thread=threading.Thread(name=name)
    )
    end_on_thread_error(args, End())
    assert [outcome.code for outcome in outcomes] == ([code] if code else [])
    assert len(lines) == (code is None)
    assert (tmp_path / CRASH_LOG).exists() == (code == Exit.SOFTWARE)


def test_a_node_without_its_disk_tells_the_others_why_it_ends(monkeypatch):
    posted, error = [], node_error(Exit.CANNOT_WRITE, "unavailable", "the disk of /run")
    own = SimpleNamespace(post_failure=posted.append, wait=posted.append)
    monkeypatch.setattr(NodeAgent, "_start_consensus", lambda _: own)
    monkeypatch.setattr(os, "_exit", sys.exit)
    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    node = mock.MagicMock(config=config)
    NodeAgent(node, mock.MagicMock())
    with pytest.raises(SystemExit) as end:
        end_without_disk(node.workers, mock.MagicMock(), mock.MagicMock(), error)
    assert end.value.code == Exit.CANNOT_WRITE
    failure = Failure(node=0, rank=0, status=Exit.CANNOT_WRITE, refused=str(error))
    assert posted == [failure, GIVE_UP_S]  # it waits until they have heard


def test_no_scrape_misses_a_rank_that_ends():
    agent, ranks = mock.MagicMock(), {"ddp_ranks_alive": 1, "ddp_ranks_done": 0}
    scrapes = []

    def scrape(metric, value):
        ranks[metric.name] = value
        scrapes.append(sum(ranks.values()))

    agent.consensus.decision, agent._num_succeeded, agent._first_rank, agent._node.workers.alive = None, 0, 0, ()
    agent._failure.return_value = SimpleNamespace(oom="", stopped_by="", step=3)
    agent._rendezvous_handler.attempt, agent._was_stopped.return_value = 1, False
    agent._node.series.set = scrape
    NodeAgent._on_exit(agent, "1.0", 0)
    assert (ranks, min(scrapes)) == ({"ddp_ranks_alive": 0, "ddp_ranks_done": 1}, 1)
