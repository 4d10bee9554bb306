"""Memory of a bidirectional pass: its plan beside the process, and how even its use is.

LLaDA-8B, Dream-7B and LLaDA-MoE with published shapes and two layers, lengths from 1,024 to 32,768
tokens, operators divided as far as it takes and not at all. After a step to warm up the process's
peak (VmHWM, begun again) less what it held must be the plan's bytes within 1% or 32 MiB, whichever
is more, and the arena's pages (pagemap) the arena's bytes.

Then the peak of what is alive in a step over its average by time, of a model with all its layers,
against transformers' class: the paper's ratio is 2.71 times lower. Under a cap of 24 GB operators
are not divided at these lengths; the other end is as far as it takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from common.allocation_trace import Use
from common.arguments import add_parts, make_parser, run_script
from common.masked_memory import OURS
from common.masked_shapes import MODELS, MaskedShape, masked_shapes, settings_of
from common.memory import MemoryLimit
from common.planned_model import UNDIVIDED
from common.record import Recorder, say
from common.worker import in_process

PARTS = ("planned", "evenness")
NUM_LAYERS = 2
SLACK_BYTES = 32 << 20
SLACK_SHARE = 0.01
HUGE_PAGE_BYTES = 2 << 20
CAP_BYTES = 24_000_000_000
PAPER_RATIO = 2.71
NO_LIMIT = MemoryLimit("none", "a step's memory is measured, not limited")


def main() -> None:
    options = _options()
    settings = {
        "prompt_share": options.share,
        "lengths": options.lengths,
        "traced_lengths": options.traced,
    }
    recorder = Recorder("planned_memory", settings, options.out)
    for shape in masked_shapes(options.models):
        if "planned" in options.parts:
            _compare_all(recorder, shape, options)
        if "evenness" in options.parts:
            shape.folder(shape.num_layers)
            for num_tokens in options.traced:
                _evenness(recorder, shape, num_tokens, options.share)


def _compare_all(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> None:
    """Every length divided, the shorter ones undivided too."""
    shape.folder(NUM_LAYERS)
    for num_tokens in options.lengths:
        _compare(recorder, shape, num_tokens, options.share, "most")
        if num_tokens <= options.undivided:
            _compare(recorder, shape, num_tokens, options.share, UNDIVIDED)


def _compare(
    recorder: Recorder,
    shape: MaskedShape,
    num_tokens: int,
    prompt_share: float,
    chunks: str | Mapping[str, int],
) -> None:
    task = {
        "shape": settings_of(shape),
        "num_layers": NUM_LAYERS,
        "num_tokens": num_tokens,
        "prompt_share": prompt_share,
        "chunks": chunks,
    }
    row = in_process("masked step", task, NO_LIMIT, 0)
    planned, measured = row["planned_bytes"], row["step_bytes"]
    off_bytes = measured - planned
    arena_off_bytes = row["arena_resident_bytes"] - row["arena_bytes"]
    values = {
        "model": shape.name,
        "num_tokens": num_tokens,
        **row,
        "off_bytes": off_bytes,
        "is_as_planned": is_as_planned(planned, measured),
        "arena_off_bytes": arena_off_bytes,
        "is_arena_as_planned": abs(arena_off_bytes) < HUGE_PAGE_BYTES,
    }
    recorder.write("planned", values)
    say(
        f"{shape.name}, {num_tokens} tokens, chunks {row['chunks']}: planned "
        f"{planned / 1e6:.0f} MB, measured {off_bytes / 1e6:+.0f} MB "
        f"({'as planned' if values['is_as_planned'] else 'NOT as planned'}), arena "
        f"{row['arena_bytes'] / 1e6:.0f} MB, pages {arena_off_bytes / 1e6:+.1f} MB"
    )


def is_as_planned(planned_bytes: int, measured_bytes: int) -> bool:
    """Within 1% or 32 MiB, whichever is more."""
    return abs(measured_bytes - planned_bytes) <= max(SLACK_SHARE * planned_bytes, SLACK_BYTES)


def _evenness(recorder: Recorder, shape: MaskedShape, num_tokens: int, prompt_share: float) -> None:
    """Peak over average of lowtide's live bytes and of transformers'."""
    plans: dict[str, dict[str, Any]] = {
        "transformers": {"side": "transformers"},
        "lowtide under the cap": {"side": OURS, "free_bytes": CAP_BYTES - shape.weight_bytes},
        "lowtide divided": {"side": OURS, "chunks": "most"},
    }
    ratios = {}
    for name, plan in plans.items():
        task = {
            "shape": settings_of(shape),
            "num_layers": shape.num_layers,
            "num_tokens": num_tokens,
            "prompt_share": prompt_share,
            **plan,
        }
        row = in_process("masked trace", task, NO_LIMIT, 0)
        use = Use(*(row[field] for field in Use._fields))
        ratios[name] = use.peak_over_average
        values = {
            "model": shape.name,
            "num_tokens": num_tokens,
            "side": name,
            "peak_bytes": use.peak_bytes,
            "average_bytes": use.average_bytes,
            "peak_over_average": use.peak_over_average,
            "lower_by": ratios["transformers"] / use.peak_over_average,
            "paper": PAPER_RATIO,
        }
        recorder.write("evenness", values)
    say(
        f"{shape.name}, {num_tokens} tokens, peak over average: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    )


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_parts(parser, PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    parser.add_argument("--share", type=float, default=0.5, help="r_p")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1024, 4096, 8192, 32768],
        help="tokens of a step",
    )
    parser.add_argument(
        "--traced",
        type=int,
        nargs="+",
        default=[2048, 8192],
        help="of peak over average",
    )
    parser.add_argument(
        "--undivided", type=int, default=8192, help="longest with undivided operators too"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
