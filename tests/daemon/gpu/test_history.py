"""The last hour of a device: bounded, at a steady pace, with what the driver gives and no more."""

import time

import pytest

from lorad.daemon.gpu.devices import find_devices
from lorad.daemon.gpu.occupancy import Ours, read_all
from lorad.daemon.gpu.state import PERIOD, DeviceHistory
from lorad.records.devices import DeviceSample
from tests.kit.fakes.gpu_kit import Gpu, Nvml

MINE = Ours((), b"LORAD_ATTEMPT=/none/", frozenset())


def test_an_hour_is_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now, history = 0.0, DeviceHistory()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for number in range(400):
        assert history.is_due()
        history.take({"cuda:0": DeviceSample(float(number))})
        assert not history.is_due()
        now += PERIOD
    assert [sample.at for sample in history.samples["cuda:0"]] == [float(n) for n in range(40, 400)]


def test_power_and_temperature_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(GPU_a=Gpu()).install(monkeypatch)
    sight = read_all(find_devices(), MINE)["GPU-a"]
    assert (sight.power, sight.temperature) == (350.5, 61)
    nvml.refuses = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature"}
    sight = read_all(find_devices(), MINE)["GPU-a"]
    assert (sight.power, sight.temperature, sight.lost) == (None, None, "")
