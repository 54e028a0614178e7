"""Schedules: against the official formula (written here with numpy) and its published numbers."""

from __future__ import annotations

import numpy as np
import pytest

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.solvers.schedules import Schedule, cut_schedule, given_sigmas, wan_official


def official_points(steps: int, shift: float) -> tuple[list[float], list[int]]:
    """The official set_timesteps: float32 training sigmas, float64 shift, truncated timesteps."""
    first = float(np.float32(1.0 - np.linspace(1, 1 / 1000, 1000)[-1]))
    unshifted = np.linspace(first, 0.0, steps + 1)[:-1]
    shifted = shift * unshifted / (1 + (shift - 1) * unshifted)
    return [*shifted.tolist(), 0.0], (shifted * 1000).astype(np.int64).tolist()


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0, 12.0])
def test_wan_official_equals_the_official_code_at_every_length(shift: float) -> None:
    for steps in range(1, 121):
        schedule = wan_official(steps, shift)
        sigmas, timesteps = official_points(steps, shift)
        assert schedule.sigmas == pytest.approx(sigmas, abs=1e-15)
        assert schedule.timesteps == tuple(timesteps), f"{steps} steps"


def test_wan_official_gives_the_published_numbers_at_50_steps() -> None:
    schedule = wan_official(50, 5.0)
    assert len(schedule.sigmas) == 51
    assert schedule.sigmas[:2] == pytest.approx((0.99980, 0.99573), abs=5e-6)
    assert schedule.sigmas[-3:] == pytest.approx((0.17227, 0.09251, 0.0), abs=5e-6)
    assert schedule.timesteps[:3] == (999.0, 995.0, 991.0)
    assert schedule.timesteps[-2:] == (172.0, 92.0)


def test_wan_official_truncates_on_the_float32_side_of_an_integer() -> None:
    # 999 * (1 - 1/27) is 962: just above in the official code, 961.99... from a float64 0.999.
    assert wan_official(27, 1.0).timesteps[1] == 962.0


@pytest.mark.parametrize(
    ("steps", "denoise", "full_steps"),
    [(20, 0.5, 40), (20, 0.75, 26), (10, 0.3, 33), (4, 0.99, 4), (1, 0.1, 10)],
)
def test_wan_official_keeps_the_last_steps_when_denoise_is_below_one(
    steps: int, denoise: float, full_steps: int
) -> None:
    part, full = wan_official(steps, 5.0, denoise=denoise), wan_official(full_steps, 5.0)
    assert part.sigmas == full.sigmas[-(steps + 1) :]
    assert part.timesteps == full.timesteps[-steps:]


def test_wan_official_takes_denoise_above_09999_for_one() -> None:
    assert wan_official(20000, 5.0, denoise=0.99995) == wan_official(20000, 5.0)


def test_wan_official_is_empty_when_denoise_is_zero() -> None:
    schedule = wan_official(20, 5.0, denoise=0.0)
    assert schedule.sigmas == ()
    assert schedule.timesteps == ()


@pytest.mark.parametrize(
    ("steps", "shift", "denoise", "word"),
    [
        (0, 5.0, 1.0, "steps"),
        (10, 0.0, 1.0, "shift"),
        (10, float("inf"), 1.0, "shift"),
        (10, float("nan"), 1.0, "shift"),
        (10, 5.0, 1.5, "denoise"),
        (10, 5.0, float("nan"), "denoise"),
    ],
)
def test_wan_official_refuses_what_is_out_of_range(
    steps: int, shift: float, denoise: float, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        wan_official(steps, shift, denoise=denoise)


def test_timesteps_of_given_sigmas_are_unrounded_and_leave_out_the_last_sigma() -> None:
    assert given_sigmas((1.0, 0.9959, 0.0)).timesteps == pytest.approx((1000.0, 995.9))


# ---- parts of a schedule; which sigmas stock takes is compared in test_stock_schedules.py


def cut(schedule: Schedule, start: int, end: int, *, leftover_noise: bool = True) -> Schedule:
    return cut_schedule(schedule, start=start, end=end, leftover_noise=leftover_noise)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_parts_with_leftover_noise_are_the_whole(split: int) -> None:
    for whole in (wan_official(4, 5.0), given_sigmas((1.0, 0.8, 0.6, 0.4, 0.2))):
        first, second = cut(whole, 0, split), cut(whole, split, 10000, leftover_noise=False)
        assert first.sigmas == whole.sigmas[: split + 1]
        assert second.sigmas == whole.sigmas[split:]
        # What the model is told is not made anew: the official code's timesteps are rounded.
        assert first.timesteps + second.timesteps == whole.timesteps
        # The official code starts from noise alone; a part that goes on has what its sigma says.
        assert (first.start, second.start) == (whole.start, whole.sigmas[split])
        assert cut(whole, 0, 4, leftover_noise=False) == whole


def test_part_without_leftover_noise_ends_at_0() -> None:
    whole = given_sigmas((1.0, 0.75, 0.5, 0.25, 0.0))
    part = cut(whole, 1, 3, leftover_noise=False)
    assert part == Schedule(sigmas=(0.75, 0.5, 0.0), timesteps=(750.0, 500.0), start=0.75)


@pytest.mark.parametrize(("start", "end"), [(4, 10000), (9, 10000), (2, 2), (3, 1), (0, 0)])
def test_part_without_a_step_is_empty(start: int, end: int) -> None:
    part = cut(given_sigmas((1.0, 0.75, 0.5, 0.25, 0.0)), start, end)
    assert part == cut(given_sigmas(()), 0, 10000) == Schedule(sigmas=(), timesteps=(), start=0.0)


def test_part_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"start_at_step is -1 and end_at_step 3; .*from 0 on"):
        cut(given_sigmas((1.0, 0.5, 0.0)), -1, 3)
    with pytest.raises(ConfigError, match="end_at_step -1;"):
        cut(given_sigmas((1.0, 0.5, 0.0)), 0, -1)
    # Where all is noise stock divides by 0.
    level = given_sigmas((1.0, 1.0, 0.5, 0.0))
    with pytest.raises(ConfigError, match="value 1 of the sigmas from step 0 to 1 is 1.0"):
        cut(level, 0, 1)
    assert cut(level, 0, 1, leftover_noise=False).sigmas == (1.0, 0.0)
