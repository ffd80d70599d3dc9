import pytest

from gpu_plugin.cli.options import settings_from
from gpu_plugin.config.errors import ConfigError


@pytest.fixture
def settings(tmp_path):
    def read(text):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return settings_from({"config_file": str(file)}, {})

    return read


def test_anchors_and_merged_mappings_are_yaml_too(settings):
    shared = "flags: {plugin: {<<: &p {passDeviceSpecs: true, deviceIDStrategy: index}, deviceIDStrategy: uuid}}"
    read = settings(shared)
    assert (read.pass_device_specs, read.device_id_strategy) == (True, "uuid")


def test_json_is_yaml_too(settings):
    assert settings('{"version": "v1", "flags": {"migStrategy": "single"}}').mig_strategy == "single"


def test_an_empty_file_asks_for_nothing(settings):
    assert settings("# nothing yet\n").mig_strategy == "none"


def test_a_key_that_stands_twice_is_refused_with_its_line(settings):
    with pytest.raises(ConfigError, match=r"config\.yaml:3: flags\.migStrategy: stands twice, first on line 2$"):
        settings("flags:\n  migStrategy: none\n  migStrategy: mixed\n")
