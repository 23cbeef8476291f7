"""The table of bench/train.py: the rate of each way, its ratio to the tutorial's rate, and the goals."""

import statistics

import measuring

GOALS = {  # images per CPU-second over the tutorial's, and over the best framework's in float32
    1: {"ConvNet": (2.9, 1.9), "ImageClassifier": (2.2, 1.7), "ResNet-18": (1.4, 1.1)},
    2: {"ConvNet": (2.4, 1.9), "ImageClassifier": (2.0, 1.7), "ResNet-18": (1.2, 1.1)},
}


def table(found: dict[str, dict[str, list[float]]], ranks: int) -> list[str]:
    """Return the lines of the table. A ratio is a way's rate, divided by the tutorial's rate in the same round."""
    lines = [f"{'':28}{'images/s':>10}{'over the tutorial':>20}{'min':>7}{'max':>7}{'n':>4}"]
    for model, rates in found.items():
        lines.append(model)
        base = rates["tutorial"]
        for name, values in rates.items():
            ratios = [mine / theirs for mine, theirs in zip(values, base, strict=True)]
            rate, middle = statistics.median(values), statistics.median(ratios)
            spread = f"{min(ratios):7.2f}{max(ratios):7.2f}{len(ratios):4}"
            lines.append(f"  {name:26}{rate:10.0f}{middle:20.2f}{spread}")
        lines += goals(model, rates, ranks)
    return lines


def goals(model: str, rates: dict[str, list[float]], ranks: int) -> list[str]:
    """Return lines that say whether the goals for a model are reached."""
    if model not in GOALS.get(ranks, {}) or "ddptrain" not in rates:
        return []
    lines = []
    plain, best = GOALS[ranks][model]
    ratio = measuring.ratio(rates["ddptrain"], rates["tutorial"])
    lines.append(f"  goal: {plain} x the tutorial: {'reached' if ratio >= plain else 'NOT reached'} ({ratio:.2f})")
    for suffix, what in (("", "in float32"), (" bf16", "in their bf16")):
        names = [name for name in rates if name in {f"{one}{suffix}" for one in ("fabric", "accelerate", "lightning")}]
        if names:
            top = max(names, key=lambda name: statistics.median(rates[name]))
            over = measuring.ratio(rates["ddptrain"], rates[top])
            goal = f", goal {best}: {'reached' if over >= best else 'NOT reached'}" if not suffix else ""
            lines.append(f"  over the best framework {what} ({top}): {over:.2f}{goal}")
    return lines
