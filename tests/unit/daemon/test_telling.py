import json
import logging
from pathlib import Path

import pytest

from gpu_plugin.config.document import parse
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.configuration import LONGEST_LINE, log_settings

FILE = b"""
flags: {migStrategy: mixed, healthPollInterval: 200ms, plugin: {passDeviceSpecs: true}}
resources: {gpus: [{pattern: "*H100*", name: h100}]}
sharing: {timeSlicing: {resources: [{name: h100, rename: h100.shared, devices: [0, "1"], replicas: 4}]}}
selection: {exclude: [7]}
health: {xid: {31: ignore}}
"""


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.DEBUG)

    def tell(settings, file=None):
        log_settings(settings, file)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return tell


def test_what_is_not_the_default_is_one_line_and_all_of_it_another(told):
    settings = resolve({"device_plugin_dir": "/p"}, {"DP_DISABLE_HEALTHCHECKS": "31"}, parse(FILE, "f"))
    line, full, remark = told(settings, Path("/config/a100"))
    assert line[0] == "INFO"
    assert line[1] == (
        "configuration: /config/a100: flags.migStrategy: mixed; flags.plugin.passDeviceSpecs: true; flags.devicePluginDir: /p; "
        "selection.exclude: 7; flags.healthPollInterval: 200ms; DP_DISABLE_HEALTHCHECKS: 31; "
        "resources.gpus: *H100* is nvidia.com/h100; "
        "sharing: nvidia.com/h100 of 0,1 as nvidia.com/h100.shared, 4 replicas of each by time-slicing; health.xid.31: ignore"
    )
    assert full[0] == "DEBUG"
    content = json.loads(full[1].partition("in full: ")[2])
    assert resolve({}, {"DP_DISABLE_HEALTHCHECKS": "31"}, content) == settings
    assert remark[0] == "INFO"
    assert remark[1].startswith("configuration: f:3: resources.gpus, sharing.timeSlicing.resources[0].rename, ")


def test_defaults_are_told_as_such_and_a_long_list_is_cut(told):
    assert told(resolve({}, {}))[0] == ("INFO", "configuration: no file: only defaults")
    many = ",".join(f"*model-{number}*" for number in range(4000))
    assert len(told(resolve({"exclude_gpus": many}, {}))[2][1]) < LONGEST_LINE + 100
