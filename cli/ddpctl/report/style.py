"""How the page looks: on paper and on a screen, light and dark."""

# https://colorbrewer2.org: told apart by who sees no red or green, too.
PHASES = {
    "data": "#80b1d3",
    "h2d": "#8dd3c7",
    "forward": "#4daf4a",
    "backward": "#1b7837",
    "comm_exposed": "#e08214",
    "optimizer": "#e6c229",
    "other": "#9a9a9a",
    "queue": "#bdbdbd",
    "start": "#9e9ac8",
    "preflight": "#80b1d3",
    "rendezvous": "#4292c6",
    "import": "#2171b5",
    "restore": "#8dd3c7",
    "first-step": "#e6c229",
    "training": "#1b7837",
    "running": "#1b7837",
    "evaluation": "#4daf4a",
    "checkpoints": "#b07aa1",
    "lost": "#c0392b",
    "end": "#bdbdbd",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #626a73; --paper: #fff; --card: #f6f7f9; --rule: #dfe3e8;
  --bad: #c0392b; --line: #2171b5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4af; --paper: #15181c; --card: #1e2329;
  --rule: #323a43; --bad: #ef6b5b; --line: #6baed6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0; font-size: 26px; }
h2 { margin: 32px 0 8px; font-size: 17px; }
p { margin: 4px 0; }
.soft { color: var(--soft); }
pre, .mono { font-family: ui-monospace, monospace; font-size: 13px; }
.badge { display: inline-block; margin-left: 10px; padding: 2px 10px; border-radius: 12px; color: #fff;
  font-size: 14px; vertical-align: 4px; background: #626a73; }
.badge.succeeded, .badge.training { background: #1b7837; }
.badge.failed, .badge.lost { background: #c0392b; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0; }
.tile { flex: 1 1 120px; padding: 10px 14px; border-radius: 8px; background: var(--card); }
.tile b { display: block; font-size: 20px; }
.tile span { color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-family: system-ui, sans-serif; }
svg .label { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; }
.dot { fill: var(--line); }
.hover { fill: transparent; }
.hover:hover { fill: var(--ink); fill-opacity: .08; }
.mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; }
.mark.bad { stroke: var(--bad); stroke-width: 2; }
.key { color: var(--soft); font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px; border-radius: 2px; }
.key i:first-child { margin-left: 0; }
table { border-collapse: collapse; width: 100%; }
.wide { overflow-x: auto; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
td.mono { overflow-wrap: anywhere; }
tr.other td { color: var(--bad); font-weight: 600; }
pre { padding: 12px; border-radius: 8px; background: var(--card); overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; }
footer { margin-top: 36px; color: var(--soft); font-size: 13px; }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } svg, .tiles { break-inside: avoid; } }
""" + "".join(
    f".area.{name}, .bar.phase-{name}, .key .{name} {{ fill: {colour}; background: {colour}; }}\n"
    for name, colour in PHASES.items()
)  # fmt: skip
