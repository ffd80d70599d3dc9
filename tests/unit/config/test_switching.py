"""The recorded files and variables of NVIDIA's plugin v0.20.0 have the recorded results, and its options are documented."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_plugin.config.document import parse
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import OPTIONS
from gpu_plugin.config.written import differing

RECORDED: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("nvidia_plugin_v0_20_0.yaml").read_text())
PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
ITS_OWN = {"DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"}
NVIDIA = OPTIONS[: [option.name for option in OPTIONS].index("device_plugin_dir")]
VARIABLES = [option.envs for option in (*NVIDIA, *(o for o in OPTIONS if set(o.envs) <= ITS_OWN))]


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["case"].replace(" ", "-"))
def test_what_is_recorded_comes_to_pass(row):
    assert row.keys() <= {"case", "file", "env", "flags", "theirs", "ours", "refused", "same", "remarks"}
    assert row["theirs"]
    asked = (row.get("flags", {}), row.get("env", {}), parse(row.get("file", "").encode(), "config.yaml"))
    if "refused" in row:
        with pytest.raises(ConfigError) as caught:
            resolve(*asked)
        assert row["refused"] in str(caught.value)
        assert row["theirs"].startswith("exits: ") == row["same"]
        return
    settings = resolve(*asked)
    assert differing(settings) == row["ours"]
    assert not (row["same"] and row["theirs"].startswith("exits: "))
    remarks = [str(remark) for remark in settings.remarks]
    expected = row.get("remarks", [])
    assert len(remarks) == len(expected)
    assert all(part in remark for part, remark in zip(expected, remarks, strict=True))


def test_no_case_is_recorded_twice():
    cases = [row["case"] for row in RECORDED]
    assert len(cases) == len(set(cases))


@pytest.mark.parametrize("names", VARIABLES, ids=lambda names: names[0])
def test_every_option_that_it_has_is_recorded_and_on_the_page(names):
    recorded = {name for row in RECORDED for name in row.get("env", {})} | {"CONFIG_FILE_DST"}
    in_a_file = [option.file for option in NVIDIA if option.envs == names and option.file]
    files = "\n".join(row.get("file", "") for row in RECORDED)
    assert recorded & set(names) or any(key.rpartition(".")[2] in files for key in in_a_file)
    assert all(f"`{name}`" in PAGE for name in names)


@pytest.mark.parametrize("option", NVIDIA, ids=lambda option: option.name)
def test_every_flag_of_it_is_on_the_page(option):
    assert all(f"`--{flag}`" in PAGE for flag in option.flags)
    assert not option.file or f"`{option.file}`" in PAGE
