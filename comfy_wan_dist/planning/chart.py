"""A plan as a bar chart: predicted seconds of each mesh, and of what they consist."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as PILImage

from .plan import MeshOption, Plan
from .report import basis, shown_options

WIDTH = 1200
MARGIN = 30
ROW = 40
BAR = 24
LABEL_WIDTH = 300
VALUE_WIDTH = 300
FONT_SIZE = 18

PAPER, INK, FAINT = "#ffffff", "#1d1d1f", "#77777c"
PARTS = (("arithmetic", "#2f6fb2"), ("exchange", "#e0913a"), ("waiting", "#b9bcc2"))
MISFIT = "#e3c6c6"


def draw_plan(plan: Plan) -> PILImage:
    """A row for each mesh of the plan's table, 1200 pixels wide; the longest bar fills its room.

    Bars are split into arithmetic, exchange and waiting for other stages. Pale red: it does not fit into memory.
    """
    options = shown_options(plan)
    head = MARGIN + 2 * ROW
    image = Image.new("RGB", (WIDTH, head + ROW * (len(options) + 1) + MARGIN), PAPER)
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(FONT_SIZE), ImageFont.load_default(FONT_SIZE - 5)
    job = plan.job
    draw.text(
        (MARGIN, MARGIN - 8),
        f"Predicted seconds: {job.grid.tokens} tokens, {job.steps} steps, batch {job.batch}, on {plan.pool}",
        fill=INK,
        font=font,
    )
    _draw_legend(draw, top=MARGIN + ROW - 8, font=font)
    longest = max((option.seconds.video for option in options), default=1.0)
    named = (("latency", plan.latency), ("throughput", plan.throughput), ("auto", plan.auto))
    for row, option in enumerate(options):
        top = head + row * ROW
        names = [name for name, choice in named if choice and choice.option.mesh == option.mesh]
        label = str(option.mesh) + (f"  ({', '.join(names)})" if names else "")
        draw.text((MARGIN, top + 2), label, fill=INK, font=font)
        end = _draw_bar(draw, option, top=top, longest=longest)
        draw.text((end + 10, top + 2), _value(option, batch=job.batch), fill=FAINT, font=font)
    draw.text(
        (MARGIN, head + ROW * len(options) + 12), basis(plan.pool.weakest), fill=FAINT, font=small
    )
    return image


def _draw_legend(
    draw: ImageDraw.ImageDraw, *, top: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> None:
    left: float = MARGIN + LABEL_WIDTH
    for part, colour in PARTS:
        draw.rectangle((left, top + 4, left + 14, top + 18), fill=colour)
        draw.text((left + 22, top), part, fill=FAINT, font=font)
        left += 22 + draw.textlength(part, font=font) + 30


def _draw_bar(draw: ImageDraw.ImageDraw, option: MeshOption, *, top: int, longest: float) -> float:
    """Draw the parts one after another; returns where the bar ends."""
    room = WIDTH - 2 * MARGIN - LABEL_WIDTH - VALUE_WIDTH
    seconds = option.seconds
    lengths = {
        "arithmetic": seconds.steps * seconds.compute,
        "exchange": seconds.steps * seconds.exchange + seconds.once,
        "waiting": seconds.steps * seconds.waiting,
    }
    left: float = MARGIN + LABEL_WIDTH
    for part, colour in PARTS:
        right = left + room * lengths[part] / longest
        if right - left >= 1:
            draw.rectangle(
                (left, top, right - 1, top + BAR), fill=colour if option.fits else MISFIT
            )
        left = right
    return left


def _value(option: MeshOption, *, batch: int) -> str:
    parts = [f"{option.seconds.video:.3g} s", f"{option.memory.total / 1e9:.1f} GB"]
    if not option.fits:
        parts.append("too much")
    if option.mesh.dp > batch:
        parts.append(f"{option.mesh.dp} jobs at a time")
    return ", ".join(parts)
