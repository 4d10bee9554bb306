"""Every error lowtide raises on purpose, as one tree.

LowtideError
├── UsageError            an option, prompt or parameter that cannot be honoured
│   └── UnsupportedError  something named that lowtide does not do
├── CheckpointError       a model folder that is not what it claims to be
│   └── ConfigError       its config.json
├── HubError              a model that could not be fetched
├── PlanError             a memory budget that something does not fit into
│   └── PageError         pages that were refused while running
├── StorageError          a read or write that failed while running
├── DeviceError           a compute device that failed or did not answer
├── NumericError          a result that is no number, of weights that all are
└── InternalError         a fault of lowtide's own, caught before it could spread

Messages carry the numbers and the way out. This module imports nothing.
"""


class LowtideError(Exception):
    """Base class: catching it catches everything lowtide raises on purpose."""


class UsageError(LowtideError):
    """An option, prompt or parameter that cannot be honoured as given."""


class UnsupportedError(UsageError):
    """Something asked for by name that lowtide does not do."""


class CheckpointError(LowtideError):
    """A model folder that is incomplete, damaged or not what it claims to be."""


class ConfigError(CheckpointError):
    """A `config.json` that is missing, contradictory or of an unknown family."""


class HubError(LowtideError):
    """A model that is not here and could not be fetched."""


class PlanError(LowtideError):
    """A memory budget that something does not fit into; raised before anything is loaded."""


class PageError(PlanError):
    """Pages that the budget or the system refuses while running; what was there stays."""


class StorageError(LowtideError):
    """A read or write that failed while running: a truncated file, a full disk."""


class DeviceError(LowtideError):
    """A compute device, or the link to it, that failed or did not answer in time."""


class NumericError(LowtideError):
    """A pass that ended in an infinity or NaN, though its weights hold none: an overflow."""


class InternalError(LowtideError):
    """A fault of lowtide's own: a worker that died, a wait that ended without an answer."""
