"""What a MODEL's transformer is called with beside x and text: what its ranks do not get is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from comfyui_child import found_beside_comfyui

LATENTS = ("time_dim_concat", "context_latents")
LEFT_OUT = ("clip_fea", "reference_latent")
"""As ComfyUI's own transformer does without the layers for it."""


def print_answers() -> None:
    """By input what the transformer says to it; run in a process of its own."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import torch

    from comfy_wan_dist.comfyui.remote_model import build_model
    from comfy_wan_dist.ipc.errors import ConfigError
    from comfy_wan_dist.mesh.shape import WanShape

    class Run:
        def __call__(self, x: Any, timesteps: Any, text: Any) -> Any:
            assert timesteps.shape[0] == text.shape[0] == x.shape[0]
            return torch.zeros_like(x)

        def close(self) -> None:
            pass

    shape = WanShape(dim=128, ffn_dim=128, num_layers=1, in_dim=16, out_dim=16)
    transformer = build_model(shape, lambda _: Run()).model.diffusion_model
    transformer.begin(None)
    x, text = torch.zeros(1, 16, 2, 4, 4), torch.zeros(1, 7, 4096)
    answers = {}
    for name in ("control", *LATENTS, *LEFT_OUT):
        try:
            transformer(x, torch.tensor([500.0]), text, **{name: [x]})
        except ConfigError as error:
            answers[name] = str(error)
        else:
            answers[name] = ""
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def answers(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = found_beside_comfyui(
        __file__, tmp_path_factory.mktemp("inputs"), comfyui_path
    )
    return found


def test_what_the_ranks_do_not_get_is_refused_by_name(answers: dict[str, str]) -> None:
    for name, said in {"control": "a ControlNet", **{name: name for name in LATENTS}}.items():
        assert answers[name].startswith(f"the MODEL of Wan Dist was given {said}, which needs")


def test_what_the_model_has_no_use_for_is_left_out(answers: dict[str, str]) -> None:
    assert [answers[name] for name in LEFT_OUT] == ["", ""]


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    print_answers()
