"""The dashboard and the alerts: each query names what is documented and really scraped, and Prometheus and Grafana take it."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.dashboard import ROWS, VARIABLES, dashboard
from tests.chart import recording
from tests.chart.grafana import KINDS, Types
from tests.chart.helm import CHART, Helm
from tests.chart.prometheus import Prometheus
from tests.chart.promql import named
from tests.chart.test_values import SCHEMA

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
ALERTS = CHART / "alerts" / "gpu-plugin.yaml"
CASES = HERE / "alert_cases.yaml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
SHOWN = [(row, show, legend, query) for row in ROWS for show in row.panels for legend, query in show.queries.items()]

OF_TARGETS = {"cluster", "node", "instance", "job"}
"""Labels that the scrape adds: those of the PodMonitor, and `cluster` for several clusters."""

KUBE_STATE_METRICS = {
    f"kube_daemonset_status_{name}": {"namespace", "daemonset"}
    for name in ("number_unavailable", "updated_number_scheduled")
}
"""github.com/kubernetes/kube-state-metrics, docs/metrics/workload/daemonset-metrics.md: the metrics that queries use."""

TEMPLATED = re.compile(r'printf "(.*?)" (?:\$labels\.\w+ )+\| query')


def _queries() -> Iterator[tuple[str, str]]:
    """Yield the place of each query, and the query."""
    for row, show, _, query in SHOWN:
        yield f"{row.title}: {show.title}", query
    for name, asked in VARIABLES.items():
        yield f"variable {name}", asked.removeprefix("label_values(").rpartition(",")[0]
    for name, rule in RULES.items():
        yield name, rule["expr"]
        for text in rule["annotations"].values():
            for asked in TEMPLATED.findall(text):
                yield f"{name}, annotation", asked.replace('\\"', '"').replace("%q", '"x"')


QUERIES = [*_queries()]


def _documented() -> dict[str, set[str]]:
    """Labels by metric, as the tables of docs/metrics.md have them."""
    found: dict[str, set[str]] = {}
    of_gpu = False
    for line in (DOCS / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            of_gpu = line in {"## GPUs", "## Readings"}
        if line.startswith("| `gpu_plugin_"):
            name, kind, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            labels = {"uuid", "index"} if of_gpu else set[str]()
            labels |= set(re.findall(r"`([a-z_]+)`", cells[0]))
            bare = name.strip("`")
            for each in (bare, *(f"{bare}_{end}" for end in ("bucket", "sum", "count") if kind == "histogram")):
                found[each] = labels | ({"le"} if each.endswith("_bucket") else set())
    return found


@pytest.fixture(scope="session")
def scrapes() -> recording.Scrapes:
    """Two nodes before and after faults."""
    return recording.record()


@pytest.fixture(scope="session")
def prometheus(programs: Prometheus, scrapes: recording.Scrapes) -> Iterator[recording.Recorded]:
    """A Prometheus with these scrapes."""
    with recording.replayed(programs, scrapes) as running:
        yield running


@pytest.mark.parametrize(("where", "expr"), QUERIES)
def test_a_query_names_documented_metrics_and_labels(where: str, expr: str) -> None:
    documented = {**_documented(), **KUBE_STATE_METRICS}
    assert len(documented) > 60
    asked = named(expr)
    assert asked.metrics, where
    everything = OF_TARGETS.union(*(documented.get(name, set()) for name in asked.metrics))
    for name, labels in asked.metrics.items():
        assert name == "up" or name in documented
        assert labels <= documented.get(name, set()) | OF_TARGETS
    assert asked.grouped <= everything


def test_queries_name_metrics_and_labels_of_a_real_scrape(scrapes: recording.Scrapes) -> None:
    scraped = {**recording.names_and_labels(scrapes), **KUBE_STATE_METRICS}
    wrong = [
        (where, name, labels - scraped.get(name, set()) - OF_TARGETS)
        for where, expr in QUERIES
        for name, labels in named(expr).metrics.items()
        if name != "up" and (name not in scraped or labels - scraped[name] - OF_TARGETS)
    ]
    assert wrong == []


def _asked(expr: str) -> str:
    """A query as Grafana sends it where All is chosen."""
    for name in ("cluster", "node", "gpu"):
        expr = expr.replace(f"${name}", ".*")
    return expr.replace("$__rate_interval", "4m")


@pytest.mark.timeout(900)  # with the processor time that a cluster leaves
def test_every_panel_shows_something_of_nodes_in_trouble(prometheus: recording.Recorded) -> None:
    empty, faults = [], []
    for row, show, legend, query in SHOWN:
        found = prometheus.ask(_asked(query), instant=show.of_now)
        where = f"{row.title}: {show.title}: {query}"
        if not found:
            empty.append(where)
        for series in found:
            named_labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
            if missing := named_labels - set(series["metric"]):
                faults.append(f"{where}: no label {missing}")
        if show.kind == "table" and found:
            columns = {name for name in show.columns if not name.startswith("Value")}
            faults += [f"{where}: no column {each}" for each in columns - set(found[0]["metric"])]
    assert (empty, faults) == ([], [])


def test_what_the_panels_say_of_these_nodes_is_so(prometheus: recording.Recorded) -> None:
    def value(title: str) -> float:
        (query,) = (query for _, show, _, query in SHOWN if show.title == title and show.kind == "stat")
        (series,) = prometheus.ask(_asked(query), instant=True)
        return float(series["value"][1])

    assert {title: value(title) for title in ("Nodes", "GPUs", "Devices held", "Nodes without driver")} == {
        "Nodes": 2,
        "GPUs": 16,
        "Devices held": 7,
        "Nodes without driver": 0,
    }
    # Four GPUs have an Xid and another is cordoned. The failing GPU and the hanging GPU follow within some time.
    assert 5 <= value("Unhealthy") <= 7
    (held_back,) = (query for _, show, _, query in SHOWN if show.title == "GPUs held back by operators")
    told = [series["metric"] for series in prometheus.ask(_asked(held_back), instant=True)]
    assert [(each["node"], each["index"], each["by"]) for each in told] == [
        ("node-2", str(recording.HELD_BACK), "cordon")
    ]
    (hit,) = (query for _, show, _, query in SHOWN if show.title == "Pods on Unhealthy GPUs")
    pods = {series["metric"]["pod"] for series in prometheus.ask(_asked(hit), instant=True)}
    assert "train-0" in pods
    assert "notebook" not in pods


def test_no_query_minds_that_a_plugin_was_restarted(prometheus: recording.Recorded) -> None:
    # In the middle of the time each node has two targets, and a join must be one to one.
    for where, expr in QUERIES:
        if not where.startswith("variable"):
            assert isinstance(prometheus.ask(_asked(expr), instant=False), list), where


def test_a_pod_is_the_one_that_holds_the_gpu(helm: Helm, prometheus: recording.Recorded) -> None:
    (monitor,) = (each for each in helm.objects({"podMonitor": {"enabled": True}}) if each["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True  # as the recorded series have it
    assert {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"} in endpoint["relabelings"]
    (query,) = (query for _, show, _, query in SHOWN if show.title == "Power by pod")
    pods = {series["metric"]["pod"] for series in prometheus.ask(_asked(query), instant=False)}
    assert pods == {"train-0", "train-1", "notebook"}


def test_alerts_fire_for_these_nodes_in_prometheus(prometheus: recording.Recorded) -> None:
    found = {
        name: prometheus.ask(rule["expr"], instant=True) for name, rule in RULES.items()
    }  # Prometheus accepts each query
    assert {series["metric"]["node"] for series in found["GpuUnhealthy"]} == {"node-1"}
    assert {series["metric"]["node"] for series in found["GpuTemperatureNearThreshold"]} == {"node-2"}
    assert found["GpuPluginMetricsMissing"] == found["GpuPluginDown"] == found["GpuDriverTrouble"] == []


def test_grafanas_types_have_every_field_of_the_dashboard(grafana_types: Types) -> None:
    made = dashboard()
    assert grafana_types.faults(made) == []
    assert {show.kind for _, show, *_ in SHOWN} <= set(KINDS)


def test_grafanas_types_find_what_is_wrong(grafana_types: Types) -> None:
    for change, told in (
        (lambda panel: panel["options"].update(grapMode="none"), "grapMode"),
        (lambda panel: panel["fieldConfig"]["defaults"]["color"].update(mode="rainbow"), "rainbow"),
        (lambda panel: panel["gridPos"].update(w="3"), "number"),
    ):
        wrong = json.loads(json.dumps(dashboard()))
        change(next(panel for panel in wrong["panels"] if panel["type"] == "stat"))
        assert told in " ".join(grafana_types.faults(wrong))


def _all_panels(made: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for panel in made["panels"]:
        yield panel
        yield from panel.get("panels", ())


def test_panels_have_places_and_numbers_of_their_own() -> None:
    panels = [*_all_panels(dashboard())]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["description"].endswith(".") for panel in panels if panel["type"] != "row")


def test_readings_have_the_unit_of_their_name() -> None:
    units = {"celsius": "celsius", "watts": "watt", "ratio": "percentunit", "seconds": "s"}
    for _, show, _, query in SHOWN:
        if show.kind in {"timeseries", "stat"}:
            ends = {name.removesuffix("_bucket").rpartition("_")[2] for name in named(query).metrics}
            expected = {units[end] for end in ends if end in units}
            assert expected <= {show.unit}, show.title


def test_promtool_takes_the_rules_and_every_case_holds(programs: Prometheus, helm: Helm, tmp_path: Path) -> None:
    (rule,) = (each for each in helm.objects({"prometheusRule": {"enabled": True}}) if each["kind"] == "PrometheusRule")
    (tmp_path / "rendered.yaml").write_text(yaml.safe_dump(rule["spec"]))
    for verb, *files in (("check", ALERTS, tmp_path / "rendered.yaml"), ("test", CASES)):
        command = [str(programs.tool), verb, "rules", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_cases_in_which_it_is_quiet_due_and_over() -> None:
    told: dict[str, list[list[bool]]] = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        (name,) = {each["alertname"] for each in case["alert_rule_test"]}
        told.setdefault(name, []).append([bool(each["exp_alerts"]) for each in case["alert_rule_test"]])
    assert set(told) == set(RULES)
    for seen in (each for cases in told.values() for each in cases):
        assert seen[0] is seen[-1] is False
        assert any(seen)


def test_every_alert_leads_to_its_section_of_the_documentation() -> None:
    headings = re.findall(r"^#+ (.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name, rule in RULES.items():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (page, anchor) == ("docs/troubleshooting.md", name.lower())
        assert anchor in anchors
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["labels"]["severity"] in {"critical", "warning"}


def test_every_alert_can_be_left_out_by_its_name(helm: Helm) -> None:
    items = SCHEMA["properties"]["prometheusRule"]["properties"]["disabled"]["items"]
    assert items["enum"] == [*RULES]
    for names in ([], [*RULES][:3], [*RULES]):
        objects = helm.objects({"prometheusRule": {"enabled": True, "disabled": names}})
        (made,) = (each for each in objects if each["kind"] == "PrometheusRule")
        kept = [rule["alert"] for group in made["spec"]["groups"] for rule in group["rules"] or ()]
        assert kept == [name for name in RULES if name not in names]


def test_the_config_map_has_the_dashboard_whole(helm: Helm) -> None:
    (made,) = (
        each
        for each in helm.objects({"dashboard": {"enabled": True}})
        if each["metadata"]["name"].endswith("-dashboard")
    )
    assert json.loads(made["data"]["gpu-plugin.json"]) == dashboard()
    assert len(json.dumps(made)) < 512 * 1024  # of the mebibyte that an object may have
