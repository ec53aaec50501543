"""What the trainer measured of a step."""

from lorad.protocol.calls import MachineUse, Stepped


def trainer_metrics(steps: list[Stepped]) -> dict[str, float]:
    """Collect what the trainer reported.

    Memory is in bytes on all of its devices; rates are over the time that it computed. `MachineUse` explains
    host_cpu, host_memory, device_utilization, device_memory and device_power.
    """
    if not steps:
        return {}
    metrics = _of_the_machine([step.machine for step in steps])
    seconds = sum(step.seconds for step in steps)
    if seconds:
        metrics["trainer_tokens_per_second"] = sum(step.tokens for step in steps) / seconds
    if (memory := steps[-1].memory) is not None:
        metrics["trainer_memory"] = float(memory)
    if peaks := [step.memory_peak for step in steps if step.memory_peak is not None]:
        metrics["trainer_memory_peak"] = float(max(peaks))
    if measured := [(step.mfu, step.seconds) for step in steps if step.mfu is not None]:
        metrics["mfu"] = sum(mfu * time for mfu, time in measured) / sum(time for _, time in measured)
    return metrics


def _of_the_machine(used: list[MachineUse]) -> dict[str, float]:
    """Return shares and watts over the time that all of them are about, and the memory in use at the end."""
    metrics: dict[str, float] = {}
    for name, field in (
        ("host_cpu", "cpu"),
        ("device_utilization", "device_utilization"),
        ("device_power", "device_power"),
    ):
        measured = [(getattr(use, field), use.seconds) for use in used if getattr(use, field) is not None]
        if seconds := sum(time for _, time in measured):
            metrics[name] = sum(value * time for value, time in measured) / seconds
    for name, memory in (("host_memory", used[-1].memory), ("device_memory", used[-1].device_memory)):
        if memory is not None:
            metrics[name] = float(memory)
    return metrics
