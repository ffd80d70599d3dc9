import os

import pytest

from gpu_plugin.cli.options import settings_from
from gpu_plugin.config.document import MAX_BYTES
from gpu_plugin.config.errors import ConfigError


@pytest.fixture
def settings(tmp_path):
    def read(text):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return settings_from({"config_file": str(file)}, {})

    return read


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "a named pipe"),
        (os.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make, what):
    make(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=rf"^--config-file .*config.yaml: is {what}$"):
        settings_from({"config_file": str(tmp_path / "config.yaml")}, {})


def test_dev_null_is_an_empty_file():
    assert settings_from({"config_file": "/dev/null"}, {}).mig_strategy == "none"


def test_a_file_may_be_as_long_as_a_configmap_and_not_a_byte_longer(settings):
    most = "flags: {migStrategy: single}\n" + "#" * (MAX_BYTES - 29)
    assert len(most) == MAX_BYTES
    assert settings(most).mig_strategy == "single"
    with pytest.raises(ConfigError, match=f"more than {MAX_BYTES} bytes"):
        settings(f"{most}#")
