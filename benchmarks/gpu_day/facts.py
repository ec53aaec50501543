"""What this machine is, whether lorad sees who computes on its GPU, and what the device does at best."""

import os
import platform
import time
from importlib import metadata

import torch

from benchmarks.gpu_day.sizes import GIB
from benchmarks.gpu_day.stage import Place, play
from benchmarks.gpu_day.torch_place import bandwidth, gemm
from lorad.box.gpus import nvml
from lorad.daemon.gpu.devices import Device, find_devices
from lorad.daemon.gpu.occupancy import Ours, Sight, read_all

_PACKAGES = ("transformers", "peft", "triton", "sglang", "vllm", "megatron-core", "transformer-engine")


def facts(place: Place) -> None:
    device = find_devices()[0]
    place.say("device", device.label)
    place.say("memory_gib", device.memory_total / GIB)
    place.say("python", platform.python_version())
    place.say("torch", torch.__version__)
    for package in _PACKAGES:
        try:
            place.say(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            place.say(package, "not installed")
    if place.has_gpu:
        _gpu(place, device)
    place.say("bandwidth_gb_s", bandwidth(place) / 1e9)
    place.say("gemm_tflops", gemm(place) / 1e12)


def _gpu(place: Place, device: Device) -> None:
    """Say what the driver and torch say of the GPU, and whom lorad sees there before and while we compute."""
    place.say("nobody_before_us", not _look(device).strangers(device))
    torch.cuda.set_device(place.device)
    held = torch.zeros(GIB, dtype=torch.uint8, device=place.device)
    properties = torch.cuda.get_device_properties(held.device)
    with nvml() as found:
        place.say("driver", str(found.nvmlSystemGetDriverVersion()))
    place.say("cuda", str(torch.version.cuda))
    place.say("capability", ".".join(map(str, torch.cuda.get_device_capability())))
    place.say("same_gpu_as_leased", str(properties.uuid) in device.uuid)
    sight = _look(device)
    place.say("sees_us", bool(sight.strangers(device)))
    place.say("sees_our_pid", os.getpid() in [process.pid for process in sight.processes])


def _look(device: Device) -> Sight:
    return read_all([device], Ours((), b"of no pool", frozenset())).get(device.uuid, Sight(time.monotonic()))


if __name__ == "__main__":
    play(facts)
