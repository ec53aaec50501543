"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}."""

from lorad import errors
from lorad.errors import LoradError

_INVALID = "invalid_request_error"
_RETRY_SECONDS = 2


class ApiError(Exception):
    """An error that the client reads.

    Args:
        kind: The `type` of the answer.
        retry_after: Seconds after which the client may ask again; None where asking again does not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


def no_such_model(model: str) -> ApiError:
    message = (
        f"The model `{model}` does not exist: give an alias (`lorad aliases`) or run@version (`lorad "
        "adapters`)."
    )
    return ApiError(404, message, param="model", code="model_not_found")


def refused(param: str, why: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param, code=code)


def from_lorad(error: LoradError) -> ApiError:
    """Convert an error from behind the gateway.

    Clients may ask again where a pool is full, gone or still starting.
    """
    message = f"{error.message}. {error.hint}".rstrip(". ") + "."
    match error:
        case errors.SpecError():
            return ApiError(400, message)
        case errors.NotFound():
            return ApiError(404, message, param="model", code="model_not_found")
        case errors.NotAllowed():
            return ApiError(403, message, kind="permission_error", code="not_allowed")
        case errors.PoolLost() | errors.EngineGone() | errors.DaemonUnreachable() | errors.Conflict():
            retry = _RETRY_SECONDS
            return ApiError(503, message, kind="server_error", code="unavailable", retry_after=retry)
    return ApiError(500, message, kind="server_error", code=type(error).__name__)
