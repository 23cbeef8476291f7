"""The time before ranks were started, by what it went for."""

from ddprank.heartbeat import Beat
from ddprun.metrics.recovery import Downtime


def test_the_first_start_of_a_run_has_met_and_a_later_one_has_waited_too() -> None:
    assert Downtime(began_at=10.0).started(12.5) == "rendezvous=2.500,at=12.500"
    again = Downtime(began_at=10.0, requeued_s=90.04)
    assert again.requeued == {"requeued_s": 90.0}
    assert again.started(11.0) == "requeue=90.040,rendezvous=1.000,at=11.000"


def test_after_a_failure_the_time_since_the_last_sign_of_life_is_lost() -> None:
    downtime = Downtime(began_at=0.0)
    downtime.started(2.0)
    downtime.ended(50.0, hung=True, beats=[Beat(step=3, at_s=19.0), Beat(step=3, at_s=20.0)])
    assert downtime.started(51.0) == "hang=30.000,rendezvous=1.000,at=51.000"
    downtime.ended(53.0, hung=False, beats=[])  # before its first step: since it was started
    assert downtime.started(53.5) == "restart=2.000,rendezvous=0.500,at=53.500"
