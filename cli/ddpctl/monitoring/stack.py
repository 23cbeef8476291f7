"""Prometheus and Grafana in a box: every file of the folder from which docker compose runs the two.

compose.yaml is the same everywhere; what differs between machines stands in ``.env`` beside it, which compose reads.
"""

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from ddpctl.monitoring.limits import Limits
from ddpctl.monitoring.prometheus import Scraping, prometheus_yml
from ddpctl.monitoring.rule_files import dump, groups

PROJECT = "ddpctl-monitor"
BOXED_TARGETS = "/targets"  # where the containers see the folder of the targets
DASHBOARDS = ("run", "fleet")

COMPOSE = """\
# Prometheus and Grafana for the runs of this machine: `ddpctl monitor up` writes this folder and starts it. By hand:
#
#   TARGETS=~/.local/state/ddpctl/runs/.targets docker compose -f docker/monitoring/compose.yaml up -d
#
# Both are on the host's network, because a run on one machine answers at 127.0.0.1 alone, and listen there alone:
# to see Grafana from elsewhere, ssh -L 3000:127.0.0.1:3000. Nobody logs in; who reaches it may look and change nothing.
# Written for docker compose v2 and docker-compose 1.29.

x-careful: &careful
  network_mode: host
  user: ${OWNER:-65534:65534} # must be able to read TARGETS
  read_only: true
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  restart: unless-stopped

services:
  prometheus:
    <<: *careful
    image: ${PROMETHEUS_IMAGE:-docker.io/prom/prometheus:v3.5.0}
    command:
      - --config.file=/etc/prometheus/prometheus.yml
      - --storage.tsdb.path=/prometheus
      - --storage.tsdb.retention.time=${RETENTION:-30d}
      - --web.listen-address=127.0.0.1:${PROMETHEUS_PORT:-9090}
    volumes:
      - ./prometheus.yml:/etc/prometheus/prometheus.yml:ro
      - ./rules.yaml:/etc/prometheus/rules.yaml:ro
      - ${TARGETS:-./targets}:/targets:ro
      - ${PROMETHEUS_DATA:-prometheus}:/prometheus
  grafana:
    <<: *careful
    image: ${GRAFANA_IMAGE:-docker.io/grafana/grafana:11.6.0}
    environment:
      GF_SERVER_HTTP_ADDR: 127.0.0.1
      GF_SERVER_HTTP_PORT: ${GRAFANA_PORT:-3000}
      GF_AUTH_ANONYMOUS_ENABLED: "true"
      GF_AUTH_ANONYMOUS_ORG_ROLE: Viewer
      GF_AUTH_DISABLE_LOGIN_FORM: "true"
      GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION: "true"
      GF_ANALYTICS_REPORTING_ENABLED: "false"
      GF_ANALYTICS_CHECK_FOR_UPDATES: "false"
      GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES: "false"
      GF_PLUGINS_PREINSTALL_DISABLED: "true" # it would download some
      GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: /dashboards/fleet.json
      GF_PATHS_PROVISIONING: /provisioning
      GF_LOG_MODE: console
      PROMETHEUS_URL: http://127.0.0.1:${PROMETHEUS_PORT:-9090}
    tmpfs: /tmp
    volumes:
      - ./provisioning:/provisioning:ro
      - ${DASHBOARDS:-../../cli/ddpctl/monitoring}:/dashboards:ro
      - ${GRAFANA_DATA:-grafana}:/var/lib/grafana

volumes:
  prometheus:
  grafana:
"""

_SOURCES = {
    "apiVersion": 1,
    "datasources": [
        {
            "name": "Prometheus",
            "type": "prometheus",
            "uid": "prometheus",
            "access": "proxy",
            "url": "$PROMETHEUS_URL",
            "isDefault": True,
            "editable": False,
        }
    ],
}
_PROVIDERS = {
    "apiVersion": 1,
    "providers": [
        {
            "name": "ddpctl",
            "folder": "ddpctl",
            "type": "file",
            "allowUiUpdates": False,
            "options": {"path": "/dashboards"},
        }
    ],
}


@dataclass(frozen=True, kw_only=True)
class Box:
    """What ``.env`` says of this machine."""

    targets: Path
    owner: str  # uid:gid
    prometheus_port: int
    grafana_port: int
    retention: str
    folder: Path


def dashboard(name: str) -> str:
    """One of DASHBOARDS, as Grafana reads it."""
    return (resources.files("ddpctl.monitoring") / f"{name}.json").read_text()


def prometheus_files(scraping: Scraping, limits: Limits) -> dict[str, str]:
    """What a Prometheus reads, by path inside the folder."""
    return {"prometheus.yml": prometheus_yml(scraping), "rules.yaml": groups(limits)}


def dashboard_files() -> dict[str, str]:
    """The dashboards, by path inside the folder."""
    return {f"dashboards/{name}.json": dashboard(name) for name in DASHBOARDS}


def compose_files(scraping: Scraping, limits: Limits) -> dict[str, str]:
    """docker/monitoring: all but the dashboards and what is a machine's own."""
    return {
        **prometheus_files(replace(scraping, targets=BOXED_TARGETS), limits),
        "compose.yaml": COMPOSE,
        "provisioning/datasources/prometheus.yaml": dump(_SOURCES),
        "provisioning/dashboards/ddpctl.yaml": dump(_PROVIDERS),
    }


def env_file(box: Box) -> str:
    """``.env``. Data lies in folders of the user's own, so that no container needs root to make them."""
    values = {
        "TARGETS": box.targets,
        "OWNER": box.owner,
        "PROMETHEUS_PORT": box.prometheus_port,
        "GRAFANA_PORT": box.grafana_port,
        "RETENTION": box.retention,
        "DASHBOARDS": box.folder / "dashboards",
        "PROMETHEUS_DATA": box.folder / "data" / "prometheus",
        "GRAFANA_DATA": box.folder / "data" / "grafana",
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())
