"""Makes the door's answers: JSON, protobuf, and results of models as the client expects them."""

from aiohttp import web

from lorad.gateway.guard import answer
from lorad.tinker.door.checkpoints import path_of
from lorad.tinker.door.state import Model
from lorad.tinker.door.wire import write_output
from lorad.tinker.records import Created, Failed, Loaded, Outcome, Passed, Published, Saved, Stepped, Unloaded

PROTOBUF = "application/x-protobuf"


def protobuf(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=PROTOBUF)


def failed(message: str, category: str) -> web.Response:
    """Make the answer that the client raises as RequestFailedError."""
    return answer({"error": message, "category": category})


def try_again(request: str, reason: str) -> web.Response:
    """Have the client ask again at once; for a 200 it would log a warning each time."""
    state = "paused_capacity" if reason else "active"
    body = {
        "type": "try_again",
        "request_id": request,
        "queue_state": state,
        "queue_state_reason": reason or None,
    }
    return answer(body, status=408)


def of_outcome(model: Model, outcome: Outcome) -> web.Response:
    """Answer a poll with the result of a numbered request."""
    match outcome:
        case Failed():
            return failed(outcome.message, outcome.category)
        case Passed():
            return protobuf(write_output(outcome))
        case Stepped():
            return answer({"metrics": outcome.metrics})
        case Created() if model.source:
            return answer({"path": model.source, "model_id": model.id, "type": "load_weights"})
        case Created():
            return answer({"model_id": model.id, "type": "create_model"})
        case Saved():
            return answer({"path": path_of(model.id, "weights", outcome.name), "type": "save_weights"})
        case Published(name=""):
            kind = "save_weights_for_sampler"
            return answer({"path": None, "sampling_session_id": outcome.sampler, "type": kind})
        case Published():
            path = path_of(model.id, "sampler_weights", outcome.name)
            return answer({"path": path, "type": "save_weights_for_sampler"})
        case Loaded():
            return answer({"path": outcome.path, "model_id": model.id, "type": "load_weights"})
        case Unloaded():
            return answer({"model_id": model.id, "type": "unload_model"})
    raise AssertionError(outcome)
