"""The dashboard and the alerts: each query names metrics and labels of the daemon, and Prometheus and Grafana accept it."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

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
ALL_RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
RECORDED = {rule["record"]: rule["expr"] for rule in ALL_RULES if "record" in rule}
RULES = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
DASHBOARD: Mapping[str, Any] = json.loads((CHART / "dashboards" / "gpu-plugin.json").read_text())
PANELS = [panel for top in DASHBOARD["panels"] for panel in (top, *top.get("panels", ())) if panel["type"] != "row"]
VARIABLES = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]

OF_TARGETS = {"cluster", "node", "instance", "job"}
"""Labels that the scrape adds: labels of the PodMonitor, and `cluster` for several clusters."""

OF_OTHERS: Mapping[str, set[str]] = {
    "up": set(),
    "kube_daemonset_status_desired_number_scheduled": {"namespace", "daemonset"},
    "kube_daemonset_status_updated_number_scheduled": {"namespace", "daemonset"},
}
"""Labels of the metrics of Prometheus and of kube-state-metrics that queries use.

github.com/kubernetes/kube-state-metrics, docs/metrics/workload/daemonset-metrics.md
"""

TEMPLATED = re.compile(r'printf "(.*?)" (?:\$labels\.\w+ )+\| query')


@dataclass(frozen=True)
class Query:
    """A query of a panel, with the legend of its series and whether it asks only for the present values."""

    panel: Mapping[str, Any]
    expr: str
    legend: str
    instant: bool

    @property
    def place(self) -> str:
        return f"{self.panel['title']}: {self.expr}"


SHOWN = [
    Query(panel, target["expr"], target.get("legendFormat", ""), target.get("instant", False))
    for panel in PANELS
    for target in panel["targets"]
]


def _queries() -> Iterator[tuple[str, str]]:
    """Yield the place of each query, and the query."""
    for query in SHOWN:
        yield query.place, query.expr
    for variable in VARIABLES:
        yield (
            f"variable {variable['name']}",
            variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0],
        )
    for rule in ALL_RULES:
        yield rule.get("alert", rule.get("record")), rule["expr"]
        for text in rule.get("annotations", {}).values():
            for asked in TEMPLATED.findall(text):
                yield f"{rule['alert']}, annotation", asked.replace('\\"', '"').replace("%q", '"x"')


QUERIES = [*_queries()]


@pytest.fixture(scope="session")
def scrapes() -> recording.Scrapes:
    """Two nodes before and after faults."""
    return recording.record()


@pytest.fixture(scope="session")
def prometheus(programs: Prometheus, scrapes: recording.Scrapes) -> Iterator[recording.Recorded]:
    """A Prometheus with these scrapes."""
    with recording.replayed(programs, scrapes) as running:
        yield running


def test_queries_name_metrics_and_labels_that_the_daemon_exposes(scrapes: recording.Scrapes) -> None:
    known = {**recording.names_and_labels(scrapes), **OF_OTHERS}
    known |= {name: {"uuid", "index"} for name in RECORDED}
    wrong = []
    for place, expr in QUERIES:
        asked = named(expr)
        assert asked.metrics, place
        wrong += [f"{place}: there is no metric {name}" for name in asked.metrics.keys() - known]
        metrics = {name: labels for name, labels in asked.metrics.items() if name in known}
        labels = OF_TARGETS.union(*(known[name] for name in metrics))
        wrong += [f"{place}: no label {each}" for each in asked.grouped - labels]
        for name, matched in metrics.items():
            wrong += [f"{place}: {name} has no label {each}" for each in matched - known[name] - OF_TARGETS]
    assert wrong == []


def _asked(expr: str) -> str:
    """Return a query as Grafana sends it if all values of the variables are selected."""
    for name in ("cluster", "node", "gpu"):
        expr = expr.replace(f"${name}", ".*")
    return expr.replace("$__rate_interval", "4m")


@pytest.mark.timeout(900)  # with the processor time that a cluster leaves
def test_every_panel_shows_something_of_nodes_in_trouble(prometheus: recording.Recorded) -> None:
    empty, faults = [], []
    for query in SHOWN:
        found = prometheus.ask(_asked(query.expr), instant=query.instant)
        if not found:
            empty.append(query.place)
        legend = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        lacking = (legend - set(series["metric"]) for series in found)
        faults += [f"{query.place}: no label {missing}" for missing in lacking if missing]
        if query.panel["type"] == "table" and found:
            columns = {
                name
                for each in query.panel["transformations"]
                if each["id"] == "filterFieldsByName"
                for name in each["options"]["include"]["names"]
                if not name.startswith("Value")
            }
            missing = columns.difference(*(row["metric"] for row in found))
            faults += [f"{query.place}: no column {each}" for each in missing]
    assert (empty, faults) == ([], [])


def _of(title: str, kind: str) -> Query:
    """Return the only query of a panel."""
    (query,) = (each for each in SHOWN if (each.panel["title"], each.panel["type"]) == (title, kind))
    return query


def test_panels_show_the_state_of_these_nodes(prometheus: recording.Recorded) -> None:
    def value(title: str) -> float:
        (series,) = prometheus.ask(_asked(_of(title, "stat").expr), instant=True)
        return float(series["value"][1])

    def rows(title: str) -> list[Mapping[str, str]]:
        return [series["metric"] for series in prometheus.ask(_asked(_of(title, "table").expr), instant=True)]

    titles = ("Nodes", "GPUs", "Devices held", "Nodes without driver", "Held back")
    assert [value(title) for title in titles] == [2, 16, 7, 0, 1]
    # Five GPUs have a fault. The failing GPU and the hanging GPU follow within some time. The cordoned GPU does not count.
    assert 5 <= value("Unhealthy") <= 7
    held_back = [(each["node"], each["index"], each["by"]) for each in rows("GPUs held back by operators")]
    assert held_back == [("node-2", str(recording.HELD_BACK), "cordon")]
    faults = rows("GPUs that need attention")
    assert {each["index"] for each in faults if each.get("xid") == "79"} == {"0", "1", "2", "3"}
    assert all(each["action"] for each in faults)
    assert "cordon" not in {each["signal"] for each in faults}
    pods = {each["pod"] for each in rows("Pods on Unhealthy GPUs")}
    assert "train-0" in pods
    assert "notebook" not in pods


def test_queries_survive_a_restart_of_the_plugin(prometheus: recording.Recorded) -> None:
    # In the middle of the time each node has two targets, and a join must be one to one.
    for place, expr in QUERIES:
        if not place.startswith("variable"):
            assert isinstance(prometheus.ask(_asked(expr), instant=False), list), place


def test_a_pod_is_the_one_that_holds_the_gpu(helm: Helm, prometheus: recording.Recorded) -> None:
    (monitor,) = (each for each in helm.objects({"podMonitor": {"enabled": True}}) if each["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True  # as the recorded series have it
    assert {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"} in endpoint["relabelings"]
    found = prometheus.ask(_asked(_of("Power by pod", "timeseries").expr), instant=False)
    assert {series["metric"]["pod"] for series in found} == {"train-0", "train-1", "notebook"}


def test_grafanas_types_have_every_field_of_the_dashboard(grafana_types: Types) -> None:
    assert grafana_types.faults(DASHBOARD) == []
    assert {panel["type"] for panel in PANELS} <= set(KINDS)


def test_grafanas_types_find_wrong_fields(grafana_types: Types) -> None:
    wrong = copy.deepcopy(dict(DASHBOARD))
    panel = next(each for each in wrong["panels"] if each["type"] == "stat")
    panel["options"]["grapMode"] = "none"
    panel["fieldConfig"]["defaults"]["color"]["mode"] = "rainbow"
    panel["gridPos"]["w"] = "3"
    faults = " ".join(grafana_types.faults(wrong))
    assert all(each in faults for each in ("grapMode", "rainbow", "number"))


def test_readings_have_the_unit_of_their_name() -> None:
    units = {"celsius": "celsius", "watts": "watt", "ratio": "percentunit", "seconds": "s"}
    for query in SHOWN:
        if query.panel["type"] in {"timeseries", "stat"}:
            ends = {name.removesuffix("_bucket").rpartition("_")[2] for name in named(query.expr).metrics}
            expected = {units[end] for end in ends if end in units}
            assert expected <= {query.panel["fieldConfig"]["defaults"]["unit"]}, query.place


def _promtool(programs: Prometheus, *arguments: str | Path) -> None:
    """Run promtool, and fail with its output if it fails."""
    done = subprocess.run([programs.tool, *arguments], capture_output=True, text=True, check=False, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_every_case(programs: Prometheus, helm: Helm, tmp_path: Path) -> None:
    (rule,) = (each for each in helm.objects({"prometheusRule": {"enabled": True}}) if each["kind"] == "PrometheusRule")
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(yaml.safe_dump(rule["spec"]))
    _promtool(programs, "check", "rules", ALERTS, rendered)
    _promtool(programs, "test", "rules", CASES)


def test_each_cause_on_a_node_raises_one_alert(programs: Prometheus, tmp_path: Path) -> None:
    scrapes = recording.record_incidents()
    firing = [(alert, node) for node, incident in recording.INCIDENTS.items() for alert in incident.alerts]
    case = {
        "interval": "1m",
        "input_series": [
            {"series": series, "values": f"{value}x50"}
            for node, scrape in scrapes.items()
            for series, value in recording.series(scrape, node)
            # promtool allows 10,000 samples for a query, and Xids that never happened change nothing
            if not (series.startswith("gpu_plugin_xid_errors_total") and value == "0")
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, node) (ALERTS{alertstate="firing"})',
                "eval_time": "45m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}", node="{node}"}}', "value": 1} for alert, node in firing
                ],
            }
        ],
    }
    tests = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "incidents.yaml").write_text(json.dumps(tests))
    _promtool(programs, "test", "rules", tmp_path / "incidents.yaml")


def test_every_alert_has_a_case_in_which_it_is_quiet_due_and_over() -> None:
    told: set[str] = set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        checks: dict[str, list[bool]] = {}
        for each in case["alert_rule_test"]:
            checks.setdefault(each["alertname"], []).append(bool(each.get("exp_alerts")))
        told |= {name for name, due in checks.items() if any(due) and not due[0] and not due[-1]}
    assert told == set(RULES)


def test_every_alert_leads_to_its_section_of_the_documentation() -> None:
    headings = re.findall(r"^#+ (.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name, rule in RULES.items():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (page, anchor) == ("docs/troubleshooting.md", name.lower())
        assert anchor in anchors
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["labels"]["severity"] in {"critical", "warning"}


def test_the_table_of_alerts_has_each_with_its_severity_and_time() -> None:
    rows = re.findall(r"^\| \[(Gpu\w+)\]\(\S+\) \| (\w+) \| (\w*) ?\|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert rows == [(name, rule["labels"]["severity"], rule.get("for", "")) for name, rule in RULES.items()]


def test_every_alert_can_be_left_out_by_its_name(helm: Helm) -> None:
    items = SCHEMA["properties"]["prometheusRule"]["properties"]["disabled"]["items"]
    assert items["enum"] == [*RULES]
    for names in ([], [*RULES][:3], [*RULES]):
        objects = helm.objects({"prometheusRule": {"enabled": True, "disabled": names, "alertLabels": {"team": "gpu"}}})
        (made,) = (each for each in objects if each["kind"] == "PrometheusRule")
        rules = [rule for group in made["spec"]["groups"] for rule in group["rules"] or ()]
        assert [rule["alert"] for rule in rules if "alert" in rule] == [name for name in RULES if name not in names]
        assert [rule for rule in rules if "record" in rule] == [rule for rule in ALL_RULES if "record" in rule]


def test_the_config_map_has_the_dashboard_whole(helm: Helm) -> None:
    (made,) = (
        each
        for each in helm.objects({"dashboard": {"enabled": True}})
        if each["metadata"]["name"].endswith("-dashboard")
    )
    assert json.loads(made["data"]["gpu-plugin.json"]) == DASHBOARD
    assert len(json.dumps(made)) < 512 * 1024  # of the mebibyte that an object may have
