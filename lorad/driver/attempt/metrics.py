"""What the trainer measured of a step."""

from lorad.protocol.calls import Stepped


def trainer_metrics(steps: list[Stepped]) -> dict[str, float]:
    """Collect what the trainer reported, memory in bytes on all of its devices; see `MachineUse`."""
    if not steps:
        return {}
    metrics: dict[str, float] = {}
    used = [step.machine for step in steps]
    for name, field in (
        ("host_cpu", "cpu"),
        ("device_utilization", "device_utilization"),
        ("device_power", "device_power"),
    ):
        shares = [(getattr(use, field), use.seconds) for use in used if getattr(use, field) is not None]
        if seconds := sum(time for _, time in shares):
            metrics[name] = sum(value * time for value, time in shares) / seconds
    for name, in_use in (("host_memory", used[-1].memory), ("device_memory", used[-1].device_memory)):
        if in_use is not None:
            metrics[name] = float(in_use)
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
