"""All errors that lowtide raises on purpose.

    LowtideError
    ├── UsageError            an option, prompt or parameter that cannot be honoured
    │   └── UnsupportedError  a named feature that lowtide does not have
    ├── CheckpointError       a damaged or incomplete model folder
    │   └── ConfigError       its config.json
    ├── HubError              a model that could not be fetched
    ├── PlanError             a memory budget that is too small
    │   └── PageError         pages refused at run time
    ├── StorageError          a read or write that failed at run time
    ├── DeviceError           a compute device that failed or did not answer
    ├── NumericError          an infinity or NaN computed from finite weights
    └── InternalError         a fault of lowtide's own

Messages carry the numbers and the way out. This module imports nothing.
"""


class LowtideError(Exception):
    """Base class of everything that lowtide raises on purpose."""


class UsageError(LowtideError):
    """An option, prompt or parameter that cannot be honoured as given."""


class UnsupportedError(UsageError):
    """A feature, requested by name, that lowtide does not have."""


class CheckpointError(LowtideError):
    """A model folder that is incomplete, damaged or not what it claims to be."""


class ConfigError(CheckpointError):
    """A `config.json` that is missing, contradictory or of an unknown family."""


class HubError(LowtideError):
    """A model that is not on this machine and could not be fetched."""


class PlanError(LowtideError):
    """A memory budget that is too small; raised before anything is loaded."""


class PageError(PlanError):
    """Pages that the budget or the system refuses at run time; memory in use stays valid."""


class StorageError(LowtideError):
    """A read or write that failed at run time, such as a truncated file or a full disk."""


class DeviceError(LowtideError):
    """A compute device, or the link to it, that failed or did not answer in time."""


class NumericError(LowtideError):
    """A pass that ended in an infinity or NaN though all weights are finite: an overflow."""


class InternalError(LowtideError):
    """A fault of lowtide's own, such as a dead worker, or a policy's answer that is unusable."""
