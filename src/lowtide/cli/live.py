"""Live view: a diffusion model's block, redrawn in place on a terminal while it is filled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from lowtide.cli.screen import printable, start_display

if TYPE_CHECKING:
    from lowtide.model_folder.tokenizer import Tokenizer

MASK = "░"
_ERASE_LINE_ABOVE = (
    ControlType.CARRIAGE_RETURN,
    (ControlType.ERASE_IN_LINE, 2),
    (ControlType.CURSOR_UP, 1),
)

MIN_FRAME_S = 0.05  # at most 20 drawings a second


class LiveView:
    """Draws an answer while it is made: whole lines scroll away, the current block stays below.

    Owns the screen's contents and knows nothing of the engine: drafts and committed tokens are
    passed in, and `caption` makes a line shown below. A block may begin with the prompt's last
    tokens; with `num_prompt_tokens` they are not drawn again.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: Tokenizer | None,
        num_prompt_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        caption: Callable[[], str] = str,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_prompt_tokens = num_prompt_tokens
        self._clock = clock
        self._caption = caption
        self._printed = ""  # whole lines of the answer that have scrolled away
        self._pending = ""  # its last line so far
        self._thought = ""  # the last line so far of the thoughts before it
        self._draft = Text()
        self._before: dict[int, int] = {}  # position -> token, as of the previous draft
        self._last_frame_s = -MIN_FRAME_S
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn: list[int] = []  # cells of the last frame's lines
        self._width = 0  # of the terminal, then
        self.num_frames = 0

    def __enter__(self) -> LiveView:
        start_display(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(Text(), refresh=True)
        self._live.stop()
        self._end_thoughts()
        if self._pending:
            self._print(self._pending)

    @property
    def text(self) -> str:
        """The answer so far, as a user who stops it has seen it."""
        return self._printed + self._pending

    def draft(self, block_start: int, tokens: Iterable[int], is_masked: Iterable[bool]) -> None:
        """Draw the block after a denoising pass: masks dim, new tokens bright."""
        written: dict[int, int] = {}
        self._draft = Text()
        for position, (token, masked) in enumerate(
            zip(tokens, is_masked, strict=True), block_start
        ):
            if position < self._num_prompt_tokens:
                continue
            if masked:
                self._draft.append(MASK, "dim")
                continue
            written[position] = int(token)
            is_new = self._before.get(position) != int(token)
            self._draft.append(self._piece(int(token)), "bold green" if is_new else "")
        self._before = written
        self._draw(is_due=self._clock() - self._last_frame_s >= MIN_FRAME_S)

    def commit(self, tokens: Sequence[int], text: str, reasoning: str = "") -> None:
        """Add final tokens and their text; whole lines leave the live region."""
        self._before, self._draft = {}, Text()
        if self._tokenizer is None:
            text = " " * bool(self.text) + " ".join(map(str, tokens))
        self._think(reasoning)
        self._advance(text)

    def finish(self, text: str) -> None:
        """Take the engine's own text of the whole answer; leaving the view prints its end."""
        # A stop string may cut within a line that has scrolled away; then nothing is left.
        self._pending = text[len(self._printed) :] if text.startswith(self._printed) else ""

    def _think(self, text: str) -> None:
        lines, newline, self._thought = (self._thought + text).rpartition("\n")
        if newline:
            self._print(lines, "dim")

    def _end_thoughts(self) -> None:
        """Print the last line of the thoughts and an empty line."""
        if self._thought:
            self._print(f"{self._thought}\n", "dim")
        self._thought = ""

    def _advance(self, text: str) -> None:
        if text:
            self._end_thoughts()
        lines, newline, self._pending = (self._pending + text).rpartition("\n")
        if newline:
            self._print(lines)
            self._printed += lines + newline
        self._draw(is_due=True)

    def _print(self, text: str, style: str = "") -> None:
        """Print for good, with long lines unbroken: a user may copy them."""
        self._live.console.print(Text(printable(text), style), soft_wrap=True)

    def _draw(self, is_due: bool) -> None:
        if not is_due:
            return
        self._last_frame_s = self._clock()
        self.num_frames += 1
        self._follow_resize()
        frame = Text()
        if self._thought:
            frame.append(f"{printable(self._thought)}\n", "dim")
        frame = frame.append(printable(self._pending)) + self._draft
        if caption := self._caption():
            frame.append(f"\n{caption}", "dim")
        self._live.update(frame, refresh=True)
        self._drawn = self._widths(frame)

    def _widths(self, frame: Text) -> list[int]:
        """Return the cells of each line of a frame within the screen's height."""
        console = self._live.console
        self._width = console.width
        lines = console.render_lines(frame, pad=False)[: console.height]
        return [sum(segment.cell_length for segment in line) for line in lines]

    def _follow_resize(self) -> None:
        """Erase the additional lines that a narrower terminal broke the last frame into.

        The next frame erases as many lines as the last one had.
        """
        width = self._live.console.width
        if width >= self._width:
            return
        num_more = sum(max(0, -(-cells // width) - 1) for cells in self._drawn)
        self._live.console.control(Control(*(_ERASE_LINE_ABOVE * num_more)))
        self._drawn, self._width = [], width

    def _piece(self, token: int) -> str:
        if self._tokenizer is None:
            return f"{token} "
        return printable(self._tokenizer.piece(token))
