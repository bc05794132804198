"""Every error this package raises on purpose, as one tree.

BulletError
|-- ConfigError            an option or a combination of options that cannot work; the message has the fix
|-- ModelError             a checkpoint that cannot be served
|   |-- ModelMissing       nothing is there
|   |-- BrokenCheckpoint   something is there, but it is damaged or incomplete
|   `-- UnsupportedModel   it is whole, but of an architecture, quantisation or shape we do not run
|-- RequestError           one request's own fault; carries what HTTP needs
|   |-- InvalidRequest     a field has a wrong value
|   |-- ContextTooLong     prompt and wanted output exceed the context
|   |-- UnknownModel       the model name is not served here
|   `-- Overloaded         refused now, may be retried
|-- EngineError            the engine could not carry out work
|   |-- EngineDied         its process is gone
|   `-- DeviceError        the GPU or its driver refused a call
|       `-- NoGreenContexts    they cannot split the GPU's SMs; the message has why and the fix
|-- ServerRefuses          a server that cannot be measured: it is not there, or refuses what every request needs
|-- RecordError            a recorded run that cannot be read or replayed; the message has the line
`-- PolicyError            a policy failed or starts nothing: a bug in the policy, which the message names
    `-- PlanError          it returned a plan that breaks the rules of `scheduler/plan_check`
"""


class BulletError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(BulletError):
    """An option, or a combination of options, that cannot work."""


class ModelError(BulletError):
    """A checkpoint that cannot be served."""


class ModelMissing(ModelError):
    """No checkpoint where one was named."""


class BrokenCheckpoint(ModelError):
    """A checkpoint that is damaged or incomplete."""


class UnsupportedModel(ModelError):
    """An architecture, quantisation or shape that we do not run."""


class RequestError(BulletError):
    """One request's own fault. `status` is the HTTP status, `param` the field, `code` a stable word."""

    status = 400
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field of the request has a value that cannot be served."""

    code = "invalid_value"


class ContextTooLong(RequestError):
    """Prompt and wanted output exceed the context."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class Overloaded(RequestError):
    """Refused now; `retry_after_s` says when another try makes sense."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(BulletError):
    """The engine could not carry out work."""


class EngineDied(EngineError):
    """The engine process is gone; whatever it held is lost."""


class DeviceError(EngineError):
    """The GPU or its driver refused a call; the message names the call and the code."""


class NoGreenContexts(DeviceError):
    """This GPU, driver or installation cannot split SMs with green contexts; the message has the reason and the fix."""


class PolicyError(BulletError):
    """A policy raised, returned no plan, or starts nothing; the message names it and what it raised."""


class PlanError(PolicyError):
    """A policy returned a plan that breaks the rules of `scheduler/plan_check`."""


class ServerRefuses(BulletError):
    """A server that cannot be measured; the message has the reason."""


class RecordError(BulletError):
    """A recorded run that cannot be read or replayed."""
