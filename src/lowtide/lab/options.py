"""Options of the workbench's verbs; those that they share with others are the command line's."""

from __future__ import annotations

from functools import partial

from lowtide.option import Group, Kind, Option, command_option

_calibration = partial(command_option, Group.CALIBRATION)
_simulation = partial(command_option, Group.SIMULATION)
_bench = partial(command_option, Group.BENCH)
_quality = partial(command_option, Group.QUALITY)

OPTIONS: tuple[Option, ...] = (
    _calibration("text", "Text file typical of the model's use."),
    _calibration("pieces", "How many parts of the text to run.", 16),
    _calibration(
        "inputs",
        "Also record experts' inputs, for pack and --format with --calibration.",
        False,
    ),
    _calibration(
        "buddies", "Also record which expert can stand in for which, for buddymoe.", False
    ),
    _calibration(
        "buddy_weights",
        "Count the tokens of two experts by the lesser of the two weights.",
        False,
    ),
    _calibration(
        "buddy_temperature", "Temperature of a token's weights in buddymoe's entropy gate.", 1.0
    ),
    _calibration(
        "buddy_alpha",
        "Share of co-activations that buddies cover: one, one for each MoE layer (0.9,0.95), or "
        "the first and the last layer's (0.99:0.9).",
        kind=Kind.TEXT,
    ),
    _simulation(
        "machine",
        "Hardware profile: rtx3090, a100-40gb, laptop-8gb, ... or a TOML file.",
        "rtx3090",
    ),
    _simulation("residents", "Share of a layer's experts that fits into memory.", 0.5, high=1),
    _simulation("tau", "Steps after which policy tide chooses residents again.", 4, low=1),
    _bench("repeats", "Number of answers timed for each policy or setting.", 3),
    _bench("profile", "Write this machine as a hardware profile, for simulate --machine."),
    _quality(
        "setting",
        "Options to compare, as 'format=q4' or 'policy=lru residents=0.5'. A name given "
        "twice makes a row for each of its values.",
        kind=Kind.TEXTS,
    ),
    _quality("tokens", "Number of tokens of the text to score.", 2048),
    _quality("window", "Length of a scored window in tokens, at most.", 256),
    _quality(
        "mask_ratios",
        "Shares of a diffusion model's tokens to hide, separated by commas.",
        "0.15,0.5,0.9",
    ),
    _quality(
        "save_curve",
        "Measure the loss from replaced experts, for max_kl of buddymoe; kept with the buddies.",
        False,
    ),
    _quality("choices", "File of multiple-choice questions, one JSON object per line."),
)
