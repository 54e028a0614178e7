"""What one side writes on a launcher's or a rank's command line the other side reads."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from comfy_wan_dist.ipc.launch_options import LauncherOptions, RankOptions
from comfy_wan_dist.ipc.tcp import Address

FULL = LauncherOptions(
    folder=Path("/tmp/a folder"),
    device="cuda",
    mesh="cfg2-ulysses2",
    runner="module:function",
    store=Address(host="10.0.0.1", port=29400),
    report=Address(host="head", port=1),
    models=Path("models"),
    lifeline=3,
    client=4,
    ranks=5,
    machines=6,
    machine=0,
    store_listener=7,
)
OPTIONAL = [each.name for each in fields(LauncherOptions) if "None" in str(each.type)]


def test_the_example_has_a_value_of_its_own_for_every_field() -> None:
    values = [str(getattr(FULL, each.name)) for each in fields(FULL)]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("missing", [(), *((name,) for name in OPTIONAL), OPTIONAL])
def test_options_survive_the_command_line(missing: tuple[str, ...]) -> None:
    changes: dict[str, Any] = dict.fromkeys(missing)
    options = replace(FULL, **changes)
    assert LauncherOptions.parse(options.argv()) == options
    of_ranks = options.for_ranks()
    assert type(of_ranks) is RankOptions
    assert RankOptions.parse(of_ranks.argv()) == of_ranks
    assert of_ranks.mesh == FULL.mesh


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (FULL.argv()[2:], "--folder"),
        ([*FULL.argv(), "--novelty", "1"], "--novelty"),
        ([*FULL.argv(), "--ranks", "many"], "--ranks"),
        ([*FULL.argv(), "--device", "tpu"], "--device"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        LauncherOptions.parse(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
