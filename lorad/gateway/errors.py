"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}."""

from msgspec import Struct

from lorad import errors
from lorad.errors import LoradError

_INVALID = "invalid_request_error"
_RETRY_SECONDS = 2


class Description(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """An error as OpenAI writes it."""

    error: Description


class ApiError(Exception):
    """kind: `type` of the answer. retry_after: seconds, for what passes by itself."""

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
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(Description(self.message, self.kind, self.param, self.code))

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


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

    Clients may ask again if a pool is full, gone or about to be there.
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
