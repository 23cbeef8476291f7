"""What a node's endpoint said at one moment, as numbers. Pure; it knows the form of metrics, not their meaning."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpctl.look import Seen


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One node's samples: by the series' name, each with its labels."""

    node: int
    time: float  # the node's clock, in seconds since the epoch
    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]] = field(default_factory=dict)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The values of a series that has these labels, by another one's value."""
        return {
            said[label]: value
            for said, value in self.samples.get(name, ())
            if label in said and said.items() >= labels.items()
        }

    def values(self, name: str, **labels: str) -> list[float]:
        """All values of a series that has these labels."""
        return [value for said, value in self.samples.get(name, ()) if said.items() >= labels.items()]

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the one sample of a series that is always 1; of none, none."""
        return next((said for said, _ in self.samples.get(name, ())), {})


def read(seen: Seen) -> Reading | None:
    """What a node said of itself; None: it said nothing that can be read."""
    from prometheus_client.parser import text_string_to_metric_families

    if not seen.metrics or seen.time is None:
        return None
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(seen.metrics):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError):
        return None  # it was cut short, or is no Prometheus text
    return Reading(node=seen.node, time=seen.time, samples={name: tuple(said) for name, said in samples.items()})
