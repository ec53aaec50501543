"""What loggers wrote, by their own readers: `python -m tests.loggers.readers LOGGER DIRECTORY` prints JSON.

{"points": {"name": {"step": [values…]}}}: those of the lineage that survives, where a segment replaces what
earlier ones say of later steps.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Points = dict[str, dict[int, list[float]]]


def tensorboard(directory: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tb" / "r"), size_guidance={"scalars": 0})
    found.Reload()
    points: Points = defaultdict(lambda: defaultdict(list))
    for name in found.Tags()["scalars"]:
        for event in found.Scalars(name):
            points[name][event.step].append(event.value)
    return points


def mlflow(directory: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    experiment = client.get_experiment_by_name("lorad")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    runs.sort(key=lambda run: int(run.data.tags["lorad.segment"]))
    assert [run.data.tags["lorad.segment"] for run in runs] == [str(n) for n in range(len(runs))]
    segments = []
    for run in runs:
        rows = [
            (name, metric.step, metric.value)
            for name in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
        segments.append((int(run.data.tags["lorad.from_step"]), rows))
    return _joined(segments)


def wandb(directory: Path) -> Points:
    from lorad.loggers.builtin.wandb_file import records

    segments = []
    files = sorted((directory / "wb").glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stem)
    for path in files:
        rows, after, segment = [], -1, -1
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                config = {item.key: item.value_json for item in record.run.config.update}
                told = json.loads(config["lorad"])
                after, segment = told["from_step"], told["segment"]
            if kind == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = int(items["_step"])
                rows += [(name, step, value) for name, value in items.items() if "/" in name]
        assert segment >= 0, path
        segments.append((segment, after, rows))
    assert sorted(number for number, _, _ in segments) == list(range(len(files)))
    return _joined((after, rows) for _, after, rows in sorted(segments))


def _joined(segments: Iterable[tuple[int, list[tuple[str, int, float]]]]) -> Points:
    points: Points = defaultdict(lambda: defaultdict(list))
    for after, rows in segments:
        for steps in points.values():
            for step in [step for step in steps if step > after]:
                del steps[step]
        for name, step, value in rows:
            points[name][step].append(value)
    return points


READERS = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))
