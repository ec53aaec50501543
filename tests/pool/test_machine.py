"""What a step says of the machine: means over its own time, of whoever used it."""

import sys
from typing import Any

import pytest

from lorad.driver.attempt.metrics import trainer_metrics
from lorad.pool.energy import Reading, meter_of
from lorad.pool.machine import MachineMeter
from lorad.protocol.calls import MachineUse, Stepped
from tests.kit.fakes.gpu_kit import Gpu, Nvml


class Cores:
    """Two cores and a clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy = 100.0, 0.0
        monkeypatch.setattr("lorad.pool.machine.time.monotonic", lambda: self.now)
        monkeypatch.setattr("lorad.pool.machine.psutil.cpu_times", self.times)

    def times(self) -> Any:
        return Times((self.busy, 2 * self.now - self.busy))

    def work(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.busy += 2 * seconds * share


class Times(tuple[float, float]):
    @property
    def idle(self) -> float:
        return self[1]


def test_each_slot_counts_from_its_own_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, machine = Cores(monkeypatch), MachineMeter(memory=lambda: 7)
    machine.opens("a")
    cores.work(10, 0.5)
    machine.opens("b")
    cores.work(10, 1.0)
    assert machine.take("a") == MachineUse(20.0, 0.75, 7)
    assert machine.take("b") == MachineUse(10.0, 1.0, 7)
    cores.work(4, 0.25)
    assert machine.take("a") == MachineUse(4.0, 0.25, 7)
    machine.forget("a")
    assert machine.take("a").cpu is None


def test_devices_are_means_of_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, machine = Cores(monkeypatch), MachineMeter(memory=lambda: 7)
    machine.sample(Reading(0.0, 5, 0.1))
    machine.opens("a")
    for joules, utilization in ((300.0, 0.5), (500.0, 1.0)):
        cores.work(1, 0.0)
        machine.sample(Reading(joules, 6, utilization))
    used = machine.take("a")
    assert (used.device_utilization, used.device_memory, used.device_power) == (0.75, 6, 400.0)
    used = machine.take("a")  # no sample since: what was seen last
    assert (used.device_utilization, used.device_power) == (1.0, 500.0)


def test_what_nobody_measures_is_unknown() -> None:
    machine = MachineMeter()
    machine.opens("a")
    used = machine.take("a")
    assert used.memory and used.memory > 1 << 20
    assert (used.device_utilization, used.device_memory, used.device_power) == (None, None, None)
    machine.sample(Reading(None))
    used = machine.take("a")
    assert (used.device_utilization, used.device_memory, used.device_power) == (None, None, None)


def test_meter_reads_utilization_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(GPU_0=Gpu(used=3, load=20), GPU_1=Gpu(used=4, load=60))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    read = meter_of(["GPU-0", "GPU-1"])
    nvml.gpus["GPU-1"].millijoules += 5000
    assert read is not None and read() == Reading(5.0, 7, 0.4)
    nvml.refuses = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTotalEnergyConsumption"}
    assert read() == Reading(None, 7, None)


def test_figures_of_several_updates_are_time_weighted() -> None:
    first = MachineUse(30.0, 0.2, 5, 0.9, 6, 300.0)
    second = MachineUse(10.0, 0.6, 7, 0.5, 8, 100.0)
    assert trainer_metrics([Stepped(1.0, True, machine=one) for one in (first, second)]) == {
        "host_cpu": pytest.approx(0.3),
        "host_memory": 7.0,
        "device_utilization": pytest.approx(0.8),
        "device_memory": 8.0,
        "device_power": pytest.approx(250.0),
    }
