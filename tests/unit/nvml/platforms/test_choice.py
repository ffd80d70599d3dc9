import pytest

from gpu_plugin.nvml.platforms.choice import Platform, Traces, choose

NVML, WSL, TEGRA = Platform.NVML, Platform.WSL, Platform.TEGRA

NOTHING = Traces()
WINDOWS = Traces(dxcore="/usr/lib/wsl/lib/libdxcore.so", dxg="/dev/dxg")
JETSON = Traces(tegra="/etc/nv_tegra_release")
NO_LIBRARY = None
H100 = ("NVIDIA H100 80GB HBM3",)


@pytest.mark.parametrize(
    ("strategy", "traces", "models", "platform"),
    [
        ("auto", NOTHING, H100, NVML),
        ("auto", NOTHING, (), NVML),
        ("auto", NOTHING, NO_LIBRARY, NVML),
        ("auto", JETSON, NO_LIBRARY, TEGRA),
        ("auto", JETSON, H100, NVML),
        ("auto", JETSON, (), NVML),
        ("auto", JETSON, ("Orin (nvgpu)",), TEGRA),
        ("auto", NOTHING, ("Orin (nvgpu)",), TEGRA),
        ("auto", NOTHING, ("NVIDIA Thor",), TEGRA),
        ("auto", NOTHING, (*H100, "NVIDIA Thor"), TEGRA),
        ("auto", NOTHING, ("Orin nvgpu",), NVML),
        ("auto", WINDOWS, H100, WSL),
        ("auto", WINDOWS, NO_LIBRARY, WSL),
        ("auto", Traces(dxcore=WINDOWS.dxcore), H100, NVML),
        ("auto", Traces(dxg=WINDOWS.dxg), H100, NVML),
        ("auto", Traces(WINDOWS.dxcore, WINDOWS.dxg, JETSON.tegra), NO_LIBRARY, WSL),
        ("nvml", NOTHING, H100, NVML),
        ("nvml", JETSON, NO_LIBRARY, NVML),
        ("nvml", JETSON, ("Orin (nvgpu)",), NVML),
        ("nvml", WINDOWS, H100, WSL),
        ("tegra", NOTHING, H100, TEGRA),
        ("tegra", WINDOWS, NO_LIBRARY, TEGRA),
    ],
)
def test_platform_follows_from_the_traces(strategy, traces, models, platform):
    choice = choose(strategy, traces, lambda: models)
    assert choice.platform is platform
    assert choice.reason


@pytest.mark.parametrize(("strategy", "traces"), [("tegra", JETSON), ("nvml", JETSON), ("auto", WINDOWS)])
def test_nvml_is_not_opened_if_its_answer_changes_nothing(strategy, traces):
    asked = []
    choose(strategy, traces, lambda: asked.append("NVML"))
    assert asked == []


@pytest.mark.parametrize(
    ("strategy", "traces", "models", "words"),
    [
        ("tegra", NOTHING, H100, "--device-discovery-strategy"),
        ("auto", JETSON, NO_LIBRARY, "/etc/nv_tegra_release"),
        ("auto", WINDOWS, H100, "/usr/lib/wsl/lib/libdxcore.so and /dev/dxg"),
        ("auto", NOTHING, (*H100, "NVIDIA Thor"), "NVIDIA Thor"),
    ],
)
def test_the_reason_names_what_decided(strategy, traces, models, words):
    assert words in choose(strategy, traces, lambda: models).reason
