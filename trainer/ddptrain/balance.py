"""How each global batch is divided among the ranks: in equal shares, in given ones, or by the ranks' measured speeds.

The mean of the ranks' gradients is exact for any division (`BatchShard`). A speed is a rank's share of the batch,
divided by its own mean time of a step, without the time in which it waits for other ranks. The shares change only after
an epoch. They are part of the checkpoint, so that an interrupted epoch continues with the same shares.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ddptrain.config import SHARDED, Options
from ddptrain.data.sampling import BatchShard, shard_of
from ddptrain.distributed import RankInfo, gather
from ddptrain.errors import config_error
from ddptrain.step_timing import Phases

MIN_STEPS = 10  # measured before the shares change; a shorter epoch is measured together with the next one
MIN_GAIN = 0.05  # of the time of a step: smaller differences are noise
RESOLUTION = 1000  # the sum of measured shares


class Balance:
    """The ranks' shares of each batch. Every rank has the same."""

    def __init__(self, options: Options, rank_info: RankInfo) -> None:
        """Raises TrainError if the options cannot be combined, or if there is not one share for each rank."""
        given, size = options.ranks.balance, rank_info.size
        self._rank_info, self.is_measured = rank_info, given == "auto" and size > 1
        self.shares = (1,) * size
        if given not in ("off", "auto"):
            self.shares = tuple(map(int, given.split(":")))
        if len(self.shares) != size:
            message = f"--balance {given}: the number of shares is {len(self.shares)}, and that of ranks is {size}"
            raise config_error(message, hint="give one share for each rank, or auto", rank=None)
        strategy = options.ranks.strategy
        for flag, is_conflict, reason in (
            ("--deterministic", options.machine.deterministic, "measured times differ from run to run"),
            (f"--strategy {strategy}", strategy in SHARDED, "its ranks wait for each other in every layer"),
        ):
            if is_conflict and self.is_measured:
                hint = "give the shares, as auto logs them, such as --balance 2:1"
                raise config_error(f"--balance auto cannot be used with {flag}: {reason}", hint=hint, rank=None)

    def shard_of(self, batch_N: Tensor) -> BatchShard:  # noqa: N803 - tensors carry their shape in their name
        """Return this rank's shard of a global batch."""
        return shard_of(batch_N, rank=self._rank_info.rank, shares=self.shares)

    def percent(self, rank: int) -> float | None:
        """Return a rank's share of a batch in percent, or None if all shares are equal."""
        return 100 * self.shares[rank] / sum(self.shares) if len({*self.shares}) > 1 else None

    def adapt(self, phases: Phases) -> bool:
        """Change the shares to the measured speeds if that shortens the steps. Return whether they have changed.

        Call this on every rank after an epoch.
        """
        own_s = gather(self._rank_info, phases.own_total_s / phases.num_own if phases.num_own >= MIN_STEPS else 0.0)
        if not all(own_s):
            return False
        phases.forget_own()
        shares, step_s = measured_shares(self.shares, own_s)
        if max(own_s) < (1 + MIN_GAIN) * step_s:
            return False
        self.shares = shares
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the shares, for a checkpoint."""
        return {"shares": [*self.shares]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Continue with the shares of a checkpoint. Another number of ranks is measured anew."""
        if len(values["shares"]) == len(self.shares):
            self.shares = tuple(values["shares"])


def measured_shares(shares: Sequence[int], own_s: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """Return the shares with which all ranks need the same time for a step, and this time in seconds.

    ``own_s`` are the ranks' own mean times of a step with the present ``shares``.
    """
    speeds = [share / sum(shares) / seconds for share, seconds in zip(shares, own_s, strict=True)]
    step_s = 1 / sum(speeds)
    return tuple(max(1, round(RESOLUTION * speed * step_s)) for speed in speeds), step_s
